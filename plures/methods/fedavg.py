"""FedAvg: clients train the received model, and the server averages the results.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Differs from the paper: nothing. With `pm=local` the personal model is the one that a client trained in its last round,
as in the Fed-RoD paper; with `pm=global` it is the mean, for every client.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures.methods.base import NO_TERMS, Averaged, Method, setting
from plures.tree import Params


class FedAvgClient(NamedTuple):
    model: Params  # as trained in the last round; empty with pm=global


@dataclass(frozen=True)
class FedAvg(Averaged):
    """Clients train the received model; the server takes the mean, weighted by rows."""

    pm: str = setting(
        "global", "the personal model: the mean, or the model that the client last trained", choices=("global", "local")
    )

    def init_client(self, task, params):
        return FedAvgClient(params if self.pm == "local" else {})

    def train(self, task, received, client, shard, terms=NO_TERMS):
        _, model, metrics = Method.train(self, task, received, client, shard, terms)
        return FedAvgClient(model if self.pm == "local" else {}), model, metrics

    def personalize(self, task, received, client, shard):
        return client.model if self.pm == "local" else received

    @property
    def personal_model_name(self):
        return self.pm
