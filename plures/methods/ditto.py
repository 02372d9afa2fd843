"""Ditto: FedAvg, plus a personal model per client that is trained to stay close to the received model.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021.

Personal model: v <- v - lr * (grad F_i(v) + lam * (v - w)), where w is the received model; v is never reset.

Differs from the paper: the mean is weighted by numbers of rows (`weights=uniform` gives the paper's). Both models take
the same number of steps at the same rate, unless `pm_epochs` and `pm_lr` say otherwise.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, Method, setting
from plures.methods.search import among, log
from plures.tree import Params


class DittoClient(NamedTuple):
    model: Params  # the personal model, never uploaded


@dataclass(frozen=True)
class Ditto(Averaged):
    """Trains the shared model as FedAvg does, and a personal model that is kept close to it."""

    lam: float = setting(
        0.1, "strength of the pull of the personal model towards the received one", least=0, search=log(0.01, 10)
    )
    pm_lr: float = setting(
        0.0,
        "learning rate of the personal model; 0: that of clients",
        least=0,
        search=among(0.0, 0.01, 0.05, 0.2).if_named(),
    )
    pm_epochs: int = setting(
        0,
        "epochs of the personal model in a round; 0: as many as clients train",
        least=0,
        search=among(0, 1, 3, 5).if_named(),
    )

    def init_client(self, task, params):
        return DittoClient(params)

    def train_personal(self, task, own, received, shard, solver):
        """The personal model after training with the pull towards the received model."""

        def loss(params, batch, received):
            return task.loss(params, batch) + self.lam / 2 * tree.sq_dist(params, received)

        return fit(loss, own, shard, solver.with_rate(self.pm_lr), given=(received,)).params

    def train(self, task, received, client, shard, terms=NO_TERMS):
        _, upload, metrics = Method.train(self, task, received, (), shard, terms)
        solver = self.solver.for_epochs(self.pm_epochs) if self.pm_epochs else self.solver
        return DittoClient(self.train_personal(task, client.model, received, shard, solver)), upload, metrics

    def personalize(self, task, received, client, shard):
        return client.model

    def adapt(self, task, received, shard, epochs):
        return self.train_personal(task, received, received, shard, self.solver.for_epochs(epochs))

    @property
    def personal_model_name(self):
        return "local"
