"""Executor: client functions over cohorts. It is told what to do, cuts it into jobs for its workers, and returns it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import engine, tree
from plures.data.batches import batches_per_epoch
from plures.data.population import Rows
from plures.engine import Cost, Usage, cost_of
from plures.errors import UsageError
from plures.learn.fit import TEST_BATCH
from plures.methods.messages import Each, Message
from plures.simulate.client_store import ClientStore
from plures.simulate.grouping import group_clients
from plures.simulate.shapes import Shapes
from plures.simulate.tables import Tables
from plures.simulate.work import Job, Kind, States, Work, train_function
from plures.simulate.workers import Workers
from plures.tree import Params, Tree

CANNOT_STACK = ("atching rule not implemented", "data-dependent control flow", "vmap: ")  # in what torch says
EIGHTHS = 8  # a test is counted in eighths of a batch, so that clients with few rows are together


class CannotStack(UsageError):
    """Clients of a model cannot be stacked."""


class Trained(NamedTuple):
    """A cohort after its training: stacked, row i belongs to the i-th client. The next training overwrites it."""

    clients: Tree
    uploads: Tree
    metrics: dict[str, Tensor]
    flops: int


class Executor:
    """Runs client functions over cohorts."""

    def __init__(
        self,
        work: Work,
        shapes: Shapes,
        store: ClientStore,
        message: Message,
        make_workers: Callable[[Work, Tables, Message], Workers],
        capacity: int,
        keeps_outputs: bool = False,
    ) -> None:
        """`message` is one to a single client, by which the first step is compiled; `capacity` the largest cohort.

        keeps_outputs: whether `outputs` will be asked for.
        """
        self.work, self.capacity, self.is_each = work, capacity, shapes.is_each
        self._trained_bytes = tree.n_bytes((shapes.kept, shapes.upload, shapes.metrics))
        n_outputs = work.population.most_tested() if keeps_outputs else 0
        self._tables = Tables(shapes, work.task.initial, work.population.n_classes, store, capacity, n_outputs)
        self.usage = Usage()
        self.personal_flops = 0  # of making the personal models that were scored
        warm_up(work, message)
        # Last: forked workers share the tables, and inherit the compiled step.
        self._workers = make_workers(work, self._tables, message)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def train(self, round: int, message: Message, ids: list[int]) -> Trained:
        """Train a cohort; results are in the order of ids."""
        self._tables.deliver(message, len(ids))
        task, batch = self.work.task, self.work.method.solver.batch
        weights = self._trained_bytes + tree.n_bytes(task.initial)
        cost = cost_of(task.size, batch, 3, 4 * weights + 3 * batch * task.row_bytes)
        if self.work.stack is not None:
            cost = cost._replace(most=min(cost.most, self.work.stack))
        n_groups = self._run("train", round, isinstance(message, Each), ids, self._n_steps(ids), cost)
        clients, uploads, metrics = self._tables.first("trained", len(ids))
        return Trained(clients, uploads, metrics, int(self._tables.first("flops", n_groups).sum()))

    def score(
        self, round: int, message: Message, ids: list[int], rows: Rows = "test", states: States = "kept"
    ) -> dict[str, Tensor]:
        """Hits, loss and number of rows of each client's personal model."""
        self._deliver(message, ids, states)
        n_groups = self._score("score", round, isinstance(message, Each), ids, rows, states)
        self.personal_flops += int(self._tables.first("personal flops", n_groups).sum())
        return tree.map(Tensor.clone, self._tables.first("scores", len(ids)))

    def score_classes(self, round: int, message: Message, ids: list[int], states: States = "kept") -> Tensor:
        """[client, class]: hits of each client's personal model on the pool."""
        self._deliver(message, ids, states)
        self._score("classes", round, isinstance(message, Each), ids, "pool", states)
        return self._tables.first("classes", len(ids)).clone()

    def outputs(self, round: int, message: Message, ids: list[int], rows: Rows, states: States) -> Tensor:
        """[client, row, output]: of each client's personal model on its rows, which come first."""
        self._deliver(message, ids, states)
        self._score("outputs", round, isinstance(message, Each), ids, rows, states)
        return self._tables.first("outputs", len(ids)).clone()

    def outputs_generic(self, params: Params, ids: list[int]) -> Tensor:
        """[client, row, output]: of one model on every client's test rows."""
        self._tables.deliver_generic(params)
        self._score("generic outputs", 0, False, ids, "test", "kept")
        return self._tables.first("outputs", len(ids)).clone()

    def score_generic(self, params: Params, ids: list[int]) -> dict[str, Tensor]:
        """Hits, loss and number of rows of one model on every client's test rows."""
        self._tables.deliver_generic(params)
        self._score("generic", 0, False, ids, "test", "kept")
        return tree.map(Tensor.clone, self._tables.first("scores", len(ids)))

    def sum_of_personal(self, round: int, message: Message, ids: list[int], states: States = "kept") -> Params:
        """The sum of the clients' personal models, weighted by their training rows."""
        self._deliver(message, ids, states)
        task = self.work.task
        cost = cost_of(task.size, self.work.method.solver.batch, 1, 2 * tree.n_bytes(task.initial))
        n_groups = self._run("sum", round, isinstance(message, Each), ids, self._n_steps(ids), cost, states=states)
        return tree.map(lambda x: x.sum(0), self._tables.first("sums", n_groups))

    def _deliver(self, message: Message, ids: list[int], states: States) -> None:
        if states == "new":
            self._tables.deliver_newcomer(message.tree)
        else:
            self._tables.deliver(message, len(ids))

    def _score(self, kind: Kind, round: int, is_each: bool, ids: list[int], rows: Rows, states: States) -> int:
        task, population = self.work.task, self.work.population
        eighths = [len(population.rows_of(i, rows)) * EIGHTHS // TEST_BATCH + 1 for i in ids]
        width = min(TEST_BATCH, TEST_BATCH // EIGHTHS * int(np.median(eighths)))
        bytes_each = 2 * tree.n_bytes(task.initial) + 2 * TEST_BATCH * task.row_bytes
        step, overhead, most = cost_of(task.size, width, 1, bytes_each)
        cost = Cost(step * (TEST_BATCH // EIGHTHS) / width, overhead / EIGHTHS, most)
        return self._run(kind, round, is_each, ids, eighths, cost, rows, states)

    def _n_steps(self, ids: list[int]) -> list[int]:
        solver, population = self.work.method.solver, self.work.population
        if solver.steps is not None:
            return [solver.steps] * len(ids)
        sizes = np.array([len(population.train[i]) for i in ids])
        per_epoch = batches_per_epoch(sizes, solver.batch, population.smallest, population.last_batch)
        return [int(n) for n in np.maximum(solver.epochs, 1) * per_epoch]

    def _run(
        self,
        kind: Kind,
        round: int,
        is_each: bool,
        ids: list[int],
        n_steps: Sequence[int],
        cost: Cost,
        rows: Rows = "test",
        states: States = "kept",
    ) -> int:
        """Do the jobs of a cohort, the longest first; returns the number of groups."""
        groups = group_clients(n_steps, cost)
        jobs = [
            Job(kind, round, is_each, k, places, [ids[i] for i in places], rows, states)
            for k, places in enumerate(groups)
        ]
        jobs.sort(key=lambda job: cost.of([n_steps[i] for i in job.places]), reverse=True)
        self.usage = self.usage.plus(self._workers.run(jobs))
        return len(jobs)


def warm_up(work: Work, message: Message) -> None:
    """Train two clients with one row each, so that the first step is compiled, or refused, before workers start."""
    one_row = work.population.train[work.population.eligible()[0]][:1]
    two = work.population._replace(train=[one_row, one_row], test=[])
    clients = tree.map(lambda x: torch.stack([x, x]), work.initial)
    if isinstance(message, Each):
        message = Each(tree.map(lambda x: torch.cat([x, x]), message.tree))
    try:
        with engine.using(work.engine):
            work.run(train_function(work.method, work.task), message, clients, two.shards([0, 1], "train", "probe", 0))
    except RuntimeError as error:
        if work.style == "one_by_one" or not any(words in str(error) for words in CANNOT_STACK):
            raise
        raise CannotStack(
            "torch cannot stack clients of this model (an operation of it has no rule for that, or it decides by the "
            "numbers in a tensor what to do next); use --executor one_by_one, or write that layer with plain operations"
        ) from error
