"""FedFomo: each client starts from a mean of others' models, weighted by how much they lower its validation loss.

Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021.

A client receives the models of M other clients. Let p be its model before its last training, and L its loss on
validation rows that it never trains on. A model t, received or the client's own last one, has the weight
max(0, (L(p) - L(t)) / |t - p|), divided by the sum of all. Training starts at the weighted mean, or at the client's own
model if all weights are zero. The server sums up the weights and sends the models with the largest sums; each of the M
places goes, with a probability that falls over the rounds, to a random model instead.

Differs from the paper: a client's own model is not sent, as the client has it. A client with fewer than five rows sets
one row aside; if it has only one row, that row is used for both.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import devices, seeds, tree
from plures.learn.fit import measure
from plures.methods.base import Collected, Method, fine_tune, setting
from plures.methods.messages import Each
from plures.methods.search import linear
from plures.tree import Params

BATCH = 64  # validation rows of a batch


class FedFomoServer(NamedTuple):
    models: Params  # [client, ...], each client's last model
    seen: Tensor  # [client], 1 if it has uploaded a model, else 0
    affinity: Tensor  # [client, client], sum of the weights so far
    key: Tensor
    round: Tensor


class FedFomoClient(NamedTuple):
    model: Params  # as trained in the last round
    before: Params  # where that training started


@dataclass(frozen=True)
class FedFomo(Collected):
    """The server sends models of other clients; a client weighs them on its validation rows."""

    models: int = setting(5, "how many models of other clients a client receives", least=0, search=linear(2, 10))
    aside: float = setting(
        0.2, "share of rows that is set aside for validation", least=0.01, most=0.9, search=linear(0.1, 0.4)
    )
    explore: float = setting(
        0.3,
        "probability that a place goes to a random model in the first round; it falls to 0",
        least=0,
        most=1,
        search=linear(0, 0.6),
    )
    pm: str = setting("local", "the personal model: as last trained, or the weighted mean", choices=("local", "mean"))

    refuses = {"ala": "a client gets several models, and no single one to blend its own with"}
    depends_on_rounds = True

    def n_sent(self, n_clients):
        """How many models of other clients a client receives."""
        return min(self.models, n_clients - 1)

    def init_server(self, task, params, federation):
        n = federation.n_clients
        return FedFomoServer(tree.repeat(params, n), torch.zeros(n), torch.zeros(n, n), federation.key, torch.tensor(0))

    def choose_models(self, server, ids):
        """[receiver, M]: whose models each client receives."""
        n, m = len(server.seen), self.n_sent(len(server.seen))
        random = seeds.uniform(seeds.mix(server.key, server.round), (n, n + m))[ids]
        lots, ties = random[:, :m], random[:, m:]
        rate = self.explore * (1 - server.round / self.schedule.rounds).clamp(min=0)
        n_best = m - (lots < rate).sum(1, keepdim=True)  # places that go to the models with the largest sums
        last = 1e6 * server.seen - 1e9 * torch.nn.functional.one_hot(ids, n)  # who has uploaded no model comes last
        last = devices.in_double(last)
        by_sum = devices.in_double(server.affinity[ids] + 1e-6 * ties) + last
        rank = by_sum.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        priority = torch.where(rank < n_best.to(rank.device), 1e12, devices.in_double(ties) + last)
        return priority.argsort(dim=1, descending=True, stable=True)[:, :m].to(ids.device)

    def send(self, task, server, ids):
        chosen = self.choose_models(server, ids)
        return Each({"models": tree.rows(server.models, chosen), "there": server.seen[chosen], "whose": chosen})

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

    def weigh(self, task, received, client, aside):
        """The received models and, last, the client's own; and their weights, which are all zero if none helps."""
        models = tree.map(lambda xs, x: torch.cat([xs, x[None]]), received["models"], client.model)
        candidates = tree.map(lambda xs, x: torch.cat([xs, x[None]]), models, client.before)

        def losses(candidates, batch):
            def loss(params):
                return (task.row_losses(task.logits(params, batch.x), batch.y) * batch.mask).sum()

            return torch.vmap(loss)(candidates)

        each = measure(losses, candidates, aside, BATCH) / aside.size
        distance = torch.vmap(tree.sq_dist, (0, None))(models, client.before).sqrt()
        there = torch.cat([received["there"], torch.ones(1)])
        helps = ((each[-1] - each[:-1]) / (distance + 1e-5)).clamp(min=0) * there
        total = helps.sum()
        return models, helps / torch.where(total > 0, total, torch.ones_like(total))

    def weighted_mean(self, task, received, client, aside):
        """Where training starts, and the weights of all models."""
        models, weights = self.weigh(task, received, client, aside)
        any_helps = weights.sum() > 0
        mean = tree.map(lambda xs: torch.tensordot(weights.to(xs.dtype), xs, 1), models)
        return tree.where(any_helps, mean, client.model), weights

    def train(self, task, received, client, shard):
        aside, rest = shard.fixed_split(self.aside, "set aside")
        start, weights = self.weighted_mean(task, received, client, aside)
        _, model, metrics = Method.train(self, task, start, (), rest)
        upload = {"model": model, "weights": weights[:-1], "whose": received["whose"]}
        return FedFomoClient(model, start), upload, metrics

    def personalize(self, task, received, client, shard):
        if self.pm == "local":
            return client.model
        aside, _ = shard.fixed_split(self.aside, "set aside")
        return self.weighted_mean(task, received, client, aside)[0]

    def adapt(self, task, received, shard, epochs):
        return fine_tune(task, received, shard, self.solver, epochs)

    @property
    def personal_model_name(self):
        return "local" if self.pm == "local" else "weighted mean"

    def traffic(self, task, message, upload):
        """The models; the few numbers sent with them are not counted."""
        return message["models"], upload["model"]
