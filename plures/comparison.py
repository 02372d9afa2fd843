"""Several methods, perhaps with several seeds, on the same split, schedule and start.

A comparison that was stopped goes on when the same one is asked for in the same folder: runs that are
done are read, the one that stopped is resumed.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from . import checkpoint, ray_crew, rows, stats
from .config import Config, make_config, read_toml
from .datasets import Dataset
from .errors import UsageError
from .run import Result, Say, Scene, Watcher, carry_out, folder_name, load_data, open_scene, set_scene, start

Equal = Literal["rounds", "bytes", "seconds", "flops"]
REFERENCES = ("local", "fedavg")  # what clients gain over them is told when they are among the methods
PROBE_ROUNDS = 3  # FedALA's long first stage is in the second round
MOST = 100  # times the rounds of the first method that another one may have


class Ask(NamedTuple):
    """What is to be compared."""

    methods: list[str]
    config: Config
    seeds: list[int]
    equal: Equal = "rounds"  # what all methods may spend as much of as the first


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


def compare(
    ask: Ask,
    out: Path | None,
    say: Say,
    watcher_of: Callable[[str, int, Path | None], Watcher],
    done: Callable[[str, int, Result], None] = lambda method, seed, result: None,
) -> Runs:
    """A run for each method and seed."""
    if len(set(ask.methods)) < len(ask.methods):
        raise UsageError(f"a method is named twice: {' '.join(ask.methods)}")
    data = load_data(ask.config)
    for method in ask.methods:  # all of them first: a slip in the last one must not cost an hour
        _scene(ask, method, ask.seeds[0], data)
    runs, config = Runs(), ask.config
    with ray_crew.cluster(config.address, config.workers) if config.executor == "ray" else nullcontext():
        for seed in ask.seeds:
            for method in ask.methods:
                scene = _scene(ask, method, seed, data)
                first = runs.get((ask.methods[0], seed))
                if ask.equal != "rounds" and first is not None:
                    scene = _scene(ask, method, seed, data, affordable(scene, first, ask.equal))
                folder = None
                if out is not None:
                    folder = (out if len(ask.seeds) == 1 else out / f"seed-{seed}") / folder_name(method)
                runs[method, seed] = _carried_out(scene, folder, say, watcher_of(method, seed, folder))
                _tell_gains(runs, seed)
                done(method, seed, runs[method, seed])
    return runs


def _scene(ask: Ask, method: str, seed: int, data: Dataset, rounds: int | None = None) -> Scene:
    changes = {"method": method, "seed": seed, "settings": ask.config.settings}
    changes |= {} if rounds is None else {"rounds": rounds}
    return set_scene(ask.config.model_copy(update=changes), data=data)


def _carried_out(scene: Scene, folder: Path | None, say: Say, watcher: Watcher) -> Result:
    """Run, go on, or read what was done before."""
    if folder is None or not (folder / "config.toml").exists():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return start(scene, folder, say, watcher)
    before = make_config(read_toml(folder / "config.toml"))
    if before.identity() != scene.config.identity():
        raise UsageError(f"{folder} holds a run of another config; choose another --out")
    if (folder / "summary.json").exists():
        return read_result(folder)
    workers = {"workers": scene.config.workers}
    opened = open_scene(folder)
    return carry_out(
        opened._replace(config=opened.config.model_copy(update=workers)), folder, say, watcher, going_on=True
    )


def read_result(folder: Path) -> Result:
    """The numbers of a run that has ended, from its folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder} has no summary.json: is it a run folder, and has the run ended?") from None
    return Result(summary, rows.read_csv(folder / "rounds.csv"), rows.read_csv(folder / "clients.csv"), {}, folder)


# The same cost for all


def affordable(scene: Scene, first: Result, equal: Equal) -> int:
    """How many rounds a method has until it has spent what the first one spent."""
    budget = sum(_cost(row, equal) for row in first.rounds)
    few = scene.config.model_copy(update={"rounds": PROBE_ROUNDS, "eval_every": 0, "new_clients": 0, "pool_rows": 0})
    probe = start(scene._replace(config=few, newcomers=None), None, lambda line: None, Watcher())
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


def _tell_gains(runs: Runs, seed: int) -> None:
    """Add to each run of a seed what its clients gain over the references that are done."""
    known = {name: runs[name, seed] for name in REFERENCES if (name, seed) in runs}
    for (method, other_seed), result in runs.items():
        missing = [name for name in known if name not in result.summary.get("gains", {})]
        if other_seed != seed or not missing:
            continue
        found = dict(result.summary.get("gains", {}))
        clients = [dict(row) for row in result.clients]
        for name in missing:
            theirs = accuracies(known[name])
            own = accuracies(result)
            both = [client for client in own if client in theirs]
            if both:
                found[name] = rows.gains(np.array([own[c] for c in both]), np.array([theirs[c] for c in both]))
            for row in clients:
                row[f"{name}_accuracy"] = theirs.get(row["client"])
        harmed = found["local"]["harmed"] if "local" in found else result.summary["harmed"]
        runs[method, seed] = _rewritten(result, result.summary | {"gains": found, "harmed": harmed}, clients)


def _rewritten(result: Result, summary: dict, clients: list[dict]) -> Result:
    if result.folder is not None:
        rows.write_clients(result.folder, clients)
        checkpoint.write_text(result.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return result._replace(summary=summary, clients=clients)


def accuracies(result: Result) -> dict[int, float]:
    """Of every scored client's own model; clients that were new are left out."""
    own = [row for row in result.clients if row["role"] == "client" and row["personal_accuracy"] is not None]
    return {row["client"]: row["personal_accuracy"] for row in own}


# Tables

METRICS = {
    "personal": lambda s: s["personal"] and s["personal"]["mean"],
    "worst 5 %": lambda s: s["personal"] and s["personal"]["worst5"],
    "pooled": lambda s: s["personal"] and s["personal"]["pooled"],
    "generic": lambda s: s["generic"] and s["generic"]["accuracy"],
}


class Line(NamedTuple):
    """A method over its seeds."""

    method: str
    spreads: dict[str, stats.Spread]  # of each metric
    harmed: list[int]  # clients, for each seed where it is known
    n_bytes: float  # means over the seeds
    flops: float
    seconds: float
    p: float | None  # that it is no different from the first method, client by client


def lines(runs: Runs) -> list[Line]:
    """One for each method."""
    out = []
    for method in runs.methods():
        own = [result.summary for result in runs.of(method)]
        spreads = {}
        for name, value in METRICS.items():
            found = [value(summary) for summary in own]
            spreads[name] = stats.spread([x for x in found if x is not None and not math.isnan(x)])
        out.append(
            Line(
                method,
                spreads,
                [summary["harmed"] for summary in own if summary["harmed"] is not None],
                float(np.mean([summary["bytes"]["down"] + summary["bytes"]["up"] for summary in own])),
                float(np.mean([summary["flops"] for summary in own])),
                float(np.mean([summary["seconds"]["total"] for summary in own])),
                None if method == runs.methods()[0] else p_value(runs, method, runs.methods()[0]),
            )
        )
    return out


def differences(runs: Runs, method: str, other: str) -> list[float]:
    """What each client of each seed gains by one method over another."""
    out = []
    for (name, seed), result in runs.items():
        if name == method and (other, seed) in runs:
            own, theirs = accuracies(result), accuracies(runs[other, seed])
            out += [own[client] - theirs[client] for client in own if client in theirs]
    return out


def p_value(runs: Runs, method: str, other: str) -> float:
    return stats.paired_test(differences(runs, method, other))


def write_tables(runs: Runs, folder: Path) -> None:
    """table.csv, a line a method; pairs.csv, every two methods compared client by client; table.tex."""
    found = lines(runs)
    table = []
    for line in found:
        row: dict = {"method": line.method, "seeds": max(s.n for s in line.spreads.values())}
        for name, spread in line.spreads.items():
            key = name.replace(" ", "").replace("%", "")
            row |= {key: spread.mean, f"{key}_std": spread.std, f"{key}_ci95": spread.half_width}
        row |= {"harmed": float(np.mean(line.harmed)) if line.harmed else None, "bytes": line.n_bytes}
        row |= {"flops": line.flops, "seconds": line.seconds, "p_against_first": line.p}
        table.append(row)
    rows.write_csv(folder / "table.csv", table)
    pairs = []
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            gains = differences(runs, a.method, b.method)
            mean = float(np.mean(gains)) if gains else math.nan
            p = stats.paired_test(gains)
            pairs.append({"method": a.method, "other": b.method, "pairs": len(gains), "mean_gain": mean, "p": p})
    if pairs:
        rows.write_csv(folder / "pairs.csv", pairs)
    checkpoint.write_text(folder / "table.tex", latex(found))


def latex(found: list[Line]) -> str:
    """A tabular that needs no package; the best mean of each column is bold."""
    names = list(METRICS)
    best = {}
    for name in names:
        means = [line.spreads[name].mean for line in found if line.spreads[name].n]
        best[name] = max(means) if means else math.nan
    head = " & ".join(["method", *[name.replace("%", r"\%") for name in names], "harmed", "MB"])
    out = [r"\begin{tabular}{l" + "r" * (len(names) + 2) + "}", r"\hline", head + r" \\", r"\hline"]
    for line in found:
        cells = [_tex(line.method)]
        for name in names:
            text = percent_of(line.spreads[name], r" $\pm$ ")
            cells.append(rf"\textbf{{{text}}}" if line.spreads[name].mean == best[name] else text)
        cells.append(f"{np.mean(line.harmed):.1f}" if line.harmed else "--")
        cells.append(f"{line.n_bytes / 1e6:.1f}")
        out.append(" & ".join(cells) + r" \\")
    return "\n".join([*out, r"\hline", r"\end{tabular}"]) + "\n"


def _tex(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text


def percent_of(spread: stats.Spread, between: str = " ± ") -> str:
    """Mean and standard deviation in per cent."""
    if not spread.n:
        return "--"
    text = f"{100 * spread.mean:.2f}"
    return text if spread.n == 1 else f"{text}{between}{100 * spread.std:.2f}"
