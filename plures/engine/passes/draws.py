"""Draws: the random numbers of dropout are computed a block at a time, so that all passes over them stay in the cache.

As traced, `seeds.at_least` is a dozen kernels over whole tensors of 64-bit integers, each of which is written to memory
and read again. After this pass they are one function, which gives the same bits.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from plures import seeds
from plures.engine import private
from plures.engine.passes.channels_last import VIEWS, shape_of

aten = torch.ops.aten

BLOCK = 32768  # numbers at a time: with what they are mixed with, 512 kB


def apply(graph: fx.Graph, n: int) -> None:
    """Replace the comparison of mixed numbers with a bound, and all that they are mixed by."""
    for node in list(graph.nodes):
        if node.target is not aten.gt.Scalar:
            continue
        found = _key_and_number(node.args[0], n)
        if found is None:
            continue
        key, n_numbers = found
        with graph.inserting_before(node):
            drawn = graph.call_function(draw, (key, n_numbers, node.args[1], list(shape_of(node))))
        drawn.meta = dict(node.meta)
        node.replace_all_uses_with(drawn)
        for user in filter(_is_infinity_elsewhere, list(drawn.users)):
            kept, dtype = user.args[1].args[0], user.meta["val"].dtype  # type: ignore[union-attr]
            with graph.inserting_before(user):
                by = graph.call_function(divisors, (drawn, kept, dtype))
            by.meta = dict(user.meta)
            user.replace_all_uses_with(by)
    graph.eliminate_dead_code()


def draw(keys: Tensor, n_numbers: int, bound: int, shape: list[int]) -> Tensor:
    """For every key, which of its first numbers are above a bound: `seeds.mix(key, count) > bound`.

    By numpy: its shifts of unsigned integers need no mask, and its kernels for them are faster than torch's.
    """
    rows, counts = keys.reshape(-1, 1).numpy().view(np.uint64), _counts(n_numbers)
    found = np.empty((len(rows), n_numbers), np.bool_)
    wide = min(n_numbers, BLOCK)
    high = max(1, BLOCK // wide)
    numbers = np.empty((2, wide * high), np.uint64)
    for first in range(0, len(rows), high):
        for start in range(0, n_numbers, wide):
            own, out = rows[first : first + high], found[first : first + high, start : start + wide]
            z, other = (x[: out.size].reshape(out.shape) for x in numbers)
            np.add(own, counts[start : start + wide], out=z)
            for bits, factor in _rounds(bound):
                np.bitwise_xor(z, np.right_shift(z, bits, out=other), out=z)
                if factor is not None:
                    np.multiply(z, factor, out=z)
            np.greater(np.bitwise_and(z, _LARGEST, out=z), np.uint64(bound), out=out)
    return torch.from_numpy(found).view(shape)


def divisors(stays: Tensor, kept: float, dtype: torch.dtype) -> Tensor:
    """`kept` where something stays, and infinity elsewhere: in fewer instructions than torch.where takes."""
    return torch.div(kept, stays.view(torch.uint8).to(dtype))


_LARGEST = np.uint64(seeds.LARGEST)


def _rounds(bound: int) -> list[tuple[Any, Any]]:
    """How numbers are mixed, for numpy.

    The last round changes only the low bits of a number: it is left out where they do not decide whether the number is
    above the bound, as in `seeds.at_least`.
    """
    *others, last = seeds.ROUNDS
    decides = (bound + 1) % (1 << (64 - last[0])) != 0
    rounds = [*others, last] if decides else others
    return [(np.uint64(bits), None if factor is None else np.uint64(factor % (1 << 64))) for bits, factor in rounds]


@lru_cache(maxsize=64)
def _counts(n: int) -> np.ndarray:
    """What `seeds.mix` adds to a key for each of its first numbers. Every step asks for the same; none changes it."""
    return np.arange(1, n + 1, dtype=np.uint64) * np.uint64(seeds.GOLDEN % (1 << 64))


def _is_infinity_elsewhere(node: fx.Node) -> bool:
    """Whether it is where(stays, a number, infinity), as dropout divides by."""
    if node.target is not aten.where.self:
        return False
    numbers = [x.args[0] if getattr(x, "target", None) is aten.scalar_tensor.default else None for x in node.args[1:]]  # type: ignore[union-attr]
    return isinstance(numbers[0], float) and numbers[1] in (math.inf,)


def _key_and_number(node: Any, n: int) -> tuple[fx.Node, int] | None:
    """The keys, [client, 1, ...], and how many numbers of each are mixed; None if it is anything else."""
    z = _source(node, aten.bitwise_and.Scalar, seeds.LARGEST)
    for bits, factor in reversed(seeds.ROUNDS):
        if factor is not None:
            z = _source(z, aten.mul.Tensor, factor)
        if z is None or z.target is not aten.bitwise_xor.Tensor:
            return None
        z, mixed = z.args
        masked = _source(mixed, aten.bitwise_and.Scalar, seeds.mask_after(bits))
        if _source(masked, private.SHIFT_RIGHT, bits) is not z:
            return None
    if z is None or z.target is not aten.add.Tensor or z.kwargs:
        return None
    key, counts = z.args
    if not isinstance(key, fx.Node) or shape_of(key) != (n, *[1] * (len(shape_of(z)) - 1)):
        return None
    plus_one = _source(counts, aten.mul.Tensor, seeds.GOLDEN)
    numbers: Any = _source(plus_one, aten.add.Tensor, 1)
    while isinstance(numbers, fx.Node) and numbers.target in (*VIEWS, torch.reshape):
        numbers = numbers.args[0]
    if not isinstance(numbers, fx.Node) or numbers.target is not aten.arange.default:
        return None
    return key, int(numbers.args[0])  # type: ignore[arg-type]


def _source(node: Any, target: Any, value: int) -> Any:
    """What a kernel is given beside this number; None if it is another kernel, or another number."""
    if not isinstance(node, fx.Node) or node.target is not target or len(node.args) != 2 or node.args[1] != value:
        return None
    return node.args[0]
