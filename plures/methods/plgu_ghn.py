"""PLGU-GHN (our reconstruction): pFedHN whose clients train with layer-wise SAM.

Named in Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, 2023; its
procedure is in a supplement that is not public.

The client scores each layer by the distance between the model that it trained last and the received one, and trains the
whole model by the steps of PLGU-GRep. The server learns as in pFedHN.

Differs from the paper: it is a reconstruction. This reading needs no more traffic than pFedHN, and lets the embedding
personalise while the shared hypernetwork generalises.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures.learn.fit import fit
from plures.methods.addons.keep import KeepLocal
from plures.methods.base import NO_TERMS, Method, with_penalties
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.layerwise import LayerwiseSteps
from plures.methods.pfedhn import PFedHN
from plures.tree import Params


class PlguGhnClient(NamedTuple):
    model: Params  # as trained in the last round
    rounds: Tensor  # how many rounds the client took part in


@dataclass(frozen=True)
class PlguGhn(LayerwiseSteps, PFedHN):
    """Generated models, trained with layer-wise SAM."""

    def init_client(self, task, params):
        return PlguGhnClient(params, torch.tensor(0))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def objective(params, batch, scores, lr, penalties):
            return with_penalties(self.sharp_loss(lambda p: task.loss(p, batch), params, lr, scores), params, penalties)

        start = terms.start_from(received)
        each, layer_of = self.layer_scores(task, client.model, start, client.rounds)
        given = (layer_scores.expand_to_tensors(each, layer_of), self.solver.rate(shard.round), terms.penalties)
        fitted = fit(objective, start, shard, self.solver, given=given)
        return PlguGhnClient(fitted.params, client.rounds + 1), fitted.params, {"loss": fitted.loss}


def plgu_ghn() -> Method:
    """PLGU-GHN with private BatchNorm statistics."""
    return KeepLocal(host=PlguGhn(), private="statistics")
