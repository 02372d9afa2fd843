"""How far clients drift in a round: from what they were sent, and from each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import devices, tree
from plures.learn.task import Task
from plures.methods.messages import Each, Message
from plures.tree import Params, Tree

CACHE_BYTES = 2 << 20
_WRAPPINGS = {"host", "model", "core"}  # names under which messages and uploads hold a model


class Drift(NamedTuple):
    """Two numbers about the updates of a cohort."""

    norm: float | None  # mean distance between the model that a client uploads and the one it was sent
    variance: float | None  # mean squared distance between an uploaded model and the mean of them


def model_in(task: Task, message: Tree) -> Params:
    """The weights of the model in a message or an upload; empty if it holds something else (gradients, models)."""
    found = {}
    for path, x in zip(tree.names(message), tree.leaves(message), strict=True):
        *around, name = path.split("/")
        if name in task.initial and set(around) <= _WRAPPINGS and not tree.is_statistic(name):
            found[name] = x
    return found


def measure_drift(task: Task, message: Message, uploads: Tree) -> Drift:
    """Of a cohort; the uploads are stacked."""
    sent, back = model_in(task, message.tree), model_in(task, uploads)
    if not back:
        return Drift(None, None)
    each = isinstance(message, Each)
    shapes = {name: x.shape[1:] if each else x.shape for name, x in sent.items()}
    comparable = all(shapes.get(name) == x.shape[1:] for name, x in back.items())
    n = len(next(iter(back.values())))
    moved, together = (devices.in_double(torch.zeros(size)) for size in (n, 1))  # squared lengths: of each, of the mean
    for name, x in back.items():
        flat = x.reshape(n, -1)
        # Where nothing was sent to compare with, all are taken from the first one: that leaves their variance.
        old = sent[name].reshape(n if each else 1, -1) if comparable else flat[:1]
        width = max(1, CACHE_BYTES // (n * x.element_size()))
        for start in range(0, flat.shape[1], width):  # a piece of all models at a time, so that it stays in cache
            some = flat[:, start : start + width] - old[:, start : start + width]
            moved += _squared_lengths(some)
            together += _squared_lengths(some.mean(0, keepdim=True))
    # The mean squared distance to the mean, by the lengths alone: one look at the models is enough.
    variance = max(0.0, float(moved.mean() - together))
    return Drift(float(moved.sqrt().mean()) if comparable else None, variance)


def _squared_lengths(rows: Tensor) -> Tensor:
    return devices.in_double(torch.linalg.vector_norm(rows, dim=1)).square()
