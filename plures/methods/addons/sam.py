"""SAM: every gradient is taken a step uphill, where the loss is sharpest."""

from dataclasses import dataclass
from functools import cache

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.ingredients.sharpness import sharp


@cache  # one task for all calls, so that its steps are traced once
def sharpened(task, rho):
    """The task with sharpness-aware gradients."""
    return task.judged_by(lambda params, batch: sharp(lambda p: task.loss(p, batch), params, rho))


@dataclass(frozen=True)
class Sam(Addon):
    """Local training takes its gradients at p + rho * g / |g|, with the same batch for both passes."""

    rho: float = setting(0.05, "how far uphill the gradient is taken", least=0)

    def train(self, task, received, client, shard, terms=NO_TERMS):
        return self.host.train(sharpened(task, self.rho), received, client, shard, terms)
