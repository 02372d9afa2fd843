"""Executors: a client function over a cohort, one client after another or stacked, over worker processes.

Which clients are stacked together depends on the cohort alone, never on the number of workers, and
every worker computes with one thread: so any number of workers gives the same bits.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from . import flops, seeds, tree
from .errors import RunFailed, UsageError
from .fit import TEST_BATCH, measure
from .method import Each, Method, Same
from .shard import Shard, batches_an_epoch
from .store import ClientStore, table
from .task import Batch, Task, cross_entropy
from .tree import Params, Tree

Style = Literal["vectorised", "one_by_one"]
Rows = Literal["train", "test", "validation", "pool"]
ClientFunction = Callable[..., Tree]

GROUP_BYTES = 1 << 30  # what the stacked tensors of a group may take
CACHE_BYTES = 24 << 20  # and what the outputs of its layers may take, if it has more than a few clients
WEIGHT_BYTES = 32 << 20  # and what its weights may take, if they are trained and some are of convolutions
A_FEW = 4


class Population(NamedTuple):
    """All clients' data: two tables, and who has which rows."""

    x: Tensor
    y: Tensor
    train: list[np.ndarray]
    test: list[np.ndarray]
    n_classes: int
    seed: int
    smallest: int  # batch, for training
    validation: Sequence[np.ndarray] = ()  # rows of each client that are kept apart, if any are
    pool: np.ndarray = np.zeros(0, np.int64)  # test rows of all clients together, on which every model is tested

    def eligible(self) -> list[int]:
        """The clients that have rows to train on; the others sit out."""
        return [i for i, rows in enumerate(self.train) if len(rows)]

    def parted(self, n_new: int) -> tuple["Population", "Population | None"]:
        """The clients that train, and the last n, which are new; None when there are none."""
        if n_new == 0:
            return self, None
        n = len(self.train) - n_new
        if n < 1:
            raise UsageError(f"{n_new} new clients of {len(self.train)} leave nobody to train; hold out fewer")
        old = self._replace(train=self.train[:n], test=self.test[:n])
        return old, self._replace(train=self.train[n:], test=self.test[n:])

    def with_public(self, n_each: int) -> tuple["Population", np.ndarray]:
        """The clients without n rows of each class, drawn from all of them, and these rows.

        No client gives its first row, so that none is left without any.
        """
        if self.y.dim() != 1:
            raise UsageError("this method needs some public rows of each class; rows with several labels have none")
        rng, labels = seeds.generator(self.seed, "public rows"), self.y.numpy()
        spare = np.concatenate([rows[1:] for rows in self.train])
        public = []
        for label in range(self.n_classes):
            rows = spare[labels[spare] == label]
            public.append(rng.choice(rows, min(n_each, len(rows)), replace=False))
        taken = np.sort(np.concatenate(public))
        return self._replace(train=[rows[~np.isin(rows, taken)] for rows in self.train]), taken

    def with_validation(self, share: float) -> "Population":
        """The clients without a share of their training rows, kept apart: one row at least, if a client has two."""
        if not share:
            return self
        train, validation = [], []
        for client, rows in enumerate(self.train):
            n = min(max(1, int(share * len(rows))), len(rows) - 1) if len(rows) > 1 else 0
            order = seeds.generator(self.seed, "validation", client).permutation(len(rows))
            train.append(np.sort(rows[order[n:]]))
            validation.append(np.sort(rows[order[:n]]))
        return self._replace(train=train, validation=validation)

    def with_pool(self, n_rows: int) -> "Population":
        """With so many of all clients' test rows, drawn at random, or with all of them if there are no more."""
        rows = np.unique(np.concatenate(self.test)) if self.test else self.pool
        if len(rows) > n_rows:
            rows = np.sort(seeds.generator(self.seed, "pool").choice(rows, n_rows, replace=False))
        return self._replace(pool=rows)

    def rows_of(self, client: int, part: "Rows") -> np.ndarray:
        if part == "pool":
            return self.pool
        return {"train": self.train, "test": self.test, "validation": self.validation}[part][client]

    def sizes(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.train])

    def shards(self, ids: Sequence[int], part: "Rows", purpose: str, round: int) -> Shard:
        """The shards of some clients, stacked (but for the tables)."""
        own = [self.rows_of(i, part) for i in ids]
        sizes = np.array([len(rows) for rows in own])
        rows = np.zeros((len(own), max(1, int(sizes.max(initial=0)))), np.int64)
        counts = np.zeros((len(own), self.n_classes), np.float32)
        labels = self.y.numpy()
        for i, client in enumerate(ids):
            rows[i, : sizes[i]] = own[i]
            counts[i] = np.bincount(labels[self.train[client]].ravel(), minlength=self.n_classes)
        return Shard(
            self.x,
            self.y,
            torch.from_numpy(rows),
            torch.from_numpy(sizes),
            torch.from_numpy(counts),
            torch.tensor([seeds.key_of(self.seed, purpose, round, i) for i in ids]),
            torch.full((len(own),), round),
            torch.full((len(own),), self.smallest),
        )


# One function, two ways to run it over a group


def run_group(style: Style, fn: ClientFunction, message: Same | Each, *stacked: Tree) -> Tree:
    """`fn(received, *rows)` for every client of a group; results are stacked."""
    with torch.no_grad():
        return (one_by_one if style == "one_by_one" else vectorised)(fn, message, *stacked)


def one_by_one(fn: ClientFunction, message: Same | Each, *stacked: Tree) -> Tree:
    def received(i: int) -> Tree:
        return message.tree if isinstance(message, Same) else tree.row(message.tree, i)

    n = _n_rows(stacked)
    return tree.stack([fn(received(i), *[_row(part, i) for part in stacked]) for i in range(n)])


def vectorised(fn: ClientFunction, message: Same | Each, *stacked: Tree) -> Tree:
    leaves, spec = tree.flatten((message.tree, *stacked))
    dims: list[int | None] = [None if isinstance(message, Same) else 0] * len(tree.leaves(message.tree))
    for part in stacked:
        dims += [None, None, *[0] * 6] if isinstance(part, Shard) else [0] * len(tree.leaves(part))
    found: list[tree.Spec] = []

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, form = tree.flatten(fn(*tree.unflatten(leaves, spec)))
        found.append(form)
        return tuple(out)

    # With tensors in a row vmap has less to look at than with trees.
    out = torch.vmap(flat, in_dims=tuple(dims))(*leaves)
    return tree.unflatten(out, found[0])


def _row(part: Tree, i: int) -> Tree:
    if isinstance(part, Shard):
        return Shard(part.x, part.y, *[x[i] for x in part[2:]])
    return tree.row(part, i)


def _n_rows(stacked: Sequence[Tree]) -> int:
    return next(len(part.size) for part in stacked if isinstance(part, Shard))


# Client functions


def train_function(method: Method, task: Task) -> ClientFunction:
    def train(received: Tree, client: Tree, shard: Shard) -> Tree:
        client, upload, metrics = method.train(task, received, client, shard)
        return client, upload, metrics

    return train


def personal_function(method: Method, task: Task) -> ClientFunction:
    """The client's personal model."""

    def personalize(received: Tree, client: Tree, shard: Shard) -> Tree:
        return method.personalize(task, received, client, shard)

    return personalize


def score_function(method: Method, task: Task) -> ClientFunction:
    """Hits and loss of the personal model on the client's test rows."""

    def score(received: Tree, client: Tree, train: Shard, test: Shard) -> Tree:
        personal = method.personalize(task, received, client, train)

        def on_batch(personal: Tree, batch: Batch) -> Tree:
            return hits_and_loss(method.predict(task, personal, batch.x), batch)

        return measure(on_batch, personal, test)

    return score


def classes_function(method: Method, task: Task) -> ClientFunction:
    """Hits of the personal model on some rows, class by class."""

    def score(received: Tree, client: Tree, train: Shard, pool: Shard) -> Tree:
        personal = method.personalize(task, received, client, train)

        def on_batch(personal: Tree, batch: Batch) -> Tensor:
            return hits_of_classes(method.predict(task, personal, batch.x), batch, task.n_classes)

        return measure(on_batch, personal, pool)

    return score


def hits_of_classes(logits: Tensor, batch: Batch, n_classes: int) -> Tensor:
    """How many labels of each class are told right; of rows with several labels each one counts."""
    each_label = batch.mask.reshape(-1, *[1] * (batch.y.dim() - 1)).expand(batch.y.shape)
    right = (logits.argmax(-1) == batch.y).to(torch.float32) * each_label
    return right.flatten() @ torch.nn.functional.one_hot(batch.y.flatten(), n_classes).to(torch.float32)


def generic_function(task: Task) -> ClientFunction:
    """Hits and loss of one model, the received one, on the client's test rows."""

    def score(received: Params, test: Shard) -> Tree:
        def on_batch(params: Params, batch: Batch) -> Tree:
            return hits_and_loss(task.logits(params, batch.x), batch)

        return measure(on_batch, received, test)

    return score


def hits_and_loss(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    right = (logits.argmax(-1) == batch.y).to(torch.float32).reshape(len(batch.mask), -1).mean(1)
    n = batch.mask.sum()
    return {"hits": (right * batch.mask).sum(), "loss": cross_entropy(logits, batch) * n, "n": n}


# Groups


class Cost(NamedTuple):
    """What a step of a stack costs, in seconds of an imagined core (only ratios matter), and how wide it may be."""

    step: float  # the arithmetic of one client
    overhead: float  # besides, for however many clients
    most: int  # clients in a stack

    def of(self, n_steps: Sequence[int]) -> float:
        """Of a whole stack, from the steps of its clients."""
        return max(n_steps) * self.overhead + sum(n_steps) * self.step


def cost_of(task: Task, batch: int, n_passes: int, client_bytes: int) -> Cost:
    """Of steps that go through the model so many times with batches of this size."""
    step = n_passes * task.flops * batch / 2e10
    # Kernels for convolutions are slower for one client than for four in a stack.
    has_convolutions = any(x.dim() == 4 for x in task.initial.values())
    calls = max(7e-4, 1e-5 * n_passes * task.n_kernels)  # a recurrent net calls very many
    overhead = calls + (0.4 * step if has_convolutions else 0.0)
    in_cache = max(A_FEW, CACHE_BYTES // (batch * task.row_bytes))
    if has_convolutions and n_passes > 1:  # of one pass, in a test, all clients may share the weights
        in_cache = min(in_cache, WEIGHT_BYTES // tree.n_bytes(task.initial))
    return Cost(step, overhead, max(1, min(in_cache, GROUP_BYTES // client_bytes)))


def groups(n_steps: Sequence[int], cost: Cost) -> list[list[int]]:
    """As below; where every round has the same clients, they are grouped once."""
    return [list(group) for group in _groups(tuple(n_steps), cost)]


@lru_cache(maxsize=16)
def _groups(n_steps: tuple[int, ...], cost: Cost) -> list[list[int]]:
    """Which places of a cohort are stacked together: clients of like length, so that few steps are thin.

    A stacked step costs a fixed overhead and the arithmetic of its clients. Of some ways to cut the
    cohort, sorted by length, into groups, the one is taken that would end first with two workers,
    which count twice, and with eight; how many there really are plays no part.
    """
    order = sorted(range(len(n_steps)), key=lambda i: (-n_steps[i], i))

    def seconds(group: Sequence[int]) -> float:
        return cost.of([n_steps[i] for i in group])

    def cut(limit: float) -> list[list[int]]:
        out: list[list[int]] = []
        so_far = 0.0
        for i in order:
            so_far += n_steps[i] * cost.step
            if not out or len(out[-1]) == cost.most or so_far > limit:
                out.append([])
                so_far = n_steps[i] * (cost.overhead + cost.step)
            out[-1].append(i)
        return out

    def end(cuts: list[list[int]], n_workers: int) -> float:
        free = [0.0] * n_workers
        for each in sorted(map(seconds, cuts), reverse=True):
            free[free.index(min(free))] += each
        return max(free)

    def ends(cuts: list[list[int]]) -> float:
        return 2 * end(cuts, 2) + end(cuts, 8)

    whole = seconds(order)
    limits = [whole / 1.15**k for k in range(21)]
    limit = min(limits, key=lambda limit: ends(cut(limit)))
    # A somewhat lower limit may give as many groups, of more even cost.
    return min((cut(limit * (1 - 0.025 * k)) for k in range(6)), key=ends)


class Job(NamedTuple):
    """What one group has to do."""

    kind: str  # train, score, classes, sum or generic
    round: int
    each: bool  # whether every client has a message of its own
    group: int  # its number in the cohort
    places: list[int]  # of its clients in the cohort
    ids: list[int]  # of its clients
    part: Rows = "test"  # what is scored on
    fresh: bool = False  # whether clients are as the last training left them, though it is not in the store


class Trained(NamedTuple):
    """A cohort after its training: stacked, row i belongs to the i-th client. The next training overwrites it."""

    clients: Tree
    uploads: Tree
    metrics: dict[str, Tensor]
    flops: int


class Work(NamedTuple):
    """What groups are run with: the same for all of a run's groups."""

    method: Method
    task: Task
    population: Population
    initial: Tree  # the state of a client that has not taken part
    style: Style

    def probe(self, message: Same | Each) -> Tree:
        """What training returns, learned from two clients with one row; what was traced for it is kept."""
        one_row = self.population.train[self.population.eligible()[0]][:1]
        shards = self.population._replace(train=[one_row, one_row], test=[]).shards([0, 1], "train", "probe", 0)
        clients = tree.map(lambda x: torch.stack([x, x]), self.initial)
        if isinstance(message, Each):
            message = Each(tree.map(lambda x: torch.cat([x, x]), message.tree))
        try:
            found = run_group(self.style, train_function(self.method, self.task), message, clients, shards)
        except RuntimeError as error:
            if "atching rule not implemented" not in str(error):
                raise
            raise UsageError(
                "torch cannot stack clients of this model (nn.LSTM, nn.GRU and the like have no rule for it); "
                "use --executor one_by_one, or write the cell with plain operations as the model charlstm does"
            ) from error
        return tree.row(found, 0)

    def result(self, job: Job, message: Same | Each, clients: Tree) -> Tree:
        """What a group gives, from its messages and states."""
        if job.kind == "generic":
            tests = self.population.shards(job.ids, "test", "test", 0)
            return run_group(self.style, generic_function(self.task), message, tests)
        if job.kind == "train":
            shards = self.population.shards(job.ids, "train", "train", job.round)
            fn = train_function(self.method, self.task)
            with flops.counted() as counter:
                trained = run_group(self.style, fn, message, clients, shards)
            return trained, torch.tensor([counter.total])
        shards = self.population.shards(job.ids, "train", "personalize", job.round)
        if job.kind in ("score", "classes"):
            score = score_function if job.kind == "score" else classes_function
            tests = self.population.shards(job.ids, job.part, "test", 0)
            return run_group(self.style, score(self.method, self.task), message, clients, shards, tests)
        personal = run_group(self.style, personal_function(self.method, self.task), message, clients, shards)
        weight = shards.size.to(torch.float32)
        return tree.map(lambda x: torch.tensordot(weight, x, 1)[None], personal)


class Crew(Protocol):
    """Those who do jobs."""

    def do(self, jobs: list[Job]) -> None:
        """Do all jobs, of which the first is the longest; all are of one kind and one round."""

    def close(self) -> None: ...


class Executor:
    """Runs client functions over cohorts, by a crew, which reads and writes its tables."""

    def __init__(
        self,
        work: Work,
        store: ClientStore,
        message: Same | Each,
        crew_of: Callable[["Executor", Same | Each], Crew],
        capacity: int,
    ) -> None:
        self.work, self.store, self.capacity = work, store, capacity
        self.method, self.task, self.population = work.method, work.task, work.population
        if isinstance(message, Each):
            self._messages = table(tree.row(message.tree, 0), capacity)
        else:
            self._messages = table(message.tree, 1)
        self._generic = table(self.task.initial, 1)
        self.template = work.probe(message)
        self._trained = table(self.template, capacity)
        self._flops = table(torch.zeros((), dtype=torch.int64), capacity)
        self._classes = table(torch.zeros(self.population.n_classes), capacity)
        self._scores = table({name: torch.zeros(()) for name in ("hits", "loss", "n")}, capacity)
        self._sums = table(self.task.initial, capacity)
        self._crew = crew_of(self, message)  # last: forked workers share the tables, and inherit what was traced

    def close(self) -> None:
        self._crew.close()

    # What the run asks for

    def train(self, round: int, message: Same | Each, ids: list[int]) -> Trained:
        """Train a cohort; results are in the order of ids."""
        self._deliver(message, len(ids))
        steps = self._n_steps(ids)
        weights = tree.n_bytes(self.template) + tree.n_bytes(self.task.initial)
        batch = self.method.solver.batch
        cost = cost_of(self.task, batch, 3, 4 * weights + 3 * batch * self.task.row_bytes)
        n_groups = self._spread("train", round, isinstance(message, Each), ids, steps, cost)
        clients, uploads, metrics = tree.map(lambda x: x[: len(ids)], self._trained)
        return Trained(clients, uploads, metrics, int(self._flops[:n_groups].sum()))

    def score(
        self, round: int, message: Same | Each, ids: list[int], part: Rows = "test", fresh: bool = False
    ) -> dict[str, Tensor]:
        """Hits, loss and number of rows of each client's personal model; `fresh`, as `train` has just left it."""
        self._deliver(message, len(ids))
        self._score("score", round, isinstance(message, Each), ids, part, fresh)
        return tree.map(lambda x: x[: len(ids)].clone(), self._scores)

    def score_classes(self, round: int, message: Same | Each, ids: list[int], fresh: bool = False) -> Tensor:
        """[client, class]: hits of each client's personal model on the pool."""
        self._deliver(message, len(ids))
        self._score("classes", round, isinstance(message, Each), ids, "pool", fresh)
        return self._classes[: len(ids)].clone()

    def score_generic(self, params: Params, ids: list[int]) -> dict[str, Tensor]:
        """Hits, loss and number of rows of one model on every client's test rows."""
        for name, x in self._generic.items():
            x[0] = params[name]
        self._score("generic", 0, False, ids, "test", False)
        return tree.map(lambda x: x[: len(ids)].clone(), self._scores)

    def sum_of_personal(self, round: int, message: Same | Each, ids: list[int]) -> Params:
        """The sum of the clients' personal models, weighted by their training rows."""
        self._deliver(message, len(ids))
        cost = cost_of(self.task, self.method.solver.batch, 1, 2 * tree.n_bytes(self.task.initial))
        n_groups = self._spread("sum", round, isinstance(message, Each), ids, self._n_steps(ids), cost)
        return tree.map(lambda x: x[:n_groups].sum(0), self._sums)

    def _score(self, kind: str, round: int, each: bool, ids: list[int], part: Rows, fresh: bool) -> None:
        # Counted in eighths of a batch, so that clients with few rows are together: their batches are narrow.
        n_rows = [len(self.population.rows_of(i, part)) for i in ids]
        eighths = [n * 8 // TEST_BATCH + 1 for n in n_rows]
        width = min(TEST_BATCH, 8 * int(np.median(eighths)))
        bytes_each = 2 * tree.n_bytes(self.task.initial) + 2 * TEST_BATCH * self.task.row_bytes
        step, overhead, most = cost_of(self.task, width, 1, bytes_each)
        self._spread(kind, round, each, ids, eighths, Cost(step * 8 / width, overhead / 8, most), part, fresh)

    def _n_steps(self, ids: list[int]) -> list[int]:
        solver = self.method.solver
        if solver.steps is not None:
            return [solver.steps] * len(ids)
        sizes = np.array([len(self.population.train[i]) for i in ids])
        per_epoch = batches_an_epoch(sizes, solver.batch, self.population.smallest)
        return [int(n) for n in np.maximum(solver.epochs, 1) * per_epoch]

    def _deliver(self, message: Same | Each, n: int) -> None:
        if n > self.capacity:
            raise ValueError(f"a cohort of {n} clients, room for {self.capacity}")
        received = tree.leaves_like(self._messages, message.tree)
        for whole, new in zip(tree.leaves(self._messages), received, strict=True):
            if isinstance(message, Each):
                whole[:n] = new
            else:
                whole[0] = new

    def _spread(
        self,
        kind: str,
        round: int,
        each: bool,
        ids: list[int],
        n_steps: list[int],
        cost: Cost,
        part: Rows = "test",
        fresh: bool = False,
    ) -> int:
        """Do all groups of a cohort, here or over the workers, and say how many there were."""
        plan = groups(n_steps, cost)
        jobs = [
            Job(kind, round, each, k, places, [ids[i] for i in places], part, fresh) for k, places in enumerate(plan)
        ]
        jobs.sort(key=lambda job: cost.of([n_steps[i] for i in job.places]), reverse=True)
        self._crew.do(jobs)
        return len(jobs)

    # What a crew asks for

    def do(self, job: Job) -> None:
        """One group, here: read, run, write."""
        self.keep(job, self.work.result(job, self.message(job), self.states(job)))

    def message(self, job: Job) -> Same | Each:
        """What the clients of a group receive."""
        if job.each:
            return Each(tree.rows(self._messages, torch.tensor(job.places)))
        return Same(tree.row(self._generic if job.kind == "generic" else self._messages, 0))

    def states(self, job: Job) -> Tree:
        """What the clients of a group have kept, if it is needed."""
        if job.kind == "generic":
            return ()
        if job.fresh:
            return tree.rows(self._trained[0], torch.tensor(job.places))
        return self.store.rows(torch.tensor(job.ids))

    def keep(self, job: Job, result: Tree) -> None:
        """Write what a group gave into the tables of its kind."""
        places, group = torch.tensor(job.places), torch.tensor([job.group])
        if job.kind == "train":
            trained, n_flops = result
            _write(self._trained, places, trained)
            _write(self._flops, group, n_flops)
        elif job.kind == "sum":
            _write(self._sums, group, result)
        else:
            _write(self._classes if job.kind == "classes" else self._scores, places, result)


def _write(to: Tree, places: Tensor, new: Tree) -> None:
    for whole, part in zip(tree.leaves(to), tree.leaves_like(to, new), strict=True):
        whole[places] = part


# Crews


class Alone:
    """Nobody but this process."""

    def __init__(self, do: Callable[[Job], None]) -> None:
        self._do = do

    def do(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._do(job)

    def close(self) -> None:
        pass


class Forked:
    """Worker processes, forked, so that they see the same memory; each takes the next job when it is free."""

    def __init__(self, n_workers: int, do: Callable[[Job], None]) -> None:
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(n_workers)]
        self._ends: list[Connection] = [ours for ours, _ in pipes]
        self._processes = []
        for k, (_, theirs) in enumerate(pipes):
            others = [end for i, pair in enumerate(pipes) for end in pair if not (i == k and end is theirs)]
            process = fork.Process(target=_work, args=(theirs, others, do), daemon=True)
            process.start()
            self._processes.append(process)
        for _, theirs in pipes:
            theirs.close()

    def do(self, jobs: list[Job]) -> None:
        waiting = list(reversed(jobs))
        busy: dict[Connection, Job] = {}
        failure = ""
        for end in self._ends:
            if waiting:
                busy[end] = self._give(end, waiting.pop())
        while busy:
            for ready in wait(list(busy)):
                end = next(end for end in busy if end is ready)
                job = busy.pop(end)
                try:
                    answer = end.recv_bytes().decode()
                except (EOFError, OSError):
                    raise lost(job) from None
                failure = failure or answer
                if waiting and not failure:
                    busy[end] = self._give(end, waiting.pop())
        if failure:
            raise failed(failure)

    @staticmethod
    def _give(end: Connection, job: Job) -> Job:
        try:
            end.send_bytes(json.dumps(job).encode())
        except OSError:
            raise lost(job) from None
        return job

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()


def failed(said: str) -> RunFailed:
    return RunFailed(
        f"a client function failed ({said}); rerun with --executor one_by_one --workers 1 --debug to learn where"
    )


def lost(job: Job) -> RunFailed:
    return RunFailed(
        f"a worker process ended while it had clients {job.ids} in round {job.round + 1}; was it out of memory? "
        "Go on with `plures resume`, perhaps with fewer --workers."
    )


def _work(mine: Connection, others: list[Connection], do: Callable[[Job], None]) -> None:
    for end in others:
        end.close()  # else the end of the main process would not be seen
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach the whole group: the main process decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job = Job(*json.loads(mine.recv_bytes()))
        except EOFError:
            os._exit(0)
        try:
            do(job)
            answer = ""
        except BaseException as error:
            answer = in_a_line(error)
        mine.send_bytes(answer.encode())


def in_a_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
