"""BRM: local training with a class-balanced loss, as Fed-RoD trains its shared model."""

from dataclasses import dataclass
from functools import cache

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.ingredients.balance import LOSSES


@cache  # one task for all calls, so that its steps are traced once
def balanced(task, loss, gamma):
    """The task with a balanced loss."""
    return task.judged_by(lambda params, batch: LOSSES[loss](task.training_logits(params, batch), batch, gamma))


@dataclass(frozen=True)
class Brm(Addon):
    """The loss of local training weighs classes as if the client had as many rows of each."""

    balance: str = setting("bsm", "balanced loss of local training", choices=tuple(LOSSES))
    gamma: float = setting(1.0, "strength of the balance", least=0)

    @property
    def refuses(self):
        return {**self.host.refuses, "sam": "add it the other way round, before brm"}

    def train(self, task, received, client, shard, terms=NO_TERMS):
        return self.host.train(balanced(task, self.balance, self.gamma), received, client, shard, terms)
