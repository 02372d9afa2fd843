"""HeurpFedLA: pFedLA in which each client keeps the layers that it would mostly get from itself.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022.

The k layers with the largest weight on the client's own model are not sent down: the client goes on with its own
last ones, and its hypernetwork does not learn from them in that round. The whole model is uploaded.

Differs from the paper: as pFedLA. Which layers stay is chosen anew for each client in each round.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from plures import tree
from plures.methods.addons.keep import KeepLocal
from plures.methods.base import NO_TERMS, Method, setting
from plures.methods.pfedla import PFedLA
from plures.tree import Params

KEPT = "layers kept"  # among what is received: [layer] 1 where the client goes on with its own


class HeurpFedLAClient(NamedTuple):
    model: Params  # as trained in the last round


@dataclass(frozen=True)
class HeurpFedLA(PFedLA):
    """The server mixes all layers but the k that a client would mostly get from itself."""

    k: int = setting(1, "how many layers a client keeps", least=0)

    def shared(self, task, params):
        return {name: x for name, x in params.items() if name != KEPT}

    def kept(self, weights, ids):
        """[receiver, layer]: 1 for the k layers with the largest self-weight (of equals the lower ones)."""
        own = weights.detach().gather(2, ids[:, None, None].expand(-1, weights.shape[1], 1)).squeeze(2)
        rank = (-own).argsort(dim=1, stable=True).argsort(dim=1)
        return (rank < self.k).to(torch.int64)

    def weights(self, mixers, ids):
        """As in pFedLA, but all of a kept layer comes from the client itself, and no gradient passes there."""
        learned = super().weights(mixers, ids)
        alone = one_hot(ids, learned.shape[-1]).to(learned.dtype).unsqueeze(1)
        return torch.where(self.kept(learned, ids).unsqueeze(2) > 0, alone, learned)

    def send(self, task, server, ids):
        message = super().send(task, server, ids)
        kept = self.kept(super().weights(tree.rows(server.mixers, ids), ids), ids)
        return message._replace(tree=message.tree | {KEPT: kept})

    def newcomer(self, task, server):
        mean = super().newcomer(task, server)
        return mean | {KEPT: torch.zeros(len(task.layers_in(mean)), dtype=torch.int64)}

    def init_client(self, task, params):
        return HeurpFedLAClient(params)

    def local_model(self, task, received, client):
        """The received layers, but the client's own where they are kept: those need not be sent."""
        models = self.shared(task, received)
        if KEPT not in received:
            return models  # it is whole already
        layers = task.layers_in(models)

        def whole(name, x):
            kept = received[KEPT][layers.index(task.layer_of(name))]
            return torch.where(kept > 0, client.model[name], x)

        return {name: whole(name, x) for name, x in models.items()}

    def train(self, task, received, client, shard, terms=NO_TERMS):
        _, model, metrics = Method.train(self, task, received, (), shard, terms)
        return HeurpFedLAClient(model), model, metrics

    def trim(self, task, message):
        layers = task.layers_in(self.shared(task, message))
        kept = [layer for layer, stays in zip(layers, message[KEPT].tolist(), strict=True) if stays]
        return {name: x for name, x in message.items() if name == KEPT or task.layer_of(name) not in kept}


def heurpfedla() -> Method:
    return KeepLocal(host=HeurpFedLA(), private="statistics")
