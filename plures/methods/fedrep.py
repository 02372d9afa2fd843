"""FedRep: a shared body and a head of each client's own, trained one after the other.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.

Each round a client first fits its head on the received body, which is frozen and in inference mode
(so that statistics of BatchNorm do not move), then the body under the fixed head. The body travels.

Differs from the paper: the mean is weighted by rows (`weights=uniform` gives the paper's); there is
no last round in which all heads are trained again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, fit_head, setting, with_penalties
from plures.tree import Params


class FedRepClient(NamedTuple):
    head: Params  # never uploaded


@dataclass(frozen=True)
class FedRep(Averaged):
    """The head stays and is trained first; the body travels and takes the solver's epochs or steps."""

    head_epochs: int = setting(10, "epochs on the head before the body is trained", least=0)

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
        body = fit(body_loss, start, shard, self.solver, given=(head.params, terms.penalties))
        return FedRepClient(head.params), body.params, {"loss": body.loss, "steps": body.steps}

    def local_model(self, task, received, client):
        return received | client.head

    def personalize(self, task, received, client, shard):
        return received | client.head

    def adapt(self, task, received, shard, epochs):
        head = tree.keep(task.initial, task.is_head)
        return received | fit_head(task, head, received, shard, self.solver, epochs).params

    @property
    def personal_model_name(self):
        return "server body, own head"
