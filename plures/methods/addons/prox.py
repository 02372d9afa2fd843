"""Prox: a proximal term keeps local training close to the received model, as in FedProx."""

from dataclasses import dataclass

import torch

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, Penalty, setting
from plures.methods.search import log


@dataclass(frozen=True)
class Prox(Addon):
    """Adds the proximal term mu/2 |p - received|^2 to the local loss of the shared model."""

    mu: float = setting(0.1, "strength of the pull towards the received model", least=0, search=log(0.001, 10))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        anchor = self.shared(task, received) if self.mu else {}  # without an anchor, steps equal the host's bit for bit
        penalty = Penalty(linear={}, weight=torch.tensor(self.mu), anchor=anchor)
        return self.host.train(task, received, client, shard, terms.plus(penalty))
