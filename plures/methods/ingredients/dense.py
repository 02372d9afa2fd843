"""Initial weights of the small fully connected networks that some methods train besides the model."""

import math

from torch import Tensor

from plures import seeds


def draw_weights(key: Tensor, shape: tuple[int, ...], n_in: int, stream: int) -> Tensor:
    """Random weights or biases of a layer with n_in inputs: uniform in [-1 / sqrt(n_in), 1 / sqrt(n_in))."""
    return (2 * seeds.uniform(key, shape, stream) - 1) / math.sqrt(n_in)
