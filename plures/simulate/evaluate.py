"""Evaluation: how well every client's own model, and the one for all, do on test rows. It reads state, changes none."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data.population import Rows
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


class Evaluator(NamedTuple):
    """Scores the clients of a simulation."""

    executor: Executor
    eligible: list[int]
    scored: list[int]
    refresh: bool  # score clients after one more training, on a copy of their state

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
            personal = _sums(self._score(server, round, self.scored, "test", new))
            personal_flops = self.executor.personal_flops - before
            validation = None
            if population.validation:
                have_rows = [i for i in self.scored if len(population.validation[i])]
                validation = _sums(self._score(server, round, have_rows, "validation", new))
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
            pool = None
            if with_pool and len(population.pool) and self.scored:
                pool = self._on_pool(server, round, generic_model, new)
        seconds = time.perf_counter() - began
        never = tuple(i for i in self.scored if round and not bool(trained[i]))
        return Evaluation(self.scored, personal, generic, seconds, validation, pool, personal_flops, never, is_mean)

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

    def _score(self, server: Tree, round: int, ids: list[int], rows: Rows, new: set[int]) -> dict[str, Tensor]:
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
            hits = run_group("one_by_one", fn, Same(generic_model), (), shards, shards)[0].numpy()
        n = np.bincount(population.y.numpy()[population.pool].ravel(), minlength=population.n_classes)
        counts = population.shards(ids, "train", "pool", 0).counts.numpy()
        return Pool(ids, n, personal.numpy(), hits, counts)

    def _mean_of_personal(self, server: Tree, round: int, new: set[int]) -> Params:
        """The mean of all personal models, weighted by rows: for methods that have no model for all."""
        sizes, total = self.executor.work.population.sizes(), None
        for ids, is_new in self._parts(self.eligible, new):
            states: States = "new" if is_new else "kept"
            part = self.executor.sum_of_personal(round, self._message(server, ids, is_new), ids, states)
            total = part if total is None else tree.add(total, part)
        return tree.scale(1 / int(sizes[self.eligible].sum()), total)


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
