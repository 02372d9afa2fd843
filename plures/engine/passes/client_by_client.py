"""Client by client: convolutions of stacked clients run one client after another, with channels last in memory.

As traced, clients are groups of channels of one convolution. Kernels for groups are slow where images are large or
strides are not one, and some of them, with channels last, end the process. The same convolution of a single client is
one that every library is made for, and what it reads and writes stays in the cache. Between convolutions values lie
in the order [client, row, height, width, channel]; what stands there, element by element, keeps it.

Windows of one place with a stride read some places and no others. With channels last, torch's kernels for them write
beyond their memory on processors without AVX-512 (four channels in, six out, a stride of two): numbers are wrong, or
the process ends. So those places are taken first, and the convolution has no stride.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plures.engine.passes import channels_last, columns, winograd
from plures.engine.passes.channels_last import VIEWS, shape_of, stacked_source

aten = torch.ops.aten

MANY = 256  # channels that come in: with more, images are small, and kernels are faster with channels first
_SWAP = [1, 0, 2, 3, 4]
_CHANNELS_FIRST = (0, 1, 4, 2, 3)  # from [client, row, height, width, channel]
_CHANNELS_LAST = (0, 1, 3, 4, 2)  # and back


def apply(graph: fx.Graph, n: int, with_winograd: bool) -> None:
    """Rewrite the convolutions of a step of stacked clients, if not all of them are of the kind that may be folded."""
    convolutions = [node for node in graph.nodes if _is_of_stack(node, n)]
    if all(channels_last.is_safe(node, n) for node in convolutions):
        return  # those are faster as groups of channels
    backward = {
        tuple(node.args[1:3]): node
        for node in graph.nodes
        if node.target is aten.convolution_backward.default and not node.args[-1][2]
    }  # a gradient of the bias is a sum of its own, in all that was seen
    for node in convolutions:
        back = backward.get(node.args[:2])
        if _windows_tile(node, n):
            _as_products(graph, node, back, n)
        elif with_winograd and winograd.takes(node, n):
            _by_winograd(graph, node, back, n)
        elif columns.takes(node, n):
            _by_columns(graph, node, back, n)
        else:
            _each(graph, node, back, n)
    _keep_channels_last(graph, n)
    channels_last.reshape_views(graph)
    graph.eliminate_dead_code()


def apply_to_first_layers(graph: fx.Graph, n: int) -> None:
    """Where clients are folded (`channels_last`), rewrite convolutions that read images of a few channels: for those,
    kernels for groups of channels take up to three times as long as kernels for one client."""
    backward = {tuple(node.args[1:3]): node for node in graph.nodes if node.target is aten.convolution_backward.default}
    for node in [node for node in graph.nodes if _is_of_stack(node, n) and channels_last.is_safe(node, n)]:
        x, kernels, bias, _, padding, *_ = node.args
        back = backward.get((x, kernels))
        if not 1 < shape_of(kernels)[1] < channels_last.WIDE or x.target is not channels_last.fold:
            continue
        if back is None or back.args[-1][0] or back.args[-1][2]:
            continue
        own_kernels = _kernels(graph, kernels, n)
        with graph.inserting_before(node):
            images = graph.call_function(lay_channels_last, x.args)  # of batches alone: it may be computed early
            images.meta = dict(x.args[0].meta)
            found = graph.call_function(convolve_folded, (images, own_kernels, bias, padding))
        found.meta = dict(node.meta)
        node.replace_all_uses_with(found)
        for part in list(back.users):
            with graph.inserting_before(part):
                whole = graph.call_function(kernel_gradients, (back.args[0], images, own_kernels, padding))
            whole.meta = dict(part.meta)
            part.replace_all_uses_with(whole)
    graph.eliminate_dead_code()


def lay_channels_last(x: Tensor) -> Tensor:
    """[client, row, channel, height, width] with channels last in memory."""
    return x.permute(_CHANNELS_LAST).contiguous().permute(_CHANNELS_FIRST)


def convolve_folded(x: Tensor, kernels: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """[row, client * out, height, width], channels last, of x [client, row, in, ...] and kernels [client, out, ...]."""
    n, n_out = kernels.shape[:2]
    biases = [None] * n if bias is None else bias.view(n, n_out).unbind()
    out = None
    for i, (own, kernel) in enumerate(zip(x.unbind(), kernels.unbind(), strict=True)):
        found = aten.convolution.default(own, kernel, biases[i], [1, 1], padding, [1, 1], False, [0, 0], 1)
        found = found.permute(0, 2, 3, 1)
        if out is None:
            out = found.new_empty(*found.shape[:3], n, n_out)
        out[:, :, :, i] = found
    assert out is not None
    return out.flatten(3).permute(0, 3, 1, 2)


def kernel_gradients(of_output: Tensor, x: Tensor, kernels: Tensor, padding: Sequence[int]) -> Tensor:
    """[client * out, in, k, k], from the gradient with respect to what `convolve_folded` gives."""
    options = (None, [1, 1], padding, [1, 1], False, [0, 0], 1, [False, True, False])
    out = torch.empty_like(kernels)
    each = of_output.unflatten(1, (len(kernels), -1)).unbind(1)
    for i, (gradient, own, kernel) in enumerate(zip(each, x.unbind(), kernels.unbind(), strict=True)):
        laid = gradient.contiguous(memory_format=torch.channels_last)
        out[i] = aten.convolution_backward.default(laid, own, kernel, *options)[1]
    return out.flatten(0, 1)


def convolve_each(
    x: Tensor,
    kernels: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """[client, row, out, height, width], from x [client, row, in, height, width], kernels [client, out, in, k, k] and
    bias [client, out]; `groups` are those of one client."""
    out = None
    if _skips_places(kernels, stride):
        x, stride, padding = _padded(x, padding)[..., :: stride[0], :: stride[1]], [1, 1], [0, 0]
    options = (stride, padding, dilation, False, [0, 0], groups)
    for i, (own, kernel) in enumerate(zip(x.unbind(), kernels.unbind(), strict=True)):
        found = aten.convolution.default(_laid(own, x.shape[2]), kernel, None if bias is None else bias[i], *options)
        found = found.permute(0, 2, 3, 1)
        if len(x) == 1:
            return found[None].permute(_CHANNELS_FIRST)
        if out is None:
            out = found.new_empty(len(x), *found.shape)
        out[i] = found
    assert out is not None
    return out.permute(_CHANNELS_FIRST)


def gradients_each(
    of_output: Tensor,
    x: Tensor,
    kernels: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """With respect to the input and to the kernels, each as `convolve_each` takes it; None for what is not wanted."""
    if _skips_places(kernels, stride):
        return _gradients_where_read(of_output, x, kernels, stride, padding, groups, wanted)
    options = (None, stride, padding, dilation, False, [0, 0], groups, [*wanted[:2], False])
    of_x = x.new_empty(len(x), len(x[0]), *x.shape[3:], x.shape[2]) if wanted[0] else None
    of_kernels = torch.empty_like(kernels) if wanted[1] else None
    n_in = x.shape[2]
    for i, (gradient, own, kernel) in enumerate(zip(of_output.unbind(), x.unbind(), kernels.unbind(), strict=True)):
        a, b, _ = aten.convolution_backward.default(_laid(gradient, n_in), _laid(own, n_in), kernel, *options)
        if of_x is not None:
            of_x[i] = a.permute(0, 2, 3, 1)
        if of_kernels is not None:
            of_kernels[i] = b
    return None if of_x is None else of_x.permute(_CHANNELS_FIRST), of_kernels


def _gradients_where_read(
    of_output: Tensor,
    x: Tensor,
    kernels: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """`gradients_each` for windows of one place: the gradient of places that none of them reads is zero."""
    padded = _padded(x, padding)
    read = padded[..., :: stride[0], :: stride[1]]
    of_read, of_kernels = gradients_each(of_output, read, kernels, [1, 1], [0, 0], [1, 1], groups, wanted)
    if of_read is None:
        return None, of_kernels
    of_padded = x.new_zeros([padded.shape[i] for i in _CHANNELS_LAST]).permute(_CHANNELS_FIRST)
    of_padded[..., :: stride[0], :: stride[1]] = of_read
    (top, left), (height, width) = padding, x.shape[3:]
    return of_padded[..., top : top + height, left : left + width], of_kernels


def _skips_places(kernels: Tensor, stride: Sequence[int]) -> bool:
    return tuple(kernels.shape[3:]) == (1, 1) and max(stride) > 1


def _padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    down, across = padding
    return pad_last(x, [across, across, down, down]) if down or across else x


def windows(x: Tensor, height: int, width: int) -> Tensor:
    """[client, window, in * height * width]: the windows of x, [client, row, in, ...], side by side, as columns."""
    n, rows, n_in = x.shape[:3]
    down, across = x.shape[3] // height, x.shape[4] // width
    whole = x[:, :, :, : down * height, : across * width].reshape(n, rows, n_in, down, height, across, width)
    return whole.permute(0, 1, 3, 5, 2, 4, 6).reshape(n, rows * down * across, n_in * height * width)


def from_windows(columns: Tensor, shape: Sequence[int], height: int, width: int) -> Tensor:
    """The other way: zeros where no window lies; `shape` is that of one client."""
    rows, n_in, *size = shape
    down, across = size[0] // height, size[1] // width
    whole = columns.view(-1, rows, down, across, n_in, height, width).permute(0, 1, 4, 2, 5, 3, 6)
    rest = (0, size[1] - across * width, 0, size[0] - down * height)
    return aten.constant_pad_nd.default(whole.reshape(-1, rows, n_in, down * height, across * width), rest)


def pad_last(x: Tensor, by: Sequence[int], value: float = 0.0) -> Tensor:
    """As torch pads [client, row, channel, height, width], with channels last."""
    whole = [*by, *[0] * (10 - len(by))]
    width, height, channel = whole[:2], whole[2:4], whole[4:6]
    padded = aten.constant_pad_nd.default(_channels_at_end(x), [*channel, *width, *height, *whole[6:]], value)
    return padded.permute(_CHANNELS_FIRST)


def spread_last(x: Tensor, shape: Sequence[int], axis: int, start: int, end: int, step: int) -> Tensor:
    """The gradient of a slice of [client, row, channel, height, width], with channels last."""
    size = [shape[i] for i in _CHANNELS_LAST]
    found = aten.slice_backward.default(_channels_at_end(x), size, _CHANNELS_LAST.index(axis), start, end, step)
    return found.permute(_CHANNELS_FIRST)


def sum_of_squares(x: Tensor, axes: list[int]) -> Tensor:
    """Where channels lie last, it is quicker than a norm."""
    return (x * x).sum(axes)


_WITH_CHANNELS_LAST = {aten.constant_pad_nd.default: pad_last, aten.slice_backward.default: spread_last}


def _channels_at_end(x: Tensor) -> Tensor:
    return x.permute(_CHANNELS_LAST)


def _keep_channels_last(graph: fx.Graph, n: int) -> None:
    """What stands between convolutions and is not done element by element gives channels first: here it does not."""
    for node in list(graph.nodes):
        if len(shape_of(node)) == 5 and shape_of(node)[0] == n:
            node.target = _WITH_CHANNELS_LAST.get(node.target, node.target)
            if node.target is aten.clone.default and all(user.target in VIEWS for user in node.users):
                node.replace_all_uses_with(
                    node.args[0]
                )  # a copy for the sake of views, which `reshape` makes if need be
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            norm = node.args[0]
            if norm.target is aten.linalg_vector_norm.default and norm.args[1:] == (2, [3, 4]):
                node.target, node.args = sum_of_squares, (norm.args[0], [3, 4])


def _laid(x: Tensor, n_in: int) -> Tensor:
    """[row, channel, height, width] in the order in memory that is fastest: channels last, unless there are many."""
    return x.contiguous(memory_format=torch.channels_last if n_in < MANY else torch.contiguous_format)


def split_clients(x: Tensor, axis: int, n: int) -> Tensor:
    """[..., client * channel, ...] as [client, ...]; a view."""
    return x.unflatten(axis, (n, -1)).movedim(axis, 0)


def _is_of_stack(node: Any, n: int) -> bool:
    """Whether it is a convolution of images in which each client has its own kernels."""
    if node.target is not aten.convolution.default:
        return False
    transposed, groups = node.args[6], node.args[8]
    return not transposed and groups % n == 0 and len(shape_of(node)) == 4


def _next(node: fx.Node) -> fx.Node:
    """Where nodes that read a node can be put: after it, and after all inputs."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _split(graph: fx.Graph, x: Any, n: int) -> fx.Node:
    """The node [client, row, channel, height, width] for [row, client * channel, height, width]."""
    source = stacked_source(x, n)
    if source is not None:
        return source
    with graph.inserting_before(_next(x)):
        return graph.call_function(split_clients, (x, 1, n))


def _kernels(graph: fx.Graph, kernels: Any, n: int) -> fx.Node:
    """The node [client, out, in, k, k] for [client * out, in, k, k]."""
    source = kernels
    while source.target in VIEWS or (source.target is aten.permute.default and _permutes_nothing(source)):
        source = source.args[0]
        if len(shape_of(source)) == 5 and shape_of(source)[0] == n:
            return source
    with graph.inserting_before(_next(kernels)):
        return graph.call_function(split_clients, (kernels, 0, n))


def _permutes_nothing(node: Any) -> bool:
    return list(node.args[1]) == sorted(node.args[1])


def _each(graph: fx.Graph, conv: Any, back: Any, n: int) -> None:
    x, kernels, bias, stride, padding, dilation, _, _, groups = conv.args
    own = (_split(graph, x, n), _kernels(graph, kernels, n))
    options = (stride, padding, dilation, groups // n)
    with graph.inserting_before(conv):
        own_bias = None if bias is None else graph.call_function(split_clients, (bias, 0, n))
        found = graph.call_function(convolve_each, (*own, own_bias, *options))
    _give(graph, conv, found, n)
    if back is not None:
        args = (_split(graph, back.args[0], n), *own, *options, list(back.args[-1][:2]))
        _give_gradients(graph, back, gradients_each, args, n)


def _windows_tile(conv: Any, n: int) -> bool:
    """Whether the windows of a convolution lie side by side, as where an image is cut into patches."""
    _, kernels, _, stride, padding, dilation, _, _, groups = conv.args
    window = shape_of(kernels)[2:]
    return groups == n and tuple(stride) == window and max(window) > 1 and not any(padding) and set(dilation) == {1}


def _as_products(graph: fx.Graph, conv: Any, back: Any, n: int) -> None:
    """Windows that lie side by side are columns of a matrix, which do not depend on weights."""
    x, kernels, bias, *_ = conv.args
    own_x, own_kernels = _split(graph, x, n), _kernels(graph, kernels, n)
    (rows, _, *size), (n_out, n_in, *window) = shape_of(conv), shape_of(kernels)
    n_out, places = n_out // n, rows * size[0] * size[1]

    def call(function: Any, *args: Any, shape: Sequence[int]) -> fx.Node:
        node = graph.call_function(function, args)
        node.meta["val"] = conv.meta["val"].new_empty(shape)
        return node

    with graph.inserting_before(conv):
        columns = call(windows, own_x, *window, shape=(n, places, n_in * math.prod(window)))
        flat = call(torch.reshape, own_kernels, [n, n_out, -1], shape=(n, n_out, n_in * math.prod(window)))
        turned = call(aten.transpose.int, flat, 1, 2, shape=(n, n_in * math.prod(window), n_out))
        found = call(aten.bmm.default, columns, turned, shape=(n, places, n_out))
        if bias is not None:
            own_bias = call(torch.reshape, bias, [n, 1, n_out], shape=(n, 1, n_out))
            found = call(aten.add.Tensor, found, own_bias, shape=(n, places, n_out))
        found = call(torch.reshape, found, [n, rows, *size, n_out], shape=(n, rows, *size, n_out))
        found = call(aten.permute.default, found, list(_CHANNELS_FIRST), shape=(n, rows, n_out, *size))
    _give(graph, conv, found, n)
    if back is None:
        return
    gradient = _split(graph, back.args[0], n)
    with graph.inserting_before(back):
        gradient = call(aten.permute.default, gradient, list(_CHANNELS_LAST), shape=(n, rows, *size, n_out))
        gradient = call(torch.reshape, gradient, [n, places, n_out], shape=(n, places, n_out))
    for part in list(back.users):
        with graph.inserting_before(part):
            if part.args[1] == 0:
                of_columns = call(aten.bmm.default, gradient, flat, shape=(n, places, n_in * math.prod(window)))
                one = (shape_of(x)[0], n_in, *shape_of(x)[2:])
                _give(graph, part, call(from_windows, of_columns, one, *window, shape=(n, *one)), n)
                continue
            turned = call(aten.transpose.int, gradient, 1, 2, shape=(n, n_out, places))
            of_kernels = call(aten.bmm.default, turned, columns, shape=(n, n_out, n_in * math.prod(window)))
            whole = call(torch.reshape, of_kernels, list(shape_of(part)), shape=shape_of(part))
        part.replace_all_uses_with(whole)


def _by_winograd(graph: fx.Graph, conv: Any, back: Any, n: int) -> None:
    x, kernels, bias, _, padding, _, _, _, _ = conv.args
    window = shape_of(kernels)[2:]
    own = (_split(graph, x, n), _kernels(graph, kernels, n))
    with graph.inserting_before(conv):
        own_bias = None if bias is None else graph.call_function(split_clients, (bias, 0, n))
        whole = graph.call_function(winograd.convolve_each, (*own, own_bias, padding))
        found, *at_points = [graph.call_function(operator.getitem, (whole, k)) for k in range(3)]
    _give(graph, conv, found, n)
    if back is not None:
        args = (_split(graph, back.args[0], n), *at_points, window, padding)
        _give_gradients(graph, back, winograd.gradients_each, args, n)


def _by_columns(graph: fx.Graph, conv: Any, back: Any, n: int) -> None:
    x, kernels, bias, stride, padding, *_ = conv.args
    own = (_split(graph, x, n), _kernels(graph, kernels, n))
    with graph.inserting_before(conv):
        own_bias = None if bias is None else graph.call_function(split_clients, (bias, 0, n))
        whole = graph.call_function(columns.convolve_each, (*own, own_bias, stride, padding))
        found, matrices = [graph.call_function(operator.getitem, (whole, k)) for k in range(2)]
    _give(graph, conv, found, n)
    if back is not None:
        options = (stride, padding, list(back.args[-1][:2]))
        args = (_split(graph, back.args[0], n), own[0], matrices, own[1], *options)
        _give_gradients(graph, back, columns.gradients_each, args, n)


def _give_gradients(graph: fx.Graph, back: Any, function: Any, args: tuple[Any, ...], n: int) -> None:
    """Put what a function gives, for the input and for the kernels, in the place of the gradients as traced."""
    with graph.inserting_before(back):
        found = graph.call_function(function, args)
    for part in list(back.users):
        with graph.inserting_before(part):
            own = graph.call_function(operator.getitem, (found, part.args[1]))
            if part.args[1] == 0:
                _give(graph, part, own, n)
                continue
            flat = graph.call_function(torch.flatten, (own, 0, 1))
        flat.meta["val"] = part.meta["val"]
        part.replace_all_uses_with(flat)


def _give(graph: fx.Graph, node: Any, found: fx.Node, n: int) -> None:
    """Put [client, row, ...] in the place of a node [row, client * channel, ...]."""
    rows, wide, *size = shape_of(node)
    whole = node.meta["val"].new_empty(n, rows, wide // n, *size)
    found.meta["val"] = whole
    for user in list(node.users):
        if user.target in VIEWS and shape_of(user) == (rows, n, wide // n, *size):
            for last in list(user.users):
                if last.target is aten.permute.default and list(last.args[1]) == _SWAP:
                    last.replace_all_uses_with(found)
            with graph.inserting_before(user):
                swapped = graph.call_function(aten.permute.default, (found, _SWAP))
            swapped.meta["val"] = user.meta["val"]
            user.replace_all_uses_with(swapped)
    if node.users:
        with graph.inserting_after(found):
            swapped = graph.call_function(aten.permute.default, (found, _SWAP))
        with graph.inserting_after(swapped):
            flat = graph.call_function(torch.reshape, (swapped, [rows, wide, *size]))
        flat.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(flat)
