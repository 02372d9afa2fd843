"""FedPer-Meta: a shared body that is good after each client's head has taken a step of adaptation.

The baseline of that name in the AFML paper: FedPer's split with a meta-learned head.

A client splits its rows into support and query, adapts its head by one step on the support rows, and
moves body and head down the gradient of the query loss through that step. The body travels and is averaged;
the head stays, or travels too with `share_head=true`. The personal model fine-tunes the head.

Differs from the paper, which says no more than the above: gradients are over all rows; one outer step of size
lr a round.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import tree
from plures.learn.fit import step_down
from plures.methods.base import Method, fit_head, setting
from plures.methods.ingredients.meta import meta_gradients
from plures.tree import Params


class FedPerMetaClient(NamedTuple):
    head: Params  # never uploaded; empty with share_head


@dataclass(frozen=True)
class FedPerMeta(Method):
    """The body learns to be adapted to; the head adapts."""

    inner_lr: float = setting(0.01, "size of the head's step of adaptation", least=0)
    support: float = setting(0.8, "share of rows that the adaptation sees; the others judge it", least=0, most=1)
    first_order: bool = setting(False, "leave out how the adaptation depends on where it began")
    share_head: bool = setting(False, "whether the head travels and is averaged too")
    pers: int = setting(5, "epochs of fine-tuning of the personal head", least=0)

    def shared(self, task, params):
        return params if self.share_head else tree.drop(params, task.is_head)

    def merge(self, task, server, ids, uploads, sizes):
        return tree.mean(uploads, torch.ones_like(sizes))

    def generic(self, task, server):
        return server if self.share_head else None

    def init_client(self, task, params):
        return FedPerMetaClient({} if self.share_head else tree.keep(params, task.is_head))

    def local_model(self, task, received, client):
        return received | client.head

    def train(self, task, received, client, shard):
        def loss(head, body, batch):
            return task.loss(body | head, batch)

        model = self.local_model(task, received, client)
        head, body = tree.keep(model, task.is_head), tree.drop(model, task.is_head)
        support, query = shard.split(self.support, "support")
        found = meta_gradients(loss, loss, head, body, support, query, self.inner_lr, self.first_order)
        lr = self.solver.rate(shard.round)
        steps = {name: x - s for (name, x), s in zip(body.items(), found.slow.values(), strict=True)}
        body = step_down(body, found.slow, lr) | tree.keep(steps, tree.is_statistic)
        head = step_down(head, found.fast, lr)
        upload = self.shared(task, {name: (body | head)[name] for name in model})
        return FedPerMetaClient({} if self.share_head else head), upload, {"loss": found.loss}

    def personalize(self, task, received, client, shard):
        model = self.local_model(task, received, client)
        head, body = tree.keep(model, task.is_head), tree.drop(model, task.is_head)
        return body | fit_head(task, head, body, shard, self.solver, self.pers).params

    def adapt(self, task, received, shard, epochs):
        model = task.initial | received
        head, body = tree.keep(model, task.is_head), tree.drop(model, task.is_head)
        return body | fit_head(task, head, body, shard, self.solver, epochs).params

    @property
    def personal_model_name(self):
        return "server body, fine-tuned head"
