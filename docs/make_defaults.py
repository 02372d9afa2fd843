"""Chooses defaults that papers do not give, tries all defaults, and writes docs/defaults.md from what was recorded.

    python docs/make_defaults.py search [METHOD ...] [--data-dir DIR]    settings on validation rows
    python docs/make_defaults.py diverge [METHOD ...] [--data-dir DIR]   every method, by its defaults, on four models
    python docs/make_defaults.py last-batch [METHOD ...] [--data-dir DIR]  batches of even size against a short last one
    python docs/make_defaults.py write                                   the page, and the lines on the methods' pages

Each goes on where it stopped; records are in docs/results, one line for each run.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import plures
from plures.errors import RunFailed
from plures.learn.solver import Solver
from plures.methods import METHODS
from plures.methods.spec import all_settings, make_method

HERE = Path(__file__).parent
RECORDS = HERE / "results"

Known = dict[str, Any]


def read(name: str) -> Known:
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def save(name: str, known: Known) -> None:
    (RECORDS / f"{name}.json").write_text(json.dumps(known, indent=1) + "\n", "utf-8")


def on(data: str, data_dir: str | None) -> dict[str, Any]:
    """Options for a data set; digits comes with the product."""
    return {"data": data} | ({"data_dir": data_dir} if data_dir and data != "digits" else {})


# Settings on validation rows

SEEDS = (10, 11)  # beside those of all tables
ROUNDS = 30
SPLITS = ("dirichlet:0.1", "labels:4")
META_SPLITS = ("relabel:0.1", "relabel:0.5")
SHARES = {"digits": 1.0, "fashion-mnist": 0.1}
TIE = 0.0025  # means that are closer than this are equal: the first one is taken


def every(**values: list[Any]) -> list[dict[str, Any]]:
    """All combinations of the values of each setting."""
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


MIXERS = [
    *every(mixer_optimizer=["adam"], mixer_lr=[0.0007, 0.0005, 0.001, 0.002, 0.005]),
    *every(mixer_optimizer=["sgd"], mixer_lr=[0.1, 0.2, 0.3, 1.0]),
]
# Method -> splits, and the settings that are tried.
SPACES: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    "fedprox": (SPLITS, every(mu=[1.0, 0.1, 0.01])),
    "apfl": (SPLITS, every(alpha=[0.25, 0.5, 0.75], adaptive=[True, False])),
    "pfedhn": (SPLITS, every(hyper_lr=[0.01, 0.003, 0.03, 0.1])),
    "plgu-ghn": (SPLITS, every(hyper_lr=[0.01, 0.003, 0.03, 0.1])),
    "perfedavg": (SPLITS, every(alpha=[0.01, 0.001, 0.03, 0.05, 0.1])),
    "mtl": (SPLITS, every(strength=[0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001])),
    "apple": (SPLITS, every(weights_lr=[0.001, 0.003, 0.01], one_hot=[False, True], mu=[0.1, 0.01])),
    "afml": (META_SPLITS, every(inner_lr=[0.03, 0.1, 0.3], server_lr=[0.003, 0.006, 0.01])),
    "fedmeta": (META_SPLITS, every(inner_lr=[0.03, 0.1, 0.3], server_lr=[0.003, 0.006, 0.01])),
    "fedpermeta": (META_SPLITS, every(inner_lr=[0.01, 0.03, 0.1, 0.3, 1.0])),
    # Clients that are alike must gain, too: their mixtures are not to end as their own models.
    "pfedla": ((*SPLITS, "iid"), MIXERS),
    "heurpfedla": ((*SPLITS, "iid"), MIXERS),
}


def cases(method: str) -> list[tuple[dict[str, Any], str, str, int]]:
    """Settings, data set, split and seed of every run."""
    splits, grid = SPACES[method]
    return [(s, data, split, seed) for s in grid for data in SHARES for split in splits for seed in SEEDS]


def in_short(settings: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items())


def name_of(method: str, settings: dict[str, Any], data: str, split: str, seed: int) -> str:
    return f"{method}:{in_short(settings)} {data} {split} {seed}"


def score(method: str, settings: dict[str, Any], data: str, split: str, seed: int, data_dir: str | None) -> float:
    """Accuracy on validation rows at the end; 0 for a run that diverges."""
    options = on(data, data_dir) | {"share": SHARES[data], "partition": split, "seed": seed, "rounds": ROUNDS}
    options |= {"validation": 0.2, "eval_every": 10, "pool_rows": 0, "workers": 2}
    try:
        found = plures.run(method, settings=settings, **options)
    except RunFailed:
        return 0.0
    return float(found.rounds[-1]["validation_mean"])


def search(methods: list[str], data_dir: str | None) -> None:
    known = read("defaults")
    wanted = {name_of(method, *case) for method in SPACES for case in cases(method)}
    known = {name: value for name, value in known.items() if name in wanted}
    for method in methods or SPACES:
        for settings, data, split, seed in cases(method):
            name = name_of(method, settings, data, split, seed)
            if name not in known:
                known[name] = score(method, settings, data, split, seed, data_dir)
                save("defaults", known)
                print(f"{name}: {100 * known[name]:.2f}", flush=True)


def means_of(method: str, known: Known) -> list[tuple[dict[str, Any], list[float]]]:
    """Settings, and the mean of each split over data sets and seeds, then of all: those that were run to the end."""
    splits, grid = SPACES[method]
    out = []
    for settings in grid:
        found = {case[1:]: known.get(name_of(method, *case)) for case in cases(method) if case[0] == settings}
        if None not in found.values():
            per_split = [fmean(x for case, x in found.items() if case[1] == split) for split in splits]
            out.append((settings, [*per_split, fmean(per_split)]))
    return out


def search_page() -> list[str]:
    known = read("defaults")
    lines = [
        "## Settings that papers leave open",
        "",
        "```",
        "python docs/make_defaults.py search --data-dir DIR",
        "```",
        "",
        "Personal accuracy, per cent, on validation rows (a fifth of each client's training rows) after "
        f"{ROUNDS} rounds with 20 clients, in the mean over digits, a tenth of Fashion-MNIST and two seeds. Test "
        "rows play no part. The best mean that does not fail below is the default; of means within "
        f"{100 * TIE:g} points of it, the first in the table. Where a setting couples clients, the strongest is first.",
        "",
    ]
    for method, (splits, _) in SPACES.items():
        found = means_of(method, known)
        if not found:
            continue
        defaults = all_settings(make_method(method, {}, Solver()))
        lines += [f"| `{method}` | " + " | ".join([*splits, "mean"]) + " | |", "|---" * (len(splits) + 3) + "|"]
        for settings, means in found:
            mark = "default" if all(defaults[key] == value for key, value in settings.items()) else ""
            lines.append(f"| `{in_short(settings)}` | " + " | ".join(f"{100 * x:.2f}" for x in means) + f" | {mark} |")
        lines.append("")
    return lines


def best(method: str, known: Known) -> dict[str, Any] | None:
    found = means_of(method, known)
    top = max((means[-1] for _, means in found), default=0.0)
    return next((settings for settings, means in found if means[-1] > top - TIE), None)


# Every default on four models

GRID: dict[str, dict[str, Any]] = {
    "digits, mlp": {"data": "digits"},
    "Fashion-MNIST, mlp": {"data": "fashion-mnist", "share": 0.1, "model": "mlp"},
    "Fashion-MNIST, cnn4": {"data": "fashion-mnist", "share": 0.03, "model": "cnn4"},
    "CIFAR-10, resnet8": {"data": "cifar10", "share": 0.03, "model": "resnet8"},
}
N_ROUNDS = 10
# What might have been a default, and diverges.
NOT_DEFAULTS = ("perfedavg:order=hf", "afml:server_lr=0.01", "fedmeta:inner_lr=0.3", "fedmeta:server_lr=0.01")
NOT_ON = "Fashion-MNIST, cnn4"


def diverge(methods: list[str], data_dir: str | None) -> None:
    known = read("divergence")
    wanted = [(method, name) for name in GRID for method in methods or METHODS]
    wanted += [(method, NOT_ON) for method in NOT_DEFAULTS if not methods or method in methods]
    for method, name in dict.fromkeys(wanted):
        if f"{method} on {name}" in known:
            continue
        given = {**GRID[name], **on(GRID[name]["data"], data_dir)}
        try:
            found = plures.run(method, rounds=N_ROUNDS, eval_every=0, pool_rows=0, workers=2, **given)
            losses = [row["loss"] for row in found.rounds]
            record = {"personal": found.summary["personal"]["mean"], "first": losses[0], "last": losses[-1]}
            record["middle"] = losses[len(losses) // 2 - 1]
        except RunFailed as error:
            record = {"failed": str(error).partition(";")[0]}
        known[f"{method} on {name}"] = record
        save("divergence", known)
        print(f"{method} on {name}: {record}", flush=True)


def diverges(record: Known) -> bool:
    """Whether a run failed, or ended with a larger training loss than in its first and its middle round."""
    return "failed" in record or record["last"] > max(record["first"], record.get("middle", record["first"]))


def in_cell(record: Known | None) -> str:
    if not record:
        return "-"
    if "failed" in record:
        return str(record["failed"])
    shown = ("first", "middle", "last") if record["last"] > record["first"] else ("first", "last")
    losses = ", ".join(f"{record[when]:.2f}" for when in shown)
    return f"{100 * record['personal']:.1f} ({losses})"


def divergence_page() -> list[str]:
    known = read("divergence")
    runs = {(method, name): known.get(f"{method} on {name}") for method in METHODS for name in GRID}
    bad = [f"`{method}` on {name}" for (method, name), record in runs.items() if record and diverges(record)]
    n_missing = sum(record is None for record in runs.values())
    lines = [
        "## Every method by its defaults",
        "",
        "```",
        "python docs/make_defaults.py diverge --data-dir DIR",
        "```",
        "",
        f"Personal accuracy, per cent, after {N_ROUNDS} rounds with no option but data, model and share (a tenth of "
        "Fashion-MNIST for the mlp, 3 % of Fashion-MNIST and CIFAR-10 for the others); one seed. In brackets the "
        "training loss of the first and the last round, and between them, where it has risen, that of the fifth. A run "
        "diverges if a number is not finite, or if the last of these losses is above the others. (SCAFFOLD's rises as "
        "its corrections begin, in round 2.)",
        "",
        "| method | " + " | ".join(GRID) + " |",
        "|---" * (1 + len(GRID)) + "|",
    ]
    for method in METHODS:
        lines.append(f"| `{method}` | " + " | ".join(in_cell(runs[method, name]) for name in GRID) + " |")
    lines += ["", f"Diverged: {', '.join(bad) or 'none'}." + (f" Not run: {n_missing}." if n_missing else "")]
    tried = [f"`{method}`: {in_cell(known.get(f'{method} on {NOT_ON}'))}" for method in NOT_DEFAULTS]
    words = f"Not defaults, because on {NOT_ON} their loss is not finite, rises or hardly falls"
    lines += ["", f"{words}: {'; '.join(tried)}."]
    return [*lines, ""]


# The last batch

TABLE2_SPLIT = {"data": "fashion-mnist", "share": 0.1, "partition": "dirichlet:0.1", "clients": 20}
LAST_ROUNDS, LAST_SEEDS = 30, (0, 1, 2)


def last_batch(methods: list[str], data_dir: str | None) -> None:
    known = read("last-batch")
    for seed in LAST_SEEDS:
        for method in methods or METHODS:
            for kind in ("even", "keep"):
                name = f"{method} {kind} {seed}"
                if name in known:
                    continue
                options = TABLE2_SPLIT | on(str(TABLE2_SPLIT["data"]), data_dir) | {"last_batch": kind, "seed": seed}
                options |= {"rounds": LAST_ROUNDS, "model": "mlp", "eval_every": 0, "pool_rows": 0, "workers": 2}
                found = plures.run(method, **options).summary["personal"]
                known[name] = {"mean": found["mean"], "worst5": found["worst5"]}
                save("last-batch", known)
                print(f"{name}: {100 * known[name]['mean']:.2f}", flush=True)


def spread(found: list[float]) -> str:
    return f"{100 * fmean(found):.2f} ± {100 * stdev(found):.2f}"


def last_batch_page() -> list[str]:
    known = read("last-batch")
    shown = " ".join(f"--{key} {value}" for key, value in TABLE2_SPLIT.items())
    lines = [
        "## Batches of even size",
        "",
        "```",
        "python docs/make_defaults.py last-batch --data-dir DIR",
        "```",
        "",
        f"`{shown} --model mlp --rounds {LAST_ROUNDS}`, seeds {', '.join(map(str, LAST_SEEDS))}: the split of Table 2 "
        "of FedALA in [results.md](results.md). With `even`, the default, a client's n rows are dealt into "
        "ceil(n / batch) batches of nearly equal size; with `keep` the last batch has what is left, down to one row, "
        "and the step it takes is as large as any other. Mean and standard deviation over the seeds, per cent.",
        "",
        "| method | personal, even | personal, keep | even - keep | worst 5 %, even | worst 5 %, keep |",
        "|---|---|---|---|---|---|",
    ]
    gains = []
    for method in METHODS:
        both = [[known.get(f"{method} {kind} {seed}") for seed in LAST_SEEDS] for kind in ("even", "keep")]
        if None in both[0] or None in both[1]:
            continue
        even, keep = ([run["mean"] for run in runs] for runs in both)
        worst = [spread([run["worst5"] for run in runs]) for runs in both]
        gains.append(100 * (fmean(even) - fmean(keep)))
        lines.append(f"| `{method}` | {spread(even)} | {spread(keep)} | {gains[-1]:+.2f} | {worst[0]} | {worst[1]} |")
    if gains:
        n_up = sum(gain > 0 for gain in gains)
        lines += ["", f"`even` is above `keep` for {n_up} of {len(gains)} methods, in the mean by {fmean(gains):+.2f}."]
    return [*lines, ""]


# Versions

VERSION_SPLITS = ("dirichlet:0.1", "labels:4")
WITH_HEADS = [*METHODS, "fedrod:head=hyper"]


def before_and_after(method: str) -> list[str]:
    """Of each split: the accuracy with each version, or a dash."""
    known = read("versions")
    out = []
    for split in VERSION_SPLITS:
        both = [known.get(version, {}).get(f"{method} {split}") for version in ("0.1.0", plures.__version__)]
        out += ["-" if x is None else f"{100 * x:.2f}" for x in both]
    return out


def versions_page() -> list[str]:
    lines = [
        "## Before and after",
        "",
        "```",
        "python docs/measure_versions.py",
        "```",
        "",
        "Personal accuracy, per cent, with no option but `--data digits --rounds 30` and the split: version 0.1.0, and "
        "this one. One seed. For all methods the batches are others (`last_batch`), and for those marked a default of "
        "the method itself.",
        "",
        "| method | dirichlet:0.1, before | after | labels:4, before | after | |",
        "|---|---|---|---|---|---|",
    ]
    for method in WITH_HEADS:
        mark = "changed" if method.partition(":")[0] in CHANGED else ""
        lines.append(f"| `{method}` | " + " | ".join(before_and_after(method)) + f" | {mark} |")
    return [*lines, ""]


# Methods that have another default than in 0.1.0, or do something else by default.
CHANGED = (
    *["afml", "apfl", "apple", "fedamp", "fedfomo", "fedmeta", "fedpermeta", "fedprox", "fedrod", "heurpfedla"],
    *["mtl", "perfedavg", "pfedhn", "pfedla", "plgu-ghn", "plgu-lf"],
)
LINE = "With no option but `--data digits --rounds 30`"


def write_lines() -> None:
    """The line of numbers on each page of a method whose default changed."""
    for method in CHANGED:
        path = HERE / "methods" / f"{method}.md"
        one, two, three, four = before_and_after(method)
        new = f"{LINE}: {one} % before and {two} % after on dirichlet:0.1, {three} % and {four} % on labels:4."
        old = [line for line in path.read_text("utf-8").splitlines() if line.startswith(LINE)]
        if old:
            path.write_text(path.read_text("utf-8").replace(old[0], new), "utf-8")


def write() -> None:
    write_lines()
    lines = [
        "# Where defaults come from",
        "",
        "A default comes from the method's paper, or from a search on validation rows, or it is chosen so that the "
        "method does not diverge. Which is told on each method's page; here are the searches and the trials. Every "
        "number was written by `python docs/make_defaults.py write` from runs that its other commands recorded in "
        "`docs/results`.",
        "",
        *versions_page(),
        *search_page(),
        *divergence_page(),
        *last_batch_page(),
    ]
    (HERE / "defaults.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["search", "diverge", "last-batch", "write"])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--data-dir")
    given = parser.parse_args()
    if given.what != "write":
        {"search": search, "diverge": diverge, "last-batch": last_batch}[given.what](given.methods, given.data_dir)
    known = read("defaults")
    for method in SPACES:
        print(f"{method}: {best(method, known)}")
    write()


if __name__ == "__main__":
    main()
