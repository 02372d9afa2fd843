"""FedMeta: a shared start, learned by slopes through one step of adaptation of the whole model.

Chen et al., Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018.

A client splits its rows into support and query, takes one step of size inner_lr on the support rows and
uploads the slope of the query loss there, as a function of where the step began. The server takes one
step of size lr along the mean of these slopes. The personal model is fine-tuned from the mean.

Differs from the paper: slopes are over all support and all query rows of a client.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..fit import step_down
from ..meta import meta_slopes
from ..method import Method, Same, fine_tuned, setting
from ..tree import Params


class FedMetaServer(NamedTuple):
    model: Params
    round: Tensor


@dataclass(frozen=True)
class FedMeta(Method):
    """One outer slope a client and round; the server takes the step."""

    inner_lr: float = setting(0.01, "size of the step of adaptation", least=0)
    support: float = setting(0.8, "share of rows that the adaptation sees; the others judge it", least=0, most=1)
    first_order: bool = setting(False, "leave out how the adaptation depends on where it began")
    pers: int = setting(5, "epochs of fine-tuning of the personal model", least=0)

    def init_server(self, task, params, federation):
        return FedMetaServer(params, torch.tensor(0))

    def send(self, task, server, ids):
        return Same(server.model)

    def merge(self, task, server, ids, uploads, sizes):
        slopes = tree.mean(uploads["slopes"], torch.ones_like(sizes))
        stepped = step_down(server.model, slopes, self.solver.rate(server.round))
        moved = {name: x - slopes[name] for name, x in server.model.items() if tree.is_statistic(name)}
        return FedMetaServer(stepped | moved, server.round + 1)

    def generic(self, task, server):
        return server.model

    def newcomer(self, task, server):
        return server.model

    def train(self, task, received, client, shard):
        def loss(fast, slow, batch):
            return task.loss(fast, batch)

        support, query = shard.split(self.support, "support")
        found = meta_slopes(loss, loss, received, {}, support, query, self.inner_lr, self.first_order)
        return client, {"slopes": found.fast}, {"loss": found.loss}

    def personalize(self, task, received, client, shard):
        return fine_tuned(task, received, shard, self.solver, self.pers)

    @property
    def scored(self):
        return "global, fine-tuned"
