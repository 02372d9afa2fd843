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
        anchor = self.shared(task, received) if self.mu else {}  # with no anchor the step is the host's, to the bit
        pull = Pull(slope={}, weight=torch.tensor(self.mu), anchor=anchor)
        return self.host.train(task, received, client, shard, worn.pulled(pull))
