"""FedDyn: a dynamic regulariser, updated in every round, aligns the clients' optima with the global optimum."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import devices, tree
from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, Penalty, setting
from plures.methods.search import log
from plures.tree import Params, Tree


class FedDynServer(NamedTuple):
    host: Tree
    drift: Params  # h / alpha: minus the sum of all clients' updates so far, divided by the number of clients
    n_clients: torch.Tensor


class FedDynClient(NamedTuple):
    host: Tree
    gradient: Params  # g_i: gradient of the client's loss at the model that it trained last


@dataclass(frozen=True)
class FedDyn(Addon):
    """Local loss F_i(v) - <g_i, v> + alpha/2 |v - received|^2; then g_i <- g_i - alpha (v - received)."""

    @property
    def refuses(self):
        twice = "one correction of drift is enough"
        own = "its server has a step of its own"
        return {**self.host.refuses, "feddyn": twice, "scaffold": twice, "fedopt": own}

    alpha: float = setting(0.01, "strength of the dynamic regularisation", least=0, search=log(0.001, 0.1))
    gm: str = setting(
        "server",
        "the generic model: as the server sends it, or the plain mean of the last uploads",
        choices=("server", "mean"),
    )

    def init_server(self, task, params, federation):
        host = self.host.init_server(task, params, federation)
        return FedDynServer(
            host,
            tree.zeros_like(self.shared_weights(task, host)),
            devices.in_double(torch.tensor(federation.n_clients)),
        )

    def send(self, task, server, ids):
        return self.host.send(task, server.host, ids)

    def serve(self, task, server, ids):
        return self.host.serve(task, server.host, ids)

    def merge(self, task, server, ids, uploads, sizes):
        mean = self.host.merge(task, server.host, ids, uploads, torch.ones_like(sizes))

        def update_drift(name, drift):
            change = (uploads[name] - server.host[name]).sum(0)
            return drift - change / server.n_clients.to(change.dtype)

        drift = {name: update_drift(name, x) for name, x in server.drift.items()}
        return server._replace(host=_shift(mean, drift, -1), drift=drift)

    def generic(self, task, server):
        host = server.host if self.gm == "server" else _shift(server.host, server.drift, 1)
        return self.host.generic(task, host)

    def newcomer(self, task, server):
        return self.host.newcomer(task, server.host)

    def init_client(self, task, params):
        weights = self.shared_weights(task, self.host.shared(task, params))
        return FedDynClient(self.host.init_client(task, params), tree.zeros_like(weights))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        anchor = self.shared_weights(task, received)
        penalty = Penalty(linear=tree.scale(-1, client.gradient), weight=torch.tensor(self.alpha), anchor=anchor)
        host, upload, metrics = self.host.train(task, received, client.host, shard, terms.plus(penalty))
        gradient = {name: x - self.alpha * (upload[name] - anchor[name]) for name, x in client.gradient.items()}
        return FedDynClient(host, gradient), upload, metrics

    def local_model(self, task, received, client):
        return self.host.local_model(task, received, client.host)

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, received, client.host, shard)


def _shift(model, by, sign):
    return model | {name: model[name] + sign * x for name, x in by.items()}
