"""Local: every client trains alone, from the common start; nothing travels.

Differs from the papers: with partial participation clients take turns, so that each one gets the
same number of rounds that the others of a comparison get on average.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..fit import fit
from ..method import Method, Same, fine_tuned
from ..tree import Params


class LocalClient(NamedTuple):
    model: Params  # never uploaded


@dataclass(frozen=True)
class Local(Method):
    """Clients go on training their own model; the server does nothing."""

    turns = "in turn"

    def init_server(self, task, params, federation):
        return {}

    def send(self, task, server, ids):
        return Same({})

    def merge(self, task, server, ids, uploads, sizes):
        return server

    def generic(self, task, server):
        return None

    def init_client(self, task, params):
        return LocalClient(params)

    def train(self, task, received, client, shard):
        fitted = fit(task.loss, client.model, shard, self.solver)
        return LocalClient(fitted.params), {}, {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        return client.model

    def adapt(self, task, received, shard, epochs):
        return fine_tuned(task, task.initial, shard, self.solver, epochs)

    @property
    def scored(self):
        return "local"
