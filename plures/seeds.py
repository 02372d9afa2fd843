"""All randomness is computed from (seed, purpose, round, client); there is no hidden generator.

`key_of` turns such a tuple into one 63-bit integer. `mix` turns a key and a counter into a
well-spread integer, elementwise, by the finaliser of the SplitMix64 generator. It uses only
operators that numpy arrays and torch tensors share, so one text serves the order of examples
(numpy) and what is drawn inside a client function (torch, also under `vmap`).
"""

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
ROUNDS = ((30, _FIRST), (27, _SECOND), (31, None))  # how far bits are shifted, and the factor after it
LARGEST = 2**63 - 1


def key_of(*parts: int | str) -> int:
    """A key for a purpose, e.g. `key_of(seed, "order", round, client)`."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator for a purpose."""
    return np.random.Generator(np.random.Philox(key=key_of(*parts)))


def mask_after(bits: int) -> int:
    """The bits that a logical shift to the right leaves of 64."""
    return (1 << (64 - bits)) - 1


def mix(key: Any, counter: Any) -> Any:
    """Well-spread non-negative 63-bit integers, one for each (key, counter)."""
    z = key + (counter + 1) * GOLDEN
    for bits, factor in ROUNDS:
        z = z ^ ((z >> bits) & mask_after(bits))
        if factor is not None:
            z = z * factor
    return z & LARGEST


def uniform(key: "Tensor", shape: tuple[int, ...], stream: int = 0) -> "Tensor":
    """Numbers in [0, 1) for `key`; another `stream` gives other numbers. Works under vmap."""
    import torch  # here, because partitions draw with numpy alone, and the command line starts without torch

    count = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    return (mix(mix(key, torch.tensor(stream)), count) >> 39).to(torch.float32) / 2**24


def at_least(key: "Tensor", shape: tuple[int, ...], p: float, stream: int = 0) -> "Tensor":
    """Where `uniform` would be at least p: the same bits in fewer passes, for whole numbers are compared."""
    import torch  # as above

    count = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    first = math.ceil(float(np.float32(p)) * 2**24)  # of the 2^24 numbers that `uniform` may give
    return mix(mix(key, torch.tensor(stream)), count) > (first << 39) - 1


def normal(key: "Tensor", shape: tuple[int, ...], stream: int = 0) -> "Tensor":
    """Standard normal numbers for `key` (Box-Muller). Works under vmap.

    They are computed on the CPU wherever the key is: logarithms and cosines are rounded differently elsewhere, and the
    whole numbers behind `uniform` are not.
    """
    if key.device.type not in ("cpu", "meta"):  # there are no numbers on the meta device
        import torch  # as above

        with torch.device("cpu"):
            return normal(key.cpu(), shape, stream).to(key.device)
    radius = (-2 * (-uniform(key, shape, 2 * stream)).log1p()).sqrt()
    return radius * (2 * math.pi * uniform(key, shape, 2 * stream + 1)).cos()
