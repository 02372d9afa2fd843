"""Comparisons: several methods, perhaps with several seeds, on the same split, schedule and initial weights.

A comparison that was stopped is resumed when the same one is asked for in the same folder: runs that are done are read,
the one that stopped is resumed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from plures.data.partition import split_to_json
from plures.errors import UsageError, unknown
from plures.files import read_toml, to_toml, write_text
from plures.methods.spec import make_method, setting_fields
from plures.runs import results
from plures.runs.callbacks import Callback, Say
from plures.runs.config import HOW_IT_IS_RUN, Config, make_config
from plures.runs.folders import folder_name, read_config
from plures.runs.loop import Result, read_result
from plures.runs.scene import GIVEN, Objects, Scene, load_data, make_scene
from plures.runs.simulation import resume, start
from plures.simulate import ray

Equal = Literal["rounds", "bytes", "seconds", "flops"]
REFERENCES = ("local", "fedavg")  # what clients gain over them is told when they are among the methods
PROBE_ROUNDS = 3  # FedALA's long first stage is in the second round
COMPARISON = "comparison.toml"
MOST = 100  # times the rounds of the first method that another one may have


class Comparison(NamedTuple):
    """What is to be compared."""

    methods: list[str]
    config: Config
    seeds: list[int]
    equal: Equal = "rounds"  # what all methods may spend as much of as the first
    objects: Objects = Objects()  # data and model that were given as objects


def data_sets(config: Config) -> list[str]:
    """The data sets of a comparison: names with commas between; a path may have a comma."""
    names = [name.strip() for name in config.data.split(",")]
    if len(names) == 1 or Path(config.data).exists():
        return [config.data]
    if "" in names or len(set(names)) < len(names):
        raise UsageError(f"--data takes names of data sets with commas between, each once, got {config.data!r}")
    return names


def on_each(wanted: Comparison) -> dict[str, Comparison]:
    """The comparison on each of its data sets, by names that fit in tables and folders."""
    out: dict[str, Comparison] = {}
    for data in data_sets(wanted.config):
        name = Path(data).stem
        if name in out:
            raise UsageError(f"two data sets are called {name}; rename one of the files")
        out[name] = wanted._replace(config=wanted.config.model_copy(update={"data": data}))
    return out


class Runs(dict[tuple[str, int], Result]):
    """(method, seed) -> its run, in the order of the methods as asked for, for one seed after another."""

    def of(self, method: str) -> list[Result]:
        """The runs of a method, by seed."""
        return [result for (name, _), result in self.items() if name == method]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self))

    def named(self) -> dict[str, Result]:
        """By a name that fits in a table: with the seed only if there are several."""
        several = len({seed for _, seed in self}) > 1
        return {f"{method}, seed {seed}" if several else method: result for (method, seed), result in self.items()}


def compare_methods(
    wanted: Comparison,
    out: Path | None,
    say: Say,
    callback_of: Callable[[str, int, Path | None], Callback],
    done: Callable[[str, int, Result], None] = lambda method, seed, result: None,
) -> Runs:
    """A run for each method and seed."""
    given, wanted = wanted.objects, with_data(wanted)
    check_comparison(wanted)
    runs, config = Runs(), wanted.config
    with ray.cluster(config.address, config.workers) if config.executor == "ray" else nullcontext():
        for seed in wanted.seeds:
            for method in wanted.methods:
                scene = _scene(wanted, method, seed)
                if runs:  # what there is to say of data and split has been said
                    scene = scene._replace(notes=scene.method.notes(scene.task))
                first = runs.get((wanted.methods[0], seed))
                if wanted.equal != "rounds" and first is not None:
                    scene = _scene(wanted, method, seed, affordable(scene, first, wanted.equal))
                folder = None
                if out is not None:
                    folder = (out if len(wanted.seeds) == 1 else out / f"seed-{seed}") / folder_name(method)
                runs[method, seed] = _result(scene, folder, say, callback_of(method, seed, folder), given)
                _add_gains(runs, seed)
                done(method, seed, runs[method, seed])
    return runs


def check_comparison(wanted: Comparison) -> dict[str, Scene]:
    """Raise what is wrong with any of the methods, before the first one runs; returns the scene of each."""
    wanted = with_data(wanted)
    return {method: _scene(wanted, method, wanted.seeds[0]) for method in wanted.methods}


def with_data(wanted: Comparison) -> Comparison:
    """A comparison with its data, read once for all its methods."""
    if len(set(wanted.methods)) < len(wanted.methods):
        raise UsageError(f"a method is named twice: {' '.join(wanted.methods)}")
    _check_settings(wanted)
    if wanted.objects.data is not None:
        return wanted
    return wanted._replace(objects=wanted.objects._replace(data=load_data(wanted.config)))


def _check_settings(wanted: Comparison) -> None:
    """A setting is for the methods that have it; one that none has is a slip."""
    solver = wanted.config.solver()
    known = {key for method in wanted.methods for key in setting_fields(make_method(method, {}, solver))}
    for key in wanted.config.settings:
        if key not in known:
            raise unknown(f"setting of {', '.join(wanted.methods)}", key, known)


def _scene(wanted: Comparison, method: str, seed: int, rounds: int | None = None) -> Scene:
    known = setting_fields(make_method(method, {}, wanted.config.solver()))
    own = {key: value for key, value in wanted.config.settings.items() if key in known}
    changes: dict[str, Any] = {"method": method, "seed": seed, "settings": own}
    changes |= {} if rounds is None else {"rounds": rounds}
    return make_scene(wanted.config.model_copy(update=changes), objects=wanted.objects)


def _result(scene: Scene, folder: Path | None, say: Say, callback: Callback, objects: Objects) -> Result:
    """Run, resume, or read what was done before."""
    if folder is None or not (folder / "config.toml").exists():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return start(scene, folder, say, callback)
    changed = _differences(folder, scene)
    if changed:
        raise UsageError(f"{folder} holds a run with other options ({', '.join(changed)}); choose another --out")
    if (folder / "summary.json").exists():
        return read_result(folder)
    return resume(folder, say, callback, scene.config.workers, objects)


def _differences(folder: Path, scene: Scene) -> list[str]:
    """The options by which a run that is in a folder differs from the one that is asked for, with their values."""
    before = read_config(folder)
    found = []
    asked = scene.config.settled_like(before)
    if before.record_identity() != asked.record_identity():
        old, new = before.model_dump(exclude=set(HOW_IT_IS_RUN)), asked.model_dump(exclude=set(HOW_IT_IS_RUN))
        found += [f"{name} is {old[name]!r} there and {new[name]!r} here" for name in old if old[name] != new[name]]
    if split_to_json(scene.split) != (folder / "split.json").read_text(encoding="utf-8"):
        found.append("another split")
    if scene.schema != ((folder / "schema.toml").read_text(encoding="utf-8") if scene.schema else ""):
        found.append("another schema of its table")
    return found


# A comparison as a folder that can be resumed


def write_comparison(folder: Path, wanted: Comparison) -> None:
    """Write down what is compared, if it is not there yet."""
    if not (folder / COMPARISON).exists():
        about = {"methods": wanted.methods, "seeds": wanted.seeds, "equal": wanted.equal}
        write_text(folder / COMPARISON, to_toml(about | {"config": wanted.config.model_dump(exclude_none=True)}))


def is_comparison(folder: Path) -> bool:
    """Whether a folder holds a comparison that can be resumed."""
    return (folder / COMPARISON).exists()


def read_comparison(folder: Path, workers: int) -> Comparison:
    """What is compared in a folder."""
    about = read_toml(folder / COMPARISON)
    alone = about["config"].get("device", "cpu") != "cpu"  # a device is used by one process
    config = make_config(about["config"] | {"workers": 1 if alone else workers})
    if config.data.startswith(GIVEN) or str(config.model).startswith(GIVEN):
        raise UsageError(f"{folder} was given data or a model as an object, from Python: call plures.compare again")
    return Comparison(about["methods"], config, about["seeds"], about["equal"])


# The same cost for all


def affordable(scene: Scene, first: Result, equal: Equal) -> int:
    """How many rounds a method has until it has spent what the first one spent."""
    budget = sum(_cost(row, equal) for row in first.rounds)
    few = scene.config.model_copy(update={"rounds": PROBE_ROUNDS, "eval_every": 0, "new_clients": 0, "pool_rows": 0})
    probe = start(scene._replace(config=few, new_clients=None), None)
    costs = [_cost(row, equal) for row in probe.rounds]
    if sum(costs) == 0:
        return scene.config.rounds  # it costs nothing: as many rounds as were asked for
    n, spent = 0, 0.0
    while n < MOST * max(1, scene.config.rounds) and spent + costs[min(n, PROBE_ROUNDS - 1)] <= budget * (1 + 1e-9):
        spent += costs[min(n, PROBE_ROUNDS - 1)]
        n += 1
    return max(1, n)


def _cost(row: dict[str, float], equal: Equal) -> float:
    if equal == "bytes":
        return row["bytes_down"] + row["bytes_up"]
    return row["train_seconds" if equal == "seconds" else "flops"]


# What clients gain


def _add_gains(runs: Runs, seed: int) -> None:
    """Add to each run of a seed what its clients gain over the references that are done."""
    known = {name: runs[name, seed] for name in REFERENCES if (name, seed) in runs}
    for (method, other_seed), result in runs.items():
        missing = [name for name in known if name not in result.summary.get("gains", {})]
        if other_seed != seed or not missing:
            continue
        found = dict(result.summary.get("gains", {}))
        clients = [dict(row) for row in result.clients]
        for name in missing:
            theirs, own, metric = values_of(known[name]), values_of(result), results.metric_of(result.summary)
            both = [client for client in own if client in theirs]
            if both:
                n_test = {row["client"]: row["n_test"] for row in clients}
                a, b, n = (np.array([each[c] for c in both]) for each in (own, theirs, n_test))
                found[name] = results.gains(a, b, n, metric)
            for row in clients:
                row[f"{name}_{metric.name}"] = theirs.get(row["client"])
        harmed = found["local"]["harmed"] if "local" in found else result.summary["harmed"]
        runs[method, seed] = _rewrite(result, result.summary | {"gains": found, "harmed": harmed}, clients)


def _rewrite(result: Result, summary: dict, clients: list[dict]) -> Result:
    if result.folder is not None:
        (result.folder / "summary.json").unlink()  # so that a kill in between leaves a run that is resumed
        results.write_clients(result.folder, clients)
        results.write_summary(result.folder, summary)
    return result._replace(summary=summary, clients=clients)


def values_of(result: Result) -> dict[int, float]:
    """The metric of every scored client's own model; clients that were new are left out."""
    column = results.score_column(results.metric_of(result.summary).name)
    own = [row for row in result.clients if row["role"] == "client" and row[column] is not None]
    return {row["client"]: row[column] for row in own}
