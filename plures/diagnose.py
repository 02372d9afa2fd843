"""How far clients drift in a round: from what they were sent, and from each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import tree
from .method import Each, Same
from .task import Task
from .tree import Params, Tree

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

    def sq_norms(changes: Params) -> Tensor:
        return torch.stack([x.flatten(1).square().sum(1) for x in changes.values()]).sum(0)

    apart = sq_norms({name: x - x.mean(0) for name, x in back.items()})
    shapes = {name: x.shape[1:] if isinstance(message, Each) else x.shape for name, x in sent.items()}
    if any(shapes.get(name) != x.shape[1:] for name, x in back.items()):
        return Drift(None, float(apart.mean()))
    moved = sq_norms({name: x - sent[name] for name, x in back.items()})
    return Drift(float(moved.sqrt().mean()), float(apart.mean()))
