"""Reproduction: a paper's table, run from its preset, with the published numbers beside ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plures.runs import results
from plures.runs.config import make_config
from plures.studies import stats
from plures.studies.compare import Comparison, Runs
from plures.studies.preset import Preset, Scale

NEAR = 2.0  # points within which a number counts as the published one, if the paper gives no wider spread


def comparison_of(
    preset: Preset, scale: Scale, data_dir: str | None, workers: int, only: Sequence[str] = ()
) -> Comparison:
    """What is to be run at a scale: all methods, or only some."""
    options = preset.options_at(scale) | {"workers": workers} | ({"data_dir": data_dir} if data_dir else {})
    methods = [preset.run_as(method, scale) for method in preset.methods() if not only or method in only]
    return Comparison(methods, make_config(options), preset.seeds if scale == "full" else preset.seeds[:1])


class Cell(NamedTuple):
    """One number of a table, theirs and ours, in per cent, or in the unit of its column."""

    method: str  # as the preset names it
    column: str
    published: float | None
    published_std: float | None
    ours: stats.Spread
    verdict: str  # within, better, worse, or nothing where there is no published number


def value_at(summary: dict[str, Any], path: str) -> float | None:
    """A number of summary.json by its path: personal.mean, or personal_epochs.curve.1; None if it is not there."""
    found: Any = summary
    for key in path.split("."):
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(key))
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else float(found)


def in_units(preset: Preset, column: str, value: float) -> float:
    """A number of summary.json as its column tells it: in per cent, or in the column's own unit."""
    return value / preset.units[column] if column in preset.units else 100 * value


Numbers = dict[str, dict[str, list[float]]]  # method -> column -> per cent or units, one for each seed


def numbers(preset: Preset, runs: Runs, scale: Scale) -> Numbers:
    """What was measured, by the preset's names; without methods that were not run."""
    out: Numbers = {}
    for method in preset.methods():
        summaries = [result.summary for result in runs.of(preset.run_as(method, scale))]
        if summaries:
            found = {column: [value_at(s, path) for s in summaries] for column, path in preset.columns.items()}
            out[method] = {
                column: [in_units(preset, column, x) for x in xs if x is not None] for column, xs in found.items()
            }
    return out


def cells(preset: Preset, measured: Numbers) -> list[Cell]:
    """The table, row by row."""
    out = []
    for method, found in measured.items():
        for column in preset.columns:
            ours = stats.spread(found.get(column, []))
            theirs = preset.published[method].get(column)
            mean, std = (theirs[0], theirs[1]) if isinstance(theirs, list) else (theirs, None)
            out.append(Cell(method, column, mean, std, ours, _verdict(mean, std, ours)))
    return out


def _verdict(published: float | None, std: float | None, ours: stats.Spread) -> str:
    if published is None or ours.n == 0:
        return ""
    near = max(NEAR, 2 * (std or 0.0))
    gap = ours.mean - published
    return "within" if abs(gap) <= near else "better" if gap > 0 else "worse"


class Order(NamedTuple):
    """How often the paper's own methods are above or below the others as published."""

    column: str
    holds: int
    pairs: int
    broken: list[str]  # e.g. "fedala above ditto"


def orders(preset: Preset, table: list[Cell]) -> list[Order]:
    out = []
    for column in preset.columns:
        here = {cell.method: cell for cell in table if cell.column == column and cell.published is not None}
        here = {method: cell for method, cell in here.items() if cell.ours.n}
        holds, broken = 0, []
        for own in [method for method in preset.own if method in here]:
            for other in [method for method in here if method not in preset.own]:
                theirs = (here[own].published or 0) - (here[other].published or 0)
                ours = here[own].ours.mean - here[other].ours.mean
                if theirs * ours > 0 or theirs == ours:
                    holds += 1
                else:
                    broken.append(f"{own} {'above' if theirs > 0 else 'below'} {other}")
        out.append(Order(column, holds, holds + len(broken), broken))
    return out


def write_csv(table: list[Cell], folder: Path) -> None:
    lines = [
        {
            "method": cell.method,
            "column": cell.column,
            "published": cell.published,
            "published_std": cell.published_std,
            "ours": cell.ours.mean,
            "ours_std": cell.ours.std,
            "seeds": cell.ours.n,
            "verdict": cell.verdict,
        }
        for cell in table
    ]
    results.write_csv(folder / "reproduction.csv", lines)
