"""Columns: convolutions into many channels, client by client, as products of matrices.

The windows of a convolution, laid side by side, are the rows of a matrix [place, in * k * k]; its kernels are a matrix
[out, in * k * k] as they lie. Laying windows out costs as much as moving an image for each place of a window, whatever
the number of channels that come out, and the products run at the full speed of a core. So it pays where many channels
come out: there, images are small, and kernels for convolutions, above all those for gradients, reach less than half of
that speed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plures.engine import onednn
from plures.engine.passes.channels_last import shape_of

MANY = 256  # channels that come out


def takes(conv: Any, n: int) -> bool:
    """Whether a convolution of a stack of n clients is one that is replaced."""
    n_out, _, *window = shape_of(conv.args[1])
    dilation, transposed, groups = conv.args[5], conv.args[6], conv.args[8]
    many = 2 * MANY if onednn.is_faster() else MANY  # there, kernels for convolutions reach more of the speed of a core
    return groups == n and not transposed and set(dilation) == {1} and max(window) > 1 and n_out // n >= many


def convolve_each(
    x: Tensor,
    kernels: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    by_onednn: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """[client, row, out, height, width], channels last, from x [client, row, in, height, width], kernels
    [client, out, in, k, k] and bias [client, out]; and the matrices of windows, listed by client, for the gradients."""
    n, n_out, _, *window = kernels.shape
    laid = [windows_of(own, window, stride, padding) for own in x.unbind()]
    rows, down, across = laid[0].shape[:3]
    matrices = [own.reshape(rows * down * across, -1) for own in laid]
    out = x.new_empty(n, rows * down * across, n_out)
    for i, (own, kernel) in enumerate(zip(matrices, kernels.unbind(), strict=True)):
        flat = kernel.reshape(n_out, -1).t()
        if by_onednn:
            out[i] = onednn.multiply(own, flat, None if bias is None else bias[i])
        elif bias is None:
            torch.mm(own, flat, out=out[i])
        else:
            torch.addmm(bias[i], own, flat, out=out[i])
    return out.view(n, rows, down, across, n_out).permute(0, 1, 4, 2, 3), matrices


def gradients_each(
    of_output: Tensor,
    x: Tensor,
    matrices: list[Tensor],
    kernels: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    wanted: Sequence[bool],
    by_onednn: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """With respect to the input and to the kernels, each as `convolve_each` takes it; None for what is not wanted."""
    n, rows, n_out, down, across = of_output.shape
    (n_in, *window), (height, width) = kernels.shape[2:], x.shape[3:]
    (top, left), padded = padding, [size + 2 * by for size, by in zip((height, width), padding, strict=True)]
    multiply = onednn.multiply if by_onednn else torch.mm
    of_x = x.new_zeros(n, rows, *padded, n_in) if wanted[0] else None
    of_kernels = torch.empty(kernels.shape, dtype=kernels.dtype) if wanted[1] else None
    for i, (gradient, own, kernel) in enumerate(zip(of_output.unbind(), matrices, kernels.unbind(), strict=True)):
        flat = gradient.permute(0, 2, 3, 1).reshape(-1, n_out)
        if of_kernels is not None:
            to = of_kernels[i].view(n_out, -1)
            to.copy_(onednn.multiply(flat.t(), own)) if by_onednn else torch.mm(flat.t(), own, out=to)
        if of_x is not None:
            of_windows = multiply(flat, kernel.reshape(n_out, -1)).view(rows, down, across, n_in, *window)
            add_windows(of_x[i], of_windows, stride)
    if of_x is None:
        return None, of_kernels
    return of_x[:, :, top : top + height, left : left + width].permute(0, 1, 4, 2, 3), of_kernels


def windows_of(x: Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """[row, down, across, in, k, k]: the windows of x, [row, in, height, width], with zeros around it.

    First rows of channels are moved whole, place by place, and then turned, window by window; in one go it takes ten
    times as long.
    """
    (down, across), last = padding, x.permute(0, 2, 3, 1)
    padded = torch.nn.functional.pad(last, (0, 0, across, across, down, down)) if down or across else last
    each = padded.unfold(1, window[0], stride[0]).unfold(2, window[1], stride[1])
    return each.permute(0, 1, 2, 4, 5, 3).contiguous().permute(0, 1, 2, 5, 3, 4).contiguous()


def add_windows(whole: Tensor, windows: Tensor, stride: Sequence[int]) -> None:
    """Add windows [row, down, across, in, k, k] to images [row, height, width, in], where they lie."""
    down, across, _, *window = windows.shape[1:]
    turned = windows.permute(0, 1, 2, 4, 5, 3).contiguous()
    for i in range(window[0]):
        for j in range(window[1]):
            below, right = slice(i, i + stride[0] * down, stride[0]), slice(j, j + stride[1] * across, stride[1])
            whole[:, below, right] += turned[:, :, :, i, j]
