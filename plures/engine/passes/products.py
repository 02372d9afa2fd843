"""Products: products of matrices run by oneDNN (`onednn`), on machines where that is faster.

A call of oneDNN takes longer than one of torch, so that small products are left as they are; but for those that share a
matrix, as the positions of a recurrent net share the weights of its state. That matrix is packed once for all of them.
"""

from typing import Any

import torch
from torch import fx

from plures.engine import onednn
from plures.engine.gradients import LargeProduct, Product
from plures.engine.passes import columns
from plures.engine.passes.join_products import is_transposed, value_of

aten = torch.ops.aten

LARGE = onednn.LARGE

USES = 8  # of a matrix in a step, from which it pays to pack it
NOT_TINY = 4e5  # FLOPs of a product with a packed matrix

_REWRITTEN: dict[Any, tuple[Any, int]] = {  # kernel -> what replaces it, and which argument its first matrix is
    aten.mm.default: (onednn.multiply, 0),
    aten.addmm.default: (onednn.add_multiply, 1),
    aten.bmm.default: (onednn.multiply_each, 0),
    aten.baddbmm.default: (onednn.add_multiply_each, 1),
    Product: (LargeProduct, 0),
}

_BY_PACKED: dict[Any, Any] = {
    aten.bmm.default: onednn.multiply_packed,
    aten.baddbmm.default: onednn.add_multiply_packed,
}


def apply(graph: fx.Graph, n: int) -> None:
    """Rewrite products of a graph of n clients, after all passes that look for products."""
    inputs = [value_of(node) for node in graph.nodes if node.op == "placeholder"]
    if not onednn.is_faster() or any(x is not None and x.dtype == torch.float64 for x in inputs):
        return
    _pack_what_is_shared(graph, n)
    for node in graph.nodes:
        if node.target is columns.convolve_each or node.target is columns.gradients_each:
            node.kwargs = {**node.kwargs, "by_onednn": True}
        elif node.target in _REWRITTEN and not node.kwargs:
            name, first = _REWRITTEN[node.target]
            if flops(node.args[first], node.args[first + 1], n) >= LARGE:
                node.target = name


def _pack_what_is_shared(graph: fx.Graph, n: int) -> None:
    """Products with the same matrix on the right: bring it once into the order in which it is read."""
    sharing: dict[Any, list[fx.Node]] = {}
    rows: dict[Any, int] = {}
    for node in graph.nodes:
        if node.target in _BY_PACKED and not node.kwargs:
            left, right = node.args[-2:]
            value = value_of(left)
            if value is not None and value.shape[0] == n and NOT_TINY <= flops(left, right, n) < LARGE:
                turned = is_transposed(right)
                key = (right.args[0] if turned else right, turned)
                sharing.setdefault(key, []).append(node)
                rows[key] = value.shape[1]
    for key, nodes in sharing.items():
        if len(nodes) >= USES:
            with graph.inserting_before(nodes[0]):
                packed = graph.call_function(onednn.pack, (nodes[0].args[-1], rows[key]))
            for node in nodes:
                node.target, node.args = _BY_PACKED[node.target], (*node.args[:-1], packed)


def flops(a: Any, b: Any, n: int) -> float:
    """Of the product of one client; zero if its size is not known."""
    left, right = value_of(a), value_of(b)
    if left is None or right is None or left.dtype != torch.float32:
        return 0.0
    rows, inner, wide = (size // n if size % n == 0 else size for size in (*left.shape[-2:], right.shape[-1]))
    return 2.0 * rows * inner * wide
