"""Sums of rows that a traced step looks up in a table, as of the words of a text, without writing the rows.

As traced, all rows are gathered, multiplied with a mask and added up, and the slope of each is written;
most rows of a short text are padding. Here only the rows are met that the mask marks.
"""

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten


@lru_cache(maxsize=64)
def counted(start: int, end: int, step: int, dtype: Any = None, layout: Any = None, device: Any = None) -> Tensor:
    """Whole numbers from start on. Steps ask for the same again and again, and none changes them."""
    return torch.arange(start, end, step, dtype=dtype, layout=layout or torch.strided, device=device)


def places(mask: Tensor) -> Tensor:
    """Which places a mask marks, counted in a row."""
    return mask.reshape(-1).nonzero().squeeze(1)


def pick(values: Tensor, some: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, some)


def summed(table: Tensor, at: Tensor, some: Tensor, mask: Tensor) -> Tensor:
    """[..., width]: sums of rows of the table over the last axis of the mask, of the rows it marks."""
    *shape, length = mask.shape
    bags = torch.searchsorted(some, counted(0, mask.numel(), length))
    found, *_ = aten._embedding_bag_forward_only(table, at, bags)
    return found.view(*shape, table.shape[1])


def spread(slopes: Tensor, which: Tensor) -> Tensor:
    """[place, width]: the slope of every row of the sums, from those of the sums."""
    return slopes.index_select(0, which)


def sum_rows(graph: fx.Graph) -> None:
    """Rewrite sums of rows and their slopes, in a step of stacked clients."""
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
            elif node.target is aten.embedding_dense_backward.default and (found := _spread_slope(node.args[0])):
                slope, mask = found
                some = once(places, mask)
                *_, length, width = node.args[0].meta["val"].shape
                slopes = graph.call_function(torch.reshape, (slope, [-1, width]))
                rows = graph.call_function(spread, (slopes, graph.call_function(torch.floor_divide, (some, length))))
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


def _spread_slope(product: Any) -> tuple[Any, ...] | None:
    """The slope of a sum and the mask, if that is what the slopes of its rows are the product of."""
    for spread_out, mask in _factors(product):
        if getattr(spread_out, "target", None) is aten.expand.default:
            slope = _without_axis(spread_out.args[0], -2)
            if slope is not None and spread_out.meta["val"].shape[:-1] == mask.meta["val"].shape:
                return slope, mask
    return None


def _factors(product: Any) -> list[tuple[Any, Any]]:
    """Pairs of what is multiplied and the mask it is multiplied with, a number for each row."""
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return []
    pairs = [(one, _without_axis(other, -1)) for one, other in (product.args, product.args[::-1])]
    return [(one, mask) for one, mask in pairs if _is_truth(mask)]


def _is_truth(node: Any) -> bool:
    """Whether it is made of truth values: zeros and ones."""
    if not isinstance(node, fx.Node) or node.target is not aten._to_copy.default:
        return False
    return bool(cast(fx.Node, node.args[0]).meta["val"].dtype == torch.bool)


def _without_axis(node: Any, axis: int) -> Any:
    """What a node is, but for an axis of one."""
    if not isinstance(node, fx.Node) or node.target is not aten.unsqueeze.default:
        return None
    return node.args[0] if node.args[1] % node.meta["val"].dim() == node.meta["val"].dim() + axis else None
