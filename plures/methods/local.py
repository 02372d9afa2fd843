"""Local: every client trains alone from the common initial model; nothing is sent.

Differs from the papers: with partial participation clients take turns, so that each client trains in as many rounds as
clients of other methods do on average.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures.learn.fit import fit
from plures.methods.base import Method, fine_tune
from plures.methods.messages import Same
from plures.tree import Params


class LocalClient(NamedTuple):
    model: Params  # never uploaded


@dataclass(frozen=True)
class Local(Method):
    """Each client keeps training its own model; the server does nothing."""

    sampling = "in turn"

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
        return fine_tune(task, task.initial, shard, self.solver, epochs)

    @property
    def personal_model_name(self):
        return "local"
