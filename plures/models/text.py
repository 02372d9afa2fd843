"""Models of text: rows of tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.models.inputs import Shape, tokens


class FastText(nn.Module):
    """fastText: the mean of 32 numbers for each token of a row, and two linear layers.

    Token 0 is padding and does not count in the mean. The published model of FedALA takes the mean over
    all positions, so that a short text is moved towards the vector of padding; the weights are as many.
    """

    def __init__(self, shape: Shape, n_classes: int, n_tokens: int) -> None:
        super().__init__()
        tokens("fasttext", shape, n_tokens)
        self.embedding = nn.Embedding(n_tokens, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.embedding(x)
        counts = (x != 0).to(vectors.dtype)
        mean = (vectors * counts.unsqueeze(-1)).sum(1) / counts.sum(1, keepdim=True).clamp(min=1)
        return self.head(self.hidden(mean))


class _Lstm(nn.Module):
    """One layer of LSTM in plain operations; torch's own cannot be stacked over clients.

    It has the weights of `nn.LSTM`, started as there, with the gates in the order in, forget, out, cell:
    so one sigmoid serves three of them. What the input gives to the gates is computed for all positions
    at once.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.n_out = n_out
        self.input_weight = nn.Parameter(torch.empty(4 * n_out, n_in))
        self.state_weight = nn.Parameter(torch.empty(4 * n_out, n_out))
        self.input_bias = nn.Parameter(torch.empty(4 * n_out))
        self.state_bias = nn.Parameter(torch.empty(4 * n_out))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(n_out**-0.5), n_out**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, position, n_in] -> [batch, position, n_out], from a state of zeros."""
        given = F.linear(x, self.input_weight, self.input_bias + self.state_bias)
        states: list[Tensor] = []
        cell: Tensor | None = None
        for gates in given.unbind(1):
            if states:
                gates = gates + F.linear(states[-1], self.state_weight)
            doors, new = gates.split((3 * self.n_out, self.n_out), -1)
            let_in, keep, let_out = doors.sigmoid().chunk(3, -1)
            new = let_in * new.tanh()
            cell = new if cell is None else torch.addcmul(new, keep, cell)
            states.append(let_out * cell.tanh())
        return torch.stack(states, 1)


class CharLstm(nn.Module):
    """Two LSTM layers of 128 over characters, with 8 numbers for each; predicts at every position."""

    def __init__(self, shape: Shape, n_classes: int, n_tokens: int) -> None:
        super().__init__()
        tokens("charlstm", shape, n_tokens)
        self.embedding = nn.Embedding(n_tokens, 8)
        self.lstm1 = _Lstm(8, 128)
        self.lstm2 = _Lstm(128, 128)
        self.head = nn.Linear(128, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm2(self.lstm1(self.embedding(x))))
