"""Clean: drop what changes nothing from a traced step."""

from typing import Any, cast

import torch
from torch import Tensor, fx

from plures.engine import private

aten = torch.ops.aten


def apply(graph: fx.Graph, n: int) -> None:
    """Drop what changes nothing: views to the same shape, detach, times one, a permutation that permutes nothing.

    Ones that are like something only need its shape; a view of an input that adds an axis of one says so.
    """

    def shape(node: Any) -> Any:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return tuple(value.shape) if isinstance(value, Tensor) else None

    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        same = shape(node) is not None and shape(node) == shape(source)
        if node.target is aten.ones_like.default and same:
            with graph.inserting_before(node):
                ones = graph.call_function(
                    aten.full.default, (list(shape(node)), 1.0), {"dtype": node.meta["val"].dtype}
                )
            ones.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(ones)
            continue
        if node.target is aten.view.default and _is_sum_that_keeps_axes(source):
            x, axes, _ = cast(tuple[Any, ...], source.args)
            kept = [size for i, size in enumerate(shape(x)) if i not in axes]
            if shape(node) == tuple(kept) and all(axis >= 0 for axis in axes):
                with graph.inserting_before(node):
                    total = graph.call_function(aten.sum.dim_IntList, (x, axes))
                total.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(total)
                continue
        if node.target is aten.view.default and source.op == "placeholder":
            before = shape(source)
            axes = [i for i in range(1, len(before) + 1) if (*before[:i], 1, *before[i:]) == shape(node)]
            if axes:
                node.target, node.args = aten.unsqueeze.default, (source, axes[0])
                continue
        idle = (
            node.target in (aten.detach.default, aten.alias.default)
            or (same and node.target in (aten.view.default, private.UNSAFE_VIEW, aten.expand.default))
            or (node.target in (aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1)
            or (same and node.target in (aten.mul.Tensor, aten.div.Tensor) and _is_one(node.args[1], node, source))
            or (node.target is aten.permute.default and list(node.args[1]) == sorted(node.args[1]))
        )
        twice = (
            node.target is aten.transpose.int
            and source.target is aten.transpose.int
            and set(node.args[1:]) == set(source.args[1:])
        )
        if idle or twice:
            node.replace_all_uses_with(source.args[0] if twice else source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_one(factor: Any, node: fx.Node, source: fx.Node) -> bool:
    """Whether it is the number one, and not one that makes another type of what it is multiplied with."""
    return not isinstance(factor, fx.Node) and factor == 1 and node.meta["val"].dtype == source.meta["val"].dtype


def _is_sum_that_keeps_axes(node: fx.Node) -> bool:
    return node.target is aten.sum.dim_IntList and len(node.args) == 3 and node.args[2] is True
