"""Shapes: what the server and clients keep, and what travels, learned from the method itself without data.

The one answer to "what does an upload look like", for the tables of a simulation, the forecast of memory, the
messages of a federation and what `plures show` prints.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data.dataset import Target, TaskKind
from plures.data.population import Population
from plures.engine import private
from plures.learn.task import Task
from plures.methods.base import Federation, Method
from plures.methods.messages import Each, Same, one_of
from plures.simulate.stacking import as_stack, run_group
from plures.simulate.work import train_function
from plures.tree import Params, Tree


class Shapes(NamedTuple):
    """Trees of tensors that have a shape and a type and no numbers."""

    server: Tree  # kept by the server
    kept: Tree  # by one client; never travels
    train: Tree  # down, to a client that trains
    serve: Tree  # down, to a client that is scored
    generic: Tree  # down: the one model for all; empty when there is none
    newcomer: Tree  # down, to a client that has not taken part
    upload: Tree  # up
    metrics: Tree  # numbers that a client shows
    is_each: bool  # whether clients are sent different messages


def shapes_of(method: Method, task: Task, sizes: Tensor) -> Shapes:
    """All shapes for clients with so many rows. No data and hardly any memory is needed."""
    try:
        with torch.device("meta"), torch.no_grad():
            params = {name: x.to("meta") for name, x in task.initial.items()}
            found, is_each = _before_training(method, task, params, sizes.to("meta"))
    except (RuntimeError, NotImplementedError):
        # A method may mix what it is given with real tensors of its own. The other way allows that; it imports a
        # compiler of torch, which takes a second and 85 MB.
        with private.shapes_only() as mode, torch.no_grad():
            params = {name: private.shape_of(mode, x) for name, x in task.initial.items()}
            found, is_each = _before_training(method, task, params, sizes.clone())
    _, upload, metrics = _trained_on_one_row(method, task, found[2])
    return Shapes._make((*[tree.map(_shape, x) for x in (*found, upload, metrics)], is_each))


def _before_training(method: Method, task: Task, params: Params, sizes: Tensor) -> tuple[tuple[Tree, ...], bool]:
    """What the server and a client keep, and what goes down; and whether clients are sent different messages."""
    server = method.init_server(task, params, Federation(sizes, torch.tensor(0)))
    first = torch.zeros(1, dtype=torch.int64)  # not arange, whose shape torch finds by way of SymPy: 35 MB
    message = method.send(task, server, first)
    train, serve = one_of(message, 0), one_of(method.serve(task, server, first), 0)
    generic = method.generic(task, server) or {}
    newcomer, kept = method.newcomer(task, server), method.init_client(task, params)
    return (server, kept, train, serve, generic, newcomer), isinstance(message, Each)


def _shape(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _trained_on_one_row(method: Method, task: Task, received: Tree) -> Tree:
    """A client's state, upload and metrics after training on one row of zeros."""
    x = torch.zeros(1, *task.example.shape, dtype=task.example.dtype)
    with torch.no_grad():
        outputs = task.logits(task.initial, x)
        y = zeros_like_labels(outputs, task.kind)
        client = method.init_client(task, task.initial)
    population = Population(x, y, [np.zeros(1, np.int64)], [], task.n_classes, 0, task.smallest_batch)
    population = population._replace(target=Target(task.kind))
    zeros = tree.map(lambda x: torch.zeros(x.shape, dtype=x.dtype), received)
    shards = population.shards([0], "train", "shapes", 0)
    trained = run_group("one_by_one", train_function(method, task), Same(zeros), as_stack(client), shards)
    return tree.row(trained, 0)


def zeros_like_labels(outputs: Tensor, kind: TaskKind) -> Tensor:
    """What is to be predicted, of rows with such outputs, all zero."""
    if kind == "labels":
        return torch.zeros_like(outputs)
    return torch.zeros(outputs.shape[:-1], dtype=torch.int64 if kind == "classes" else outputs.dtype)
