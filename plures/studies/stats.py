"""Several seeds: mean, spread, a confidence interval, and a paired test between two methods."""

import itertools
import math
from typing import NamedTuple

import numpy as np

FLIPS = 10_000  # of signs, where trying all of them would be more


class Spread(NamedTuple):
    n: int
    mean: float
    std: float  # of the sample, n - 1; not a number for one value
    half_width: float  # of the 95 % interval of the mean, by Student's t; not a number for one value


def spread(values: list[float]) -> Spread:
    n = len(values)
    if n == 0:
        return Spread(0, math.nan, math.nan, math.nan)
    mean = float(np.mean(values))
    if n == 1:
        return Spread(1, mean, math.nan, math.nan)
    std = float(np.std(values, ddof=1))
    return Spread(n, mean, std, t_quantile(0.975, n - 1) * std / math.sqrt(n))


def t_below(t: float, df: int) -> float:
    """The probability that Student's t with so many degrees of freedom is below t: the finite sums for whole df."""
    angle = math.atan(t / math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    term, total = 1.0, 0.0
    if df % 2:
        for k in range(1, (df - 1) // 2 + 1):
            total += term
            term *= cos2 * 2 * k / (2 * k + 1)
        inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    else:
        for k in range(1, df // 2 + 1):
            total += term
            term *= cos2 * (2 * k - 1) / (2 * k)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(p: float, df: int) -> float:
    """The t below which Student's distribution has the share p, by halving."""
    low, high = -1e3, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_below(middle, df) < p else (low, middle)
    return (low + high) / 2


def holm(values: list[float]) -> list[float]:
    """Values of p for several tests, corrected so that the chance of any false finding stays below the level (Holm)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, highest = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[i]))
        out[i] = highest
    return out


def paired_test(differences: list[float]) -> float:
    """How likely a mean this far from zero is if each difference could as well have the other sign (two-sided).

    All signs are tried for up to 13 differences, else 10,000 drawn ones, always the same.
    """
    d = np.asarray(differences, np.float64)
    if len(d) == 0 or not d.any():
        return 1.0
    seen = abs(d.sum()) - 1e-12
    if 2 ** len(d) <= FLIPS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(d))))
        return float((np.abs(signs @ d) >= seen).mean())
    signs = np.random.Generator(np.random.Philox(key=0)).choice([-1.0, 1.0], (FLIPS, len(d)))
    return float((1 + (np.abs(signs @ d) >= seen).sum()) / (1 + FLIPS))  # the seen one is one of them
