"""How a server moves what it keeps down a slope, from round to round: SGD with momentum, or Adam, as pure functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import tree
from .tree import Tree

TINY = 1e-5  # slopes far below it are rounding, such as those of a bias before BatchNorm, and move nothing


class Speed(NamedTuple):
    """What a solver remembers from step to step."""

    first: Tree  # mean of slopes
    second: Tree  # of squared slopes; empty for SGD
    steps: Tensor


def at_rest(params: Tree, adam: bool = False) -> Speed:
    return Speed(tree.zeros_like(params), tree.zeros_like(params) if adam else (), torch.tensor(0))


def sgd(
    params: Tree, slopes: Tree, speed: Speed, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> tuple[Tree, Speed]:
    """One step of SGD with momentum."""
    first = tree.map(lambda v, g, p: momentum * v + g + weight_decay * p, speed.first, slopes, params)
    return tree.axpy(-lr, first, params), speed._replace(first=first, steps=speed.steps + 1)


def adam(params: Tree, slopes: Tree, speed: Speed, lr: float) -> tuple[Tree, Speed]:
    """One step of Adam."""
    steps = speed.steps + 1
    first = tree.map(lambda v, g: 0.9 * v + 0.1 * g, speed.first, slopes)
    second = tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, speed.second, slopes)
    count = steps.to(torch.float64)
    long, wide = 1 - 0.9**count, 1 - 0.999**count

    def moved(p: Tensor, v: Tensor, s: Tensor) -> Tensor:
        return (p - lr * (v / long) / ((s / wide).sqrt() + TINY)).to(p.dtype)

    return tree.map(moved, params, first, second), Speed(first, second, steps)


def clipped(slopes: Tree, longest: float) -> Tree:
    """The slopes, shortened to a length if they are longer."""
    length = torch.stack([x.square().sum() for x in tree.leaves(slopes)]).sum().sqrt()
    return tree.scale((longest / length.clamp(min=1e-12)).clamp(max=1), slopes)
