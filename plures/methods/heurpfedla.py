"""HeurpFedLA: pFedLA in which each client keeps the k layers that it would mostly receive from itself.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022.

The k layers in which the client's own model has the largest weight are not sent: the client keeps its own last ones,
and its hypernetwork does not learn from them in that round. The whole model is uploaded.

Differs from the paper: as pFedLA. The kept layers are chosen again for each client in each round.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from plures import tree
from plures.methods.addons.keep import KeepLocal
from plures.methods.base import NO_TERMS, Method, setting
from plures.methods.pfedla import PFedLA
from plures.methods.search import linear
from plures.tree import Params

KEPT = "layers kept"  # part of the message, [layer]: 1 where the client keeps its own layer, else 0


class HeurpFedLAClient(NamedTuple):
    model: Params  # as trained in the last round


@dataclass(frozen=True)
class HeurpFedLA(PFedLA):
    """The server mixes all layers except the k that a client would mostly receive from itself."""

    k: int = setting(1, "how many layers a client keeps", least=0, search=linear(0, 2))

    def shared(self, task, params):
        return {name: x for name, x in params.items() if name != KEPT}

    def choose_kept(self, weights, ids):
        """[receiver, layer]: 1 for the k layers in which the receiver's own model has the largest weight; else 0."""
        own = weights.detach().gather(2, ids[:, None, None].expand(-1, weights.shape[1], 1)).squeeze(2)
        rank = (-own).argsort(dim=1, stable=True).argsort(dim=1)
        return (rank < self.k).to(torch.int64)

    def weights(self, mixers, ids):
        """As in pFedLA, but a kept layer comes from the client itself alone, and no gradient flows through it."""
        learned = super().weights(mixers, ids)
        alone = one_hot(ids, learned.shape[-1]).to(learned.dtype).unsqueeze(1)
        return torch.where(self.choose_kept(learned, ids).unsqueeze(2) > 0, alone, learned)

    def send(self, task, server, ids):
        message = super().send(task, server, ids)
        kept = self.choose_kept(super().weights(tree.rows(server.mixers, ids), ids), ids)
        return message._replace(tree=message.tree | {KEPT: kept})

    def newcomer(self, task, server):
        mean = super().newcomer(task, server)
        return mean | {KEPT: torch.zeros(len(task.layers_in(mean)), dtype=torch.int64)}

    def init_client(self, task, params):
        return HeurpFedLAClient(params)

    def local_model(self, task, received, client):
        """The received model with the kept layers replaced by the client's own."""
        model = self.shared(task, received)
        if KEPT not in received:
            return model  # it is complete already
        layers = task.layers_in(model)

        def choose(name, x):
            kept = received[KEPT][layers.index(task.layer_of(name))]
            return torch.where(kept > 0, client.model[name], x)

        return {name: choose(name, x) for name, x in model.items()}

    def train(self, task, received, client, shard, terms=NO_TERMS):
        _, model, metrics = Method.train(self, task, received, (), shard, terms)
        return HeurpFedLAClient(model), model, metrics

    def trim(self, task, message):
        layers = task.layers_in(self.shared(task, message))
        kept = [layer for layer, stays in zip(layers, message[KEPT].tolist(), strict=True) if stays]
        return {name: x for name, x in message.items() if name == KEPT or task.layer_of(name) not in kept}


def heurpfedla() -> Method:
    """HeurpFedLA with private BatchNorm statistics."""
    return KeepLocal(host=HeurpFedLA(), private="statistics")
