"""The numbers behind the tables and figures that rows alone can give: no model is opened, nothing is drawn."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from plures.report.runs import Group, Run, twins
from plures.runs import results
from plures.studies import stats

MOST_POINTS = 400  # of a curve; more cannot be told apart


class Stat(NamedTuple):
    """A number over seeds."""

    mean: float
    std: float  # of a sample; 0 for one seed
    n: int


def stat(values: Sequence[float]) -> Stat | None:
    """Mean and standard deviation; None when there is no number."""
    found = stats.spread([value for value in values if not math.isnan(value)])
    return Stat(found.mean, found.std if found.n > 1 else 0.0, found.n) if found.n else None


def number(cell: float | None) -> float:
    """A cell of a CSV file; not a number where it is empty."""
    return math.nan if cell is None else float(cell)


def over_seeds(group: Group, of: Callable[[dict[str, Any]], Any]) -> Stat | None:
    """A number of summary.json; None where no run of the group has it."""
    found = []
    for run in group.runs:
        try:
            value = of(run.summary)
        except (KeyError, TypeError, IndexError):
            continue
        if isinstance(value, (int, float)):
            found.append(float(value))
    return stat(found)


# Clients


def scored(run: Run) -> list[dict[str, Any]]:
    """The clients that took part and have a personal accuracy; not the new ones."""
    own = [row for row in run.clients if row.get("role", "client") == "client"]
    return [row for row in own if row["personal_accuracy"] is not None]


def name_of(row: dict[str, Any]) -> str:
    return str(row.get("name") or row["client"])


class Point(NamedTuple):
    """One client of one run."""

    seed: int
    client: str
    n_train: int
    local: float
    own: float


class Against(NamedTuple):
    """Every client under one method, beside what it would have alone."""

    label: str
    look: int
    points: list[Point]

    @property
    def harmed(self) -> int:
        return sum(point.own < point.local - 1e-12 for point in self.points)


def against_local(groups: list[Group]) -> list[Against]:
    """For every group but Local itself, its clients beside the Local run on the same split and seed."""
    runs = [run for group in groups for run in group.runs]
    out = []
    for group in groups:
        if group.runs[0].method == "local":
            continue
        points = [point for run in group.runs for point in _points(run, runs)]
        if points:
            out.append(Against(group.label, group.look, points))
    return out


def _points(run: Run, runs: list[Run]) -> list[Point]:
    local = next(iter(twins(run, "local", runs)), None)
    if local is not None:
        alone = {row["client"]: number(row["personal_accuracy"]) for row in scored(local)}
    else:
        alone = {row["client"]: number(row.get("local_accuracy")) for row in scored(run)}
    return [
        Point(
            run.summary["seed"],
            name_of(row),
            int(row["n_train"]),
            alone[row["client"]],
            number(row["personal_accuracy"]),
        )
        for row in scored(run)
        if not math.isnan(alone.get(row["client"], math.nan))
    ]


class Spread(NamedTuple):
    """The accuracies of all clients under one method."""

    label: str
    look: int
    clients: list[str]
    values: list[float]  # worst first
    worst: list[bool]  # among the ceil(5 %) worst of its run
    mean: float
    worst_mean: float


def spreads(groups: list[Group]) -> list[Spread]:
    """With several seeds the clients of all of them; the worst 5 % are taken seed by seed."""
    out = []
    for group in groups:
        found: list[tuple[float, bool, str]] = []
        means, tails = [], []
        for run in group.runs:
            own = sorted((number(row["personal_accuracy"]), name_of(row)) for row in scored(run))
            if not own:
                continue
            values = np.array([value for value, _ in own])
            n_worst = math.ceil(0.05 * len(own) - 1e-9)
            seed = f", seed {run.summary['seed']}" if len(group.runs) > 1 else ""
            found += [(value, place < n_worst, f"{name}{seed}") for place, (value, name) in enumerate(own)]
            means.append(float(values.mean()))
            tails.append(results.tail(values)[0])
        if found:
            found.sort(key=lambda one: (one[0], not one[1]))
            values_, worst, names = zip(*found, strict=True)
            mean, tail = float(np.mean(means)), float(np.mean(tails))
            out.append(Spread(group.label, group.look, list(names), list(values_), list(worst), mean, tail))
    return out


# Rounds


class Curve(NamedTuple):
    """A number over the rounds of one group, mean and standard deviation over its seeds."""

    label: str
    look: int
    x: list[float]
    mean: list[float]
    std: list[float]
    n_seeds: int


MEASURES = {
    "personal_mean": "personal models, mean of clients",
    "personal_worst5": "personal models, worst 5 % of clients",
    "generic_accuracy": "the one model for all",
}
AXES = {
    "rounds": "rounds",
    "bytes": "bytes sent, both ways",
    "seconds": "seconds of training",
    "flops": "FLOPs of training",
}


def curves(groups: list[Group], axis: str, measure: str) -> list[Curve]:
    """Evaluated rounds only; of several seeds, the rounds that all of them evaluated."""
    out = []
    for group in groups:
        ways = [_way(run, axis, measure) for run in group.runs]
        common = sorted(set.intersection(*[set(way) for way in ways])) if all(ways) else []
        if not common:
            continue
        kept = common[:: math.ceil(len(common) / MOST_POINTS)]
        kept += common[-1:] if kept[-1] != common[-1] else []
        table = np.array([[way[at] for at in kept] for way in ways])  # [seed, round, (x, y)]
        x, y = table[..., 0].mean(0), table[..., 1]
        std = y.std(0, ddof=1) if len(ways) > 1 else np.zeros(len(kept))
        out.append(Curve(group.label, group.look, x.tolist(), y.mean(0).tolist(), std.tolist(), len(ways)))
    return out


def _way(run: Run, axis: str, measure: str) -> dict[int, tuple[float, float]]:
    """Round -> (what was spent until then, the measure)."""
    spent, out = 0.0, {}
    for row in run.rounds:
        if axis == "rounds":
            spent = float(row["round"])
        elif axis == "bytes":
            spent += number(row["bytes_down"]) + number(row["bytes_up"])
        elif axis == "seconds":
            spent += number(row["train_seconds"])
        else:
            spent += number(row.get("flops"))
        value = number(row.get(measure))
        if not math.isnan(value) and not math.isnan(spent):
            out[int(row["round"])] = (spent, value)
    return out


# New clients, and AFML's zeta


class Level(NamedTuple):
    """Numbers at some places of an axis, with their spread over seeds."""

    label: str
    look: int
    x: list[float]
    mean: list[float]
    std: list[float]
    generic: float | None = None


def over_epochs(groups: list[Group], key: str) -> list[Level]:
    """Accuracy of models made from the server's state alone, after 0, 1, 2, ... epochs on a client's rows.

    `new_clients` of a summary has those of clients that were not in training, `personal_epochs` of those that were.
    """
    out = []
    for group in groups:
        found = [run.summary[key] for run in group.runs if run.summary.get(key)]
        if not found:
            continue
        n = min(len(one["curve"]) for one in found)
        known = [stat([one["curve"][k] for one in found]) for k in range(n)]
        generic = stat([one["generic"] for one in found if one["generic"] is not None])
        mean, std = [s.mean for s in known if s], [s.std for s in known if s]
        out.append(Level(group.label, group.look, list(range(n)), mean, std, generic.mean if generic else None))
    return out


def over_zeta(groups: list[Group]) -> list[Level]:
    """Personal accuracy over the share of renamed labels, a line a method; none with fewer than two shares."""
    zetas: dict[str, dict[float, list[float]]] = {}
    looks: dict[str, int] = {}
    for group in groups:
        for run in group.runs:
            name, _, value = str(run.config.get("partition")).partition(":")
            personal = run.summary["personal"]
            if name == "relabel" and value and personal:
                looks.setdefault(run.method, len(looks))
                zetas.setdefault(run.method, {}).setdefault(float(value), []).append(personal["mean"])
    if len({zeta for found in zetas.values() for zeta in found}) < 2:
        return []
    out = []
    for method, found in zetas.items():
        known = [stat(found[zeta]) for zeta in sorted(found)]
        mean, std = [s.mean for s in known if s], [s.std for s in known if s]
        out.append(Level(method, looks[method], sorted(found), mean, std))
    return out
