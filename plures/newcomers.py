"""New clients: how well a method serves those that were not in training, before and after some epochs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from . import execute
from .execute import ClientFunction, Population, Style
from .fit import measure
from .method import Method, Same
from .shard import Shard
from .task import Batch, Task
from .tree import Params, Tree, n_bytes, row


class Newcomers(NamedTuple):
    """Accuracy of every new client with a test row, after 0, 1, 2, ... epochs on its rows."""

    ids: list[int]
    curve: list[list[float]]  # [epochs][client]
    generic: list[float] | None  # of the one model for all
    first: int  # id of the first new client

    def to_json(self) -> dict[str, Any]:
        means = [float(np.mean(each)) for each in self.curve]
        return {
            "n": len(self.ids),
            "before": means[0],
            "after": means[-1],
            "curve": means,
            "generic": None if self.generic is None else float(np.mean(self.generic)),
        }


def adapt_function(method: Method, task: Task, epochs: int) -> ClientFunction:
    """The model of a new client after so many epochs."""

    def adapt(received: Tree, train: Shard) -> Tree:
        return method.adapt(task, received, train, epochs)

    return adapt


def _score_function(method: Method, task: Task, epochs: int) -> ClientFunction:
    def score(received: Tree, train: Shard, test: Shard) -> Tree:
        personal = method.adapt(task, received, train, epochs)

        def on_batch(personal: Tree, batch: Batch) -> Tree:
            return execute.hits_and_loss(method.predict(task, personal, batch.x), batch)

        return measure(on_batch, personal, test)

    return score


def welcome(
    method: Method, task: Task, server: Tree, population: Population, first: int, epochs: int, style: Style
) -> Newcomers | None:
    """Scores of all clients of a population that was not trained on; its ids count from `first`."""
    ids = [i for i in population.eligible() if len(population.test[i])]
    if not ids:
        return None
    with torch.no_grad():
        received = method.newcomer(task, server)
        generic_model = method.generic(task, server)
    found = curve(method, task, received, population, first, epochs, style)
    generic = None
    if generic_model is not None:
        score = execute.generic_function(task)
        fn: Callable[..., Tree] = lambda received, train, test: score(received, test)  # noqa: E731
        generic = _accuracies(style, fn, Same(generic_model), population, ids, task, first)
    return Newcomers([first + i for i in ids], found, generic, first)


def curve(
    method: Method, task: Task, received: Tree, population: Population, first: int, epochs: int, style: Style
) -> list[list[float]]:
    """The accuracy of each client with a test row after 0, 1, 2, ... epochs: [epochs][client]."""
    ids = [i for i in population.eligible() if len(population.test[i])]
    return [
        _accuracies(style, _score_function(method, task, e), Same(received), population, ids, task, first)
        for e in range(epochs + 1)
    ]


def _accuracies(
    style: Style, fn: ClientFunction, message: Same, population: Population, ids: list[int], task: Task, first: int
) -> list[float]:
    room = max(1, execute.GROUP_BYTES // (8 * n_bytes(task.initial)))
    out: list[float] = []
    for at in range(0, len(ids), room):
        group = ids[at : at + room]
        train = population.shards(group, "train", f"new client from {first}", 0)
        test = population.shards(group, "test", "test", 0)
        scores = execute.run_group(style, fn, message, train, test)
        out += (scores["hits"] / scores["n"]).tolist()
    return out


def own_model(method: Method, task: Task, received: Tree, population: Population, epochs: int) -> Params:
    """The model of the first client of a population, from what it was sent, after so many epochs."""
    shards = population.shards([0], "train", "adapt", 0)
    return row(execute.run_group("one_by_one", adapt_function(method, task, epochs), Same(received), shards), 0)
