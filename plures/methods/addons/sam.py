"""SAM (sharpness-aware minimisation): every gradient is computed at weights perturbed along the gradient."""

from dataclasses import dataclass
from functools import cache

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.ingredients.sharpness import sam_loss
from plures.methods.search import log


@cache  # every call gets the same task, so that its steps are traced once
def with_sam_loss(task, rho):
    """The task with the loss of SAM."""
    return task.judged_by(lambda params, batch: sam_loss(lambda p: task.loss(p, batch), params, rho))


@dataclass(frozen=True)
class Sam(Addon):
    """Local steps use the gradient at p + rho * g / |g|, where g is the gradient at p on the same batch."""

    rho: float = setting(
        0.05, "length of the perturbation at which gradients are computed", least=0, search=log(0.005, 0.5)
    )

    def train(self, task, received, client, shard, terms=NO_TERMS):
        return self.host.train(with_sam_loss(task, self.rho), received, client, shard, terms)
