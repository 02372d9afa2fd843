"""FedOpt: the server takes the mean of the clients' updates as a gradient step of an optimizer of its own.

Reddi et al., Adaptive Federated Optimization, 2021. With g = (model of the server) - (mean of the uploads):

    sgd         w <- w - lr * g                                            (lr = 1 is FedAvg)
    momentum    m <- 0.9 m + g;                       w <- w - lr * m      (FedAvgM, Hsu et al. 2019)
    adam        m <- 0.9 m + 0.1 g;  v <- 0.99 v + 0.01 g^2;               w <- w - lr * m / (sqrt(v) + 0.001)
    yogi        as adam, with v <- v - 0.01 g^2 sign(v - g^2)

Differs from the paper: nothing. v starts at 0.001^2, and there is no correction of the first steps, as in the paper's
algorithm. Statistics of BatchNorm are averaged. `--server-optimizer` puts it next to the method, inside of all other
add-ons.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures import tree
from plures.errors import UsageError
from plures.learn.optimizers import OptimizerState, adaptive, init_optimizer, sgd
from plures.methods.addons.base import Addon
from plures.methods.base import Averaged, setting
from plures.methods.search import among
from plures.tree import Tree

RATES = {"sgd": 1.0, "momentum": 1.0, "adam": 0.03, "yogi": 0.03}
TAU = 1e-3


class FedOptServer(NamedTuple):
    host: Tree
    optimizer: OptimizerState


@dataclass(frozen=True)
class FedOpt(Addon):
    """The server takes the mean update as a step of SGD with momentum, Adam or Yogi."""

    server_optimizer: str = setting(
        "adam", "how the server takes the mean update as a step", choices=("sgd", "momentum", "adam", "yogi")
    )
    server_lr: float = setting(
        0.0,
        "learning rate of the server; 0: 1, or 0.03 for adam and yogi",
        least=0,
        search=among(0.0, 0.01, 0.03, 0.1, 0.3, 1.0),
    )

    changes_training = False

    def __post_init__(self):
        super().__post_init__()
        inner = self.host
        while isinstance(inner, Addon):
            inner = inner.host
        if not isinstance(inner, Averaged):
            raise UsageError(f"{self.host.title} cannot take the add-on fedopt: its server takes no mean of models")

    @property
    def refuses(self):
        once = "it has an optimizer of the server already"
        return {**self.host.refuses, "fedopt": once, "feddyn": "FedDyn's server has a step of its own"}

    def shared(self, task, params):
        return self.host.shared(task, params.host if isinstance(params, FedOptServer) else params)

    def init_server(self, task, params, federation):
        server = self.host.init_server(task, params, federation)
        if not isinstance(server, dict):
            raise UsageError("fedopt must stand before add-ons whose server keeps more than a model: fedavg+fedopt+...")
        state = init_optimizer(tree.trainable(server), adam=self.server_optimizer in ("adam", "yogi"))
        return FedOptServer(server, state._replace(second=tree.map(lambda v: v + TAU**2, state.second)))

    def merge(self, task, server, ids, uploads, sizes):
        mean = self.host.merge(task, server.host, ids, uploads, sizes)
        lr = self.server_lr or RATES[self.server_optimizer]
        if self.server_optimizer == "sgd" and lr == 1:
            return server._replace(host=mean)
        weights = tree.trainable(server.host)
        gradients = tree.sub(weights, tree.trainable(mean))
        if self.server_optimizer in ("adam", "yogi"):
            moved, state = adaptive(weights, gradients, server.optimizer, lr, TAU, self.server_optimizer == "yogi")
        else:
            momentum = 0.9 if self.server_optimizer == "momentum" else 0.0
            moved, state = sgd(weights, gradients, server.optimizer, lr, momentum)
        return FedOptServer(mean | moved, state)

    def send(self, task, server, ids):
        return self.host.send(task, server.host, ids)

    def serve(self, task, server, ids):
        return self.host.serve(task, server.host, ids)

    def generic(self, task, server):
        return self.host.generic(task, server.host)

    def newcomer(self, task, server):
        return self.host.newcomer(task, server.host)

    def snapshot(self, task, server):
        return self.host.snapshot(task, server.host)
