"""FedFomo: each client weighs the models of others by how much they help on rows that it set aside.

Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021.

A client gets the models of M others. With p the model before its last training, and L its loss on the rows
set aside, a model t (one of these, or its own last one) weighs max(0, (L(p) - L(t)) / |t - p|), divided by the
sum; if any weighs something, the weighted mean is where it trains from, else its own model. The server
adds the weights up, and sends those that weighed most, or, the earlier the more often, random ones.

Differs from the paper: the own model is not sent, the client has it. A client with fewer than five rows sets
one aside; with one row it is used for both.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.learn.fit import measure
from plures.learn.task import row_losses
from plures.methods.base import Collected, Method, fine_tune, setting
from plures.methods.messages import Each
from plures.tree import Params

BATCH = 64  # rows of a pass over what is set aside


class FedFomoServer(NamedTuple):
    models: Params  # [client, ...] each client's last model
    seen: Tensor  # [client] whether it has uploaded one
    affinity: Tensor  # [client, client] sum of weights so far
    key: Tensor
    round: Tensor


class FedFomoClient(NamedTuple):
    model: Params  # as trained in the last round
    before: Params  # where that training began


@dataclass(frozen=True)
class FedFomo(Collected):
    """The server lends models; clients weigh them."""

    models: int = setting(5, "models of others that a client is sent", least=0)
    aside: float = setting(0.2, "share of rows that is set aside to weigh models by", least=0.01, most=0.9)
    explore: float = setting(0.3, "how often random models are sent in the first round; falls to 0", least=0, most=1)
    pm: str = setting("local", "the personal model: after training, or the weighted mean", choices=("local", "mean"))

    refuses = {"ala": "a client gets several models, and no single one to blend its own with"}

    def n_sent(self, n_clients):
        return min(self.models, n_clients - 1)

    def init_server(self, task, params, federation):
        n = federation.n_clients
        return FedFomoServer(tree.repeat(params, n), torch.zeros(n), torch.zeros(n, n), federation.key, torch.tensor(0))

    def picked(self, server, ids):
        """[receiver, M]: whose models each one is sent."""
        n = len(server.seen)
        lots = seeds.uniform(seeds.mix(server.key, server.round), (n, n + 1))[ids]
        rate = self.explore * (1 - server.round / self.schedule.rounds).clamp(min=0)
        wish = torch.where(lots[:, :1] < rate, lots[:, 1:], server.affinity[ids] + 1e-6 * lots[:, 1:])
        wish = wish.double() + 1e6 * server.seen  # models that nobody has made come last
        own = torch.nn.functional.one_hot(ids, n)
        return (wish - 1e9 * own).argsort(dim=1, descending=True, stable=True)[:, : self.n_sent(n)]

    def send(self, task, server, ids):
        picked = self.picked(server, ids)
        return Each({"models": tree.rows(server.models, picked), "there": server.seen[picked], "whose": picked})

    def merge(self, task, server, ids, uploads, sizes):
        weights = uploads["weights"].to(server.affinity.dtype)
        gained = torch.zeros(len(ids), len(server.seen)).scatter_add(1, uploads["whose"], weights)
        return FedFomoServer(
            tree.put(server.models, ids, uploads["model"]),
            server.seen.index_fill(0, ids, 1.0),
            server.affinity.index_add(0, ids, gained),
            server.key,
            server.round + 1,
        )

    def init_client(self, task, params):
        return FedFomoClient(params, params)

    def weighed(self, task, received, client, aside):
        """The weights of the received models and of the own one, which is last; all zero if none helps."""
        models = tree.map(lambda xs, x: torch.cat([xs, x[None]]), received["models"], client.model)
        candidates = tree.map(lambda xs, x: torch.cat([xs, x[None]]), models, client.before)

        def losses(candidates, batch):
            return torch.vmap(lambda p: (row_losses(task.logits(p, batch.x), batch.y) * batch.mask).sum())(candidates)

        each = measure(losses, candidates, aside, BATCH) / aside.size
        far = torch.vmap(tree.sq_dist, (0, None))(models, client.before).sqrt()
        there = torch.cat([received["there"], torch.ones(1)])
        helps = ((each[-1] - each[:-1]) / (far + 1e-5)).clamp(min=0) * there
        total = helps.sum()
        return models, helps / torch.where(total > 0, total, torch.ones_like(total))

    def weighed_mean(self, task, received, client, aside):
        models, weights = self.weighed(task, received, client, aside)
        any_helps = weights.sum() > 0
        mean = tree.map(lambda xs: torch.tensordot(weights.to(xs.dtype), xs, 1), models)
        return tree.where(any_helps, mean, client.model), weights

    def train(self, task, received, client, shard):
        aside, rest = shard.lasting_split(self.aside, "set aside")
        start, weights = self.weighed_mean(task, received, client, aside)
        _, model, metrics = Method.train(self, task, start, (), rest)
        upload = {"model": model, "weights": weights[:-1], "whose": received["whose"]}
        return FedFomoClient(model, start), upload, metrics

    def personalize(self, task, received, client, shard):
        if self.pm == "local":
            return client.model
        aside, _ = shard.lasting_split(self.aside, "set aside")
        return self.weighed_mean(task, received, client, aside)[0]

    def adapt(self, task, received, shard, epochs):
        return fine_tune(task, received, shard, self.solver, epochs)

    @property
    def personal_model_name(self):
        return "local" if self.pm == "local" else "weighted mean"

    def traffic(self, task, message, upload):
        """Models; the few numbers beside them are not counted."""
        return message["models"], upload["model"]
