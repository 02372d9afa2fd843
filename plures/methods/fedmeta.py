"""FedMeta: a shared start, learned by gradients through one step of adaptation of the whole model.

Chen et al., Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018.

A client splits its rows into support and query, takes one step of size inner_lr on the support rows and
uploads the gradient of the query loss there, as a function of where the step began. The server takes one
step of size lr along the mean of these gradients. The personal model is fine-tuned from the mean.

Differs from the paper: gradients are over all support and all query rows of a client.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import step_down
from plures.methods.base import Method, fine_tune, setting
from plures.methods.ingredients.meta import meta_gradients
from plures.methods.messages import Same
from plures.tree import Params


class FedMetaServer(NamedTuple):
    model: Params
    round: Tensor


@dataclass(frozen=True)
class FedMeta(Method):
    """One outer gradient a client and round; the server takes the step."""

    inner_lr: float = setting(0.01, "size of the step of adaptation", least=0)
    support: float = setting(0.8, "share of rows that the adaptation sees; the others judge it", least=0, most=1)
    first_order: bool = setting(False, "leave out how the adaptation depends on where it began")
    pers: int = setting(5, "epochs of fine-tuning of the personal model", least=0)

    def init_server(self, task, params, federation):
        return FedMetaServer(params, torch.tensor(0))

    def send(self, task, server, ids):
        return Same(server.model)

    def merge(self, task, server, ids, uploads, sizes):
        gradients = tree.mean(uploads["gradients"], torch.ones_like(sizes))
        stepped = step_down(server.model, gradients, self.solver.rate(server.round))
        moved = {name: x - gradients[name] for name, x in server.model.items() if tree.is_statistic(name)}
        return FedMetaServer(stepped | moved, server.round + 1)

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
