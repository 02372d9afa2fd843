"""pFedMe: each client trains a personal model close to the shared one (Moreau envelope); the shared one follows it.

Dinh et al., Personalized Federated Learning with Moreau Envelopes, 2020.

For every batch: approximate theta = argmin F(theta; batch) + lam/2 |theta - w|^2 by K gradient steps from w, then
w <- w - lr * lam * (w - theta). The server moves a share beta of the way to the mean of all w.

Differs from the paper: the personal model is the theta of the last batch, not the client's w; clients that do not take
part in a round do not train. With `warm=true` the K steps start at the last theta instead of at w.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import tree
from plures.learn.fit import descend, fit, recorded, with_gradient
from plures.methods.base import NO_TERMS, Averaged, setting, with_penalties
from plures.methods.search import among, linear, log
from plures.tree import Params


class PFedMeClient(NamedTuple):
    model: Params  # theta of the last batch, never uploaded


@dataclass(frozen=True)
class PFedMe(Averaged):
    """Personal models are kept close to the shared model, which moves towards them."""

    lam: float = setting(
        15.0, "strength of the pull of the personal model towards the shared one", least=0, search=log(5, 45)
    )
    inner_steps: int = setting(5, "gradient steps of the personal model for each batch", least=1, search=linear(1, 10))
    inner_lr: float = setting(0.05, "learning rate of these steps", least=0, search=log(0.005, 0.5))
    beta: float = setting(1.0, "share of the way to the mean that the server moves", least=0, search=linear(0.5, 2))
    outer_lr: float = setting(
        0.0,
        "learning rate of the shared model; 0: that of clients",
        least=0,
        search=among(0.0, 0.005, 0.05, 0.5).if_named(),
    )
    warm: bool = setting(False, "start each batch at the last personal model instead of the shared one")

    def merge(self, task, server, ids, uploads, sizes):
        mean = super().merge(task, server, ids, uploads, sizes)
        if self.beta == 1:
            return mean
        # Statistics of BatchNorm are averaged: beyond the mean a variance may be negative.
        old, new = tree.trainable(server), tree.trainable(mean)
        return mean | tree.map(lambda old, new: torch.lerp(old, new, self.beta), old, new)

    def init_client(self, task, params):
        return PFedMeClient(params)

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def objective(both, batch, penalties):
            shared, last = both["shared"], both["recorded"]
            w = tree.detach(shared)

            def loss(theta):
                return task.loss(theta, batch) + self.lam / 2 * tree.sq_dist(theta, w)

            theta = descend(loss, tree.detach(last) if self.warm else w, self.inner_lr, self.inner_steps)
            gradients, value = torch.func.grad_and_value(task.loss)(theta, batch)
            theta = {name: x - gradients[name] if tree.is_statistic(name) else x for name, x in theta.items()}
            gradient = {
                name: x - theta[name] if tree.is_statistic(name) else self.lam * (x - theta[name])
                for name, x in w.items()
            }
            return (
                value
                + with_gradient(shared, gradient)
                + recorded(last, theta)
                + with_penalties(torch.zeros(()), shared, penalties)
            )

        start = terms.start_from(received)
        both = {"shared": start, "recorded": client.model}
        fitted = fit(objective, both, shard, self.solver.with_rate(self.outer_lr), given=(terms.penalties,))
        metrics = {"loss": fitted.loss, "steps": fitted.steps}
        return PFedMeClient(fitted.params["recorded"]), fitted.params["shared"], metrics

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "local"
