"""FedMeta: a shared start, learned by slopes through one step of adaptation of the whole model.

Chen et al., Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018.

A client splits its rows into support and query, takes one step of size inner_lr on the support rows and
uploads the slope of the query loss there, as a function of where the step began. The server takes one
step of size lr along the mean of these slopes. The personal model is fine-tuned from the mean.

Differs from the paper: slopes are over all support and all query rows of a client. The server's step is not
decayed from round to round.
"""

from dataclasses import dataclass

import torch

from .. import tree
from ..meta import meta_slopes
from ..method import Method, fine_tuned, setting


@dataclass(frozen=True)
class FedMeta(Method):
    """One outer slope a client and round; the server takes the step."""

    inner_lr: float = setting(0.01, "size of the step of adaptation", least=0)
    support: float = setting(0.8, "share of rows that the adaptation sees; the others judge it", least=0, most=1)
    first_order: bool = setting(False, "leave out how the adaptation depends on where it began")
    pers: int = setting(5, "epochs of fine-tuning of the personal model", least=0)

    def merge(self, task, server, ids, uploads, sizes):
        slopes = tree.mean(uploads["slopes"], torch.ones_like(sizes))
        lr = self.solver.lr

        def moved(name, x):
            return x - slopes[name] if tree.is_statistic(name) else x - lr * slopes[name]

        return {name: moved(name, x) for name, x in server.items()}

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
