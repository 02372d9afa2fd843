"""C: in every round a client first fine-tunes what it received; that is its own model and where its training starts."""

from dataclasses import dataclass

from ..method import BARE, setting
from .part import Part


@dataclass(frozen=True)
class C(Part):
    """FedAvg-C and FedProx-C: fine-tuning by the host's own local training, then the host's round from there."""

    c_epochs: int = setting(10, "epochs of fine-tuning before each round's training", least=0)

    def tuned(self, task, received, client, shard, worn):
        """The received model after the host's training for so many epochs, on a throw-away state."""
        longer = self.host.with_solver(self.solver.for_epochs(self.c_epochs))
        _, model, _ = longer.train(task, received, client, shard, worn)
        return model

    def train(self, task, received, client, shard, worn=BARE):
        start = self.tuned(task, received, client, shard, worn)
        return self.host.train(task, received, client, shard, worn._replace(start=start))

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, self.tuned(task, received, client, shard, BARE), client, shard)

    @property
    def scored(self):
        return "received, fine-tuned"
