"""Models for rows of a table and for windows of a time series."""

import math

import torch
from torch import Tensor, nn

from plures.errors import UsageError
from plures.models.inputs import Shape

Sizes = tuple[int, ...]


class Linear(nn.Module):
    """A linear layer and nothing else: logistic regression, or linear regression where a number is predicted."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(shape), n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


class _Residual(nn.Module):
    """Adds to a row what two layers make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Tabular(nn.Module):
    """A residual network for tables; sizes are the width and the number of blocks, as in tabular:64,2.

    Every category of every column has a vector, every number a vector that it is multiplied with, and those of a row
    are added. As words are columns of 0 and 1, this is one linear layer.
    """

    def __init__(self, shape: Shape, n_classes: int, sizes: Sizes = ()) -> None:
        super().__init__()
        if len(sizes) > 2:
            raise UsageError(
                f"tabular takes a width and a number of blocks, as in tabular:64,2; got {len(sizes)} sizes"
            )
        width, n_blocks = (*sizes, *(64, 2)[len(sizes) :])
        self.embedding = nn.Linear(math.prod(shape), width)
        self.blocks = nn.Sequential(*[_Residual(width) for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.blocks(self.embedding(x.flatten(1))))))


class _Residual1d(nn.Module):
    """Adds to a series what two convolutions make of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(1, channels), nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.norm2(self.conv1(torch.relu(self.norm1(x))))))


class ResNet1d(nn.Module):
    """A residual network for time series; sizes are the channels and the number of blocks, as in resnet1d:32,3.

    The head reads the last position beside the mean over all, so that the newest value is not lost.
    """

    def __init__(self, shape: Shape, n_classes: int, sizes: Sizes = ()) -> None:
        super().__init__()
        if len(shape) != 2:
            raise UsageError(f"resnet1d reads windows of a time series (see --window), and the rows have shape {shape}")
        if len(sizes) > 2:
            raise UsageError(f"resnet1d takes channels and a number of blocks, as in resnet1d:32,3; got {len(sizes)}")
        channels, n_blocks = (*sizes, *(32, 3)[len(sizes) :])
        self.stem = nn.Conv1d(shape[0], channels, 3, padding=1)
        self.blocks = nn.Sequential(*[_Residual1d(channels) for _ in range(n_blocks)])
        self.head = nn.Linear(2 * channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.blocks(self.stem(x)))
        return self.head(torch.cat([x.mean(-1), x[..., -1]], -1))
