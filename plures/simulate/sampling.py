"""Sampling: which clients take part in a round, and which of a population attack; functions of the seed alone."""

from collections.abc import Sequence

from plures import seeds


def draw_cohort(eligible: Sequence[int], participation: float, seed: int, round: int, sampling: str) -> list[int]:
    """The clients of a round, ascending.

    eligible: the clients that have rows to train on.
    participation: the share of them that takes part; at least one does.
    sampling: `random`, or `in turn`, by which every client takes part equally often.
    """
    n = max(1, round_half_up(participation * len(eligible)))
    if sampling == "in turn":
        order = seeds.generator(seed, "turns").permutation(len(eligible))
        places = [order[(round * n + k) % len(eligible)] for k in range(n)]
    else:
        places = list(seeds.generator(seed, "cohort", round).choice(len(eligible), n, replace=False))
    return sorted(eligible[int(i)] for i in places)


def round_half_up(value: float) -> int:
    """2.5 -> 3, where Python's own rounding goes to the even number."""
    return int(value + 0.5)
