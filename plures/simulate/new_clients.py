"""New clients: how well a method serves those that were not in training, before and after some epochs."""

from typing import Any, NamedTuple

import numpy as np
import torch

from plures import engine, tree
from plures.data.population import Population
from plures.data.shard import Shard
from plures.engine import GROUP_BYTES
from plures.methods.messages import Same
from plures.simulate.stacking import ClientFunction
from plures.simulate.work import Work, generic_function, score_model
from plures.tree import Params, Tree


class NewClients(NamedTuple):
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


def score_new_clients(work: Work, server: Tree, first: int, epochs: int, round: int) -> NewClients | None:
    """Scores of all clients of the work's population, which was not trained on; their ids count from `first`.

    They train at the learning rate that the run has after `round` rounds, as `ft` does.
    """
    ids = _scored(work.population)
    if not ids:
        return None
    with torch.no_grad():
        received = work.method.newcomer(work.task, server)
        generic_model = work.method.generic(work.task, server)
    curve = adaptation_curve(work, received, first, epochs, round)
    generic = None
    if generic_model is not None:
        score = generic_function(work.task)

        def score_generic(received: Tree, train: Shard, test: Shard) -> Tree:
            return score(received, test)

        generic = _accuracies(work, score_generic, generic_model, ids, first, round)
    return NewClients([first + i for i in ids], curve, generic, first)


def adaptation_curve(work: Work, received: Tree, first: int, epochs: int, round: int) -> list[list[float]]:
    """The accuracy of each client with a test row after 0, 1, 2, ... epochs: [epochs][client]."""
    method, task = work.method, work.task

    def score_after(epochs: int) -> ClientFunction:
        def score(received: Tree, train: Shard, test: Shard) -> Tree:
            return score_model(method, task, method.adapt(task, received, train, epochs), test)

        return score

    ids = _scored(work.population)
    return [_accuracies(work, score_after(e), received, ids, first, round) for e in range(epochs + 1)]


def adapted_model(work: Work, received: Tree, epochs: int, round: int) -> Params:
    """The model of the first client of a population, from what it was sent, after so many epochs."""
    shards = work.population.shards([0], "train", "adapt", round)

    def adapt(received: Tree, train: Shard) -> Tree:
        return work.method.adapt(work.task, received, train, epochs)

    with engine.using(work.engine):
        return tree.row(work.run(adapt, Same(received), shards), 0)


def _scored(population: Population) -> list[int]:
    return [i for i in population.eligible() if len(population.test[i])]


def _accuracies(work: Work, fn: ClientFunction, received: Tree, ids: list[int], first: int, round: int) -> list[float]:
    """Of each client, some clients at a time."""
    room = max(1, GROUP_BYTES // (8 * tree.n_bytes(work.task.initial)))
    out: list[float] = []
    for at in range(0, len(ids), room):
        group = ids[at : at + room]
        train = work.population.shards(group, "train", f"new client from {first}", round)
        test = work.population.shards(group, "test", "test", 0)
        with engine.using(work.engine):
            scores = work.run(fn, Same(received), train, test)
        out += (scores["hits"] / scores["n"]).tolist()
    return out
