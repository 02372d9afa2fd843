"""Ranks: methods over many data sets, by Friedman's test and Nemenyi's critical difference.

On each data set methods are ranked, the best is 1, equal ones share the mean of their places. Friedman's test asks
whether the mean ranks could be so far apart by chance; two methods differ by Nemenyi's test if their mean ranks are
further apart than the critical difference. Data sets are what is counted: seeds are no further data sets.

Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, 2006.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.errors import UsageError
from plures.files import write_text
from plures.learn.metrics import ACCURACY, Metric
from plures.runs.results import write_csv
from plures.studies.tables import tex

LEVEL = 0.05
LONGEST = 24  # letters of a name in the diagram
FEW = 5  # data sets below which the tests can hardly find anything


class Ranks(NamedTuple):
    """Methods, the best first, over data sets."""

    methods: list[str]
    blocks: list[str]  # data sets
    scores: np.ndarray  # [block, method]
    ranks: np.ndarray  # [block, method]
    p: float | None  # Friedman's; None for two methods
    critical: float  # Nemenyi's critical difference of mean ranks
    metrics: list[Metric]  # what the scores of each block are

    def text(self, block: int, method: int) -> str:
        """A score as it is read."""
        return self.metrics[block].text(float(self.scores[block, method])).removesuffix(" %")

    @property
    def mean(self) -> np.ndarray:
        return self.ranks.mean(0)

    def alike(self) -> list[tuple[int, int]]:
        """(first, last) of the longest rows of methods that do not differ by Nemenyi's test; each has two or more."""
        found: list[tuple[int, int]] = []
        for first, rank in enumerate(self.mean):
            last = int(np.flatnonzero(self.mean - rank <= self.critical + 1e-12)[-1])
            if last > first and (not found or last > found[-1][1]):
                found.append((first, last))
        return found


def rank_row(values: np.ndarray) -> np.ndarray:
    """Places of values, the largest is 1; equal ones share the mean of their places."""
    return np.array([1 + (values > x).sum() + ((values == x).sum() - 1) / 2 for x in values])


def make_ranks(table: Mapping[str, Mapping[str, float]], metrics: Mapping[str, Metric] | None = None) -> Ranks | None:
    """From data set -> method -> score; None unless two or more methods were run on two or more data sets.

    metrics: data set -> what its scores are, if not accuracies.
    """
    blocks = list(table)
    methods = (
        [method for method in table[blocks[0]] if all(method in table[block] for block in blocks)] if blocks else []
    )
    if len(blocks) < 2 or len(methods) < 2:
        return None
    scores = np.array([[table[block][method] for method in methods] for block in blocks])
    found = [(metrics or {}).get(block, ACCURACY) for block in blocks]
    ranks = np.array([rank_row(metric.sign * row) for metric, row in zip(found, scores, strict=True)])
    order = np.argsort(ranks.mean(0), kind="stable")
    scores, ranks, methods = scores[:, order], ranks[:, order], [methods[i] for i in order]
    critical = critical_difference(len(methods), len(blocks))
    return Ranks(methods, blocks, scores, ranks, friedman(ranks), critical, found)


def _distributions() -> Any:
    try:
        from scipy import stats  # here: an optional extra, which only comparisons over data sets need
    except ImportError:
        raise UsageError(
            "tests over several data sets need scipy, which is not installed: pip install 'plures[tune]' brings it"
        ) from None
    return stats


def friedman(ranks: np.ndarray) -> float | None:
    """How likely mean ranks so far apart are by chance; with Iman and Davenport's correction. None for two methods."""
    n, k = ranks.shape
    if k < 3:
        return None
    mean = ranks.mean(0)
    ties = sum(count**3 - count for row in ranks for count in np.unique(row, return_counts=True)[1])
    scale = 1 - ties / (n * k * (k**2 - 1))
    if scale <= 0:
        return 1.0  # all are equal on every data set
    chi2 = 12 * n / (k * (k + 1)) * float(((mean - (k + 1) / 2) ** 2).sum()) / scale
    if n * (k - 1) - chi2 <= 1e-9:
        return 0.0  # the same order on every data set
    return float(_distributions().f.sf((n - 1) * chi2 / (n * (k - 1) - chi2), k - 1, (k - 1) * (n - 1)))


def critical_difference(n_methods: int, n_blocks: int) -> float:
    """Of mean ranks, by Nemenyi's test at the level of 5 %."""
    q = _distributions().studentized_range.ppf(1 - LEVEL, n_methods, math.inf) / math.sqrt(2)
    return float(q * math.sqrt(n_methods * (n_methods + 1) / (6 * n_blocks)))


def in_words(found: Ranks) -> list[str]:
    """What the ranks say."""
    out = []
    n = len(found.blocks)
    if found.p is not None:
        chance = "could be by chance" if found.p >= LEVEL else "are hardly by chance"
        out.append(f"Friedman's test over {n} data sets: p = {found.p:.2g}; differences of mean ranks {chance}")
    apart = [
        f"{a} above {b}"
        for i, a in enumerate(found.methods)
        for j, b in enumerate(found.methods)
        if found.mean[j] - found.mean[i] > found.critical
    ]
    told = ", ".join(apart[:6]) + (f" and {len(apart) - 6} more" if len(apart) > 6 else "")
    out.append(
        f"critical difference (Nemenyi, 5 %): {found.critical:.2f}; {told or 'no two methods are further apart'}"
    )
    if n < FEW:
        out.append(f"{n} data sets are few for these tests: they can hardly find a difference")
    return out


def write_ranks(found: Ranks, folder: Path) -> None:
    """ranks.csv, a line for each method; ranks.tex, a table and the critical-difference diagram."""
    lines = [
        {"method": method, "mean_rank": found.mean[i]}
        | {block: found.scores[k, i] for k, block in enumerate(found.blocks)}
        | {f"{block}_rank": found.ranks[k, i] for k, block in enumerate(found.blocks)}
        for i, method in enumerate(found.methods)
    ]
    write_csv(folder / "ranks.csv", lines)
    write_text(folder / "ranks.tex", latex_table(found) + "\n" + latex_diagram(found))


def latex_table(found: Ranks) -> str:
    """Accuracies on each data set, and mean ranks; the best of each column is bold."""
    head = " & ".join(["method", *[tex(block) for block in found.blocks], "mean rank"])
    out = [r"\begin{tabular}{l" + "r" * (len(found.blocks) + 1) + "}", r"\hline", head + r" \\", r"\hline"]
    for i, method in enumerate(found.methods):
        cells = [tex(method)]
        for k in range(len(found.blocks)):
            text = found.text(k, i)
            cells.append(rf"\textbf{{{text}}}" if found.ranks[k, i] == found.ranks[k].min() else text)
        text = f"{found.mean[i]:.2f}"
        cells.append(rf"\textbf{{{text}}}" if found.mean[i] == found.mean.min() else text)
        out.append(" & ".join(cells) + r" \\")
    return "\n".join([*out, r"\hline", r"\end{tabular}"]) + "\n"


class Placed(NamedTuple):
    """A method in the diagram: the better half is written on the left, the others on the right."""

    method: str
    rank: float
    row: int  # below the axis, from 0
    is_left: bool

    @property
    def short(self) -> str:
        """Name and mean rank; a long name is cut."""
        name = self.method if len(self.method) <= LONGEST else self.method[: LONGEST - 1] + "…"
        return f"{name}, {self.rank:.2f}"


def place_methods(found: Ranks) -> list[Placed]:
    """Where methods stand in the diagram: lines to their names do not cross."""
    n_left = (len(found.methods) + 1) // 2
    out = []
    for i, (method, rank) in enumerate(zip(found.methods, found.mean, strict=True)):
        row = i if i < n_left else len(found.methods) - 1 - i
        out.append(Placed(method, float(rank), row, i < n_left))
    return out


def latex_diagram(found: Ranks) -> str:
    """The critical-difference diagram as a picture that needs no package."""
    width, k = 80.0, len(found.methods)  # units of a millimetre
    placed, bars = place_methods(found), found.alike()
    rows = max(one.row for one in placed) + 1
    top = 6.0 + 5.0 * rows + 2.5 * len(bars)

    def x(rank: float) -> float:
        return (rank - 1) / (k - 1) * width

    out = [r"\setlength{\unitlength}{1mm}", rf"\begin{{picture}}({width + 60:.0f},{top + 14:.0f})(-30,0)"]
    out.append(rf"\put(0,{top:.1f}){{\line(1,0){{{width:.1f}}}}}")
    for rank in range(1, k + 1):
        out.append(rf"\put({x(rank):.2f},{top:.1f}){{\line(0,1){{1.5}}}}")
        out.append(rf"\put({x(rank):.2f},{top + 2:.1f}){{\makebox(0,3)[b]{{\footnotesize {rank}}}}}")
    length = min(found.critical / (k - 1) * width, width)
    out.append(rf"\put(0,{top + 8:.1f}){{\line(1,0){{{length:.2f}}}}}")
    out.append(rf"\put({length / 2:.2f},{top + 9:.1f}){{\makebox(0,3)[b]{{\footnotesize CD = {found.critical:.2f}}}}}")
    for level, (first, last) in enumerate(bars):
        low, high = x(found.mean[first]), x(found.mean[last])
        out.append(r"\linethickness{0.8mm}")
        out.append(rf"\put({low - 0.7:.2f},{top - 2 - 2.5 * level:.1f}){{\line(1,0){{{high - low + 1.4:.2f}}}}}")
    out.append(r"\thinlines")
    for one in placed:
        y = top - 4 - 2.5 * len(bars) - 5.0 * one.row
        out.append(rf"\put({x(one.rank):.2f},{y:.1f}){{\line(0,1){{{top - y:.2f}}}}}")
        end, align = (-2.0, "r") if one.is_left else (width + 2.0, "l")
        out.append(rf"\put({min(end, x(one.rank)):.2f},{y:.1f}){{\line(1,0){{{abs(x(one.rank) - end):.2f}}}}}")
        words = rf"\footnotesize {tex(one.method)} ({one.rank:.2f})"
        out.append(rf"\put({end + (-1 if one.is_left else 1):.1f},{y - 1.5:.1f}){{\makebox(0,3)[{align}]{{{words}}}}}")
    return "\n".join([*out, r"\end{picture}"]) + "\n"
