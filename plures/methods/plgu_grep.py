"""PLGU-GRep: FedRep whose shared body learns by layer-wise sharpness-aware steps.

Liu et al., Prevent Poorly-served Clients: Personalized Federated Learning with Layer-wise Generalization, 2023.

The head is fitted on the received body first. Layers of the body are scored by how far the client's last body
is from the received one; then every step on the body, under the fixed head, is a plain one followed by one
along the slope at body + eps, eps = rho * score * g / |g| (equations 11 to 13: three passes).

Differs from the paper: the client keeps its last body for the scores, which the printed algorithm forgets; the
body takes the solver's epochs, not one batch; `stages=one` leaves the plain step out. With momentum, both
steps of a pair are taken as one. The personal model is the server's body under the own head, as in FedRep.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import layerscores, tree
from ..fit import fit
from ..method import fitted_head, setting, weights_setting
from ..sharpness import sharp, twice_sharp
from ..tree import Params
from .fedrep import FedRep
from .plgu_lf import norm_setting, q_setting, rho_setting, scale_setting, score_setting


class PlguGRepClient(NamedTuple):
    head: Params  # never uploaded
    body: Params  # as trained in the last round
    rounds: Tensor  # that it took part in


def stages_setting():
    return setting("two", "a plain step before each sharp one, or the sharp one alone", choices=("one", "two"))


def sharp_loss(stages, loss, params, lr, rho, scores, q):
    """A loss whose slopes make the sharp step, with or without a plain one before it."""
    if stages == "two":
        return twice_sharp(loss, params, lr, rho, scores, q)
    return sharp(loss, params, rho, scores, q)


@dataclass(frozen=True)
class PlguGRep(FedRep):
    """A private head, and a shared body sharpened by layers."""

    rho: float = rho_setting()
    q: float = q_setting()
    score: str = score_setting()
    scale: str = scale_setting()
    score_norm_layers: bool = norm_setting()
    stages: str = stages_setting()
    weights: str = weights_setting("uniform")

    def init_client(self, task, params):
        return PlguGRepClient(tree.keep(params, task.is_head), self.shared(task, params), torch.tensor(0))

    def train(self, task, received, client, shard):
        def body_loss(body, batch, head, scores, lr):
            def loss(body):
                return task.loss(body | head, batch)

            return sharp_loss(self.stages, loss, body, lr, self.rho, scores, self.q)

        layer_of = layerscores.scored_layers(task, received, self.score_norm_layers)
        each = layerscores.scores(task, client.body, received, layer_of, self.score, self.scale, client.rounds > 0)
        head = fitted_head(task, client.head, received, shard, self.solver, self.head_epochs)
        given = (head.params, layerscores.by_tensor(each, layer_of), self.solver.rate(shard.round))
        body = fit(body_loss, received, shard, self.solver, given=given)
        return PlguGRepClient(head.params, body.params, client.rounds + 1), body.params, {"loss": body.loss}
