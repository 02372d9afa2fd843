"""Draws: the random numbers of dropout are computed a block at a time, so that all passes over them stay in the cache.

As traced, `seeds.at_least` is a dozen kernels over whole tensors of 64-bit integers, each of which is written to memory
and read again. After this pass they are one function, which gives the same bits.
"""

from functools import lru_cache
from typing import Any

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
    graph.eliminate_dead_code()


def draw(keys: Tensor, n_numbers: int, bound: int, shape: list[int]) -> Tensor:
    """For every key, which of its first numbers are above a bound: `seeds.mix(key, count) > bound`."""
    keys, counts = keys.reshape(-1, 1), _counts(n_numbers)
    found = torch.empty(len(keys), n_numbers, dtype=torch.bool)
    wide = min(n_numbers, BLOCK)
    high = max(1, BLOCK // wide)
    for first in range(0, len(keys), high):
        for start in range(0, n_numbers, wide):
            own, out = keys[first : first + high], found[first : first + high, start : start + wide]
            z = own + counts[start : start + wide]
            other = torch.empty_like(z)
            for bits, factor in seeds.ROUNDS:
                torch.bitwise_right_shift(z, bits, out=other)
                z.bitwise_xor_(other.bitwise_and_(seeds.mask_after(bits)))
                if factor is not None:
                    z.mul_(factor)
            torch.gt(z.bitwise_and_(seeds.LARGEST), bound, out=out)
    return found.view(shape)


@lru_cache(maxsize=64)
def _counts(n: int) -> Tensor:
    """What `seeds.mix` adds to a key for each of its first numbers. Every step asks for the same; none changes it."""
    return torch.arange(1, n + 1, dtype=torch.int64) * seeds.GOLDEN


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
