"""Tables: stacked tensors in memory that worker processes share; jobs read their input and write results there."""

from typing import Any

import torch
from torch import Tensor

from plures import tree
from plures.methods.messages import Each, Message, Same
from plures.simulate import client_store
from plures.simulate.client_store import ClientStore
from plures.simulate.shapes import Shapes
from plures.simulate.work import Job
from plures.tree import Params, Tree

GENERIC = ("generic", "generic outputs")  # kinds of jobs that test the one model for all
BY_GROUP = ("flops", "personal flops", "sums")  # tables with a row for each group; the others, for each client


class Tables:
    """The messages to a cohort, the states of all clients, and what jobs give."""

    def __init__(
        self, shapes: Shapes, model: Params, n_classes: int, store: ClientStore, capacity: int, n_outputs: int = 0
    ) -> None:
        """`capacity` is how many clients a cohort may have, `n_outputs` for how many rows of each outputs are kept."""
        self.store, self.capacity = store, capacity

        def table(template: Tree, n: int) -> Tree:
            return client_store.table(template, n, None, store.device)

        self._messages = table(shapes.train, capacity if shapes.is_each else 1)
        self._generic = table(model, 1)
        self._newcomer = table(shapes.newcomer, 1)
        self.results: dict[str, Any] = {
            "trained": table((shapes.kept, shapes.upload, shapes.metrics), capacity),
            "flops": table(torch.zeros((), dtype=torch.int64), capacity),
            "personal flops": table(torch.zeros((), dtype=torch.int64), capacity),
            "classes": table(torch.zeros(n_classes), capacity),
            "scores": table({name: torch.zeros(()) for name in ("hits", "loss", "n")}, capacity),
            "sums": table(model, capacity),
            "outputs": table(torch.zeros(n_outputs, n_classes), capacity),
        }

    # What the executor writes and reads

    def deliver(self, message: Message, n: int) -> None:
        """Put the message to a cohort of n clients where jobs read it."""
        if n > self.capacity:
            raise ValueError(f"a cohort of {n} clients, room for {self.capacity}")
        received = tree.leaves_like(self._messages, message.tree)
        for whole, new in zip(tree.leaves(self._messages), received, strict=True):
            if isinstance(message, Each):
                whole[:n] = new
            else:
                whole[0] = new

    def deliver_newcomer(self, message: Tree) -> None:
        """Put what new clients are sent where jobs read it."""
        for whole, new in zip(tree.leaves(self._newcomer), tree.leaves_like(self._newcomer, message), strict=True):
            whole[0] = new

    def deliver_generic(self, params: Params) -> None:
        """Put the one model for all where jobs read it."""
        for name, x in self._generic.items():
            x[0] = params[name]

    def first(self, name: str, n: int) -> Tree:
        """The first n rows of a table of results. The next jobs of that kind overwrite them."""
        return tree.map(lambda x: x[:n], self.results[name])

    # What workers read and write

    def message(self, job: Job) -> Message:
        """What the clients of a group receive."""
        if job.is_each:
            return Each(tree.rows(self._messages, torch.tensor(job.places)))
        common = self._generic if job.kind in GENERIC else self._newcomer if job.states == "new" else self._messages
        return Same(tree.row(common, 0))

    def states(self, job: Job) -> Tree:
        """What the clients of a group have kept, if it is needed."""
        if job.kind in GENERIC or job.states == "new":
            return ()
        if job.states == "fresh":
            return tree.rows(self.results["trained"][0], torch.tensor(job.places))
        return self.store.rows(torch.tensor(job.ids))

    def write(self, job: Job, results: dict[str, Tree]) -> None:
        """Write what a job gave into the rows of its clients, or of its group."""
        for name, rows in results.items():
            at = torch.tensor([job.group] if name in BY_GROUP else job.places)
            _write(self.results[name], at, rows)


def _write(to: Tree, at: Tensor, rows: Tree) -> None:
    for whole, part in zip(tree.leaves(to), tree.leaves_like(to, rows), strict=True):
        whole[at] = part.to(whole.dtype)
