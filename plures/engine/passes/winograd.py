"""Winograd: convolutions with fewer products, in which tiles of an image are multiplied point by point.

A tile of 4 x 4 outputs of a k x k window is part of a product of polynomials, and a product of polynomials is
known from its values at k + 3 points in each direction. So a convolution is (k + 3)^2 products of matrices,
[tile, in] times [in, out], with 4/25 of the multiplications for windows of 5 and 1/4 for windows of 3. Going to
the points and back are products with constant matrices. In exact arithmetic all is the same; in single precision
the rounding is several times that of adding up one product after another.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from plures.engine import onednn
from plures.engine.passes.channels_last import VIEWS, is_safe, shape_of

aten = torch.ops.aten

TILE = 4  # outputs of a tile, down and across
WINDOWS = (3, 5)
FEWEST = 32  # tiles: for fewer, bringing kernels to the points, where they are larger, is not worth it
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # and infinity
ONE = POINTS.index(1.0)


def apply(graph: fx.Graph, n: int) -> None:
    """Replace convolutions where it pays; their gradients start from values that the forward pass keeps.

    It builds on `channels_last`, and takes the convolutions that are safe there.
    """
    convolutions = [node for node in graph.nodes if node.target is aten.convolution.default]
    of_one_model = all(is_safe(node, 1) for node in convolutions)
    has_backward = any(node.target is aten.convolution_backward.default for node in graph.nodes)
    if not (all(is_safe(node, n) for node in convolutions) or (of_one_model and not has_backward)):
        return
    backward = {tuple(node.args[1:3]): node for node in graph.nodes if node.target is aten.convolution_backward.default}
    for node in convolutions:
        x, kernels, bias, _, padding, _, _, _, groups = node.args
        rows, _, *outputs = shape_of(node)
        n_out, n_in, *window = shape_of(kernels)
        back = backward.get((x, kernels))
        if back is not None and back.args[-1][2]:
            continue  # the gradient of the bias is expected to be a sum of its own
        if not pays(rows, n_in, n_out // groups, window, outputs):
            continue
        if kernels.target in (*VIEWS, torch.reshape) and len(shape_of(kernels.args[0])) == 5:
            kernels = kernels.args[0]  # [client, out, in, k, k]
        with graph.inserting_before(node):
            found = graph.call_function(convolve, (x, kernels, bias, padding, groups))
            out, *at_points = [graph.call_function(operator.getitem, (found, k)) for k in range(3)]
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        if back is not None:
            back.target, back.args = gradients, (back.args[0], *at_points, window, padding, groups)


def takes(conv: Any, n: int) -> bool:
    """Whether a convolution of a stack of n clients is one that is replaced."""
    n_out, n_in, *window = shape_of(conv.args[1])
    rows, _, *outputs = shape_of(conv)
    return is_safe(conv, n) and pays(rows, n_in, n_out // n, window, outputs)


def kernels_with_taps_first(graph: fx.Graph) -> list[int]:
    """Which inputs, by their places, are kernels of stacked clients that Winograd's scheme alone reads."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]

    def is_one(node: Any) -> bool:
        users = [user for user in node.users if user.target is not aten.sym_size.int]
        by_taps = all(user.target in (convolve, convolve_each) and user.args[1] is node for user in users)
        return bool(users) and by_taps and len(shape_of(node)) == 5

    return [i for i, node in enumerate(inputs) if is_one(node)]


class Scheme(NamedTuple):
    """Matrices for one window, each for down and for across; n points in each direction."""

    picture: Tensor  # [n, n], from a tile of the input to the points
    kernel: Tensor  # [n, k], from a window to the points
    back: Tensor  # [4, n], from products at the points to a tile of the output


@functools.cache
def scheme(window: int, dtype: torch.dtype) -> Scheme:
    n = TILE + window - 1
    points = torch.tensor(POINTS[: n - 1], dtype=torch.float64)

    def values(n_coefficients: int) -> Tensor:
        """Coefficients of a polynomial to its values at the points; at infinity it is as its last coefficient."""
        at_infinity = torch.eye(n_coefficients, dtype=torch.float64)[-1:]
        return torch.cat([points[:, None] ** torch.arange(n_coefficients), at_infinity])

    # Outputs are sums over a window: the transpose of a product of polynomials.
    picture, kernel, back = torch.linalg.inv(values(n)).T, values(window), values(TILE).T
    scale = picture.abs().amax(1, keepdim=True)  # so that no point weighs more than others, and rounding is even
    return Scheme(*[x.to(dtype) for x in (picture / scale, kernel * scale, back)])


def pays(rows: int, n_in: int, n_out: int, window: Sequence[int], outputs: Sequence[int]) -> bool:
    """Whether a convolution, forth and back, takes less than half of the arithmetic this way: a quarter, where
    convolutions are faster than products."""
    if window[0] != window[1] or window[0] not in WINDOWS or min(n_in, n_out) < 16:
        return False
    n, taps = (TILE + window[0] - 1) ** 2, window[0] ** 2
    tiles = rows * math.prod(math.ceil(size / TILE) for size in outputs)
    if tiles < FEWEST:
        return False
    products = 3 * tiles * n * n_in * n_out
    # Counted as if down and across were one: made one after the other they are fewer, but thin and slow.
    transforms = 2 * (tiles * n * (n * n_in + TILE**2 * n_out) + n * taps * n_in * n_out)
    slower = 2 if onednn.is_faster() else 1  # so much than convolutions are products of this many small matrices
    return 2 * slower * (products + transforms) < 3 * rows * math.prod(outputs) * taps * n_in * n_out


def taps_first(kernels: Tensor) -> Tensor:
    """Kernels [client, out, in, k, k] in the order in memory in which the scheme reads and writes them fastest."""
    return kernels.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)


def convolve(
    x: Tensor, kernels: Tensor, bias: Tensor | None, padding: Sequence[int], n_clients: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution of x, [row, client * in, height, width], with kernels [client, out, in, k, k].

    Returns its output, with channels last, and x and the kernels at the points, which `gradients` needs. It is
    fastest if x lies with channels last and the kernels with taps first.
    """
    kernels = kernels.reshape(n_clients, -1, *kernels.shape[-3:])
    n_out, n_in, window = kernels.shape[1:4]
    by, n, rows = scheme(window, x.dtype), TILE + window - 1, len(x)
    sizes = [size + 2 * pad - window + 1 for size, pad in zip(x.shape[2:], padding, strict=True)]
    down, across = [-(-size // TILE) for size in sizes]
    tiles = _padded(x, padding, (down, across), window).unflatten(1, (n_clients, n_in))
    tiles = tiles.unfold(3, n, TILE).unfold(4, n, TILE).permute(1, 5, 6, 0, 3, 4, 2)
    x_at = _apply(by.picture, tiles.reshape(n_clients, n * n, -1)).view(n_clients * n * n, -1, n_in)
    taps = kernels.permute(0, 3, 4, 2, 1).reshape(n_clients, window * window, -1)
    kernels_at = _apply(by.kernel, taps).view(n_clients * n * n, n_in, n_out)
    products = torch.bmm(x_at, kernels_at).view(n_clients, n * n, -1, n_out)
    if bias is not None:  # what is added at the point (1, 1) is added to every output
        products[:, ONE * n + ONE] += bias.view(n_clients, 1, n_out)
    out = _apply(by.back, products.flatten(2)).view(n_clients, TILE, TILE, rows, down, across, n_out)
    out = out.permute(3, 4, 1, 5, 2, 0, 6).reshape(rows, down * TILE, across * TILE, -1)
    return out[:, : sizes[0], : sizes[1]].permute(0, 3, 1, 2), x_at, kernels_at


def convolve_each(
    x: Tensor, kernels: Tensor, bias: Tensor | None, padding: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """As `convolve`, one client after another: x is [client, row, in, height, width], and so is its output, with
    channels last; bias is [client, out]. What is kept at the points is listed by client."""
    each = [
        convolve(x[i], kernels[i : i + 1], None if bias is None else bias[i], padding, 1) for i in range(len(kernels))
    ]
    out = torch.stack([found.permute(0, 2, 3, 1) for found, _, _ in each]) if len(each) > 1 else None
    whole = each[0][0][None] if out is None else out.permute(0, 1, 4, 2, 3)
    return whole, [x_at for _, x_at, _ in each], [kernels_at for _, _, kernels_at in each]


def gradients_each(
    of_output: Tensor,
    x_at: list[Tensor],
    kernels_at: list[Tensor],
    window: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As `gradients`, from what `convolve_each` gives: with respect to the input, [client, row, in, height, width],
    and the kernels, [client, out, in, k, k]."""
    each = [
        gradients(own, x, kernels, window, padding, 1)
        for own, x, kernels in zip(of_output.unbind(), x_at, kernels_at, strict=True)
    ]
    if len(each) == 1:
        return each[0][0][None], each[0][1]
    of_x = torch.stack([found.permute(0, 2, 3, 1) for found, _ in each]).permute(0, 1, 4, 2, 3)
    taps = torch.cat([found.permute(0, 3, 4, 2, 1) for _, found in each])  # in the order in which they lie
    return of_x, taps.permute(0, 4, 3, 1, 2)


def gradients(
    of_output: Tensor,
    x_at: Tensor,
    kernels_at: Tensor,
    window: Sequence[int],
    padding: Sequence[int],
    n_clients: int,
) -> tuple[Tensor, Tensor]:
    """With respect to the input, [row, client * in, height, width], and the kernels, [client, out, in, k, k]."""
    (_, tiles, n_in), n_out = x_at.shape, kernels_at.shape[2]
    rows, _, height, width = of_output.shape
    by, n = scheme(window[0], of_output.dtype), TILE + window[0] - 1
    down, across = -(-height // TILE), -(-width // TILE)
    if (height, width) != (down * TILE, across * TILE):
        of_output = torch.nn.functional.pad(of_output, (0, across * TILE - width, 0, down * TILE - height))
    parts = of_output.unflatten(1, (n_clients, n_out)).unflatten(3, (down, TILE)).unflatten(5, (across, TILE))
    parts = parts.permute(1, 4, 6, 0, 3, 5, 2).reshape(n_clients, TILE * TILE, -1)
    out_at = _apply(by.back.T, parts).view(n_clients * n * n, tiles, n_out)
    of_kernels = _apply(by.kernel.T, torch.bmm(x_at.transpose(1, 2), out_at).view(n_clients, n * n, -1))
    of_kernels = of_kernels.view(n_clients, *window, n_in, n_out).permute(0, 4, 3, 1, 2)
    of_tiles = _apply(by.picture.T, torch.bmm(out_at, kernels_at.transpose(1, 2)).view(n_clients, n * n, -1))
    of_tiles = of_tiles.view(n_clients, n, n, rows, down, across, n_in).permute(3, 4, 1, 5, 2, 0, 6)
    size = [size + window[0] - 1 - 2 * pad for size, pad in zip((height, width), padding, strict=True)]
    return _laid_over(of_tiles, size, padding), of_kernels


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    """A matrix times all clients' squares, [client, down * across, column], first down and then across."""
    to, side = matrix.shape
    n_clients, _, columns = x.shape
    down = torch.bmm(matrix.expand(n_clients, to, side), x.view(n_clients, side, side * columns))
    across = torch.bmm(matrix.expand(n_clients * to, to, side), down.view(n_clients * to, side, columns))
    return across.view(n_clients, to * to, columns)


def _padded(x: Tensor, padding: Sequence[int], tiles: Sequence[int], window: int) -> Tensor:
    """With the zeros around it that were asked for, and those that fill up tiles."""
    ends = [TILE * n + window - 1 - size - pad for n, size, pad in zip(tiles, x.shape[2:], padding, strict=True)]
    around = (padding[1], ends[1], padding[0], ends[0])
    return torch.nn.functional.pad(x, around) if any(around) else x


def _laid_over(tiles: Tensor, size: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Tiles [row, down, n, across, n, client, in], which overlap, added up to a picture, without what was padded."""
    rows, down, _, across, _, n_clients, n_in = tiles.shape
    whole = tiles.new_zeros(rows, down + 1, TILE, across + 1, TILE, n_clients, n_in)
    for below in (0, 1):
        for right in (0, 1):
            part = tiles[:, :, below * TILE : (below + 1) * TILE, :, right * TILE : (right + 1) * TILE]
            height, width = part.shape[2], part.shape[4]
            whole[:, below : below + down, :height, right : right + across, :width] += part
    flat = whole.view(rows, (down + 1) * TILE, (across + 1) * TILE, n_clients * n_in)
    top, left = padding
    return flat[:, top : top + size[0], left : left + size[1]].permute(0, 3, 1, 2)
