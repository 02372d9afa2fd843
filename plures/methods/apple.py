"""APPLE: each client's model is a weighted sum of all clients' core models, with weights that the client learns.

Luo and Wu, Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, 2022.

The model of client i is sum_j p_ij core_j. Its steps update its own core, through p_ii, and all p_ij. They minimise the
loss plus lam(r) * mu * |p_i - p0|^2, where p0 are the clients' shares of all rows; lam falls from one to zero over the
first rounds. The client uploads its core and keeps the weights p_i. The server keeps all cores and averages nothing.

Differs from the paper: the gradient of a client's core is scaled by p_ii, which is about one over the number of clients
at first; `core_speed` makes up for it. With `models` below the number of other clients, a client receives some cores in
a round and keeps the last ones that it got of the others, as in the authors' code: it asks for those that it never got,
then for those with the largest weights and a random one. BatchNorm statistics are the client's own.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from plures import devices, seeds, tree
from plures.learn.fit import fit
from plures.methods.base import Method, fine_tune, mean_of_seen, setting
from plures.methods.messages import Each
from plures.methods.search import among, linear, log
from plures.tree import Params


class AppleServer(NamedTuple):
    cores: Params  # [client, ...]
    wanted: Tensor  # [client, M], whose cores each client asked for
    sizes: Tensor  # [client], numbers of rows
    seen: Tensor  # [client], 1 if it has uploaded a core, else 0


class AppleClient(NamedTuple):
    core: Params
    weights: Tensor  # [client], never uploaded
    model: Params  # the weighted sum after the last training
    rounds: Tensor  # how many rounds it took part in
    kept: Params  # [client, ...], the last cores that it got of all clients; empty if it gets all of them in a round
    got: Tensor  # [client], 1 if it ever got that client's core


def sum_cores(core, cores, own_weight, weights):
    """The weighted sum of the client's core and the received ones; statistics are those of the client's core."""

    def sum_one(name, x):
        others = torch.tensordot(weights.to(x.dtype), cores[name], 1)
        return x if tree.is_statistic(name) else own_weight.to(x.dtype) * x + others

    return {name: sum_one(name, x) for name, x in core.items()}


@dataclass(frozen=True)
class Apple(Method):
    """Cores are sent and uploaded; each client learns the weights of their sum and keeps them."""

    models: int = setting(
        0,
        "how many cores of other clients a client receives in a round; 0: all",
        least=0,
        search=linear(0, 10).if_named(),
    )
    weights_lr: float = setting(1e-3, "learning rate of the weights", least=0, search=log(1e-4, 1e-2))
    mu: float = setting(
        0.1, "strength of the pull of the weights towards the shares of rows", least=0, search=log(0.01, 1)
    )
    calm: float = setting(
        0.1, "share of all rounds after which that pull has fallen to zero", least=0, most=1, search=linear(0, 0.5)
    )
    fall: str = setting("cos", "shape of that fall: cosine or exponential", choices=("cos", "exp"))
    core_speed: float = setting(
        0.0,
        "factor of the core's learning rate; 0: the number of clients, since p_ii scales its gradient (1 with one_hot)",
        least=0,
        search=among(0.0, 1.0, 3.0, 10.0).if_named(),
    )
    one_hot: bool = setting(False, "start with all weight on the client's own core instead of the shares of rows")

    refuses = {"ala": "a client gets several cores, and no single model to blend its own with"}
    depends_on_rounds = True

    def n_sent(self, n_clients):
        """How many cores of other clients a client receives."""
        return min(self.models or n_clients, n_clients - 1)

    def init_server(self, task, params, federation):
        n = federation.n_clients
        following = (torch.arange(n)[:, None] + 1 + torch.arange(self.n_sent(n))[None, :]) % n
        return AppleServer(tree.repeat(params, n), following, federation.sizes, torch.zeros(n))

    def send(self, task, server, ids):
        wanted = server.wanted[ids]
        sizes = server.sizes.expand(len(ids), -1)
        return Each({"cores": tree.rows(server.cores, wanted), "whose": wanted, "sizes": sizes, "me": ids})

    def merge(self, task, server, ids, uploads, sizes):
        wanted = server.wanted.index_copy(0, ids, uploads["wanted"])
        cores, seen = tree.put(server.cores, ids, uploads["core"]), server.seen.index_fill(0, ids, 1.0)
        return server._replace(cores=cores, wanted=wanted, seen=seen)

    def generic(self, task, server):
        return None

    def newcomer(self, task, server):
        return mean_of_seen(server.cores, server.seen)

    def init_client(self, task, params):
        n = self.schedule.n_clients
        kept = tree.repeat(params, n) if self.n_sent(n) < n - 1 else {}
        return AppleClient(params, torch.zeros(n), params, torch.tensor(0), kept, torch.zeros(n))

    def pull_strength(self, round):
        """lam(r) * mu."""
        length = max(1.0, self.calm * self.schedule.rounds)
        part = (round / length).clamp(max=1)
        shape = (torch.cos(math.pi * part) + 1) / 2 if self.fall == "cos" else 1e-3**part
        return torch.where(round < length, self.mu * shape, torch.zeros(()))

    def choose_wanted(self, weights, got, me, shard):
        """Whose cores to ask for: those it never got, then those with the largest weights; the last one at random."""
        n, m = len(weights), self.n_sent(len(weights))
        size, unknown, own = (devices.in_double(x) for x in (weights.abs(), 1e6 * (1 - got), 1e9 * one_hot(me, n)))
        order = (size + unknown - own).argsort(descending=True, stable=True)[: n - 1].to(weights.device)
        if m in (0, n - 1):
            return order[:m]
        first, rest = order[: m - 1], order[m - 1 :]
        pick = (seeds.uniform(shard.key, (1,), 77) * len(rest)).to(torch.int64)
        pick = torch.where(got[rest[:1]] > 0, pick, torch.zeros_like(pick))
        return torch.cat([first, rest[pick]])

    def all_cores(self, client, received):
        """The cores that the sum is made of, and whose they are: all that were sent, or all that the client has."""
        if not client.kept:
            return received["cores"], received["whose"]
        whose = torch.arange(self.schedule.n_clients)
        return tree.map(
            lambda old, new: old.index_copy(0, received["whose"], new), client.kept, received["cores"]
        ), whose

    def train(self, task, received, client, shard):
        def objective(trained, batch, cores, whose, me, start, pull):
            weights, core = trained["weights"], trained["core"]
            own, theirs = self.split_weights(weights, whose, me)
            distance = (weights - start).square().sum()
            return task.loss(sum_cores(core, cores, own, theirs), batch) + pull * distance

        me, n = received["me"], self.schedule.n_clients
        shares = received["sizes"] / received["sizes"].sum()
        start = one_hot(me, n).to(torch.float32) if self.one_hot else shares.to(torch.float32)
        weights = torch.where(client.rounds == 0, start, client.weights)
        cores, whose = self.all_cores(client, received)
        given = (cores, whose, me, start, self.pull_strength(shard.round))
        weights_pace = self.weights_lr / self.solver.lr if self.solver.lr else 0.0
        pace = (("core", self.core_speed or (1.0 if self.one_hot else float(n))), ("weights", weights_pace))
        trained = {"core": client.core, "weights": weights}
        fitted = fit(objective, trained, shard, dataclasses.replace(self.solver, pace=pace), given=given)
        core, weights = fitted.params["core"], fitted.params["weights"]
        model = sum_cores(core, cores, *self.split_weights(weights, whose, me))
        got = torch.clamp(client.got + one_hot(received["whose"], n).sum(0), max=1)
        upload = {"core": core, "wanted": self.choose_wanted(weights, got, me, shard)}
        kept = cores if client.kept else {}
        return AppleClient(core, weights, model, client.rounds + 1, kept, got), upload, {"loss": fitted.loss}

    def split_weights(self, weights, whose, me):
        """The weight of the client's own core, and the weights of the others'; its own among them counts once."""
        theirs = (weights[None, :] * one_hot(whose, len(weights))).sum(1)
        own = (weights * one_hot(me, len(weights))).sum()
        return own, torch.where(whose == me, torch.zeros_like(theirs), theirs)

    def personalize(self, task, received, client, shard):
        return client.model

    def adapt(self, task, received, shard, epochs):
        return fine_tune(task, received, shard, self.solver, epochs)

    @property
    def personal_model_name(self):
        return "local"
