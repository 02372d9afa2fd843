"""Evaluation: how well every client's own model, and the one for all, do on test rows. It reads state, changes none."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data.dataset import Target
from plures.data.population import Rows
from plures.learn.metrics import ACCURACY, Metric
from plures.learn.metrics import recalls as recalls_of
from plures.learn.task import Task
from plures.methods.base import Method
from plures.methods.messages import Message, Same
from plures.simulate.executor import Executor
from plures.simulate.stacking import run_group
from plures.simulate.work import States, classes_function
from plures.tree import Params, Tree

MOST_ON_POOL = 1000  # clients whose models are tested on the pool, where every test is a large one

Sums = dict[str, list[float]]  # hits, loss and number of rows of each client


class Pool(NamedTuple):
    """Hits on test rows of all clients together, class by class."""

    ids: list[int]
    n: np.ndarray  # [class], labels of the rows
    personal: np.ndarray  # [client, class], hits of each client's own model
    generic: np.ndarray | None  # [class], hits of the one model for all
    counts: np.ndarray  # [client, class], labels in a client's training rows


class Values(NamedTuple):
    """A metric of each scored client, not a number where it says nothing, and of all their rows together."""

    each: np.ndarray
    pooled: float


class Evaluation(NamedTuple):
    """Sums over the test rows of each scored client."""

    ids: list[int]
    personal: Sums
    generic: Sums | None
    seconds: float
    validation: Sums | None = None  # of the clients that have rows kept apart
    pool: Pool | None = None
    personal_flops: int | None = None  # of making all personal models once; None where that is not known
    never_trained: tuple[int, ...] = ()  # scored clients that never took part
    generic_is_mean: bool = False  # whether the one model for all is only the mean of the personal ones
    metric: Metric = ACCURACY  # what the run goes by
    measured: dict[str, dict[str, Values]] = {}  # name of a metric -> personal, generic, validation
    recalls: dict[str, list[float | None]] = {}  # of each class, over all rows: personal, generic

    def values(self, part: str, metric: Metric | None = None) -> Values | None:
        """A metric of the personal models, the generic one, or on validation rows; None if it was not measured."""
        metric = metric or self.metric
        if metric.name in self.measured:
            return self.measured[metric.name].get(part)
        sums: Sums | None = getattr(self, part)
        return None if sums is None or metric is not ACCURACY else accuracy_of(sums)


def accuracy_of(sums: Sums) -> Values:
    """The accuracy of each client, and over all rows."""
    n = sum(sums["n"])
    return Values(np.array(sums["hits"]) / np.array(sums["n"]), sum(sums["hits"]) / n if n else math.nan)


class Evaluator(NamedTuple):
    """Scores the clients of a simulation."""

    executor: Executor
    eligible: list[int]
    scored: list[int]
    refresh: bool  # score clients after one more training, on a copy of their state
    metric: Metric = ACCURACY  # what the run goes by
    others: tuple[Metric, ...] = ()  # that are measured at the end, besides

    def evaluate(self, server: Tree, round: int, is_last: bool, with_pool: bool, trained: Tensor) -> Evaluation:
        """Scores of every client's personal model, and of the one for all.

        trained: [client], which ones have taken part.
        is_last: the run ends here; a method without a model for all is scored by the mean of the personal ones.
        with_pool: test on the pool of all clients' rows, too.
        """
        began = time.perf_counter()
        method, task, population, *_ = self.executor.work
        new = self.served_as_new(round, trained)
        with torch.no_grad():
            before = self.executor.personal_flops
            metrics = [metric for metric in (self.metric, *(self.others if is_last else ())) if metric is not ACCURACY]
            outputs: dict[str, list[np.ndarray]] = {}
            found = self._score(server, round, self.scored, "test", new, bool(metrics))
            if metrics:
                outputs["personal"] = self._own_rows(found.pop("outputs"), self.scored, "test")
            personal = _sums(found)
            personal_flops = self.executor.personal_flops - before
            validation = None
            if population.validation:
                have_rows = [i for i in self.scored if len(population.validation[i])]
                found = self._score(server, round, have_rows, "validation", new, bool(metrics))
                if metrics:
                    outputs["validation"] = self._own_rows(found.pop("outputs"), have_rows, "validation")
                validation = _sums(found)
            generic_model = method.generic(task, server)
            is_mean = generic_model is None and is_last
            if is_mean:
                generic_model = self._mean_of_personal(server, round, new)
            generic = None
            if self._is_one_for_all(server, generic_model):
                generic = personal
            elif generic_model is not None:
                blocks = self._blocks(self.scored)
                generic = _sums(_join([self.executor.score_generic(generic_model, ids) for ids in blocks]))
            if metrics and generic is personal:
                outputs["generic"] = outputs["personal"]
            elif metrics and generic_model is not None:
                blocks = self._blocks(self.scored)
                of_all = [self.executor.outputs_generic(generic_model, ids) for ids in blocks]
                outputs["generic"] = self._own_rows(torch.cat(of_all), self.scored, "test") if of_all else []
            pool = None
            if with_pool and len(population.pool) and self.scored:
                pool = self._on_pool(server, round, generic_model, new)
        seconds = time.perf_counter() - began
        never = tuple(i for i in self.scored if round and not bool(trained[i]))
        measured, recalls = self._measure(metrics, outputs)
        return Evaluation(
            self.scored,
            personal,
            generic,
            seconds,
            validation,
            pool,
            personal_flops,
            never,
            is_mean,
            self.metric,
            measured,
            recalls if is_last else {},
        )

    def _own_rows(self, outputs: Tensor, ids: list[int], rows: Rows) -> list[np.ndarray]:
        """[row, output] of each client, without padding."""
        population = self.executor.work.population
        return [outputs[k, : len(population.rows_of(i, rows))].cpu().numpy() for k, i in enumerate(ids)]

    def _measure(
        self, metrics: list[Metric], outputs: dict[str, list[np.ndarray]]
    ) -> tuple[dict[str, dict[str, Values]], dict[str, list[float | None]]]:
        """Every metric of every part; and the recall of each class."""
        population = self.executor.work.population
        measured: dict[str, dict[str, Values]] = {metric.name: {} for metric in metrics}
        recalls = {}
        for part, found in outputs.items():
            rows: Rows = "validation" if part == "validation" else "test"
            ids = [i for i in self.scored if len(population.rows_of(i, rows))]
            y = [population.y[population.rows_of(i, rows)].numpy() for i in ids]
            if not y:
                continue
            for metric in metrics:
                measured[metric.name][part] = values_of(metric, found, y, population.target)
            if not population.target.is_real and part != "validation":
                recalls[part] = recalls_of(np.concatenate(found), np.concatenate(y), population.target)
        return measured, recalls

    def served_as_new(self, round: int, trained: Tensor) -> set[int]:
        """Clients that have never taken part, where what they or the server keep of them makes their models.

        Before the first round nobody has, and all are as they start.
        """
        work = self.executor.work
        has_own = bool(tree.leaves(work.initial)) or self.executor.is_each
        lacks_something = has_own and not work.method.is_served_whole
        if self.refresh or round == 0 or not lacks_something:
            return set()
        return {i for i in self.eligible if not bool(trained[i])}

    def _is_one_for_all(self, server: Tree, generic_model: Params | None) -> bool:
        """Whether every client's personal model is the generic one: then it need not be scored twice."""
        method, task = self.executor.work.method, self.executor.work.task
        if method.personal_model_name != "global" or not self.scored:
            return False
        served = method.serve(task, server, torch.tensor(self.scored[:1]))
        return isinstance(served, Same) and served.tree is generic_model

    def _blocks(self, ids: list[int]) -> Iterator[list[int]]:
        """As many clients at a time as the executor has room for."""
        for at in range(0, len(ids), self.executor.capacity):
            yield ids[at : at + self.executor.capacity]

    def _parts(self, ids: list[int], new: set[int]) -> Iterator[tuple[list[int], bool]]:
        """Blocks of clients, and whether they are new ones: these come last."""
        for is_new in (False, True):
            for block in self._blocks([i for i in ids if (i in new) == is_new]):
                yield block, is_new

    def _message(self, server: Tree, ids: list[int], is_new: bool) -> Message:
        method, task = self.executor.work.method, self.executor.work.task
        return Same(method.newcomer(task, server)) if is_new else method.serve(task, server, torch.tensor(ids))

    def _score(
        self, server: Tree, round: int, ids: list[int], rows: Rows, new: set[int], with_outputs: bool = False
    ) -> dict[str, Tensor]:
        """Of personal models, in the order of ids; on the pool, class by class."""
        method, task, executor = self.executor.work.method, self.executor.work.task, self.executor
        found, order = [], []
        for block, is_new in self._parts(ids, new):
            if self.refresh:  # trained on a copy: the result is scored and forgotten
                executor.train(round, method.send(task, server, torch.tensor(block)), block)
            states: States = "new" if is_new else "fresh" if self.refresh else "kept"
            message = self._message(server, block, is_new)
            if rows == "pool":
                found.append({"hits": executor.score_classes(round, message, block, states)})
            else:
                found.append(executor.score(round, message, block, rows, states))
                if with_outputs:
                    found[-1]["outputs"] = executor.outputs(round, message, block, rows, states)
            order += block
        place = {client: k for k, client in enumerate(order)}
        at = torch.tensor([place[i] for i in ids], dtype=torch.int64)
        return {name: x[at] for name, x in _join(found).items()}

    def _on_pool(self, server: Tree, round: int, generic_model: Params | None, new: set[int]) -> Pool:
        """Hits on all clients' test rows together, of the first clients if there are very many."""
        population, task, ids = self.executor.work.population, self.executor.work.task, self.scored[:MOST_ON_POOL]
        personal = self._score(server, round, ids, "pool", new)["hits"]
        hits = None
        if generic_model is not None:
            shards = population.shards([0], "pool", "test", 0)
            fn = classes_function(Method(), task, lambda received, client, shard: received)
            hits = run_group("one_by_one", fn, Same(generic_model), (), shards, shards)[0].cpu().numpy()
        n = np.bincount(population.y.numpy()[population.pool].ravel(), minlength=population.n_classes)
        counts = population.shards(ids, "train", "pool", 0).counts.cpu().numpy()
        return Pool(ids, n, personal.cpu().numpy(), hits, counts)

    def _mean_of_personal(self, server: Tree, round: int, new: set[int]) -> Params:
        """The mean of all personal models, weighted by rows: for methods that have no model for all."""
        sizes, total = self.executor.work.population.sizes(), None
        for ids, is_new in self._parts(self.eligible, new):
            states: States = "new" if is_new else "kept"
            part = self.executor.sum_of_personal(round, self._message(server, ids, is_new), ids, states)
            total = part if total is None else tree.add(total, part)
        return tree.scale(1 / int(sizes[self.eligible].sum()), total)


def values_of(metric: Metric, outputs: list[np.ndarray], y: list[np.ndarray], target: Target) -> Values:
    """A metric of each client, and of all rows together."""
    each = [metric.of(own, true, target) for own, true in zip(outputs, y, strict=True)]
    return Values(np.array(each), metric.of(np.concatenate(outputs), np.concatenate(y), target))


def affordable_pool(n_clients: int, task: Task) -> int:
    """Rows that all personal models can be tested on in a minute or so."""
    of_a_row = min(n_clients, MOST_ON_POOL) * max(1, task.flops)
    return min(2000, max(100, int(1e12 / of_a_row)))


def _join(blocks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Blocks of clients, one after the other."""
    names = ("hits", "loss", "n") if not blocks else blocks[0]
    return {name: torch.cat([block[name] for block in blocks]) if blocks else torch.zeros(0) for name in names}


def _sums(found: dict[str, Tensor]) -> Sums:
    return {name: values.tolist() for name, values in found.items()}
