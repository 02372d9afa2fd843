"""C: in every round a client first fine-tunes what it received; that is its own model and where its training starts."""

from dataclasses import dataclass

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting


@dataclass(frozen=True)
class C(Addon):
    """FedAvg-C and FedProx-C: fine-tuning by the host's own local training, then the host's round from there."""

    c_epochs: int = setting(10, "epochs of fine-tuning before each round's training", least=0)

    def tuned(self, task, received, client, shard, terms):
        """The received model after the host's training for so many epochs, on a throw-away state."""
        longer = self.host.with_solver(self.solver.for_epochs(self.c_epochs))
        _, model, _ = longer.train(task, received, client, shard, terms)
        return model

    def train(self, task, received, client, shard, terms=NO_TERMS):
        start = self.tuned(task, received, client, shard, terms)
        return self.host.train(task, received, client, shard, terms._replace(start=start))

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, self.tuned(task, received, client, shard, NO_TERMS), client, shard)

    @property
    def personal_model_name(self):
        return "received, fine-tuned"
