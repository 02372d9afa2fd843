"""PLGU-GHN (our reconstruction): pFedHN whose clients train by layer-wise sharpness-aware steps.

Liu et al., Prevent Poorly-served Clients: Personalized Federated Learning with Layer-wise Generalization, 2023,
names it; its procedure is in a supplement that is not public.

The client scores the layers of the received model by how far its last trained model is from it, and trains the
whole model by the steps of PLGU-GRep. The server learns as in pFedHN.

Differs from the paper: it is a reconstruction; this reading needs no more traffic than pFedHN, and lets the
embedding personalise while the shared hypernetwork generalises.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import layerscores
from ..fit import fit
from ..method import BARE, Method, pulled
from ..parts.keep import KeepLocal
from ..tree import Params
from .pfedhn import PFedHN
from .plgu_grep import sharp_loss, stages_setting
from .plgu_lf import norm_setting, q_setting, rho_setting, scale_setting, score_setting


class PlguGhnClient(NamedTuple):
    model: Params  # as trained in the last round
    rounds: Tensor  # that it took part in


@dataclass(frozen=True)
class PlguGhn(PFedHN):
    """Generated models, trained with layer-wise sharpness."""

    rho: float = rho_setting()
    q: float = q_setting()
    score: str = score_setting()
    scale: str = scale_setting()
    score_norm_layers: bool = norm_setting()
    stages: str = stages_setting()

    def init_client(self, task, params):
        return PlguGhnClient(params, torch.tensor(0))

    def train(self, task, received, client, shard, worn=BARE):
        def objective(params, batch, scores, lr, pulls):
            loss = sharp_loss(self.stages, lambda p: task.loss(p, batch), params, lr, self.rho, scores, self.q)
            return pulled(loss, params, pulls)

        start = worn.begin(received)
        layer_of = layerscores.scored_layers(task, start, self.score_norm_layers)
        each = layerscores.scores(task, client.model, start, layer_of, self.score, self.scale, client.rounds > 0)
        given = (layerscores.by_tensor(each, layer_of), self.solver.rate(shard.round), worn.pulls)
        fitted = fit(objective, start, shard, self.solver, given=given)
        return PlguGhnClient(fitted.params, client.rounds + 1), fitted.params, {"loss": fitted.loss}


def plgu_ghn() -> Method:
    return KeepLocal(host=PlguGhn(), private="statistics")
