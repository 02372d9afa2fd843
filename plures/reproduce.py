"""Tables of the papers as presets: what to run, the published numbers, and ours beside them.

A preset is a table in a TOML file of `plures/presets`. `full` is the paper's size as far as it is known,
`small` the same with less data and fewer rounds, `smoke` a minute on bundled data that only proves that it runs.
"""

import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from . import rows, stats
from .comparison import Ask, Runs
from .config import make_config
from .errors import unknown

Scale = Literal["smoke", "small", "full"]

# A few bundled rows, the smallest model, two rounds: whatever the preset says about these.
SMOKE: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "share": 0.3,
    "rounds": 2,
    "epochs": 1,
    "batch": 10,
    "lr": 0.05,
}
SMOKE_CLIENTS = 8
NEAR = 2.0  # points within which a number counts as the published one, if the paper gives no wider spread


class Preset(BaseModel):
    """A table of a paper."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(description="paper, table, data and split, in a line")
    options: dict[str, Any] = Field(description="of a run at full size")
    small: dict[str, Any] = Field(description="options that are different at small size")
    smoke: dict[str, Any] = Field(default_factory=dict, description="options that are different for a smoke test")
    small_methods: dict[str, str] = Field(
        default_factory=dict, description="method -> how it is spelled at small size and for a smoke test, if otherwise"
    )
    seeds: list[int] = Field(description="at full size; the others take the first")
    columns: dict[str, str] = Field(description="the paper's name of a number -> where it is in summary.json")
    own: list[str] = Field(description="the paper's own methods among those below")
    published: dict[str, dict[str, float | list[float]]] = Field(
        description="method -> column -> per cent, or per cent and standard deviation; nothing where it is not known"
    )
    unknown: list[str] = Field(description="what the paper does not say or we cannot do as it does, and what we take")

    def methods(self) -> list[str]:
        return list(self.published)

    def run_as(self, method: str, scale: Scale) -> str:
        """How a method of the table is spelled at a scale."""
        return method if scale == "full" else self.small_methods.get(method, method)

    def ask(self, scale: Scale, data_dir: str | None, workers: int, only: Sequence[str] = ()) -> Ask:
        """What is to be run at a scale: all methods, or only some."""
        options = dict(self.options)
        seeds = self.seeds if scale == "full" else self.seeds[:1]
        if scale == "small":
            options |= self.small
        if scale == "smoke":
            options |= SMOKE | {"clients": min(options.get("clients", SMOKE_CLIENTS), SMOKE_CLIENTS)} | self.smoke
        if data_dir is not None:
            options["data_dir"] = data_dir
        methods = [self.run_as(method, scale) for method in self.methods() if not only or method in only]
        return Ask(methods, make_config(options | {"workers": workers}), seeds)


class Cell(NamedTuple):
    """One number of a table, theirs and ours, in per cent."""

    method: str  # as the preset names it
    column: str
    published: float | None
    published_std: float | None
    ours: stats.Spread
    verdict: str  # within, better, worse, or nothing where there is no published number


def load() -> dict[str, Preset]:
    """All presets by name. What a file says under `shared` is in each of its presets, unless that says otherwise."""
    found: dict[str, Preset] = {}
    for file in sorted(resources.files("plures").joinpath("presets").iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        shared = content.pop("shared", {})
        for name, values in content.items():
            merged = shared | values
            for key in ("options", "small", "smoke"):
                merged[key] = shared.get(key, {}) | values.get(key, {})
            merged["unknown"] = values.get("unknown", []) + shared.get("unknown", [])
            found[name] = Preset(**merged)
    return found


def find(name: str) -> Preset:
    known = load()
    if name not in known:
        raise unknown("preset", name, known)
    return known[name]


def value_at(summary: dict[str, Any], path: str) -> float | None:
    """A number of summary.json by its path: personal.mean, or personal_epochs.curve.1; None if it is not there."""
    found: Any = summary
    for key in path.split("."):
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(key))
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else float(found)


Numbers = dict[str, dict[str, list[float]]]  # method -> column -> per cent, one for each seed


def numbers(preset: Preset, runs: Runs, scale: Scale) -> Numbers:
    """What was measured, by the preset's names; without methods that were not run."""
    out: Numbers = {}
    for method in preset.methods():
        summaries = [result.summary for result in runs.of(preset.run_as(method, scale))]
        if summaries:
            found = {column: [value_at(s, path) for s in summaries] for column, path in preset.columns.items()}
            out[method] = {column: [100 * x for x in xs if x is not None] for column, xs in found.items()}
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
    rows.write_csv(folder / "reproduction.csv", lines)
