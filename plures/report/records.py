"""Records: what a report reads from run folders, each run named by what tells it apart, and grouped over seeds."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from plures.errors import DataError, UsageError
from plures.files import read_toml
from plures.learn.metrics import ACCURACY, Metric
from plures.methods import METHODS
from plures.methods.naming import parse
from plures.runs import results
from plures.runs.config import HOW_IT_IS_RUN, SCORING
from plures.runs.folders import read_values

Rows = list[dict[str, Any]]


class RunRecord(NamedTuple):
    """What one run folder says of its run."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    rounds: Rows
    clients: Rows
    split: str  # equal for runs with the same rows at the same clients

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def base(self) -> str:
        """The method without its settings and add-ons."""
        return parse(self.method)[0].name

    @property
    def same(self) -> tuple[str, str, str]:
        """Equal for runs whose clients can be compared one by one."""
        return (str(self.summary["data"]), str(self.summary["model"]), self.split)


def metric_of_groups(groups: "list[Group]") -> Metric:
    """What all runs of a report go by."""
    return results.metric_of(groups[0].runs[0].summary) if groups else ACCURACY


class Group(NamedTuple):
    """Runs that differ in their seed alone: one line of a table, one colour in all figures."""

    label: str
    runs: list[RunRecord]
    look: int  # place among colours, dashes and markers


def read_record(folder: Path) -> RunRecord:
    """The record of a run that has ended."""
    if not (folder / "summary.json").exists():
        raise UsageError(_why_no_summary(folder))
    try:
        summary, rounds, clients = results.read_ended(folder)
        split = _hash_split(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} cannot be read as a run folder: {type(error).__name__}: {error}") from None
    return RunRecord(folder, summary, read_values(folder), rounds, clients, split)


def _hash_split(folder: Path) -> str:
    """Equal for runs whose clients have the same rows; of a federated run, the same clients with as many rows."""
    if (folder / "federation.json").exists():
        content = json.dumps(json.loads((folder / "federation.json").read_bytes())["clients"]).encode()
    else:
        content = (folder / "split.json").read_bytes()
    return hashlib.sha256(content).hexdigest()


def _why_no_summary(folder: Path) -> str:
    if not (folder / "config.toml").exists():
        return f"{folder} has no summary.json: it is not a run folder"
    try:
        done = results.read_csv(folder / "rounds.csv")[-1:]
        at = f"after round {done[0]['round']}" if done else "before round 1"
    except (OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged
        at = "before round 1, or rounds.csv cannot be read"
    wanted = read_toml(folder / "config.toml").get("rounds")
    return (
        f"{folder} has no summary.json: its run has not ended (it is {at}, of {wanted}); "
        f"resume it with `plures resume {folder}`, then make the report"
    )


def find_run_folders(given: list[Path]) -> list[Path]:
    """The folders themselves, and of a folder that holds run folders, as a comparison leaves, all of these."""
    out: list[Path] = []
    for folder in given:
        inside = [path.parent for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/config.toml")]
        inside.sort(key=_place)
        found = [folder] if (folder / "config.toml").exists() or not inside else inside
        out += [path for path in found if path.resolve() not in {known.resolve() for known in out}]
    return out


def _place(folder: Path) -> tuple[int, str]:
    """By the order in which methods are listed; Local and FedAvg come first."""
    base = parse(str(read_toml(folder / "config.toml").get("method")))[0].name
    return (list(METHODS).index(base) if base in METHODS else len(METHODS), str(folder))


# Names


def group_runs(runs: list[RunRecord]) -> list[Group]:
    """Runs together that differ in their seed alone, each group with a name that tells it from the others."""
    found: dict[str, list[RunRecord]] = {}
    for run, label in zip(runs, _label_runs(runs), strict=True):
        found.setdefault(label, []).append(run)
    return [Group(label, members, look) for look, (label, members) in enumerate(found.items())]


def _label_runs(runs: list[RunRecord]) -> list[str]:
    """The method of each run, with the options and settings in which the runs differ."""
    options = [_options_of(run) for run in runs]
    apart = [key for key in dict.fromkeys(key for one in options for key in one) if _differ(options, key)]
    out = []
    for run, own in zip(runs, options, strict=True):
        settings = [other.config.get("settings", {}) for other in runs if other.method == run.method]
        mine = run.config.get("settings", {})
        words = [_word(key, own[key]) for key in apart if key in own]
        words += [f"{key}={mine[key]}" for key in mine if _differ(settings, key)]
        out.append(", ".join([run.method, *words]))
    return out


def _options_of(run: RunRecord) -> dict[str, Any]:
    """What a result depends on, but for method, settings and seed."""
    left_out = {*HOW_IT_IS_RUN, *SCORING, "method", "settings", "seed"}
    own = {key: value for key, value in run.config.items() if key not in left_out}
    if run.config.get("split"):
        own["partition"] = f"split {Path(run.config['split']).stem}"
    return own


def _differ(options: list[dict[str, Any]], key: str) -> bool:
    return len({repr(one.get(key)) for one in options}) > 1


def _word(key: str, value: Any) -> str:
    return str(value) if key in ("data", "model", "partition") else f"{key.replace('_', ' ')} {value}"


def find_common_options(runs: list[RunRecord]) -> dict[str, Any]:
    """The options that all runs share."""
    options = [_options_of(run) for run in runs]
    return {key: value for key, value in options[0].items() if not _differ(options, key)}


def find_twins(run: RunRecord, base: str, runs: list[RunRecord]) -> list[RunRecord]:
    """The runs of another method, without add-ons, on the same data, split, model and seed."""
    return [
        other
        for other in runs
        if other.base == base and "+" not in other.method and other.same == run.same and other.seed == run.seed
    ]
