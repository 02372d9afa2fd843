"""SCAFFOLD: control variates correct each local step for the difference between client gradient and mean gradient."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import devices, tree
from plures.errors import UsageError
from plures.methods.addons.base import Addon
from plures.methods.addons.fedopt import FedOpt
from plures.methods.base import NO_TERMS, Penalty, setting
from plures.methods.messages import Same
from plures.methods.search import log
from plures.tree import Params, Tree


class ScaffoldServer(NamedTuple):
    host: Tree
    control: Params  # c: the mean of all clients' control variates
    n_clients: torch.Tensor


class ScaffoldClient(NamedTuple):
    host: Tree
    control: Params  # c_i: an estimate of the client's gradient


@dataclass(frozen=True)
class Scaffold(Addon):
    """Local steps y <- y - lr (g(y) - c_i + c); after training c_i <- c_i - c + (x - y) / (steps * lr)."""

    @property
    def refuses(self):
        order, twice = "add it the other way round, before scaffold", "one correction of drift is enough"
        before = dict.fromkeys(("ala", "c", "prox", "fedopt"), order)
        return {**self.host.refuses, **before, "feddyn": twice, "scaffold": twice}

    server_lr: float = setting(
        1.0, "learning rate of the server: 1 moves it to the mean of the uploaded models", least=0, search=log(0.3, 3)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.server_lr != 1 and isinstance(self.host, FedOpt):
            raise UsageError("scaffold has a learning rate of the server of its own; leave out one of the two")

    def with_solver(self, solver):
        if solver.kind != "sgd" or solver.nesterov or solver.clip:
            raise UsageError(
                "scaffold reads a client's gradient off the distance it went, which needs plain SGD, with or without "
                "momentum; leave out other optimizers, nesterov and clip"
            )
        return super().with_solver(solver)

    def init_server(self, task, params, federation):
        host = self.host.init_server(task, params, federation)
        return ScaffoldServer(
            host,
            tree.zeros_like(self.shared_weights(task, host)),
            devices.in_double(torch.tensor(federation.n_clients)),
        )

    def send(self, task, server, ids):
        return Same({"host": self.host.send(task, server.host, ids).tree, "control": server.control})

    def serve(self, task, server, ids):
        return Same({"host": self.host.serve(task, server.host, ids).tree, "control": server.control})

    def merge(self, task, server, ids, uploads, sizes):
        mean = self.host.merge(task, server.host, ids, uploads["host"], torch.ones_like(sizes))
        if self.server_lr != 1:  # statistics of BatchNorm are averaged: beyond the mean a variance may be negative
            old, new = (self.shared_weights(task, x) for x in (server.host, mean))
            mean = mean | tree.map(lambda old, new: torch.lerp(old, new, self.server_lr), old, new)
        change = tree.map(lambda x: x.sum(0) / server.n_clients.to(x.dtype), uploads["control"])
        return server._replace(host=mean, control=tree.add(server.control, change))

    def generic(self, task, server):
        return self.host.generic(task, server.host)

    def newcomer(self, task, server):
        return {"host": self.host.newcomer(task, server.host), "control": server.control}

    def init_client(self, task, params):
        weights = self.shared_weights(task, self.host.shared(task, params))
        return ScaffoldClient(self.host.init_client(task, params), tree.zeros_like(weights))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        before, control = self.shared_weights(task, received["host"]), received["control"]
        correction = Penalty(linear=tree.sub(control, client.control), weight=torch.zeros(()), anchor={})
        host, upload, metrics = self.host.train(task, received["host"], client.host, shard, terms.plus(correction))
        reach = self.reach(metrics["steps"], shard.round)
        after = self.shared_weights(task, upload)
        gradients = {name: (before[name] - after[name]) / reach.clamp(min=1e-30) for name in control}
        change = tree.map(lambda g, c: torch.where(reach > 0, g - c, 0.0), gradients, control)
        # The client adds the very change that it uploads, so that rounding is the same on both sides.
        own = tree.add(client.control, change)
        return ScaffoldClient(host, own), {"host": upload, "control": change}, metrics

    def reach(self, steps, round):
        """How far this many steps move along a constant gradient of one, including what momentum adds."""
        momentum, steps = self.solver.momentum, steps.clamp(min=1)
        lost = momentum * (1 - momentum**steps) / (1 - momentum) ** 2
        return self.solver.rate(round) * (steps / (1 - momentum) - lost)

    def local_model(self, task, received, client):
        return self.host.local_model(task, received["host"], client.host)

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, received["host"], client.host, shard)

    def adapt(self, task, received, shard, epochs):
        return self.host.adapt(task, received["host"], shard, epochs)
