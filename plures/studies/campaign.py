"""Campaigns: many tunings and runs, recorded piece by piece, so that a campaign that was stopped goes on.

Each scene (data, split, model and size) has one JSON file of records: what was found by tuning each method, and the
numbers of each scored run. Methods are tuned with one set of seeds and scored with others.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from plures.errors import RunFailed, UsageError
from plures.files import write_text
from plures.runs.config import Config, make_config
from plures.runs.folders import folder_name
from plures.runs.loop import Result
from plures.runs.scene import Objects, load_data, make_scene
from plures.runs.simulation import start
from plures.runs.timing import try_out
from plures.studies.compare import Equal, affordable
from plures.studies.tune import Objective, Tuning, tune_methods, write_tuning
from plures.studies.tuned import read_tuned, row_of

KEPT = ("method", "personal", "generic", "harmed", "new_clients", "personal_epochs", "bytes", "flops", "digest")
Say = Callable[[str], None]


class Plan(NamedTuple):
    """How much each method is tuned, and with which seeds it is scored."""

    trials: int
    tuned_on: list[int]
    scored_on: list[int]
    searched: tuple[str, ...] = ("lr",)  # options that are searched besides the methods' settings

    def runs_of_tuning(self) -> float:
        """About how many whole runs a tuning costs: all trials play a ninth, a third of them a third, and so on."""
        return len(self.tuned_on) * (1 + self.trials * (1 / 9 + (1 / 3) * (2 / 9) + (1 / 9) * (2 / 3)))


class Records:
    """The records of one scene, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, dict[str, Any]] = {"tuned": {}, "runs": {}}
        if path.exists():
            try:
                self.values |= json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UsageError(f"{path} cannot be read: {error}; remove it, and its runs are made again") from None

    def add(self, kind: str, name: str, value: Any) -> None:
        self.values[kind][name] = value
        write_text(self.path, json.dumps(self.values, indent=1, sort_keys=True) + "\n")


class Stage:
    """A scene of a campaign: its options, its records, and its data, read once it is needed."""

    def __init__(self, name: str, options: dict[str, Any], plan: Plan, folder: Path, say: Say) -> None:
        self.name, self.plan, self.folder, self.say = name, plan, folder, say
        self.config = make_config({"eval_every": 0} | options)
        self.records = Records(folder / f"{name}.json")
        self._objects: Objects | None = None

    @property
    def objects(self) -> Objects:
        if self._objects is None:
            self._objects = Objects(data=load_data(self.config))
        return self._objects

    # What is recorded

    def known_spec(self, method: str, objective: Objective) -> str | None:
        """What a method is run as after tuning; None if it has not been tuned."""
        found = self.records.values["tuned"].get(f"{method} {objective}")
        return None if found is None else str(found["spec"])

    def known_run(self, spec: str, seed: int, changes: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The recorded numbers of a run; None if it has not been run."""
        found: dict[str, Any] | None = self.records.values["runs"].get(_name(spec, seed, changes))
        return found

    # What is run, where it is not recorded

    def tune(self, method: str, objective: Objective) -> str:
        """The method with the best settings, by tuning, or as recorded."""
        known = self.known_spec(method, objective)
        if known is not None:
            return known
        plan = self.plan
        config = self.config.model_copy(update={"seed": 0})
        wanted = Tuning([method], config, plan.tuned_on, plan.trials, "trials", objective, plan.searched)
        folder = self.folder / "work" / f"{self.name}-{folder_name(method)}-{objective}"
        folder.mkdir(parents=True, exist_ok=True)
        write_tuning(folder, wanted)
        tune_methods(wanted._replace(objects=self.objects), folder, lambda line: None)
        [found] = read_tuned(folder)[1]
        about = {key: x for key, x in row_of(found).items() if key not in ("method", "budget", "spent")}
        self.records.add("tuned", f"{method} {objective}", about)
        shutil.rmtree(folder)
        self.say(f"{self.name}: {method} is tuned to {found.spec}, {found.points(found.gain)} on validation rows")
        return found.spec

    def score(self, spec: str, seed: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """The numbers of a run, by running it, or as recorded; a run that fails is recorded as such."""
        known = self.known_run(spec, seed, changes)
        if known is None:
            known = self._summary(self._run(self._of(spec, seed, changes)))
            self.records.add("runs", _name(spec, seed, changes), known)
            self.say(f"{self.name}: {_name(spec, seed, changes)}: {_in_short(known)}")
        return known

    def score_within(self, spec: str, seed: int, first: str, equal: Equal) -> dict[str, Any]:
        """The numbers of a run that spends as much as the run of another method, whose numbers are recorded."""
        changes: dict[str, Any] = {"equal": equal, "first": first}
        known = self.known_run(spec, seed, changes)
        if known is None:
            config = self._of(spec, seed, None)
            scene = make_scene(config, objects=self._given())
            spent = self.score(first, seed)
            whole = Result({}, [{equal: spent[equal]}], [], {}, None)
            rounds = affordable(scene, whole, equal)
            known = self._summary(self._run(config.model_copy(update={"rounds": rounds}))) | {"rounds": rounds}
            self.records.add("runs", _name(spec, seed, changes), known)
            self.say(f"{self.name}: {_name(spec, seed, changes)}: {rounds} rounds, {_in_short(known)}")
        return known

    def seconds(self, method: str) -> float:
        """About how long a run takes, by a few real steps."""
        scene = make_scene(self._of(method, 0, {"workers": 1}), objects=self._given())
        return try_out(scene).seconds(scene.config)

    def _given(self) -> Objects:
        return self.objects

    def _of(self, spec: str, seed: int, changes: dict[str, Any] | None) -> Config:
        return make_config(self.config.model_dump(exclude_none=True) | (changes or {}) | {"method": spec, "seed": seed})

    def _run(self, config: Config) -> dict[str, Any]:
        changed = config.data != self.config.data
        try:
            return start(make_scene(config, objects=Objects() if changed else self._given()), None).summary
        except RunFailed as failure:
            return {"method": config.method, "failed": str(failure)}

    @staticmethod
    def _summary(summary: dict[str, Any]) -> dict[str, Any]:
        return {key: summary[key] for key in (*KEPT, "failed") if key in summary}


def _name(spec: str, seed: int, changes: dict[str, Any] | None) -> str:
    words = "".join(f" {key}={value}" for key, value in sorted((changes or {}).items()))
    return f"{spec}{words} seed={seed}"


def _in_short(numbers: dict[str, Any]) -> str:
    if "failed" in numbers:
        return f"failed: {numbers['failed']}"
    return f"personal {100 * numbers['personal']['mean']:.2f} %"
