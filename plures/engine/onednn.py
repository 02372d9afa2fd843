"""Products of matrices by oneDNN, one client after another, and whether they are faster here than torch's own.

torch multiplies matrices in single precision by MKL, which uses the widest registers of a processor (AVX-512) only if
Intel made it. oneDNN, by which torch runs convolutions, uses them wherever they are, and is then about twice as fast. A
call of it takes some microseconds more.
"""

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plures.engine import private

LARGE = 4e6  # FLOPs of a product; a smaller one takes less time than a call of oneDNN takes more
WIDEST = "AVX512"
INTEL = "GenuineIntel"


@functools.cache
def is_faster() -> bool:
    """Whether oneDNN multiplies large matrices faster than MKL does, on this machine."""
    has_widest = private.has_onednn and torch.backends.cpu.get_cpu_capability() == WIDEST
    return has_widest and _maker() not in (INTEL, "")  # of an unknown one nothing is known


def takes(x: Tensor) -> bool:
    """Whether products with such a matrix are run here: of other numbers than single precision none is."""
    return x.dtype == torch.float32 and is_faster()


def _maker() -> str:
    """Who made the processor; empty if that cannot be told."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b, of [i, k] and [k, j] however they lie, plus a bias [j]."""
    found: Tensor = private.linear(a, b.t(), bias, "none", [], "")
    return found


def add_multiply(to: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[i, k] times [k, j], added to what has their shape or can be spread to it."""
    return multiply(a, b, to) if to.shape == b.shape[1:] else multiply(a, b).add_(to)


def multiply_each(a: Tensor, b: Tensor) -> Tensor:
    """[client, i, k] times [client, k, j]."""
    if len(a) == 1:
        return multiply(a[0], b[0])[None]
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for own, left, right in zip(out.unbind(), a.unbind(), b.unbind(), strict=True):
        own.copy_(multiply(left, right))
    return out


def add_multiply_each(to: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The same, added to [client or 1, i or 1, j or 1]."""
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    each = to.expand(len(a), -1, -1).unbind()
    for own, more, left, right in zip(out.unbind(), each, a.unbind(), b.unbind(), strict=True):
        torch.add(multiply(left, right), more, out=own)
    return out


def pack(right: Tensor, rows: int) -> Tensor:
    """[client, k, j] as `multiply_packed` reads it; `rows` is how many rows it will be multiplied with.

    To bring matrices into that order takes as long as to multiply them with a few rows. They are the kernels of a
    convolution whose windows are single places; clients are groups of its channels.
    """
    n, inner, wide = right.shape
    kernels = right.transpose(1, 2).reshape(n * wide, inner, 1, 1)
    packed: Tensor = private.pack_convolution(kernels, [0, 0], [1, 1], [1, 1], n, [1, n * inner, rows, 1])
    return packed


def multiply_packed(a: Tensor, packed: Tensor) -> Tensor:
    """[client, i, k] times what was packed; in memory clients of the result lie side by side, row by row."""
    n, rows, inner = a.shape
    width = n * inner
    laid = a.transpose(0, 1).contiguous()
    image = laid.as_strided((1, width, rows, 1), (rows * width, 1, width, width))  # channels last
    found = private.convolve_packed(image, packed, None, [0, 0], [1, 1], [1, 1], n, "none", [], "")
    wide = found.shape[1] // n
    return found.as_strided((n, rows, wide), (wide, n * wide, 1))


def add_multiply_packed(to: Tensor, a: Tensor, packed: Tensor) -> Tensor:
    """The same, added to what can be spread to its shape."""
    return multiply_packed(a, packed).add_(to)


class DenseLayers(TorchFunctionMode):
    """In here large dense layers of modules run by oneDNN, where that is faster and no gradient is asked for.

    A thread that enters it sees it, and no other does.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear and not kwargs and len(args) == 3:
            x, weight, bias = args
            no_gradient = not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            if no_gradient and takes(weight) and x.dtype == weight.dtype and 2 * x.numel() * len(weight) >= LARGE:
                return multiply(x.reshape(-1, x.shape[-1]), weight.t(), bias).view(*x.shape[:-1], len(weight))
        return function(*args, **(kwargs or {}))
