"""APFL: each client predicts with a learned mixture of a personal model and its copy of the shared model.

Deng et al., Adaptive Personalized Federated Learning, 2020.

For every batch: w <- w - lr * gradient of F(w); v <- v - lr * alpha * gradient of F at alpha v + (1 - alpha) w. Once
per round alpha takes a gradient step on the same loss, clipped to [0, 1]. w is uploaded; the mixture is the personal
model.

Differs from the paper: the gradients of both models are taken before either moves. `adaptive=false` keeps alpha fixed.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, setting, with_penalties
from plures.methods.search import among, linear, log
from plures.tree import Params


class APFLClient(NamedTuple):
    own: Params  # v, never uploaded
    shared: Params  # w as trained in the last round; empty with pm=server
    alpha: Tensor  # share of v in the mixture


def mix(own, shared, alpha):
    """alpha * own + (1 - alpha) * shared."""
    return tree.map(lambda v, w: torch.lerp(w, v, alpha.to(v.dtype)), own, shared)


@dataclass(frozen=True)
class APFL(Averaged):
    """A personal model, the shared model, and a learned mixture of the two."""

    alpha: float = setting(
        0.25, "initial share of the personal model in the mixture", least=0, most=1, search=linear(0.05, 0.95)
    )
    adaptive: bool = setting(True, "whether the share is learned")
    alpha_lr: float = setting(0.1, "learning rate of the share", least=0, search=log(0.01, 1))
    pm_lr: float = setting(
        0.0,
        "learning rate of the personal model; 0: that of clients",
        least=0,
        search=among(0.0, 0.01, 0.05, 0.2).if_named(),
    )
    pm: str = setting(
        "local", "shared model in the mixture: as last trained, or as received", choices=("local", "server")
    )

    def init_client(self, task, params):
        return APFLClient(params, params if self.pm == "local" else {}, torch.tensor(self.alpha))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def share_loss(alpha, batch, own, shared):
            mixed = mix(own, shared, alpha)
            # The gradient of a statistic is its update, which must not flow into alpha.
            statistics = tree.detach(tree.keep(mixed, tree.is_statistic))
            return task.loss(mixed | statistics, batch)

        def objective(both, batch, alpha, penalties):
            shared_loss = with_penalties(task.loss(both["shared"], batch), both["shared"], penalties)
            return shared_loss + task.loss(mix(both["own"], tree.detach(both["shared"]), alpha), batch)

        start, alpha = terms.start_from(received), client.alpha
        if self.adaptive:
            once = dataclasses.replace(self.solver.plain(self.alpha_lr).for_steps(1), box=(0.0, 1.0))
            alpha = fit(share_loss, alpha, shard, once, given=(client.own, start)).params
        solver = self.solver
        if self.pm_lr:
            solver = dataclasses.replace(solver, pace=(("own", self.pm_lr / solver.lr if solver.lr else 0.0),))
        both = {"shared": start, "own": client.own}
        fitted = fit(objective, both, shard, solver, given=(alpha, terms.penalties))
        shared, own = fitted.params["shared"], fitted.params["own"]
        return (
            APFLClient(own, shared if self.pm == "local" else {}, alpha),
            shared,
            {"loss": fitted.loss, "steps": fitted.steps},
        )

    def personalize(self, task, received, client, shard):
        return mix(client.own, client.shared if self.pm == "local" else received, client.alpha)

    @property
    def personal_model_name(self):
        return f"mixture with the {'last trained' if self.pm == 'local' else 'received'} model"
