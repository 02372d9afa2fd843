"""How far clients drift in a round: from what they were sent, and from each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import tree
from .method import Each, Same
from .task import Task
from .tree import Params, Tree

CACHE_BYTES = 4 << 20
_WRAPPINGS = {"host", "model", "core"}  # names under which messages and uploads hold a model


class Drift(NamedTuple):
    norm: float | None  # mean distance between the model that a client uploads and the one it was sent
    variance: float | None  # mean squared distance between an uploaded model and the mean of them


def model_in(task: Task, message: Tree) -> Params:
    """The weights of the model in a message or an upload; empty if it holds something else (slopes, several models)."""
    found = {}
    for path, x in zip(tree.names(message), tree.leaves(message), strict=True):
        *around, name = path.split("/")
        if name in task.initial and set(around) <= _WRAPPINGS and not tree.is_statistic(name):
            found[name] = x
    return found


def drift(task: Task, message: Same | Each, uploads: Tree) -> Drift:
    """Of a cohort; the uploads are stacked."""
    sent, back = model_in(task, message.tree), model_in(task, uploads)
    if not back:
        return Drift(None, None)

    def sq_distances(from_: Params) -> Tensor:
        return torch.stack([_sq_distances(x, from_[name]) for name, x in back.items()]).sum(0)

    apart = sq_distances({name: x.mean(0, keepdim=True) for name, x in back.items()})
    shapes = {name: x.shape[1:] if isinstance(message, Each) else x.shape for name, x in sent.items()}
    if any(shapes.get(name) != x.shape[1:] for name, x in back.items()):
        return Drift(None, float(apart.mean()))
    moved = sq_distances({name: x if isinstance(message, Each) else x[None] for name, x in sent.items()})
    return Drift(float(moved.sqrt().mean()), float(apart.mean()))


def _sq_distances(xs: Tensor, others: Tensor) -> Tensor:
    """Of each row to its own other row, or to the only one; a few large rows at a time, so that they stay in cache."""
    some = max(1, CACHE_BYTES // max(1, xs[0].nbytes))
    pairs = ((xs[i : i + some], others[i : i + some] if len(others) > 1 else others) for i in range(0, len(xs), some))
    return torch.cat([(x - other).flatten(1).square_().sum(1) for x, other in pairs])
