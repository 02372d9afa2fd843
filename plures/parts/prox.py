"""Prox: local training is pulled towards the received model."""

from dataclasses import dataclass

import torch

from ..method import BARE, Pull, setting
from .part import Part


@dataclass(frozen=True)
class Prox(Part):
    """Adds mu/2 |p - received|^2 to the local loss of the shared model."""

    mu: float = setting(0.01, "strength of the pull towards the received model", least=0)

    def train(self, task, received, client, shard, worn=BARE):
        if self.mu == 0:  # no pull is the host's own step, to the bit
            return self.host.train(task, received, client, shard, worn)
        pull = Pull(slope={}, weight=torch.tensor(self.mu), anchor=self.shared(task, received))
        return self.host.train(task, received, client, shard, worn.pulled(pull))
