"""Late updates: finds the dense layers whose weights may be `late.Late`, and calls their products by its name."""

from typing import Any, cast

import torch
from torch import fx

from plures.engine import late, onednn
from plures.engine.gradients import LargeProduct, Product
from plures.engine.passes.channels_last import shape_of
from plures.engine.passes.join_products import is_transposed

aten = torch.ops.aten

LARGE = 1e5  # weights of a layer: smaller ones stay in the cache

_PRODUCTS: dict[Any, tuple[Any, bool]] = {  # kernel -> what replaces it, and whether oneDNN runs it
    aten.bmm.default: (late.multiply, False),
    aten.baddbmm.default: (late.add_multiply, False),
    onednn.multiply_each: (late.multiply, True),
    onednn.add_multiply_each: (late.add_multiply, True),
}


def apply(graph: fx.Graph, n: int) -> None:
    """Rewrite the products with weights that are used for nothing else, and whose gradient is a product."""
    (out,) = [node for node in graph.nodes if node.op == "output"]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    _, *gradients = cast(list[Any], out.args[0])
    for weights, gradient in zip(inputs, gradients, strict=False):
        shape = shape_of(weights)
        if len(shape) != 3 or shape[0] != n or shape[1] * shape[2] < LARGE:
            continue
        if not isinstance(gradient, fx.Node) or gradient.target not in (Product, LargeProduct):
            continue
        products = _products_with(weights)
        for node, turned in products or []:
            node.target, by_onednn = _PRODUCTS[node.target]
            node.args = (*node.args[:-1], weights, turned, by_onednn)
    graph.eliminate_dead_code()


def found_in(graph: fx.Graph) -> list[int]:
    """The inputs, by their places, that may be late."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [i for i, node in enumerate(inputs) if any(user.target in _LATE for user in node.users)]


_LATE = (late.multiply, late.add_multiply)


def _products_with(weights: fx.Node) -> list[tuple[fx.Node, bool]] | None:
    """The products that have these weights on the right, and whether turned; None if they are read otherwise."""
    found = []
    for user in weights.users:
        turned = is_transposed(user)
        right = user if turned else weights
        for node in list(user.users) if turned else [user]:
            fits = node.target in _PRODUCTS and not node.kwargs and node.args[-1] is right
            if not fits or right in node.args[:-1]:
                return None
            found.append((node, turned))
    return found
