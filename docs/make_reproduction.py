"""Runs presets, the tables of the papers, and writes docs/reproduction.md from what they recorded.

    python docs/make_reproduction.py run PRESET ... --scale small|full --out CACHE [--method M ...] [--seed S ...]
    python docs/make_reproduction.py write

`run` keeps run folders in CACHE, and resumes there when it was stopped. It records what is done, numbers only, in
docs/reproduction/PRESET-SCALE.json. With --method it runs these methods alone, with --seed these seeds; the record
keeps the others that it has. `write` writes the page from all records. Why gaps are as they are is told in
docs/reproduction/explanations.toml, a text for each PRESET-SCALE.
"""

import argparse
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from plures.errors import RunFailed
from plures.runs.callbacks import Callback, say_nothing
from plures.runs.loop import Result
from plures.studies import reproduce
from plures.studies.compare import compare_methods
from plures.studies.preset import Preset, Scale, find, load

HERE = Path(__file__).parent
RECORDS = HERE / "reproduction"
EXPLANATIONS = "explanations.toml"
SCALES: tuple[Scale, ...] = ("small", "full")

# "preset", "scale", "runs": method -> seed -> {"numbers": column -> per cent, "seconds"}, "failed": method -> why
Record = dict[str, Any]


def read(path: Path) -> Record:
    return json.loads(path.read_text("utf-8"))


def run(
    name: str,
    scale: Scale,
    cache: Path,
    only: list[str],
    seeds: list[int],
    data_dir: str | None,
    records: Path,
    workers: int,
) -> None:
    """Run what is missing of a preset and record it after every run."""
    preset = find(name)
    path = records / f"{name}-{scale}.json"
    record = read(path) if path.exists() else {"preset": name, "scale": scale, "runs": {}}
    named = {preset.run_as(method, scale): method for method in preset.methods()}
    wanted = reproduce.comparison_of(preset, scale, data_dir, workers, only)
    wanted = wanted._replace(seeds=seeds or wanted.seeds)

    def save() -> None:
        records.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    def done(spelled: str, seed: int, result: Result) -> None:
        found = {column: reproduce.value_at(result.summary, at) for column, at in preset.columns.items()}
        numbers = {
            column: round(reproduce.in_units(preset, column, x), 4) for column, x in found.items() if x is not None
        }
        seconds = round(result.summary["seconds"]["total"], 1)
        record["runs"].setdefault(named[spelled], {})[str(seed)] = {"numbers": numbers, "seconds": seconds}
        save()
        print(f"{name} {scale}, seed {seed}, {spelled}: {numbers}, {seconds} s", flush=True)

    for spelled in wanted.methods:  # one by one: where one fails, the others are still run
        record.get("failed", {}).pop(named[spelled], None)
        try:
            one = wanted._replace(methods=[spelled])
            out = cache / f"{name}-{scale}"
            compare_methods(one, out, say_nothing, lambda method, seed, folder: Callback(), done)
        except RunFailed as error:
            record.setdefault("failed", {})[named[spelled]] = str(error).partition("; the state after")[0]
            save()
            print(f"{name} {scale}, {spelled}: {error}", flush=True)


def measured(preset: Preset, record: Record) -> reproduce.Numbers:
    """The numbers of a record, in the order of the preset."""
    out: reproduce.Numbers = {}
    for method in preset.methods():
        seeds = record["runs"].get(method, {}).values()
        if seeds:
            each = [seed["numbers"] for seed in seeds]
            out[method] = {column: [n[column] for n in each if column in n] for column in preset.columns}
    return out


def spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def table(cells: list[reproduce.Cell]) -> list[str]:
    lines = ["| method | number | published | ours | gap | verdict |", "|---|---|---|---|---|---|"]
    for cell in cells:
        theirs = "-" if cell.published is None else spread(cell.published, cell.published_std)
        ours = "-" if not cell.ours.n else spread(cell.ours.mean, cell.ours.std if cell.ours.n > 1 else None)
        both = cell.published is not None and cell.ours.n
        gap = f"{cell.ours.mean - (cell.published or 0):+.2f}" if both else ""
        lines.append(f"| `{cell.method}` | {cell.column} | {theirs} | {ours} | {gap} | {cell.verdict} |")
    return lines


def order_sentence(order: reproduce.Order) -> str:
    broken = f" Not: {', '.join(order.broken)}." if order.broken else ""
    return f"- {order.column}: the published order holds for {order.holds} of {order.pairs} pairs.{broken}"


def far_off(cells: list[reproduce.Cell]) -> bool:
    return any(cell.verdict in ("better", "worse") for cell in cells)


def section(record: Record, explanation: str) -> list[str]:
    """A preset's part of the page."""
    name, scale = record["preset"], record["scale"]
    preset = find(name)
    cells = reproduce.cells(preset, measured(preset, record))
    lines = [f"## {preset.title} ({scale})", "", "```", f"plures reproduce {name} --scale {scale}", "```", ""]
    lines += [*table(cells), ""]
    orders = [order_sentence(order) for order in reproduce.orders(preset, cells) if order.pairs]
    lines += [*orders, ""] if orders else []
    other = {method: preset.run_as(method, scale) for method in record["runs"]}
    lines += [
        f"`{method}` is run as `{spelled}` at this size.\n" for method, spelled in other.items() if spelled != method
    ]
    failed = record.get("failed", {})
    lines += [f"`{method}` failed: {why}\n" for method, why in failed.items()]
    missing = [f"`{method}`" for method in preset.methods() if method not in record["runs"] and method not in failed]
    lines += [f"Not run: {', '.join(missing)}.\n"] if missing else []
    if far_off(cells) and explanation:
        lines += [explanation.strip(), ""]
    runs = [run for of_seed in record["runs"].values() for run in of_seed.values()]
    seeds = sorted({int(seed) for of_seed in record["runs"].values() for seed in of_seed})
    minutes = sum(run["seconds"] for run in runs) / 60
    told = f"Seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"Seed {seeds[0]}"
    n_runs = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    lines += [f"{told}; {n_runs}, {minutes:.1f} minutes together.", ""]
    return lines + [f"- {sentence}" for sentence in preset.unknown] + [""]


def write(records: Path, page: Path) -> None:
    explanations = records / EXPLANATIONS
    texts: dict[str, str] = tomllib.loads(explanations.read_text("utf-8")) if explanations.exists() else {}
    found = {path.stem: read(path) for path in sorted(records.glob("*.json"))}
    n = len(load())
    lines = [
        "# The papers' tables",
        "",
        f"`plures list presets` names {n} tables of five papers, `plures reproduce PRESET --scale SCALE` runs",
        "one of them. Every number on this page was written by `python docs/make_reproduction.py write` from",
        "runs that `python docs/make_reproduction.py run PRESET` recorded in `docs/reproduction`. Accuracies",
        "are per cent, with the standard deviation over seeds where there are several. A number is *within*",
        "when it is not more than 2 points, or two published standard deviations, from the published one. At",
        "`full` the set-up is the paper's as far as it is known; at `small` data, rounds and often the",
        "network are smaller, so that the order of methods may hold and the numbers need not.",
        "",
    ]
    for name, record in found.items():
        if not record["runs"]:
            continue
        preset = find(record["preset"])
        if far_off(reproduce.cells(preset, measured(preset, record))) and name not in texts:
            print(f"{name}: there are gaps and no text in {explanations}", file=sys.stderr)
        lines += section(record, texts.get(name, ""))
    page.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("write", help="write docs/reproduction.md from the records")
    runs = commands.add_parser("run", help="run presets and record them")
    runs.add_argument("presets", nargs="+", metavar="PRESET", choices=list(load()))
    runs.add_argument("--scale", choices=SCALES, required=True)
    runs.add_argument("--out", type=Path, required=True, metavar="CACHE", help="folder of the run folders")
    runs.add_argument("--method", action="append", default=[], help="only this method; repeatable")
    runs.add_argument("--seed", action="append", type=int, default=[], help="only this seed; repeatable")
    runs.add_argument("--data-dir")
    runs.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.what == "run":
        for name in given.presets:
            unknown = set(given.method) - set(find(name).published)
            if unknown:
                parser.error(f"{name} has no method {', '.join(sorted(unknown))}")
            run(name, given.scale, given.out, given.method, given.seed, given.data_dir, RECORDS, given.workers)
    write(RECORDS, HERE / "reproduction.md")


if __name__ == "__main__":
    main()
