"""The numbers behind the tables and figures that rows alone can give: no model is opened, nothing is drawn."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.learn.metrics import ACCURACY, Metric
from plures.report.records import Group, RunRecord, find_twins
from plures.runs import results
from plures.runs.results import are_harmed
from plures.studies import stats
from plures.studies.ranks import Ranks, make_ranks

MOST_POINTS = 400  # of a curve; more cannot be told apart
MOST_CLIENTS = 200  # of a figure that has a row or a place for each


class Stat(NamedTuple):
    """A number over seeds."""

    mean: float
    std: float  # of a sample; 0 for one seed
    n: int


def summarise(values: Sequence[float]) -> Stat | None:
    """Mean and standard deviation; None when there is no number."""
    found = stats.spread([value for value in values if not math.isnan(value)])
    return Stat(found.mean, found.std if found.n > 1 else 0.0, found.n) if found.n else None


def to_number(cell: float | None) -> float:
    """A cell of a CSV file; not a number where it is empty."""
    return math.nan if cell is None else float(cell)


def summarise_seeds(group: Group, of: Callable[[dict[str, Any]], Any]) -> Stat | None:
    """A number of summary.json over the seeds of a group; None where no run has it."""
    found = []
    for run in group.runs:
        try:
            value = of(run.summary)
        except (KeyError, TypeError, IndexError):
            continue
        if isinstance(value, (int, float)):
            found.append(float(value))
    return summarise(found)


# Clients


def find_scored(run: RunRecord) -> list[dict[str, Any]]:
    """The clients that took part and have a personal accuracy; not the new ones."""
    own = [row for row in run.clients if row.get("role", "client") == "client"]
    return [row for row in own if own_score(run, row) is not None]


def own_score(run: RunRecord, row: dict[str, Any]) -> float | None:
    """What the run goes by, of a client's own model."""
    return row.get(results.score_column(results.metric_of(run.summary).name))


def name_of(row: dict[str, Any]) -> str:
    return str(row.get("name") or row["client"])


class Point(NamedTuple):
    """One client of one run."""

    seed: int
    client: str
    n_train: int
    n_test: int
    local: float
    own: float
    metric: Metric = ACCURACY

    @property
    def is_harmed(self) -> bool:
        own, local, n_test = (np.array([value]) for value in (self.own, self.local, self.n_test))
        return bool(are_harmed(own, local, n_test, self.metric)[0])


class Against(NamedTuple):
    """Every client under one method, beside what it would have alone."""

    label: str
    look: int
    points: list[Point]

    @property
    def metric(self) -> Metric:
        return self.points[0].metric

    @property
    def harmed(self) -> int:
        return sum(point.is_harmed for point in self.points)


def compare_with_local(groups: list[Group]) -> list[Against]:
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


def _points(run: RunRecord, runs: list[RunRecord]) -> list[Point]:
    local = next(iter(find_twins(run, "local", runs)), None)
    if local is not None:
        alone = {row["client"]: to_number(own_score(local, row)) for row in find_scored(local)}
    else:
        name = results.metric_of(run.summary).name
        alone = {row["client"]: to_number(row.get(f"local_{name}")) for row in find_scored(run)}
    return [
        Point(
            run.seed,
            name_of(row),
            int(row["n_train"]),
            int(row["n_test"]),
            alone[row["client"]],
            to_number(own_score(run, row)),
            results.metric_of(run.summary),
        )
        for row in find_scored(run)
        if not math.isnan(alone.get(row["client"], math.nan))
    ]


class Ranking(NamedTuple):
    """All clients under one method, from the worst to the best served."""

    label: str
    look: int
    clients: list[str]
    values: list[float]  # worst first
    worst: list[bool]  # among the ceil(5 %) worst of its run
    mean: float
    worst_mean: float
    metric: Metric = ACCURACY


def rank_clients(groups: list[Group]) -> list[Ranking]:
    """With several seeds the clients of all of them; the worst 5 % are taken seed by seed."""
    out = []
    for group in groups:
        found: list[tuple[float, bool, str]] = []
        means, tails = [], []
        for run in group.runs:
            metric = results.metric_of(run.summary)
            own = [(to_number(own_score(run, row)), name_of(row)) for row in find_scored(run)]
            own.sort(key=lambda pair: (metric.sign * pair[0], pair[1]))
            if not own:
                continue
            values = np.array([value for value, _ in own])
            n_worst = math.ceil(0.05 * len(own) - 1e-9)
            seed = f", seed {run.seed}" if len(group.runs) > 1 else ""
            found += [(value, place < n_worst, f"{name}{seed}") for place, (value, name) in enumerate(own)]
            means.append(float(values.mean()))
            tails.append(results.tail(values, metric=metric)[0])
        if found:
            found.sort(key=lambda one: (metric.sign * one[0], not one[1]))
            values_, worst, names = zip(*found, strict=True)
            mean, tail = float(np.mean(means)), float(np.mean(tails))
            out.append(Ranking(group.label, group.look, list(names), list(values_), list(worst), mean, tail, metric))
    return out


# Rounds


def rank_methods(groups: list[Group]) -> Ranks | None:
    """Methods over the data sets, or splits, that all of them were run on; None where there is only one."""
    table: dict[str, dict[str, list[float]]] = {}
    measured: dict[str, Metric] = {}
    for run in [run for group in groups for run in group.runs]:
        if run.summary["personal"]:
            name, partition = Path(str(run.summary["data"])).stem, str(run.summary["partition"])
            per_method = table.setdefault(f"{name}, {partition}", {})
            measured[f"{name}, {partition}"] = results.metric_of(run.summary)
            per_method.setdefault(run.method, []).append(run.summary["personal"]["mean"])
    names = {block.partition(", ")[0] for block in table}
    short = {block: block.partition(", ")[0] if len(names) == len(table) else block for block in table}
    means = {short[block]: {m: float(np.mean(values)) for m, values in one.items()} for block, one in table.items()}
    metrics = {short[block]: metric for block, metric in measured.items()}
    return make_ranks(means, metrics)


class Curve(NamedTuple):
    """A metric along an axis, mean and standard deviation over seeds."""

    label: str
    look: int
    x: list[float]
    mean: list[float]
    std: list[float]
    n_seeds: int
    generic: float | None = None  # of the one model for all, to be shown beside it
    metric: Metric = ACCURACY


MEASURES = {
    "personal_mean": "personal models, mean of clients",
    "personal_worst5": "personal models, worst 5 % of clients",
    "generic_pooled": "the one model for all",
}
AXES = {
    "rounds": "rounds",
    "bytes": "bytes sent, both ways",
    "seconds": "seconds of training",
    "flops": "FLOPs of training",
}


def make_curves(groups: list[Group], axis: str, measure: str) -> list[Curve]:
    """Evaluated rounds only; of several seeds, the rounds that all of them evaluated."""
    out = []
    for group in groups:
        found = [_read_curve(run, axis, measure) for run in group.runs]
        common = sorted(set.intersection(*map(set, found))) if all(found) else []
        if not common:
            continue
        kept = common[:: math.ceil(len(common) / MOST_POINTS)]
        kept += common[-1:] if kept[-1] != common[-1] else []
        table = np.array([[one[at] for at in kept] for one in found])  # [seed, round, (x, y)]
        x, y = table[..., 0].mean(0), table[..., 1]
        std = y.std(0, ddof=1) if len(found) > 1 else np.zeros(len(kept))
        curve = Curve(group.label, group.look, x.tolist(), y.mean(0).tolist(), std.tolist(), len(found))
        out.append(curve._replace(metric=results.metric_of(group.runs[0].summary)))
    return out


def _read_curve(run: RunRecord, axis: str, measure: str) -> dict[int, tuple[float, float]]:
    """Round -> (what was spent until then, the measure)."""
    spent, out = 0.0, {}
    for row in run.rounds:
        if axis == "rounds":
            spent = float(row["round"])
        elif axis == "bytes":
            spent += to_number(row["bytes_down"]) + to_number(row["bytes_up"])
        elif axis == "seconds":
            spent += to_number(row["train_seconds"])
        else:
            spent += to_number(row.get("flops"))
        value = to_number(row.get(measure))
        if measure == "generic_pooled" and math.isnan(value):  # folders of earlier versions
            value = to_number(row.get("generic_accuracy"))
        if not math.isnan(value) and not math.isnan(spent):
            out[int(row["round"])] = (spent, value)
    return out


# New clients, and AFML's zeta


def make_epoch_curves(groups: list[Group], key: str) -> list[Curve]:
    """Accuracy of models made from the server's state alone, after 0, 1, 2, ... epochs on a client's rows.

    `new_clients` of a summary has those of clients that were not in training, `personal_epochs` of those that were.
    """
    out = []
    for group in groups:
        found = [run.summary[key] for run in group.runs if run.summary.get(key)]
        if not found:
            continue
        n = min(len(one["curve"]) for one in found)
        known = [summarise([one["curve"][k] for one in found]) for k in range(n)]
        mean, std = [s.mean for s in known if s], [s.std for s in known if s]
        generic = summarise([one["generic"] for one in found if one["generic"] is not None])
        of_all = generic.mean if generic else None
        metric = results.metric_of(group.runs[0].summary)
        out.append(Curve(group.label, group.look, list(range(n)), mean, std, len(found), of_all, metric))
    return out


def make_zeta_curves(groups: list[Group]) -> list[Curve]:
    """Personal accuracy over the share of renamed labels, a curve for each method; none with fewer than two shares."""
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
        known = [summarise(found[zeta]) for zeta in sorted(found)]
        mean, std = [s.mean for s in known if s], [s.std for s in known if s]
        out.append(Curve(method, looks[method], sorted(found), mean, std, max(map(len, found.values()))))
    return out
