"""APPLE: each client's model is a weighted sum of all clients' core models, with weights that the client learns.

Luo and Wu, Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, 2022.

The model of client i is sum_j p_ij core_j. Its steps update its own core, through p_ii, and all p_ij. They minimise the
loss plus lam(r) * mu * |p_i - p0|^2, where p0 are the clients' shares of all rows; lam falls from one to zero over the
first rounds. The client uploads its core and keeps the weights p_i. The server keeps all cores and averages nothing.

Differs from the paper: a client may receive only some of the other cores; its own core stands in for the rest. For the
next round it asks for those with the largest weights and a random one. BatchNorm statistics are the client's own.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from plures import seeds, tree
from plures.learn.fit import fit
from plures.methods.base import Method, fine_tune, setting
from plures.methods.messages import Each
from plures.tree import Params


class AppleServer(NamedTuple):
    cores: Params  # [client, ...]
    wanted: Tensor  # [client, M], whose cores each client asked for
    sizes: Tensor  # [client], numbers of rows


class AppleClient(NamedTuple):
    core: Params
    weights: Tensor  # [client], never uploaded
    model: Params  # the weighted sum after the last training
    rounds: Tensor  # how many rounds it took part in


def sum_cores(core, cores, own_weight, weights):
    """The weighted sum of the client's core and the received ones; statistics are those of the client's core."""

    def sum_one(name, x):
        others = torch.tensordot(weights.to(x.dtype), cores[name], 1)
        return x if tree.is_statistic(name) else own_weight.to(x.dtype) * x + others

    return {name: sum_one(name, x) for name, x in core.items()}


@dataclass(frozen=True)
class Apple(Method):
    """Cores are sent and uploaded; each client learns the weights of their sum and keeps them."""

    models: int = setting(5, "how many cores of other clients a client receives", least=0)
    weights_lr: float = setting(1e-3, "learning rate of the weights", least=0)
    mu: float = setting(0.1, "strength of the pull of the weights towards the shares of rows", least=0)
    calm: float = setting(0.1, "share of all rounds after which that pull has fallen to zero", least=0, most=1)
    fall: str = setting("cos", "shape of that fall: cosine or exponential", choices=("cos", "exp"))
    core_speed: float = setting(
        1.0, "factor of the core's learning rate, whose gradient is scaled by its weight in the sum", least=0
    )
    one_hot: bool = setting(False, "start with all weight on the client's own core instead of the shares of rows")

    refuses = {"ala": "a client gets several cores, and no single model to blend its own with"}
    depends_on_rounds = True

    def n_sent(self, n_clients):
        """How many cores of other clients a client receives."""
        return min(self.models, n_clients - 1)

    def init_server(self, task, params, federation):
        n = federation.n_clients
        following = (torch.arange(n)[:, None] + 1 + torch.arange(self.n_sent(n))[None, :]) % n
        return AppleServer(tree.repeat(params, n), following, federation.sizes)

    def send(self, task, server, ids):
        wanted = server.wanted[ids]
        sizes = server.sizes.expand(len(ids), -1)
        return Each({"cores": tree.rows(server.cores, wanted), "whose": wanted, "sizes": sizes, "me": ids})

    def merge(self, task, server, ids, uploads, sizes):
        wanted = server.wanted.index_copy(0, ids, uploads["wanted"])
        return server._replace(cores=tree.put(server.cores, ids, uploads["core"]), wanted=wanted)

    def generic(self, task, server):
        return None

    def newcomer(self, task, server):
        return tree.map(lambda x: x.mean(0), server.cores)

    def init_client(self, task, params):
        return AppleClient(params, torch.zeros(self.schedule.n_clients), params, torch.tensor(0))

    def pull_strength(self, round):
        """lam(r) * mu."""
        length = max(1.0, self.calm * self.schedule.rounds)
        part = (round / length).clamp(max=1)
        shape = (torch.cos(math.pi * part) + 1) / 2 if self.fall == "cos" else 1e-3**part
        return torch.where(round < length, self.mu * shape, torch.zeros(()))

    def split_weights(self, weights, whose):
        """The weight of the client's core, plus those of cores that were not sent; and the weights of sent cores."""
        theirs = (weights[None, :] * one_hot(whose, len(weights))).sum(1)
        return weights.sum() - theirs.sum(), theirs

    def choose_wanted(self, weights, me, shard):
        """Whose cores to ask for: those with the largest weights, but a random one instead of the last."""
        n = len(weights)
        others = weights.abs() - 1e9 * one_hot(me, n)
        if self.n_sent(n) < 2 or self.n_sent(n) == n - 1:
            return others.argsort(descending=True, stable=True)[: self.n_sent(n)]
        order = others.argsort(descending=True, stable=True)[: n - 1]
        first, rest = order[: self.n_sent(n) - 1], order[self.n_sent(n) - 1 :]
        pick = (seeds.uniform(shard.key, (1,), 77) * len(rest)).to(torch.int64)
        return torch.cat([first, rest[pick]])

    def train(self, task, received, client, shard):
        def objective(trained, batch, cores, whose, start, pull):
            weights, core = trained["weights"], trained["core"]
            own, theirs = self.split_weights(weights, whose)
            distance = (weights - start).square().sum()
            return task.loss(sum_cores(core, cores, own, theirs), batch) + pull * distance

        me, n = received["me"], self.schedule.n_clients
        shares = received["sizes"] / received["sizes"].sum()
        start = one_hot(me, n).to(torch.float32) if self.one_hot else shares.to(torch.float32)
        weights = torch.where(client.rounds == 0, start, client.weights)
        given = (received["cores"], received["whose"], start, self.pull_strength(shard.round))
        weights_pace = self.weights_lr / self.solver.lr if self.solver.lr else 0.0
        solver = dataclasses.replace(self.solver, pace=(("core", self.core_speed), ("weights", weights_pace)))
        trained = {"core": client.core, "weights": weights}
        fitted = fit(objective, trained, shard, solver, given=given)
        core, weights = fitted.params["core"], fitted.params["weights"]
        own, theirs = self.split_weights(weights, received["whose"])
        model = sum_cores(core, received["cores"], own, theirs)
        upload = {"core": core, "wanted": self.choose_wanted(weights, me, shard)}
        return AppleClient(core, weights, model, client.rounds + 1), upload, {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        return client.model

    def adapt(self, task, received, shard, epochs):
        return fine_tune(task, received, shard, self.solver, epochs)

    @property
    def personal_model_name(self):
        return "local"
