"""BRM (balanced risk minimisation): local training uses a class-balanced loss, as Fed-RoD does for its shared model."""

from dataclasses import dataclass
from functools import cache

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.ingredients.balance import LOSSES
from plures.methods.search import linear


@cache  # every call gets the same task, so that its steps are traced once
def with_balanced_loss(task, loss, gamma):
    """The task with a balanced loss."""
    return task.judged_by(lambda params, batch: LOSSES[loss](task.training_logits(params, batch), batch, gamma))


@dataclass(frozen=True)
class Brm(Addon):
    """Local training uses a loss that counts every class as if the client had equally many rows of each."""

    balance: str = setting("bsm", "balanced loss for local training", choices=tuple(LOSSES))
    gamma: float = setting(1.0, "strength of the balancing", least=0, search=linear(0, 2))

    @property
    def refuses(self):
        return {**self.host.refuses, "sam": "add it the other way round, before brm"}

    @property
    def needs_classes(self):
        return "its loss is balanced by the numbers of rows of each class"

    def train(self, task, received, client, shard, terms=NO_TERMS):
        return self.host.train(with_balanced_loss(task, self.balance, self.gamma), received, client, shard, terms)
