"""Text models: rows are sequences of tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures.models.inputs import Shape, check_tokens
from plures.models.recurrent import lstm_states


class FastText(nn.Module):
    """fastText: the mean of the 32-dimensional embeddings of a row's tokens, then two linear layers.

    Token 0 is padding and is left out of the mean. The published model of FedALA takes the mean over all positions,
    which moves short texts towards the embedding of padding; it has the same number of weights.
    """

    def __init__(self, shape: Shape, n_classes: int, n_tokens: int) -> None:
        super().__init__()
        check_tokens("fasttext", shape, n_tokens)
        self.embedding = nn.Embedding(n_tokens, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.embedding(x)
        counts = (x != 0).to(vectors.dtype)
        mean = (vectors * counts.unsqueeze(-1)).sum(1) / counts.sum(1, keepdim=True).clamp(min=1)
        return self.head(self.hidden(mean))


class _Lstm(nn.Module):
    """One LSTM layer in plain operations: torch's own cannot be vectorised over clients.

    It has the weights of `nn.LSTM`, with the same initialisation, but the gates are in the order input, forget, output,
    cell, so that one sigmoid serves three of them. The part of the gates that depends on the input is computed for all
    positions at once.
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
        from_input = F.linear(x, self.input_weight, self.input_bias + self.state_bias)
        return lstm_states(from_input, self.state_weight)[0]


class CharLstm(nn.Module):
    """Two LSTM layers of 128 units over 8-dimensional embeddings of characters; predicts at every position."""

    def __init__(self, shape: Shape, n_classes: int, n_tokens: int) -> None:
        super().__init__()
        check_tokens("charlstm", shape, n_tokens)
        self.embedding = nn.Embedding(n_tokens, 8)
        self.lstm1 = _Lstm(8, 128)
        self.lstm2 = _Lstm(128, 128)
        self.head = nn.Linear(128, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm2(self.lstm1(self.embedding(x))))
