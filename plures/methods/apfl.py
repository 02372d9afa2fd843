"""APFL: each client mixes a model of its own with its copy of the shared one.

Deng et al., Adaptive Personalized Federated Learning, 2020.

For every batch: w <- w - lr * gradient of F(w); v <- v - lr * alpha * gradient of F at alpha v + (1 - alpha) w. Once a
round alpha takes a step down the same loss, within [0, 1]. w is uploaded; the mixture is the personal model.

Differs from the paper: both models step from their values before the step. `adaptive=false` keeps alpha.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, setting, with_penalties
from plures.tree import Params


class APFLClient(NamedTuple):
    own: Params  # v, never uploaded
    shared: Params  # w as trained in the last round
    alpha: Tensor


def mixture(own, shared, alpha):
    return tree.map(lambda v, w: torch.lerp(w, v, alpha.to(v.dtype)), own, shared)


@dataclass(frozen=True)
class APFL(Averaged):
    """An own model, a shared one, and a learned mixture of the two."""

    alpha: float = setting(0.75, "share of the own model in the mixture, at the start", least=0, most=1)
    adaptive: bool = setting(True, "whether the share is learned")
    alpha_lr: float = setting(0.1, "step size of the share", least=0)
    pm: str = setting("local", "shared model of the mixture: last trained, or received", choices=("local", "server"))

    def init_client(self, task, params):
        return APFLClient(params, params if self.pm == "local" else {}, torch.tensor(self.alpha))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def share_loss(alpha, batch, own, shared):
            mixed = mixture(own, shared, alpha)
            still = tree.detach(
                tree.keep(mixed, tree.is_statistic)
            )  # the gradient of a statistic is no gradient of alpha
            return task.loss(mixed | still, batch)

        def objective(both, batch, alpha, penalties):
            shared_loss = with_penalties(task.loss(both["shared"], batch), both["shared"], penalties)
            return shared_loss + task.loss(mixture(both["own"], tree.detach(both["shared"]), alpha), batch)

        start, alpha = terms.start_from(received), client.alpha
        if self.adaptive:
            once = dataclasses.replace(self.solver.plain(self.alpha_lr).for_steps(1), box=(0.0, 1.0))
            alpha = fit(share_loss, alpha, shard, once, given=(client.own, start)).params
        fitted = fit(
            objective, {"shared": start, "own": client.own}, shard, self.solver, given=(alpha, terms.penalties)
        )
        shared, own = fitted.params["shared"], fitted.params["own"]
        return (
            APFLClient(own, shared if self.pm == "local" else {}, alpha),
            shared,
            {"loss": fitted.loss, "steps": fitted.steps},
        )

    def personalize(self, task, received, client, shard):
        return mixture(client.own, client.shared if self.pm == "local" else received, client.alpha)

    @property
    def personal_model_name(self):
        return f"mixture with the {'last trained' if self.pm == 'local' else 'received'} model"
