"""Join products: weights that are used many times, as in a recurrent net, get their gradient from one product.

A1 B1 + A2 B2 + ... is [A1 A2 ...] [B1; B2; ...], and something plus a product is one kernel.
"""

from typing import Any

import torch
from torch import Tensor, fx

from plures.engine import private

aten = torch.ops.aten

TRANSPOSES, PRODUCTS = (aten.transpose.int, aten.t.default), (aten.bmm.default, aten.mm.default)


def apply(graph: fx.Graph, n: int) -> None:
    """Weights that are used many times, as in a recurrent net: a sum of products becomes one product.

    A1 B1 + A2 B2 + ... is [A1 A2 ...] [B1; B2; ...], and something plus a product is one kernel.
    """

    def is_one(node: Any, targets: tuple[Any, ...]) -> bool:
        return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1

    def transposed(x: Any) -> Any:
        """The node with its last two axes exchanged."""
        if is_transposed(x):
            return x.args[0]
        return graph.call_function(aten.transpose.int, (x, -2, -1))

    def is_product(node: Any) -> bool:
        alone = is_one(node, TRANSPOSES) and is_transposed(node) and is_one(node.args[0], PRODUCTS)
        return alone or is_one(node, PRODUCTS)

    def factors(node: fx.Node) -> tuple[Any, Any]:
        """A and B of a term that is A B, or the transpose of a product."""
        if node.target in PRODUCTS:
            return node.args[0], node.args[1]
        left, right = node.args[0].args[:2]  # type: ignore[union-attr]
        return transposed(right), transposed(left)

    def terms(node: Any) -> list[Any]:
        """What is added up in a node."""
        if is_one(node, (aten.add.Tensor,)) and not node.kwargs:
            return [*terms(node.args[0]), *terms(node.args[1])]
        return [node]

    _add_before_views(graph)
    for node in reversed(list(graph.nodes)):
        if node.target is not aten.add.Tensor or node.kwargs or not node.users:
            continue
        added = [*terms(node.args[0]), *terms(node.args[1])]
        if len(added) > 2 and all(map(is_product, added)):
            with graph.inserting_before(node):
                pairs = [factors(term) for term in added]
                left, right = (
                    _side_by_side(graph, x) for x in ([transposed(a) for a, _ in pairs], [b for _, b in pairs])
                )
                target = aten.bmm.default if node.meta["val"].dim() == 3 else aten.mm.default
                joined = graph.call_function(target, (transposed(left), right))
        elif any(map(is_product, node.args)) and node.meta["val"].dim() == 3:
            product = next(arg for arg in reversed(node.args) if is_product(arg))
            other = node.args[0] if product is node.args[1] else node.args[1]
            if not isinstance(other, fx.Node) or other.meta["val"].dim() != 3:
                continue
            with graph.inserting_before(node):
                joined = graph.call_function(aten.baddbmm.default, (other, *factors(product)))
        else:
            continue
        joined.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(joined)
        graph.erase_node(node)  # so that what it added up has no user left, and is not looked at again
    graph.eliminate_dead_code()


def _side_by_side(graph: fx.Graph, matrices: list[Any]) -> fx.Node:
    """Matrices below each other, as one; it says its shape, if all of them do."""
    joined = graph.call_function(aten.cat.default, (matrices, -2))
    values = [value for x in matrices if (value := value_of(x)) is not None]
    if len(values) == len(matrices):
        joined.meta["val"] = torch.cat(values, -2)
    return joined


def _add_before_views(graph: fx.Graph) -> None:
    """Add what views look at, where it is of one shape and one of the two a product, and take the view of the sum."""
    views = (aten.view.default, private.UNSAFE_VIEW)
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        if not all(isinstance(x, fx.Node) and x.target in views and len(x.users) == 1 for x in node.args):
            continue
        left, right = (x.args[0] for x in node.args)
        shape = left.meta["val"].shape
        is_product = any(x.target is aten.bmm.default and len(x.users) == 1 for x in (left, right))
        if shape != right.meta["val"].shape or len(shape) != 3 or not is_product:
            continue
        with graph.inserting_before(node):
            total = graph.call_function(aten.add.Tensor, (left, right))
            view = graph.call_function(aten.view.default, (total, node.args[0].args[1]))
        total.meta["val"], view.meta["val"] = left.meta["val"], node.meta["val"]
        before = node.all_input_nodes
        node.replace_all_uses_with(view)
        for gone in (node, *before):  # else they would count as readers
            graph.erase_node(gone)


def is_transposed(node: Any) -> bool:
    """Whether a node is another one with its last two axes exchanged."""
    if not isinstance(node, fx.Node) or node.target not in TRANSPOSES:
        return False
    value = node.meta.get("val")
    if node.target is aten.t.default or value is None:  # what is made here has no value, and is a transpose
        return True
    n_axes = value.dim()
    return {axis % n_axes for axis in node.args[1:]} == {n_axes - 2, n_axes - 1}


def value_of(node: Any) -> Tensor | None:
    """What a node gives, without memory; a transpose that a pass has made is known by what it transposes."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    if found is None and is_transposed(node):
        inner = value_of(node.args[0])
        found = None if inner is None else inner.transpose(-2, -1)
    return found if isinstance(found, Tensor) else None
