"""Channels last: on CPUs, convolutions and pooling of a traced step run much faster in this order in memory.

Clients are stacked as groups of channels. As traced, every convolution and every pooling gathers its
input anew in the order [client, row, channel, height, width]. Here all of them share one order in
memory, [row, height, width, client, channel], in which stacked clients are channels that lie last; what
stands between them, element by element, keeps the order. The numbers are the same but for rounding.
"""

from typing import Any

import torch
from torch import Tensor, fx

from plures.engine import private

aten = torch.ops.aten

VIEWS = (aten.view.default, private.UNSAFE_VIEW)
_SAME_NUMBERS = (*VIEWS, aten.clone.default)
_SWAP = [1, 0, 2, 3, 4]
WIDE = 16  # channels that come out of a convolution: a multiple of it


def fold(x: Tensor) -> Tensor:
    """[client, row, channel, height, width] as [row, client * channel, height, width], channels last."""
    n, rows, channels, height, width = x.shape
    n *= channels
    laid = x.permute(1, 3, 4, 0, 2).contiguous()
    return laid.as_strided((rows, n, height, width), (n * height * width, 1, n * width, n))  # even if n is 1


def unfold(x: Tensor, n: int) -> Tensor:
    """Back to n clients; a view."""
    return x.unflatten(1, (n, -1)).permute(1, 0, 2, 3, 4)


def lay_channels_last(x: Tensor) -> Tensor:
    """[row, channel, height, width] with channels last, and strides that say so even for a single channel."""
    _, channels, height, width = x.shape
    laid = x.contiguous(memory_format=torch.channels_last)
    return laid.as_strided(x.shape, (channels * height * width, 1, channels * width, channels))


def apply(graph: fx.Graph, n: int) -> None:
    """Rewrite a traced step of stacked clients; the prime `n` stands for their number."""
    convolutions = [node for node in graph.nodes if node.target is aten.convolution.default]
    if not convolutions:
        return
    if all(is_safe(node, 1) for node in convolutions):  # one model for all: clients are rows
        _channels_last_of_one(graph, convolutions)
    if not all(is_safe(node, n) for node in convolutions):
        return
    folds: dict[Any, Any] = {}  # node of five axes -> its folded form

    def folded(source: Any) -> Any:
        if source not in folds:
            with graph.inserting_after(source):
                folds[source] = graph.call_function(fold, (source,))
        return folds[source]

    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            _replace(node, 0, stacked_source(node.args[0], n), folded)
            _take_bias(graph, node, n)
        elif node.target is aten.convolution_backward.default:
            for place in (0, 1):
                _replace(node, place, stacked_source(node.args[place], n), folded)
        elif node.target is aten.max_pool2d_with_indices.default:
            _pool(graph, node, n, folded)
    reshape_views(graph)
    graph.eliminate_dead_code()


def _channels_last_of_one(graph: fx.Graph, convolutions: list[Any]) -> None:
    """Lay the inputs of convolutions with channels last; their outputs, and what follows, then lie so by themselves."""
    if any(node.target is aten.convolution_backward.default for node in graph.nodes):
        return  # tried for evaluation alone
    for node in convolutions:
        with graph.inserting_before(node):
            last = graph.call_function(lay_channels_last, (node.args[0],))
        node.args = (last, *node.args[1:])
    reshape_views(graph)


def reshape_views(graph: fx.Graph) -> None:
    """What depends on how tensors lie: a view of one that lies otherwise may have to move numbers."""
    for node in graph.nodes:
        if node.target in VIEWS:
            node.target = torch.reshape
        elif node.target is aten.native_group_norm_backward.default:
            node.target = group_norm_gradients


def group_norm_gradients(of_output: Tensor, x: Tensor, *others: Any) -> Any:
    """As torch's kernel, which gives wrong numbers if one of the two lies with channels last and the other does not."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    laid = of_output.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return aten.native_group_norm_backward.default(laid, x if last else x.contiguous(), *others)


def is_safe(conv: Any, n_groups: int) -> bool:
    """Whether a convolution is of the kind that was tried at length with channels last.

    Kernels for others may end the process: one with 4 channels, a stride of 2 and a window of 7 did.
    """
    _, weight, _, stride, _, dilation, transposed, _, groups = conv.args
    plain = list(stride) == [1, 1] and list(dilation) == [1, 1] and not transposed and groups == n_groups
    return plain and shape_of(weight)[0] % (WIDE * n_groups) == 0


def shape_of(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _is_fold(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is fold


def _replace(node: Any, place: int, source: Any, folded: Any) -> None:
    if source is not None:
        node.args = (*node.args[:place], folded(source), *node.args[place + 1 :])


def stacked_source(node: Any, n: int) -> Any:
    """The node [client, row, channel, height, width] that [row, client * channel, ...] is made of."""
    if not isinstance(node, fx.Node) or _is_fold(node):
        return None
    while node.target in _SAME_NUMBERS:
        node = node.args[0]
    if node.target is aten.permute.default and list(node.args[1]) == _SWAP and shape_of(node.args[0])[:1] == (n,):
        return node.args[0]
    return None


def _merged_source(node: Any, n: int) -> Any:
    """The node of five axes that [client * row, channel, height, width] is made of."""
    rows = shape_of(node)[:1]
    while node is not None:
        shape = shape_of(node)
        if len(shape) == 5 and shape[0] == n and (shape[0] * shape[1],) == rows:
            if node.target is aten.permute.default and tuple(node.args[1]) == (0, 1, 2, 3, 4):
                node = node.args[0]
                continue
            if node.target is aten.clone.default:
                node = node.args[0]
                continue
            return node
        if node.target not in _SAME_NUMBERS:
            return None
        node = node.args[0]
    return None


def _pool(graph: fx.Graph, pooling: Any, n: int, folded: Any) -> None:
    """Pool folded tensors, forward and backward: both or neither, for they share the places of the maxima."""
    values, places = ([user for user in pooling.users if user.args[1] == k] for k in (0, 1))
    backward = [user for place in places for user in place.users]
    if any(node.target is not aten.max_pool2d_with_indices_backward.default for node in backward):
        return
    inputs = [(pooling, 0), *[(node, k) for node in backward for k in (0, 1)]]
    sources = [_merged_source(node.args[k], n) for node, k in inputs]
    outs = [*values, *backward]
    splits = [user for out in outs for user in out.users]
    if any(source is None for source in sources) or not all(_is_split(split, n) for split in splits):
        return
    for (node, k), source in zip(inputs, sources, strict=True):
        _replace(node, k, source, folded)
    for out in outs:
        with graph.inserting_after(out):
            whole = graph.call_function(unfold, (out, n))
        for split in list(out.users):
            if split is not whole:
                whole.meta = dict(split.meta)
                split.replace_all_uses_with(whole)
                graph.erase_node(split)


def _is_split(node: Any, n: int) -> bool:
    """Whether it splits [client * row, ...] into clients and rows."""
    return node.target in VIEWS and len(shape_of(node)) == 5 and shape_of(node)[0] == n


def _take_bias(graph: fx.Graph, conv: Any, n: int) -> None:
    """Let a convolution add its bias itself, where it is added right after it."""
    if conv.args[2] is not None or len(conv.users) != 1:
        return
    split = next(iter(conv.users))
    swapped = next(iter(split.users)) if len(split.users) == 1 else None
    if swapped is None or swapped.target is not aten.permute.default or len(swapped.users) != 1:
        return
    add = next(iter(swapped.users))
    if add.target is not aten.add.Tensor or add.args[0] is not swapped or not isinstance(add.args[1], fx.Node):
        return
    channels = shape_of(swapped)[2]
    if shape_of(add.args[1]) != (n, 1, channels, 1, 1):
        return
    bias: Any = add.args[1]
    while bias.target in (*_SAME_NUMBERS, aten.unsqueeze.default):
        bias = bias.args[0]
    if bias.op != "placeholder" or shape_of(bias) != (n, channels):
        return
    with graph.inserting_before(conv):
        flat = graph.call_function(torch.reshape, (bias, [n * channels]))
    conv.args = (*conv.args[:2], flat, *conv.args[3:])
    add.replace_all_uses_with(swapped)
    graph.erase_node(add)
