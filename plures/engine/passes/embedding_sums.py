"""Embedding sums: rows of a table, as of the words of a text, are added up without being written first.

As traced, all rows are gathered, multiplied with a mask and added up, and the gradient of each is written;
most rows of a short text are padding. After this pass only the rows that the mask marks are read.
"""

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from plures.engine import private

aten = torch.ops.aten


@lru_cache(maxsize=64)
def whole_numbers(start: int, end: int, step: int, dtype: Any = None, layout: Any = None, device: Any = None) -> Tensor:
    """As `torch.arange`. Steps ask for the same numbers again and again, and none changes them."""
    return torch.arange(start, end, step, dtype=dtype, layout=layout or torch.strided, device=device)


def places(mask: Tensor) -> Tensor:
    """Which places a mask marks, counted in a row."""
    return mask.reshape(-1).nonzero().squeeze(1)


def pick(values: Tensor, some: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, some)


def summed(table: Tensor, at: Tensor, some: Tensor, mask: Tensor) -> Tensor:
    """[..., width]: sums of rows of the table over the last axis of the mask, of the rows it marks."""
    *shape, length = mask.shape
    bags = torch.searchsorted(some, whole_numbers(0, mask.numel(), length))
    found, *_ = private.EMBEDDING_BAG(table, at, bags)
    return found.view(*shape, table.shape[1])


def spread(gradients: Tensor, which: Tensor) -> Tensor:
    """[place, width]: the gradient of every row of the sums, from those of the sums."""
    return gradients.index_select(0, which)


def apply(graph: fx.Graph, n: int) -> None:
    """Rewrite sums of rows and their gradients, in a step of stacked clients."""
    made: dict[Any, fx.Node] = {}

    def once(function: Any, *args: Any) -> fx.Node:
        if (function, args) not in made:
            made[function, args] = graph.call_function(function, args)
        return made[function, args]

    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is aten.sum.dim_IntList and (found := _masked_rows(node)):
                table, at, mask = found
                some = once(places, mask)
                new = once(summed, table, once(pick, at, some), some, mask)
            elif node.target is aten.embedding_dense_backward.default and (found := _spread_gradient(node.args[0])):
                gradient, mask = found
                some = once(places, mask)
                *_, length, width = node.args[0].meta["val"].shape
                gradients = graph.call_function(torch.reshape, (gradient, [-1, width]))
                rows = graph.call_function(spread, (gradients, graph.call_function(torch.floor_divide, (some, length))))
                new = once(node.target, rows, once(pick, node.args[1], some), *node.args[2:])
            else:
                continue
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _masked_rows(node: fx.Node) -> tuple[Any, ...] | None:
    """Table, places and mask, if it is a sum of rows of a table that a mask marks."""
    product, axes, *others = cast(tuple[Any, ...], node.args)
    for rows, mask in _factors(product):
        if getattr(rows, "target", None) is aten.embedding.default and not others and len(product.users) == 1:
            at = rows.args[1]
            if list(axes) == [at.meta["val"].dim() - 1] and mask.meta["val"].shape == at.meta["val"].shape:
                return rows.args[0], at, mask
    return None


def _spread_gradient(product: Any) -> tuple[Any, ...] | None:
    """The gradient of a sum and the mask, if that is what the gradients of its rows are the product of."""
    for spread_out, mask in _factors(product):
        if getattr(spread_out, "target", None) is aten.expand.default:
            gradient = _without_axis(spread_out.args[0], -2)
            if gradient is not None and spread_out.meta["val"].shape[:-1] == mask.meta["val"].shape:
                return gradient, mask
    return None


def _factors(product: Any) -> list[tuple[Any, Any]]:
    """Pairs of what is multiplied and the mask it is multiplied with, a number for each row."""
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return []
    pairs = [(one, _without_axis(other, -1)) for one, other in (product.args, product.args[::-1])]
    return [(one, mask) for one, mask in pairs if _is_truth(mask)]


def _is_truth(node: Any) -> bool:
    """Whether it is made of truth values: zeros and ones."""
    if not isinstance(node, fx.Node) or node.target is not private.TO_COPY:
        return False
    return bool(cast(fx.Node, node.args[0]).meta["val"].dtype == torch.bool)


def _without_axis(node: Any, axis: int) -> Any:
    """What a node is, but for an axis of one."""
    if not isinstance(node, fx.Node) or node.target is not aten.unsqueeze.default:
        return None
    return node.args[0] if node.args[1] % node.meta["val"].dim() == node.meta["val"].dim() + axis else None
