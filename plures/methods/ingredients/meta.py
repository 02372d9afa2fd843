"""Meta-gradients: gradients through one adaptation step, over all rows of a client.

The fast weights adapt on the support rows: fast' = fast - lr * gradient of the inner loss. The slow weights stay. The
gradients of the outer loss at (fast', slow) on the query rows, with respect to the weights before adaptation, are

    fast: v - lr * d/dfast <inner gradient, v>,    slow: s - lr * d/dslow <inner gradient, v>,

with v and s the plain gradients at (fast', slow): three passes over the rows, and no graph is kept between them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.data.batches import Batch
from plures.data.shard import Shard
from plures.learn import optimizers
from plures.learn.fit import measure, step_down
from plures.learn.optimizers import OptimizerState
from plures.methods.base import setting
from plures.methods.search import linear
from plures.tree import Params

Loss = Callable[[Params, Params, Batch], Tensor]

BATCH = 64  # rows of a batch


def warm_up_setting() -> int:
    """The first steps of Adam move all weights by the same length, however small their gradients."""
    return setting(
        5, "adam: rounds over which the learning rate of the server rises", least=0, search=linear(0, 10).if_named()
    )


def server_step(
    kind: str, now: tree.Tree, gradients: tree.Tree, state: OptimizerState, lr: float, round: Tensor, warm_up: int
) -> tuple[tree.Tree, OptimizerState]:
    """One step of the server's optimizer; with Adam, its learning rate rises linearly over the first rounds."""
    if kind == "sgd":
        return optimizers.sgd(now, gradients, state, lr)
    return optimizers.adam(now, gradients, state, lr * min(1.0, (int(round) + 1) / max(warm_up, 1)))


class MetaGradients(NamedTuple):
    fast: Params
    slow: tree.Tree  # like the slow weights: a model, or several trees
    adapted: Params
    loss: Tensor  # the outer loss after adaptation


def average(fn: Callable[..., tree.Tree], params: tree.Tree, shard: Shard, given: tuple[tree.Tree, ...]) -> tree.Tree:
    """The mean over all rows of a shard, of a function that returns the mean over the rows of a batch."""

    def batch_sum(params: tree.Tree, batch: Batch, *given: tree.Tree) -> tree.Tree:
        return tree.scale(batch.mask.sum(), fn(params, batch, *given))

    return tree.map(lambda x: x / shard.size, measure(batch_sum, params, shard, BATCH, given))


def meta_gradients(
    inner: Loss, outer: Loss, fast: Params, slow: tree.Tree, support: Shard, query: Shard, lr: float, first_order: bool
) -> MetaGradients:
    """Gradients of the outer loss, after adaptation by the inner loss, with respect to the weights before it."""

    def inner_gradients(fast: Params, batch: Batch, slow: tree.Tree) -> Params:
        return torch.func.grad(inner)(fast, slow, batch)

    def outer_gradients(fast: Params, batch: Batch, slow: tree.Tree) -> tree.Tree:
        return torch.func.grad_and_value(outer, argnums=(0, 1))(fast, slow, batch)

    def hessian_products(fast: Params, batch: Batch, slow: tree.Tree, along: Params) -> tree.Tree:
        def gradient_along(fast: Params, slow: tree.Tree) -> Tensor:
            return tree.dot(along, torch.func.grad(inner)(fast, slow, batch))

        return torch.func.grad(gradient_along, argnums=(0, 1))(fast, slow)

    adapted = step_down(fast, average(inner_gradients, fast, support, (slow,)), lr)
    (v, s), loss = average(outer_gradients, adapted, query, (slow,))
    if first_order or lr == 0:
        return MetaGradients(v, s, adapted, loss)
    of_fast, of_slow = average(hessian_products, fast, support, (slow, v))
    return MetaGradients(step_down(v, of_fast, lr), step_down(s, of_slow, lr), adapted, loss)
