"""FedAMP: every client receives its own weighted mean of all models, in which models similar to its own weigh more.

Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, 2021.

Weights: xi_ij = a * exp(-|w_i - w_j|^2 / sigma) for j != i, and xi_ii = 1 - their sum. The client receives
u_i = sum_j xi_ij w_j and minimises F_i(w) + pull/2 |w - u_i|^2, starting at u_i.

Differs from the paper: sigma is `sigma` times the median squared distance of the models, which grows with their size,
and a is `share` / N, so that no weight is negative. `kernel=cosine` is HeurFedAMP: other models weigh in proportion to
exp(sigma * cosine), and the client's own model has a fixed weight.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import tree
from plures.methods.base import NO_TERMS, Collected, Method, Penalty, setting
from plures.methods.messages import Each
from plures.methods.search import linear, log
from plures.tree import Params


class FedAMPServer(NamedTuple):
    models: Params  # [client, ...], each client's last model
    seen: torch.Tensor  # [client], 1 if it has uploaded a model, else 0


class FedAMPClient(NamedTuple):
    model: Params  # as trained in the last round


def flatten(models):
    """[client, weight]: all weights of each model in a row, without statistics."""
    return torch.cat([x.flatten(1) for x in tree.trainable(models).values()], 1)


def mix(models, weights):
    """Stacked models: model i is the mean of all models with the weights weights[i]."""
    return tree.map(lambda x: torch.tensordot(weights.to(x.dtype), x, 1), models)


@dataclass(frozen=True)
class FedAMP(Collected):
    """The more similar the models of two clients are, the more they attract each other."""

    kernel: str = setting("gauss", "similarity of models: by distance or by angle", choices=("gauss", "cosine"))
    sigma: float = setting(
        1.0,
        "gauss: width, in multiples of the median squared distance; cosine: factor in the exponent",
        least=1e-12,
        search=log(0.1, 10),
    )
    share: float = setting(
        1.0, "gauss: the factor a, times the number of clients", least=0, most=1, search=linear(0.2, 1)
    )
    self_weight: float = setting(
        0.5, "cosine: weight of the client's own model", least=0, most=1, search=linear(0, 1).if_named()
    )
    pull: float = setting(
        0.1, "strength of the pull towards the received mixture during training", least=0, search=log(0.01, 1)
    )
    start: str = setting(
        "mixture",
        "where training starts: at the received mixture, or at the client's own model",
        choices=("mixture", "own"),
    )

    refuses = {addon: "its server keeps a model for each client and none for all" for addon in ("scaffold", "feddyn")}

    def init_server(self, task, params, federation):
        n = federation.n_clients
        return FedAMPServer(tree.repeat(params, n), torch.zeros(n))

    def weights(self, models, seen):
        """[client, client]: the weights of all models for each client; each row sums to one.

        Models of clients that have not trained yet weigh nothing. Such a client gets the others without its own, if
        anybody has trained.
        """
        flat = flatten(models)
        n, seen = len(flat), seen.to(flat.dtype)
        off = (1 - torch.eye(n, dtype=flat.dtype)) * seen  # [receiver, client]
        if self.kernel == "gauss":
            squares = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
            pairs = off * seen[:, None]
            ordered = torch.where(pairs > 0, squares, torch.inf).flatten().sort().values
            middle = ((pairs.sum() - 1) // 2).clamp(min=0).to(torch.int64)
            median = ordered.gather(0, middle.reshape(1))[0]
            width = self.sigma * torch.where(pairs.sum() > 0, median, torch.ones_like(median))
            closeness = torch.where(off > 0, -squares / width.clamp(min=1e-30), -torch.inf)
            # Who has not trained gets the others however far they are: only how near they are to each other counts.
            nearest = closeness.amax(1, keepdim=True)
            closeness = closeness - torch.where((seen[:, None] > 0) | nearest.isinf(), 0.0, nearest)
            near = torch.exp(closeness) * (self.share / n)
        else:
            unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-12)
            near = torch.exp(self.sigma * (unit @ unit.mT)) * off
            near = (1 - self.self_weight) * near / near.sum(1, keepdim=True).clamp(min=1e-12)
        total = near.sum(1)
        alone = (seen > 0) | (total <= 0)
        own = torch.where(alone, 1 - total, torch.zeros_like(total))
        return near / torch.where(alone, torch.ones_like(total), total)[:, None] + torch.diag(own)

    def send(self, task, server, ids):
        return Each(mix(server.models, self.weights(server.models, server.seen)[ids]))

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
