"""FedPer-Meta: a shared body, meta-learned to work well after one adaptation step of each client's private head.

The baseline of that name in the AFML paper: FedPer with a meta-learned head.

A client splits its rows into support and query rows and adapts its head by one gradient step on the support rows. Body
and head then take a gradient step on the query loss, through that adaptation. The body is sent and averaged; the head
stays with the client, or is sent too with `share_head=true`. The personal model has a fine-tuned head.

Differs from the paper, which says no more than the above: gradients are over all rows, and there is one outer step with
learning rate lr per round.
"""

from dataclasses import dataclass
from typing import NamedTuple

from plures import tree
from plures.learn.fit import step_down
from plures.methods.base import Averaged, fit_head, setting, weights_setting
from plures.methods.ingredients.meta import meta_gradients
from plures.methods.search import linear, log
from plures.tree import Params


class FedPerMetaClient(NamedTuple):
    head: Params  # never uploaded; empty with share_head


@dataclass(frozen=True)
class FedPerMeta(Averaged):
    """The shared body is trained through the adaptation step of the private head."""

    inner_lr: float = setting(0.3, "learning rate of the head's adaptation step", least=0, search=log(0.03, 3))
    support: float = setting(
        0.8,
        "share of rows for the adaptation step; the outer loss uses the others",
        least=0,
        most=1,
        search=linear(0.5, 0.9),
    )
    first_order: bool = setting(False, "ignore second derivatives (first-order meta-gradients)")
    share_head: bool = setting(False, "whether the head is sent and averaged too")
    pers: int = setting(5, "epochs of fine-tuning of the personal head", least=0, search=linear(1, 10))
    weights: str = weights_setting("uniform")

    trains = ("head",)

    def shared(self, task, params):
        return params if self.share_head else tree.drop(params, task.is_head)

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
        updated = {name: x - s for (name, x), s in zip(body.items(), found.slow.values(), strict=True)}
        body = step_down(body, found.slow, lr) | tree.keep(updated, tree.is_statistic)
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
