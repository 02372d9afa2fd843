"""Small fully connected networks as plain functions, for the servers and clients that learn one beside the model."""

import math

import torch
from torch import Tensor

from plures import seeds


def drawn(key: Tensor, shape: tuple[int, ...], n_in: int, stream: int) -> Tensor:
    """Weights or biases of a layer with n_in inputs: uniform within 1 / sqrt(n_in)."""
    return (2 * seeds.uniform(key, shape, stream) - 1) / math.sqrt(n_in)


def relu_layers(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """x through fully connected layers, each (weight [out, in], bias [out]) followed by ReLU."""
    for weight, bias in layers:
        x = torch.relu(x @ weight.mT + bias)
    return x
