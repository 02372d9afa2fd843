"""Grouping: which clients of a cohort are stacked together. It depends on the cohort alone, never on the workers."""

import math
from collections.abc import Sequence
from functools import lru_cache

from plures.engine import Cost

# Workers that a grouping is judged with, and how much each number of them counts; how many there really are plays no
# part, so that any number of workers gives the same bits.
JUDGED_WITH = ((2, 2.0), (8, 1.0))
FEW = 4  # groups more than the fewest, that even cuts are tried with
CLEARLY = 0.95  # of the time: for less, a run keeps the groups, and so the bits, of before there were even cuts


def group_clients(n_steps: Sequence[int], cost: Cost) -> list[list[int]]:
    """Groups of places of a cohort, from the numbers of steps of its clients.

    A stacked step costs a fixed overhead and the arithmetic of its clients. So clients of like length are stacked:
    then few steps run with few clients. Of some ways to cut the cohort, sorted by length, the one is taken that
    would end first.
    """
    return [list(group) for group in _groups(tuple(n_steps), cost)]


@lru_cache(maxsize=16)  # where every round has the same clients, they are grouped once
def _groups(n_steps: tuple[int, ...], cost: Cost) -> list[list[int]]:
    order = sorted(range(len(n_steps)), key=lambda i: (-n_steps[i], i))

    def seconds(group: Sequence[int]) -> float:
        return cost.of([n_steps[i] for i in group])

    def cut(limit: float) -> list[list[int]]:
        """Groups that cost about as much as the limit."""
        out: list[list[int]] = []
        so_far = 0.0
        for i in order:
            so_far += n_steps[i] * cost.step
            if not out or len(out[-1]) == cost.most or so_far > limit:
                out.append([])
                so_far = n_steps[i] * (cost.overhead + cost.step)
            out[-1].append(i)
        return out

    def end(groups: list[list[int]], n_workers: int) -> float:
        """When the last worker is done, if each takes the next longest group when it is free."""
        busy_until = [0.0] * n_workers
        for each in sorted(map(seconds, groups), reverse=True):
            busy_until[busy_until.index(min(busy_until))] += each
        return max(busy_until)

    def score(groups: list[list[int]]) -> float:
        return sum(weight * end(groups, n_workers) for n_workers, weight in JUDGED_WITH)

    def cut_evenly(n_groups: int) -> list[list[int]]:
        """As many groups, or more, of about the same number of steps."""
        out: list[list[int]] = []
        before, share = 0, sum(n_steps) / n_groups
        for i in order:
            if not out or len(out[-1]) == cost.most or before >= share * len(out):
                out.append([])
            out[-1].append(i)
            before += n_steps[i]
        return out

    whole = seconds(order)
    limit = min((whole / 1.15**k for k in range(21)), key=lambda limit: score(cut(limit)))
    # A somewhat lower limit may give as many groups, of more even cost.
    found = min((cut(limit * (1 - 0.025 * k)) for k in range(6)), key=score)
    # Where stacks may not be larger, what is left for the last one may leave a worker idle.
    fewest = math.ceil(len(order) / cost.most)
    even = min((cut_evenly(n) for n in range(fewest, min(fewest + FEW, len(order)) + 1)), key=score)
    return sorted(even, key=seconds, reverse=True) if score(even) < CLEARLY * score(found) else found
