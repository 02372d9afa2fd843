"""FedAMP: every client receives a mean of all models in which those like its own weigh more.

Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, 2021.

Weights: xi_ij = a * exp(-|w_i - w_j|^2 / sigma) for j != i, and xi_ii = 1 - their sum; the client gets
u_i = sum_j xi_ij w_j and minimises F_i(w) + pull/2 |w - u_i|^2 from there.

Differs from the paper: sigma is `sigma` times the median squared distance of the models, which grows with
their size, and a is `share` / N, so that no weight is negative. `kernel=cosine` is HeurFedAMP: weights of
the others as exp(sigma * cosine), with a fixed weight for the own model.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import tree
from plures.methods.base import NO_TERMS, Collected, Method, Penalty, setting
from plures.methods.messages import Each
from plures.tree import Params


class FedAMPServer(NamedTuple):
    models: Params  # [client, ...] each client's last model


class FedAMPClient(NamedTuple):
    model: Params  # as trained in the last round


def flattened(models):
    """[client, weight], without statistics."""
    return torch.cat([x.flatten(1) for x in tree.trainable(models).values()], 1)


def mixed(models, weights):
    """Row i is the mean of all models with weights[i]."""
    return tree.map(lambda x: torch.tensordot(weights.to(x.dtype), x, 1), models)


@dataclass(frozen=True)
class FedAMP(Collected):
    """Clients attract each other's models the more the liker they are."""

    kernel: str = setting("gauss", "likeness of models, by distance or by angle", choices=("gauss", "cosine"))
    sigma: float = setting(1.0, "width, in median squared distances (gauss), or sharpness (cosine)", least=1e-12)
    share: float = setting(1.0, "gauss: what N equal models would give away together", least=0, most=1)
    self_weight: float = setting(0.5, "cosine: weight of the client's own model", least=0, most=1)
    pull: float = setting(0.1, "pull towards the received mixture while training", least=0)
    start: str = setting("mixture", "where training begins: the received mixture, or own", choices=("mixture", "own"))

    refuses = {addon: "its server keeps a model for each client and none for all" for addon in ("scaffold", "feddyn")}

    def init_server(self, task, params, federation):
        return FedAMPServer(tree.repeat(params, federation.n_clients))

    def weights(self, models):
        """[client, client], rows with sum one."""
        flat = flattened(models)
        n = len(flat)
        off = 1 - torch.eye(n, dtype=flat.dtype)
        if self.kernel == "gauss":
            squares = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square() * off
            ordered = (squares + torch.diag(torch.full((n,), torch.inf))).flatten().sort().values
            width = self.sigma * (ordered[(n * (n - 1) - 1) // 2] if n > 1 else torch.ones(()))  # the median
            near = torch.exp(-squares / width.clamp(min=1e-30)) * off * (self.share / n)
            return near + torch.diag(1 - near.sum(1))
        unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-12)
        near = torch.exp(self.sigma * (unit @ unit.mT)) * off
        total = near.sum(1, keepdim=True)
        near = (1 - self.self_weight) * near / total.clamp(min=1e-12)
        return near + torch.diag(1 - near.sum(1))

    def send(self, task, server, ids):
        return Each(mixed(server.models, self.weights(server.models)[ids]))

    def init_client(self, task, params):
        return FedAMPClient(params)

    def train(self, task, received, client, shard, terms=NO_TERMS):
        terms = terms.plus(Penalty(linear={}, weight=torch.tensor(self.pull), anchor=received))
        if self.start == "own" and terms.start is None:
            terms = terms._replace(start=client.model)
        _, model, metrics = Method.train(self, task, received, (), shard, terms)
        return FedAMPClient(model), model, metrics

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "local"
