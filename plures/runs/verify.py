"""Verification: a run is run again, from the config, the split and the data that its folder names, and compared.

The state must have the same digest, and every number that the folder reports must be the same, but for times and
memory. What differs is told in sentences.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from plures._version import __version__
from plures.data.partition import split_to_json
from plures.errors import Interrupted, PluresError, UsageError
from plures.registry import doubting
from plures.runs import checkpoint, older
from plures.runs.callbacks import Callback, Say, say_nothing
from plures.runs.folders import open_config
from plures.runs.loop import Result, read_result
from plures.runs.scene import GIVEN, Scene, make_scene
from plures.runs.simulation import open_simulation, start
from plures.runs.state import CHANGED

# What no second run gives again: times, memory, how steps were run, and what a comparison adds from other runs.
NOT_COMPARED = {"seconds", "train_seconds", "evaluate_seconds", "peak_rss_mb", "engine", "gains"}
MOST_TOLD = 5  # differences that are told in words; all are counted
CLOSE = 1e-4  # relative difference up to which numbers are called close


class Verdict(NamedTuple):
    """What a second run says of a folder."""

    folder: Path
    is_same: bool | None  # None if there is nothing to compare with
    words: str
    differences: list[str] = []
    digest: str | None = None  # that the folder claims
    recomputed: str | None = None
    made_by: str | None = None  # version of Plures

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return self._asdict() | {"folder": str(self.folder), "plures": __version__}


def run_folders(folder: Path) -> list[Path]:
    """The folder, if it holds a run; else all run folders in it, as in that of a comparison."""
    if (folder / "config.toml").exists():
        return [folder]
    found = sorted(path.parent for path in folder.rglob("config.toml"))
    if not found:
        raise UsageError(f"{folder} holds no run: there is no config.toml in it")
    return found


def verify(
    folder: Path,
    trust: bool = False,
    workers: int | None = None,
    say: Say = say_nothing,
    callback: Callback = Callback(),  # noqa: B008
) -> Verdict:
    """Run a run again and compare. Without `trust`, code that the folder names is not run."""
    if not (folder / "summary.json").exists():
        return Verdict(folder, None, f"the run in {folder} has not ended; finish it with: plures resume {folder}")
    recorded = read_result(folder)
    claimed = str(recorded.summary.get("digest"))
    made_by = _version_of(folder)
    if made_by is not None:
        older.refuse_newer(made_by)
    with doubting(folder, trust):
        scene = _scene(folder, trust, workers)
        found = _changes_of_data(folder, scene)
        if found:  # then all the rest differs, too
            return _verdict(folder, found, claimed, None, made_by)
        with tempfile.TemporaryDirectory(prefix="plures-verify-") as place:
            try:
                again = start(scene, Path(place), say, callback)
            except Interrupted:
                raise Interrupted(f"interrupted before the run in {folder} was verified; nothing was changed") from None
            except PluresError as error:
                return _verdict(folder, [f"it cannot be run again: {error}"], claimed, None, made_by)
            repeated = read_result(Path(place))
        digest = str(again.summary["digest"])
        wrong = _wrong_with_checkpoint(folder, scene, digest)
    return _compare(folder, recorded, repeated, digest, wrong, made_by)


def _wrong_with_checkpoint(folder: Path, scene: Scene, digest: str) -> str:
    """Why the newest checkpoint does not hold the state with this digest; empty if it does, or if there is none."""
    newest, torn = checkpoint.read(folder / "checkpoint")
    if torn:
        return "its newest checkpoint is damaged"
    if newest is None:
        return ""
    try:
        with open_simulation(folder, scene=scene) as opened:
            if opened.state.digest() == digest:
                return ""
    except PluresError as error:
        return str(error)
    return "the state in its newest checkpoint is not that of its last round, or another one"


def _version_of(folder: Path) -> str | None:
    """The version that wrote the newest checkpoint, if there is one."""
    newest, _ = checkpoint.read(folder / "checkpoint")
    return None if newest is None else str(newest.manifest["plures"])


def _scene(folder: Path, trust: bool, workers: int | None) -> Scene:
    config = open_config(folder)
    if config.data.startswith(GIVEN) or str(config.model).startswith(GIVEN):
        raise UsageError(f"{folder} was given data or a model as an object, from Python: run it again there")
    if config.address and not trust:
        raise UsageError(
            f"{folder} names a Ray cluster that would be connected to: {config.address!r}. "
            "If you trust this folder, add --trust"
        )
    if workers is not None:
        config = config.model_copy(update={"workers": workers})
    return make_scene(config, folder / "split.json")


def _changes_of_data(folder: Path, scene: Scene) -> list[str]:
    """How rows and split differ from those of the run, in sentences."""
    config, found = scene.config, []
    newest, _ = checkpoint.read(folder / "checkpoint")
    now = scene.population.fingerprints()
    for what, known in ({} if newest is None else newest.manifest.get("data", {})).items():
        if what in now and now[what] != known:
            found.append(f"{CHANGED[what].format(data=config.data, model=config.model)} since the run")
    if split_to_json(make_scene(config).split) != (folder / "split.json").read_text(encoding="utf-8"):
        found.append("split.json is not the split that the config and the data give")
    schema = folder / "schema.toml"
    if scene.schema != (schema.read_text(encoding="utf-8") if schema.exists() else ""):
        found.append("schema.toml is not the schema that the config and the data give")
    return found


def _compare(folder: Path, recorded: Result, repeated: Result, digest: str, wrong: str, made_by: str | None) -> Verdict:
    """`wrong` says what is wrong with the folder's own checkpoint, if anything is."""
    claimed, found = str(recorded.summary.get("digest")), []
    if claimed != digest:
        found.append(f"the digest of the state is {digest[:12]} and not {claimed[:12]}")
    if wrong:
        found.append(wrong)
    summary = recorded.summary
    if "gains" in summary:  # a comparison counts by them who is harmed
        summary = {name: value for name, value in summary.items() if name != "harmed"}
    pairs: list[tuple[str, Any, Any]] = [("summary.json", summary, repeated.summary)]
    pairs += [("rounds.csv", recorded.rounds, repeated.rounds), ("clients.csv", recorded.clients, repeated.clients)]
    worst = 0.0
    for name, before, now in pairs:
        for path, old, new in _unequal(_plain(before), _plain(now)):
            if path != ("digest",):
                found.append(f"{name}: {' '.join(path)} is {new!r} and not {old!r}")
                worst = max(worst, _distance(old, new))
    if found and worst < CLOSE and claimed != digest:
        found.append("numbers are close: another processor or another torch may round in another way")
    return _verdict(folder, found, claimed, digest, made_by)


def _verdict(folder: Path, found: list[str], claimed: str, digest: str | None, made_by: str | None) -> Verdict:
    if not found:
        words = f"{folder} is verified: run again, it has the same digest {claimed[:12]} and the same numbers"
        return Verdict(folder, True, words, [], claimed, digest, made_by)
    told = "; ".join(found[:MOST_TOLD]) + (f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else "")
    words = f"{folder} is not what its config and data give: {told}"
    if made_by not in (None, __version__):
        words += f". It was made by Plures {made_by}, and this is {__version__}"
    return Verdict(folder, False, words, found, claimed, digest, made_by)


def _plain(value: Any) -> Any:
    """As it is read from a file."""
    return json.loads(json.dumps(value))


def _unequal(before: Any, now: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any, Any]]:
    """The places where two trees of numbers differ, with both values; what only one version reports is left out."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before if key in now and key not in NOT_COMPARED]
        return [one for key in keys for one in _unequal(before[key], now[key], (*path, key))]
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return [((*path, "number of rows"), len(before), len(now))]
        pairs = enumerate(zip(before, now, strict=True), start=1)
        return [one for k, (a, b) in pairs for one in _unequal(a, b, (*path, f"row {k}"))]
    is_nan = isinstance(before, float) and isinstance(now, float) and math.isnan(before) and math.isnan(now)
    return [] if before == now or is_nan else [(path, before, now)]


def _distance(old: Any, new: Any) -> float:
    """The relative difference of two numbers; infinite for what are none."""
    if not isinstance(old, int | float) or not isinstance(new, int | float):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new), 1e-12)
