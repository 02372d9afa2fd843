"""C: in every round a client first fine-tunes the received model, which gives its personal model and its start."""

from dataclasses import dataclass

from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.search import log


@dataclass(frozen=True)
class C(Addon):
    """As in FedAvg-C and FedProx-C: clients fine-tune the received model, then train from there as the host does."""

    c_epochs: int = setting(10, "epochs of fine-tuning before the training of each round", least=0, search=log(2, 20))

    def fine_tune_received(self, task, received, client, shard, terms):
        """The received model after `c_epochs` epochs of the host's training; the client's state stays as it was."""
        longer = self.host.with_solver(self.solver.for_epochs(self.c_epochs))
        _, model, _ = longer.train(task, received, client, shard, terms)
        return model

    def train(self, task, received, client, shard, terms=NO_TERMS):
        start = self.fine_tune_received(task, received, client, shard, terms)
        return self.host.train(task, received, client, shard, terms._replace(start=start))

    def personalize(self, task, received, client, shard):
        return self.host.personalize(
            task, self.fine_tune_received(task, received, client, shard, NO_TERMS), client, shard
        )

    @property
    def personal_model_name(self):
        return "received, fine-tuned"
