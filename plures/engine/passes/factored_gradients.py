"""Factored gradients: those that are products of matrices, or rows of an embedding, are given by their factors.

The factors are added to the weights in one kernel, so that the gradient is never written and read again.
"""

from typing import Any, cast

import torch
from torch import fx

from plures.engine import private
from plures.engine.gradients import Product, Scattered
from plures.engine.passes import embedding_sums
from plures.engine.passes.join_products import is_transposed

aten = torch.ops.aten


def apply(graph: fx.Graph, n: int) -> None:
    """Give gradients that are products of matrices, or rows of an embedding, and nothing else, by their parts."""
    (out,) = [node for node in graph.nodes if node.op == "output"]
    losses, *gradients = out.args[0]

    def factors(gradient: Any) -> Any:
        transposed = is_transposed(gradient)
        product: Any = gradient.args[0] if transposed else gradient
        alone = isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1
        if not alone or len(gradient.users) != 1:
            return gradient
        left, right = product.args[:2]
        with graph.inserting_before(out):
            if transposed:
                left, right = (graph.call_function(aten.transpose.int, (x, 1, 2)) for x in (right, left))
            return graph.call_function(Product, (left, right))

    def looked_up(gradient: Any) -> Any:
        node = gradient
        while isinstance(node, fx.Node) and len(node.users) == 1 and _same_order(node):
            node = node.args[0]
        backward = aten.embedding_dense_backward.default
        if not isinstance(node, fx.Node) or node.target is not backward or len(node.users) != 1:
            return gradient
        rows, at, _, padding, by_frequency = cast(tuple[fx.Node, ...], node.args)
        if padding != -1 or by_frequency:
            return gradient
        n_clients, n_rows, width = gradient.meta["val"].shape
        with graph.inserting_before(out):
            if rows.target is embedding_sums.spread:
                return graph.call_function(Scattered, (rows.args[0], at, n_clients, n_rows, rows.args[1]))
            flat_rows = graph.call_function(torch.reshape, (rows, [-1, width]))
            flat_at = graph.call_function(torch.reshape, (at, [-1]))
            return graph.call_function(Scattered, (flat_rows, flat_at, n_clients, n_rows))

    out.args = ([losses, *[looked_up(factors(gradient)) for gradient in gradients]],)
    graph.eliminate_dead_code()


def _same_order(node: fx.Node) -> bool:
    """Whether it gives the numbers of its input in their order: a view, or a permutation that permutes nothing."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == sorted(node.args[1])  # type: ignore[arg-type]
    return node.target in (aten.view.default, private.UNSAFE_VIEW)
