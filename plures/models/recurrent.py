"""Recurrent layers in plain operations: torch's own cannot be stacked over clients.

Each takes rows [batch, position, n_in] and the tensors of torch's layer, and gives the states at all positions and
those at the end. What the input gives is computed for all positions at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Ends = tuple[Tensor, ...]


class LayerTensors(NamedTuple):
    """Of one layer, in one direction."""

    input_weight: Tensor
    state_weight: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """Both biases together."""
        return None if self.input_bias is None or self.state_bias is None else self.input_bias + self.state_bias


def lstm_states(from_input: Tensor, state_weight: Tensor, start: Ends | None = None) -> tuple[Tensor, Ends]:
    """An LSTM whose gates are in the order input, forget, output, cell, so that one sigmoid serves three of them.

    `from_input` is what the input gives for all gates, with biases: [batch, position, 4 * n_out].
    """
    n_out = state_weight.shape[-1]
    states: list[Tensor] = []
    hidden, cell = (None, None) if start is None else start
    for gates in from_input.unbind(1):
        if hidden is not None:
            gates = gates + F.linear(hidden, state_weight)
        sigmoids, new = gates.split((3 * n_out, n_out), -1)
        input_gate, forget_gate, output_gate = sigmoids.sigmoid().chunk(3, -1)
        new = input_gate * new.tanh()
        cell = new if cell is None else torch.addcmul(new, forget_gate, cell)
        hidden = output_gate * cell.tanh()
        states.append(hidden)
    return torch.stack(states, 1), (states[-1], cell)  # type: ignore[return-value]


def lstm_layer(x: Tensor, of: LayerTensors, start: Ends | None) -> tuple[Tensor, Ends]:
    """One layer of `nn.LSTM`, whose gates are in the order input, forget, cell, output."""

    def reordered(weight: Tensor) -> Tensor:
        first, second, third, fourth = weight.chunk(4)
        return torch.cat([first, second, fourth, third])

    bias = None if of.bias is None else reordered(of.bias)
    from_input = F.linear(x, reordered(of.input_weight), bias)
    return lstm_states(from_input, reordered(of.state_weight), start)


def gru_layer(x: Tensor, of: LayerTensors, start: Ends | None) -> tuple[Tensor, Ends]:
    """One layer of `nn.GRU`, whose gates are in the order reset, update, new."""
    n_out = of.state_weight.shape[-1]
    hidden = x.new_zeros(len(x), n_out) if start is None else start[0]
    states: list[Tensor] = []
    for gates in F.linear(x, of.input_weight, of.input_bias).unbind(1):
        own = F.linear(hidden, of.state_weight, of.state_bias)
        both = (gates[:, : 2 * n_out] + own[:, : 2 * n_out]).sigmoid()
        reset, update = both.chunk(2, -1)
        new = torch.addcmul(gates[:, 2 * n_out :], reset, own[:, 2 * n_out :]).tanh()
        hidden = torch.addcmul(new, update, hidden - new)
        states.append(hidden)
    return torch.stack(states, 1), (hidden,)


def plain_layer(
    x: Tensor, of: LayerTensors, start: Ends | None, bend: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Ends]:
    """One layer of `nn.RNN` with the function that it bends its sums by."""
    hidden = None if start is None else start[0]
    states: list[Tensor] = []
    for gates in F.linear(x, of.input_weight, of.bias).unbind(1):
        hidden = bend(gates if hidden is None else gates + F.linear(hidden, of.state_weight))
        states.append(hidden)
    return torch.stack(states, 1), (states[-1],)
