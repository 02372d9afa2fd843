"""PLGU-GRep: FedRep whose shared body is trained with layer-wise SAM.

Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, 2023.

A client first trains its head on the received body. Each layer of the body is scored by the distance between the
client's last body and the received one. Then every step of the body, with the head frozen, is a plain step followed by
a step along the gradient at body + eps, eps = rho * score * g / |g| (equations 11 to 13: three passes).

Differs from the paper: the client keeps its last body for the scores, which the printed algorithm forgets. The body is
trained for the epochs of the solver, not on one batch. `stages=one` leaves the plain step out. With momentum, the two
steps of a pair count as one. The personal model is the server's body with the client's head, as in FedRep.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit
from plures.methods.base import fit_head, weights_setting
from plures.methods.fedrep import FedRep
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.layerwise import LayerwiseSteps
from plures.tree import Params


class PlguGRepClient(NamedTuple):
    head: Params  # never uploaded
    body: Params  # as trained in the last round
    rounds: Tensor  # how many rounds the client took part in


@dataclass(frozen=True)
class PlguGRep(LayerwiseSteps, FedRep):
    """A private head, and a shared body trained with layer-wise SAM."""

    weights: str = weights_setting("uniform")

    trains = ("head", "body")

    def init_client(self, task, params):
        return PlguGRepClient(tree.keep(params, task.is_head), self.shared(task, params), torch.tensor(0))

    def train(self, task, received, client, shard):
        def body_loss(body, batch, head, scores, lr):
            def loss(body):
                return task.loss(body | head, batch)

            return self.sharp_loss(loss, body, lr, scores)

        each, layer_of = self.layer_scores(task, client.body, received, client.rounds)
        head = fit_head(task, client.head, received, shard, self.solver, self.head_epochs)
        given = (head.params, layer_scores.expand_to_tensors(each, layer_of), self.solver.rate(shard.round))
        body = fit(body_loss, received, shard, self.solver, given=given)
        return PlguGRepClient(head.params, body.params, client.rounds + 1), body.params, {"loss": body.loss}
