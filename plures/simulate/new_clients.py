"""New clients: how well a method serves those that were not in training, before and after some epochs."""

from typing import Any, NamedTuple

import numpy as np
import torch

from plures import engine, tree
from plures.data.population import Population
from plures.data.shard import Shard
from plures.engine import GROUP_BYTES
from plures.learn.metrics import ACCURACY, Metric
from plures.methods.base import Method
from plures.methods.messages import Same
from plures.simulate.stacking import ClientFunction
from plures.simulate.work import Work, predict_rows, score_model
from plures.tree import Params, Tree


class NewClients(NamedTuple):
    """A metric of every new client with a test row, after 0, 1, 2, ... epochs on its rows."""

    ids: list[int]
    curve: list[list[float]]  # [epochs][client]
    generic: list[float] | None  # of the one model for all
    first: int  # id of the first new client
    metric: Metric = ACCURACY

    def to_json(self) -> dict[str, Any]:
        means = [_mean(each) for each in self.curve]
        return {
            "n": len(self.ids),
            "before": means[0],
            "after": means[-1],
            "curve": means,
            "generic": None if self.generic is None else _mean(self.generic),
        }


def _mean(each: list[float]) -> float | None:
    """Over the clients for which the metric says something."""
    known = [value for value in each if np.isfinite(value)]
    return float(np.mean(known)) if known else None


def score_new_clients(
    work: Work, server: Tree, first: int, epochs: int, round: int, metric: Metric = ACCURACY
) -> NewClients | None:
    """Scores of all clients of the work's population, which was not trained on; their ids count from `first`.

    They train at the learning rate that the run has after `round` rounds, as `ft` does.
    """
    ids = _scored(work.population)
    if not ids:
        return None
    with torch.no_grad():
        received = work.method.newcomer(work.task, server)
        generic_model = work.method.generic(work.task, server)
    curve = adaptation_curve(work, received, first, epochs, round, metric)
    generic = None
    if generic_model is not None:
        plain = work._replace(method=Method(work.method.solver))
        generic = _measure(plain, lambda received, train: received, generic_model, ids, first, round, metric)
    return NewClients([first + i for i in ids], curve, generic, first, metric)


def adaptation_curve(
    work: Work, received: Tree, first: int, epochs: int, round: int, metric: Metric = ACCURACY
) -> list[list[float]]:
    """The metric of each client with a test row after 0, 1, 2, ... epochs: [epochs][client]."""
    method, task = work.method, work.task

    def adapted(epochs: int) -> ClientFunction:
        return lambda received, train: method.adapt(task, received, train, epochs)

    ids = _scored(work.population)
    return [_measure(work, adapted(e), received, ids, first, round, metric) for e in range(epochs + 1)]


def adapted_model(work: Work, received: Tree, epochs: int, round: int) -> Params:
    """The model of the first client of a population, from what it was sent, after so many epochs."""
    shards = work.population.shards([0], "train", "adapt", round)

    def adapt(received: Tree, train: Shard) -> Tree:
        return work.method.adapt(work.task, received, train, epochs)

    with engine.using(work.engine):
        return tree.row(work.run(adapt, Same(received), shards), 0)


def _scored(population: Population) -> list[int]:
    return [i for i in population.eligible() if len(population.test[i])]


def _measure(
    work: Work, make: ClientFunction, received: Tree, ids: list[int], first: int, round: int, metric: Metric
) -> list[float]:
    """The metric of each client's model, as `make` makes it, some clients at a time."""
    population, method, task = work.population, work.method, work.task

    def score(received: Tree, train: Shard, test: Shard) -> Tree:
        personal = make(received, train)
        if metric is ACCURACY:
            return score_model(method, task, personal, test)
        return predict_rows(method, task, personal, test)

    room = max(1, GROUP_BYTES // (8 * tree.n_bytes(task.initial)))
    out: list[float] = []
    for at in range(0, len(ids), room):
        group = ids[at : at + room]
        train = population.shards(group, "train", f"new client from {first}", round)
        test = population.shards(group, "test", "test", 0)
        with engine.using(work.engine):
            found = work.run(score, Same(received), train, test)
        if metric is ACCURACY:
            out += (found["hits"] / found["n"]).tolist()
            continue
        for k, client in enumerate(group):
            rows = population.test[client]
            out.append(metric.of(found[k, : len(rows)].cpu().numpy(), population.y[rows].numpy(), population.target))
    return out
