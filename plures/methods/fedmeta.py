"""FedMeta: clients upload meta-gradients through one adaptation step of the whole model; the server takes the step.

Chen et al., Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018.

A client splits its rows into support and query rows. It takes one gradient step with learning rate inner_lr on the
support rows, and uploads the gradient of the query loss after that step with respect to the model before it. The server
takes one step of its optimizer with the mean of these gradients. The personal model is the server's model, fine-tuned.

Differs from the paper: gradients are over all support rows and all query rows of a client. The optimizer of the server
is that of AFML, with its warm-up, so that the two can be compared; with `server_kind=sgd` it takes plain steps at the
clients' rate, or at `server_lr`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn import optimizers
from plures.learn.optimizers import OptimizerState
from plures.methods.base import Method, fine_tune, setting
from plures.methods.ingredients.meta import meta_gradients, server_step, warm_up_setting
from plures.methods.messages import Same
from plures.methods.search import linear, log
from plures.tree import Params


class FedMetaServer(NamedTuple):
    model: Params
    optimizer: OptimizerState
    round: Tensor


@dataclass(frozen=True)
class FedMeta(Method):
    """Each client uploads one meta-gradient per round; the server takes the step."""

    inner_lr: float = setting(0.1, "learning rate of the adaptation step", least=0, search=log(0.01, 1))
    support: float = setting(
        0.8,
        "share of rows for the adaptation step; the outer loss uses the others",
        least=0,
        most=1,
        search=linear(0.5, 0.9),
    )
    first_order: bool = setting(False, "ignore second derivatives (first-order meta-gradients)")
    server_kind: str = setting("adam", "optimizer of the server", choices=("sgd", "adam"))
    server_lr: float = setting(
        0.006, "learning rate of the server; 0: that of clients", least=0, search=log(6e-4, 6e-2)
    )
    warm_up: int = warm_up_setting()
    pers: int = setting(5, "epochs of fine-tuning of the personal model", least=0, search=linear(1, 10))

    def init_server(self, task, params, federation):
        state = optimizers.init_optimizer(tree.trainable(params), adam=self.server_kind == "adam")
        return FedMetaServer(params, state, torch.tensor(0))

    def send(self, task, server, ids):
        return Same(server.model)

    def merge(self, task, server, ids, uploads, sizes):
        gradients = tree.mean(uploads["gradients"], torch.ones_like(sizes))
        now, along = tree.trainable(server.model), tree.trainable(gradients)
        lr = self.server_lr or float(self.solver.rate(server.round))
        moved, state = server_step(self.server_kind, now, along, server.optimizer, lr, server.round, self.warm_up)
        statistics = {name: x - gradients[name] for name, x in server.model.items() if tree.is_statistic(name)}
        return FedMetaServer(server.model | moved | statistics, state, server.round + 1)

    def generic(self, task, server):
        return server.model

    def newcomer(self, task, server):
        return server.model

    def train(self, task, received, client, shard):
        def loss(fast, slow, batch):
            return task.loss(fast, batch)

        support, query = shard.split(self.support, "support")
        found = meta_gradients(loss, loss, received, {}, support, query, self.inner_lr, self.first_order)
        return client, {"gradients": found.fast}, {"loss": found.loss}

    def personalize(self, task, received, client, shard):
        return fine_tune(task, received, shard, self.solver, self.pers)

    @property
    def personal_model_name(self):
        return "global, fine-tuned"
