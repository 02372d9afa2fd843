"""Work: what a group of clients is asked to do, as plain data, and the functions of one client that do it.

A job is a few words and numbers, so that it can go to another process. What it computes is a dict from the names of
tables to rows for them. It knows neither who runs it nor where the tables are.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plures import engine, tree
from plures.data.batches import Batch
from plures.data.population import Population, Rows
from plures.data.shard import Shard
from plures.engine import Engine, Usage
from plures.learn.fit import TEST_BATCH, measure
from plures.learn.task import Task
from plures.methods.base import Method
from plures.methods.messages import Each, Message, Same
from plures.simulate.stacking import ClientFunction, Style, run_group
from plures.tree import Params, Tree

Kind = Literal["train", "score", "classes", "outputs", "sum", "generic", "generic outputs"]
# What clients have: what they kept; what the last training left, though it is not in the store; or nothing, because
# they have never taken part: then they are served as new clients.
States = Literal["kept", "fresh", "new"]


class Job(NamedTuple):
    """What one group has to do."""

    kind: Kind
    round: int
    is_each: bool  # whether every client has a message of its own
    group: int  # its number in the cohort
    places: list[int]  # of its clients in the cohort
    ids: list[int]  # of its clients
    rows: Rows = "test"  # what is scored on
    states: States = "kept"

    def message(self, content: Tree) -> Message:
        """What its clients receive."""
        return Each(content) if self.is_each else Same(content)


class Work(NamedTuple):
    """What jobs are done with: the same for all jobs of a run."""

    method: Method
    task: Task
    population: Population
    initial: Tree  # the state of a client that has not taken part
    style: Style
    engine: Engine = Engine()
    stack: int | None = None  # most clients that are stacked in training; None: as the engine's estimate allows
    new_epochs: int = 0  # that a client which never took part trains for, before it is scored

    def compute(self, job: Job, message: Message, clients: Tree) -> tuple[dict[str, Tree], Usage]:
        """The rows that a job gives for each table, and how its training steps were run."""
        with engine.using(self.engine), engine.metered() as meter:
            result = COMPUTE[job.kind](self, job, message, clients)
        return result, meter.usage

    def run(self, fn: ClientFunction, message: Message, *stacked: Tree) -> Tree:
        """One client function over a group."""
        return run_group(self.style, fn, message, *stacked)


# What jobs compute: the one place where their kinds are told apart


def _train(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    shards = work.population.shards(job.ids, "train", "train", job.round)
    with engine.metered() as meter:
        trained = work.run(train_function(work.method, work.task), message, clients, shards)
    return {"trained": trained, "flops": torch.tensor([meter.flops])}


def _score(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    shards = work.population.shards(job.ids, "train", "personalize", job.round)
    tests = work.population.shards(job.ids, job.rows, "test", 0)
    spent: list[int] = []
    make = personal_function(work, job.states == "new")
    scores = work.run(score_function(work, make, spent), message, clients, shards, tests)
    return {"scores": scores, "personal flops": torch.tensor([sum(spent)])}


def _score_classes(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    shards = work.population.shards(job.ids, "train", "personalize", job.round)
    tests = work.population.shards(job.ids, job.rows, "test", 0)
    make = personal_function(work, job.states == "new")
    return {"classes": work.run(classes_function(work.method, work.task, make), message, clients, shards, tests)}


def _score_generic(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    tests = work.population.shards(job.ids, "test", "test", 0)
    return {"scores": work.run(generic_function(work.task), message, tests)}


def _outputs(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    shards = work.population.shards(job.ids, "train", "personalize", job.round)
    tests = work.population.shards(job.ids, job.rows, "test", 0)
    make = personal_function(work, job.states == "new")
    found = work.run(outputs_function(work.method, work.task, make), message, clients, shards, tests)
    return {"outputs": as_wide(found, work.population.most_tested())}


def _outputs_generic(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    tests = work.population.shards(job.ids, "test", "test", 0)

    def outputs(received: Params, test: Shard) -> Tensor:
        return predict_rows(Method(), work.task, received, test)

    return {"outputs": as_wide(work.run(outputs, message, tests), work.population.most_tested())}


def _sum_personal(work: Work, job: Job, message: Message, clients: Tree) -> dict[str, Tree]:
    shards = work.population.shards(job.ids, "train", "personalize", job.round)
    personal = work.run(personal_function(work, job.states == "new"), message, clients, shards)
    return {"sums": tree.map(lambda x: torch.tensordot(shards.size.to(x.dtype), x, 1)[None], personal)}


COMPUTE: dict[str, Callable[[Work, Job, Message, Tree], dict[str, Tree]]] = {
    "train": _train,
    "score": _score,
    "classes": _score_classes,
    "outputs": _outputs,
    "generic outputs": _outputs_generic,
    "sum": _sum_personal,
    "generic": _score_generic,
}


# Functions of one client


def train_function(method: Method, task: Task) -> ClientFunction:
    """The client's new state, its upload and its metrics."""

    def train(received: Tree, client: Tree, shard: Shard) -> Tree:
        client, upload, metrics = method.train(task, received, client, shard)
        return client, upload, metrics

    return train


def personal_function(work: Work, is_new: bool = False) -> ClientFunction:
    """The client's personal model; of one that has never taken part, as the method serves new clients."""
    method, task = work.method, work.task

    def personalize(received: Tree, client: Tree, shard: Shard) -> Tree:
        return method.personalize(task, received, client, shard)

    def adapt(received: Tree, client: Tree, shard: Shard) -> Tree:
        return method.adapt(task, received, shard, work.new_epochs)

    return adapt if is_new else personalize


def score_function(work: Work, make: ClientFunction, spent: list[int]) -> ClientFunction:
    """Hits and loss on the client's test rows of the model that `make` gives; what that costs is added to `spent`."""

    def score(received: Tree, client: Tree, train: Shard, test: Shard) -> Tree:
        with engine.metered() as meter:
            personal = make(received, client, train)
        spent.append(meter.flops)
        return score_model(work.method, work.task, personal, test)

    return score


def score_model(method: Method, task: Task, personal: Tree, test: Shard) -> Tree:
    """Hits and loss of a personal model on some rows."""

    def on_batch(personal: Tree, batch: Batch) -> Tree:
        return hits_and_loss(task, method.predict(task, personal, batch.x), batch)

    return measure(on_batch, personal, test)


def classes_function(method: Method, task: Task, make: ClientFunction) -> ClientFunction:
    """Hits on some rows of the model that `make` gives, class by class."""

    def score(received: Tree, client: Tree, train: Shard, pool: Shard) -> Tree:
        personal = make(received, client, train)

        def on_batch(personal: Tree, batch: Batch) -> Tensor:
            return hits_by_class(method.predict(task, personal, batch.x), batch, task.n_classes)

        return measure(on_batch, personal, pool)

    return score


def outputs_function(method: Method, task: Task, make: ClientFunction) -> ClientFunction:
    """What the model that `make` gives puts out for each of the client's test rows."""

    def outputs(received: Tree, client: Tree, train: Shard, test: Shard) -> Tensor:
        return predict_rows(method, task, make(received, client, train), test)

    return outputs


def predict_rows(method: Method, task: Task, personal: Tree, test: Shard) -> Tensor:
    """[row, output]: of every row of a shard, some at a time; padding is there, too."""
    parts = [method.predict(task, personal, test.x[rows]) for rows in test.rows.split(TEST_BATCH, -1)]
    return torch.cat(parts)


def as_wide(outputs: Tensor, n_rows: int) -> Tensor:
    """[client, row, output] with so many rows; what is added is zero."""
    return torch.nn.functional.pad(outputs, (0, 0, 0, n_rows - outputs.shape[1]))


def generic_function(task: Task) -> ClientFunction:
    """Hits and loss of one model, the received one, on the client's test rows."""

    def score(received: Params, test: Shard) -> Tree:
        def on_batch(params: Params, batch: Batch) -> Tree:
            return hits_and_loss(task, task.logits(params, batch.x), batch)

        return measure(on_batch, received, test)

    return score


def hits_by_class(logits: Tensor, batch: Batch, n_classes: int) -> Tensor:
    """[class]: how many labels of each class are predicted right; of rows with several labels each one counts."""
    each_label = batch.mask.reshape(-1, *[1] * (batch.y.dim() - 1)).expand(batch.y.shape)
    right = (logits.argmax(-1) == batch.y).to(torch.float32) * each_label
    return right.flatten() @ torch.nn.functional.one_hot(batch.y.flatten(), n_classes).to(torch.float32)


def hits_and_loss(task: Task, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sums over the rows of a batch; of a row with several labels, the share that is right is its hit.

    Where a number is predicted there are no hits.
    """
    if task.kind == "classes":
        is_right = outputs.argmax(-1) == batch.y
    elif task.kind == "labels":
        is_right = (outputs > 0) == (batch.y > 0)
    else:
        is_right = torch.zeros_like(batch.y, dtype=torch.bool)
    right = is_right.to(torch.float32).reshape(len(batch.mask), -1).mean(1)
    n = batch.mask.sum()
    return {"hits": (right * batch.mask).sum(), "loss": task.loss_of(outputs, batch) * n, "n": n}
