"""Pooled: a first layer whose outputs are pooled runs client by client, and what is pooled is all that is written.

The outputs of a first layer are the largest of a model, and pooling keeps a quarter of them. Written for all clients at
once they leave the cache and come back, in the convolution, in pooling, in a ReLU between them, and in the gradient of
each. Here a client's outputs are pooled while they are in the cache. A ReLU that stood before comes after: the largest
of what it gives is what it gives of the largest, and a gradient that it stops is zero either way.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from plures.engine.passes.channels_last import fold, lay_channels_last, shape_of, unfold

aten = torch.ops.aten

LARGE = 1 << 16  # outputs of a client; fewer stay in the cache anyway


def apply(graph: fx.Graph, n: int) -> None:
    """Rewrite first layers among convolutions of folded clients (`channels_last`) where only pooling reads them."""
    for conv in [node for node in graph.nodes if node.target is aten.convolution.default]:
        layer = _layer(conv, n)
        if layer is not None:
            _rewrite(graph, layer)
    graph.eliminate_dead_code()


class Kept(NamedTuple):
    """What the gradients of a client are made from."""

    images: Tensor
    places: Tensor  # of the largest outputs
    like: Tensor  # outputs before they are pooled, the same for all clients: only their shape is read


def convolve(
    x: Tensor, kernels: Tensor, bias: Tensor | None, padding: Sequence[int], pooling: Sequence[Any]
) -> tuple[Tensor, list[Kept]]:
    """The pooled outputs, [client, row, out, height, width], of x [client, row, in, ...], kernels [client * out, in, k,
    k] and bias [client * out]; and what each client's gradients are made from. `pooling` is as torch is given it.

    In memory clients lie beside each other, as `fold` lays them.
    """
    n = len(x)
    own_bias = [None] * n if bias is None else bias.view(n, -1).unbind()
    out = outputs = None
    found = []
    for i, (own, kernel) in enumerate(zip(x.unbind(), kernels.unflatten(0, (n, -1)).unbind(), strict=True)):
        images = lay_channels_last(own)
        outputs = aten.convolution.default(images, kernel, own_bias[i], [1, 1], padding, [1, 1], False, [0, 0], 1)
        pooled, places = aten.max_pool2d_with_indices.default(outputs, *pooling)
        pooled = pooled.permute(0, 2, 3, 1)
        if out is None:
            out = pooled.new_empty(*pooled.shape[:3], n, pooled.shape[3])
        out[:, :, :, i] = pooled
        found.append((images, places))
    assert out is not None and outputs is not None
    return out.permute(3, 0, 4, 1, 2), [Kept(*own, outputs) for own in found]


def gradients(of_pooled: Tensor, kept: list[Kept], kernels: Tensor, padding: Sequence[int], pooling: Any) -> Tensor:
    """With respect to the kernels, as they are given, from the gradient of what `convolve` gives."""
    window, stride, around, dilation, up = pooling
    options = (None, [1, 1], padding, [1, 1], False, [0, 0], 1, [False, True, False])
    each = kernels.unflatten(0, (len(kept), -1))
    of_kernels = torch.empty_like(each)
    for i, (gradient, (images, places, like)) in enumerate(zip(of_pooled.unbind(), kept, strict=True)):
        laid = gradient.contiguous(memory_format=torch.channels_last)
        spread = aten.max_pool2d_with_indices_backward.default(laid, like, window, stride, around, dilation, up, places)
        of_kernels[i] = aten.convolution_backward.default(spread, images, each[i], *options)[1]
    return of_kernels.flatten(0, 1)


class _Layer(NamedTuple):
    """The nodes of a convolution that is only pooled, perhaps after a ReLU, forward and backward."""

    conv: Any
    relu: Any  # None: it is pooled as it is
    pooled: Any  # [client, row, out, height, width]
    pool_back: Any
    of_outputs: Any  # the gradient of the convolution's outputs
    back: Any


def _layer(conv: Any, n: int) -> _Layer | None:
    """None if it is of another kind."""
    x, kernels, _, stride, _, dilation, transposed, _, groups = conv.args
    plain = tuple(stride) == tuple(dilation) == (1, 1) and not transposed and groups == n
    if not plain or not _is(x, fold) or shape_of(kernels)[1] == 1 or math.prod(shape_of(conv)) // n < LARGE:
        return None  # of grey images, kernels for groups of channels are as fast
    outputs = _only_user(_only_user(conv, torch.reshape), aten.permute.default)
    relu = _only_user(outputs, aten.relu.default)
    folded = next((user for user in getattr(relu or outputs, "users", ()) if _is(user, fold)), None)
    users = set(getattr(folded, "users", ()))
    pool = next((user for user in users if _is(user, aten.max_pool2d_with_indices.default)), None)
    pool_back: Any = next((user for user in users if _is(user, aten.max_pool2d_with_indices_backward.default)), None)
    if pool is None or pool_back is None or users != {pool, pool_back}:
        return None
    values, places = ([user for user in pool.users if user.args[1] == k] for k in (0, 1))
    pooled = _only_user(values[0], unfold) if len(values) == 1 else None
    of_outputs: Any = _only_user(pool_back, unfold)
    readers = {folded}
    if relu is not None:
        of_outputs = _only_user(of_outputs, aten.threshold_backward.default)
        readers.add(of_outputs)
        if of_outputs is None or of_outputs.args[1:] != (relu, 0):
            return None
    if set((relu or outputs).users) != readers or any(set(place.users) != {pool_back} for place in places):
        return None
    backs = [user.users for user in getattr(of_outputs, "users", ()) if _is(user, fold)]
    back: Any = next(iter(backs[0]), None) if len(backs) == 1 and len(backs[0]) == 1 else None
    others = [user for user in getattr(of_outputs, "users", ()) if not _is(user, fold)]
    if pooled is None or not _is(back, aten.convolution_backward.default) or not _is(pool_back.args[0], fold):
        return None
    sums = all(_is(user, aten.sum.dim_IntList) and sorted(user.args[1]) == [1, 3, 4] for user in others)
    if not sums or back.args[1:3] != (x, kernels) or list(back.args[-1]) != [False, True, False]:
        return None
    return _Layer(conv, relu, pooled, pool_back, of_outputs, back)


def _rewrite(graph: fx.Graph, layer: _Layer) -> None:
    x, kernels, bias, _, padding, *_ = layer.conv.args
    pooling = layer.pool_back.args[2:7]
    with graph.inserting_before(layer.conv):
        both = graph.call_function(convolve, (x.args[0], kernels, bias, padding, pooling))
        found, kept = [graph.call_function(operator.getitem, (both, k)) for k in range(2)]
    found.meta = dict(layer.pooled.meta)
    gradient = layer.pool_back.args[0].args[0]
    if layer.relu is not None:  # the largest of what a ReLU gives is the ReLU of the largest
        with graph.inserting_after(kept):
            found = graph.call_function(aten.relu.default, (found,))
        with graph.inserting_before(layer.pool_back):
            gradient = graph.call_function(aten.threshold_backward.default, (gradient, found, 0))
        found.meta, gradient.meta = dict(layer.pooled.meta), dict(layer.pooled.meta)
    layer.pooled.replace_all_uses_with(found)
    for total in list(layer.of_outputs.users):
        if _is(total, aten.sum.dim_IntList):
            total.args = (gradient, *total.args[1:])  # only what was pooled has a gradient
    for of_kernels in list(layer.back.users):
        with graph.inserting_before(of_kernels):
            whole = graph.call_function(gradients, (gradient, kept, kernels, padding, pooling))
        whole.meta = dict(of_kernels.meta)
        of_kernels.replace_all_uses_with(whole)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _only_user(node: Any, target: Any) -> Any:
    """The only node that reads this one, if it is of this kind; else None."""
    users = list(getattr(node, "users", ()))
    return users[0] if len(users) == 1 and _is(users[0], target) else None
