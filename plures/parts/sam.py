"""SAM: every gradient is taken a step uphill, where the loss is sharpest."""

from dataclasses import dataclass
from functools import cache

from ..method import BARE, setting
from ..sharpness import sharp
from .part import Part


@cache  # one task for all calls, so that its steps are traced once
def sharpened(task, rho):
    """The task with sharpness-aware slopes."""
    return task.judged_by(lambda params, batch: sharp(lambda p: task.loss(p, batch), params, rho))


@dataclass(frozen=True)
class Sam(Part):
    """Local training takes its slopes at p + rho * g / |g|, with the same batch for both passes."""

    rho: float = setting(0.05, "how far uphill the slope is taken", least=0)

    def train(self, task, received, client, shard, worn=BARE):
        return self.host.train(sharpened(task, self.rho), received, client, shard, worn)
