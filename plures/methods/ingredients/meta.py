"""Gradients through one step of adaptation, over all of a client's rows.

The fast part adapts on the support rows: fast' = fast - lr * gradient of the inner loss. The gradients of the
outer loss at (fast', slow) on the query rows, as functions of where the adaptation began, are

    fast: v - lr * d/dfast <inner gradient, v>,    slow: s - lr * d/dslow <inner gradient, v>,

with v and s the plain gradients at (fast', slow): three passes over rows, and no graph is kept between them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.data.batches import Batch
from plures.data.shard import Shard
from plures.learn.fit import measure, step_down
from plures.tree import Params

Loss = Callable[[Params, Params, Batch], Tensor]

BATCH = 64  # rows of a pass


class MetaGradients(NamedTuple):
    fast: Params
    slow: tree.Tree  # what does not adapt: a model, or several trees
    adapted: Params
    loss: Tensor  # outer, after adaptation


def mean_over(fn: Callable[..., tree.Tree], params: tree.Tree, shard: Shard, given: tuple[tree.Tree, ...]) -> tree.Tree:
    """The mean over a shard's rows of a function that gives the mean over a batch's."""

    def weighed(params: tree.Tree, batch: Batch, *given: tree.Tree) -> tree.Tree:
        return tree.scale(batch.mask.sum(), fn(params, batch, *given))

    return tree.map(lambda x: x / shard.size, measure(weighed, params, shard, BATCH, given))


def meta_gradients(
    inner: Loss, outer: Loss, fast: Params, slow: tree.Tree, support: Shard, query: Shard, lr: float, first_order: bool
) -> MetaGradients:
    """Gradients of the outer loss with respect to where the adaptation by the inner loss began."""

    def inner_gradients(fast: Params, batch: Batch, slow: tree.Tree) -> Params:
        return torch.func.grad(inner)(fast, slow, batch)

    def outer_gradients(fast: Params, batch: Batch, slow: tree.Tree) -> tree.Tree:
        return torch.func.grad_and_value(outer, argnums=(0, 1))(fast, slow, batch)

    def curvature(fast: Params, batch: Batch, slow: tree.Tree, along: Params) -> tree.Tree:
        def gradient_along(fast: Params, slow: tree.Tree) -> Tensor:
            return tree.dot(along, torch.func.grad(inner)(fast, slow, batch))

        return torch.func.grad(gradient_along, argnums=(0, 1))(fast, slow)

    adapted = step_down(fast, mean_over(inner_gradients, fast, support, (slow,)), lr)
    (v, s), loss = mean_over(outer_gradients, adapted, query, (slow,))
    if first_order or lr == 0:
        return MetaGradients(v, s, adapted, loss)
    bent_fast, bent_slow = mean_over(curvature, fast, support, (slow, v))
    return MetaGradients(step_down(v, bent_fast, lr), step_down(s, bent_slow, lr), adapted, loss)
