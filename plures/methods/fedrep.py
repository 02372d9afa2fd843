"""FedRep: FedAvg with a private head; in each round a client trains its head first and the shared body after it.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.

In each round a client first trains its head on the received body, which is frozen and in inference mode, so that
BatchNorm statistics stay as they are. Then it trains the body with the head frozen. Only the body is sent and averaged.

Differs from the paper: the mean is weighted by numbers of rows (`weights=uniform` gives the paper's). The authors' code
trains all heads again after the last round, for ten epochs; here `pm_epochs` does so whenever a personal model is made,
and is 0.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, fit_head, setting, with_penalties
from plures.methods.search import linear
from plures.tree import Params


class FedRepClient(NamedTuple):
    head: Params  # never uploaded


@dataclass(frozen=True)
class FedRep(Averaged):
    """Trains the private head first, then the shared body for the epochs or steps of the solver."""

    head_epochs: int = setting(10, "epochs of training the head before the body", least=0, search=linear(1, 20))
    pm_epochs: int = setting(
        0, "epochs that the head is trained again for the personal model", least=0, search=linear(0, 10).if_named()
    )

    trains: ClassVar[tuple[str, ...]] = ("head",)

    def shared(self, task, params):
        return tree.drop(params, task.is_head)

    def generic(self, task, server):
        return None

    def init_client(self, task, params):
        return FedRepClient(tree.keep(params, task.is_head))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def body_loss(body, batch, head, penalties):
            return with_penalties(task.loss(body | head, batch), body, penalties)

        start = terms.start_from(received)
        head = fit_head(task, client.head, start, shard, self.solver, self.head_epochs)
        if not start:  # the body is frozen: there is nothing to train but the head
            return FedRepClient(head.params), start, {"loss": head.loss, "steps": head.steps}
        body = fit(body_loss, start, shard, self.solver, given=(head.params, terms.penalties))
        return FedRepClient(head.params), body.params, {"loss": body.loss, "steps": body.steps}

    def local_model(self, task, received, client):
        return received | client.head

    def personalize(self, task, received, client, shard):
        if not self.pm_epochs:
            return received | client.head
        return received | fit_head(task, client.head, received, shard, self.solver, self.pm_epochs).params

    def adapt(self, task, received, shard, epochs):
        head = tree.keep(task.initial, task.is_head)
        return received | fit_head(task, head, received, shard, self.solver, epochs).params

    @property
    def personal_model_name(self):
        return "server body, own head"
