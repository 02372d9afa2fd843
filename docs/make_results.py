"""Runs the comparisons of docs/results.md and writes that page from what they recorded.

    python docs/make_results.py run NAME ... --data-dir DIR   run what is missing, record it in docs/results
    python docs/make_results.py write                         write docs/results.md from the records

A comparison that was stopped is resumed with the methods that are missing.
"""

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

import plures
from plures.runs.results import are_harmed

HERE = Path(__file__).parent
RECORDS = HERE / "results"

Summary = dict[str, Any]


class Claim(NamedTuple):
    """One method's number is above another's."""

    words: str
    column: str
    better: str
    worse: str
    worse_column: str = ""  # if it is another one


class Comparison(NamedTuple):
    title: str
    options: dict[str, Any]
    methods: list[str]
    seeds: list[int]
    columns: list[str]
    claims: list[Claim]
    remark: str = ""


COLUMNS: dict[str, Callable[[Summary], float | None]] = {
    "personal": lambda s: s["personal"]["mean"],
    "worst 5 %": lambda s: s["personal"]["worst5"],
    "pooled": lambda s: s["personal"]["pooled"],
    "generic": lambda s: s["generic"]["accuracy"] if s["generic"] else None,
    "generic on clients": lambda s: s["generic"]["on_clients"] if s["generic"] else None,
    "generic worst 5 %": lambda s: s["generic"]["worst5"] if s["generic"] else None,
    "new, before": lambda s: s["new_clients"]["before"],
    "new, after": lambda s: s["new_clients"]["after"],
    "new, generic": lambda s: s["new_clients"]["generic"],
    "harmed": lambda s: s["harmed"],
    "TFLOP": lambda s: s["flops"] / 1e12,
}

FASHION = {"data": "fashion-mnist", "eval_every": 0}
ROD = FASHION | {
    "share": 0.1,
    "partition": "dirichlet-class:0.1",
    "model": "rod-cnn",
    "epochs": 5,
    "batch": 40,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-5,
    "lr_decay": 0.99,
}
AFML = FASHION | {"share": 0.1, "clients": 20, "model": "hncnn", "batch": 10, "lr": 0.02, "rounds": 40}
ALL = [
    *["local", "fedavg", "fedprox", "scaffold", "feddyn", "fedsam", "perfedavg", "fedmeta", "fedpermeta", "pfedme"],
    *["ditto", "fedper", "fedrep", "lgfedavg", "fedbn", "fedamp", "fedphp", "fedfomo", "apple", "partialfed"],
    *["pfedhn", "mtl", "apfl", "fedala", "fedrod", "fedrod:head=hyper", "pfedla", "heurpfedla", "plgu-lf"],
    *["plgu-grep", "plgu-ghn", "afml"],
]
TABLE2 = [
    *[
        "fedavg",
        "fedprox",
        "fedavg+c:c_epochs=1",
        "fedavg+c",
        "fedprox+c:c_epochs=1",
        "perfedavg",
        "fedrep",
        "pfedme",
        "ditto",
        "fedamp",
        "fedphp",
    ],
    *["fedfomo", "apple", "partialfed", "fedala", "fedala:ala_pm=trained"],
]

COMPARISONS: dict[str, Comparison] = {
    "digits": Comparison(
        "Every method on digits",
        {"data": "digits", "clients": 20, "partition": "dirichlet:0.1", "rounds": 30, "eval_every": 0},
        ALL,
        [0],
        ["personal", "worst 5 %", "pooled", "generic", "harmed"],
        [],
        "Thirty short rounds on 1,797 small images: a check that everything runs, not a ranking.",
    ),
    "fedrod": Comparison(
        "Fed-RoD: generic and personal in one model",
        ROD | {"partition": "dirichlet-class:0.3", "clients": 20, "participation": 0.4, "rounds": 30},
        ["fedavg:pm=local", "fedrod", "fedrod:head=hyper"],
        [0, 1, 2],
        ["generic", "personal", "worst 5 %"],
        [
            Claim("Fed-RoD's generic model is better than FedAvg's", "generic", "fedrod", "fedavg:pm=local"),
            Claim(
                "its personal models are at least as good as FedAvg's local ones",
                "personal",
                "fedrod",
                "fedavg:pm=local",
            ),
            Claim(
                "so are those with heads made by the hypernetwork",
                "personal",
                "fedrod:head=hyper",
                "fedavg:pm=local",
            ),
        ],
    ),
    "fedrod-new-clients": Comparison(
        "Fed-RoD: clients that were not in training",
        ROD | {"batch": 10, "clients": 40, "new_clients": 20, "participation": 0.4, "rounds": 20},
        ["fedavg", "fedrod:head=hyper"],
        [0],
        ["new, generic", "new, before", "new, after"],
        [
            Claim(
                "a head made from class proportions alone serves new clients better than the global model",
                "new, before",
                "fedrod:head=hyper",
                "fedrod:head=hyper",
                "new, generic",
            ),
        ],
    ),
    "fedala": Comparison(
        "FedALA: the methods of its Table 2",
        FASHION
        | {"share": 0.1, "partition": "dirichlet:0.1", "clients": 20, "model": "hncnn", "rounds": 40, "lr": 0.02},
        TABLE2,
        [0],
        ["personal", "worst 5 %", "pooled", "TFLOP"],
        [
            Claim("FedALA is better than FedAvg", "pooled", "fedala", "fedavg"),
            Claim(
                "FedALA is better than FedAvg-C that fine-tunes one epoch",
                "pooled",
                "fedala",
                "fedavg+c:c_epochs=1",
            ),
            Claim("FedALA is better than FedAvg-C that fine-tunes ten", "pooled", "fedala", "fedavg+c"),
            Claim("FedALA is better than Ditto", "pooled", "fedala", "ditto"),
        ],
        "One network and forty rounds for all; the work of each method is in the last column. FedALA's default scores "
        "the blend, before local training, as its paper does; `ala_pm=trained` scores what training makes of it.",
    ),
    "afml-k3": Comparison(
        "AFML at zeta 0.1 against a FedAvg of three local steps per round",
        AFML | {"partition": "relabel:0.1", "rounds": 120, "steps": 3},
        ["fedavg+ft", "afml"],
        [0],
        ["personal", "worst 5 %"],
        [Claim("AFML is better than FedAvg-FT", "personal", "afml", "fedavg+ft")],
        "In the AFML paper clients of FedAvg take 3 or 10 steps per round; AFML takes one step at the server, whatever "
        "they take. That FedAvg-FT is ahead at zeta 0.1 elsewhere is the work of its clients, an epoch per round.",
    ),
    "pfedla": Comparison(
        "pFedLA against training alone",
        FASHION
        | {
            "share": 0.05,
            "partition": "main:2",
            "clients": 10,
            "model": "hncnn",
            "rounds": 25,
            "epochs": 2,
            "batch": 32,
            "lr": 0.02,
        },
        ["local", "fedavg", "pfedla", "heurpfedla"],
        [0, 1, 2],
        ["personal", "worst 5 %", "harmed"],
        [
            Claim("pFedLA is better than training alone", "personal", "pfedla", "local"),
            Claim("pFedLA is better than FedAvg", "personal", "pfedla", "fedavg"),
            Claim("HeurpFedLA is better than training alone", "personal", "heurpfedla", "local"),
        ],
    ),
    "plgu": Comparison(
        "PLGU-LF: the worst-served clients of the global model",
        FASHION
        | {
            "share": 0.2,
            "partition": "labels:3",
            "clients": 100,
            "participation": 0.2,
            "model": "hncnn",
            "rounds": 60,
            "epochs": 2,
            "batch": 20,
            "lr": 0.02,
        },
        ["fedavg:weights=uniform", "fedsam", "plgu-lf:personal=2"],
        [0],
        ["generic on clients", "generic worst 5 %", "personal", "worst 5 %"],
        [
            Claim(
                "PLGU-LF raises the worst 5 % over FedAvg",
                "generic worst 5 %",
                "plgu-lf:personal=2",
                "fedavg:weights=uniform",
            ),
            Claim("and over FedSAM", "generic worst 5 %", "plgu-lf:personal=2", "fedsam"),
        ],
    ),
    **{
        f"afml-{zeta}": Comparison(
            f"AFML at zeta {zeta}",
            AFML | {"partition": f"relabel:{zeta}", "rounds": 20},
            ["fedavg+ft", "fedmeta", "afml"],
            [0],
            ["personal", "worst 5 %"],
            [
                Claim("AFML is better than FedAvg-FT", "personal", "afml", "fedavg+ft"),
                Claim("AFML is better than FedMeta", "personal", "afml", "fedmeta"),
            ],
        )
        for zeta in (0.1, 0.5, 0.9)
    },
}


def command(comparison: Comparison) -> str:
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in comparison.options.items())
    seeds = f" --seeds {','.join(map(str, comparison.seeds))}"
    return f"plures compare {' '.join(map(shlex.quote, comparison.methods))} {options}{seeds}"


def record_of(name: str) -> dict[str, dict[str, Summary]]:
    """Seed -> method -> summary, as far as it was run."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def run(name: str, data_dir: str | None) -> None:
    comparison, record = COMPARISONS[name], record_of(name)
    options = comparison.options | ({"data_dir": data_dir} if data_dir else {}) | {"workers": 2}
    for seed in comparison.seeds:
        done = record.setdefault(str(seed), {})
        for method in comparison.methods:
            if method in done:
                continue
            result = plures.run(method, **options, seed=seed)
            scored = [row for row in result.clients if row["personal_accuracy"] is not None]
            each = {str(row["client"]): row["personal_accuracy"] for row in scored}
            done[method] = {**result.summary, "each": each}
            if "local" in done:
                alone = np.array([done["local"]["each"][client] for client in each])
                n_test = np.array([row["n_test"] for row in scored])
                done[method]["harmed"] = int(are_harmed(np.array(list(each.values())), alone, n_test).sum())
            (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(f"{name} seed {seed} {method}: {100 * result.summary['personal']['mean']:.2f} %", flush=True)


def values(name: str, method: str, column: str) -> list[float]:
    found = [COLUMNS[column](of_seed[method]) for of_seed in record_of(name).values() if method in of_seed]
    return [value for value in found if value is not None]


def cell(found: list[float], column: str) -> str:
    if not found:
        return "-"
    if column == "harmed":
        return " / ".join(f"{value:.0f}" for value in found)
    if column == "TFLOP":
        return f"{fmean(found):.1f}"
    spread = f" ± {100 * stdev(found):.2f}" if len(found) > 1 else ""
    return f"{100 * fmean(found):.2f}{spread}"


def page_of(name: str) -> list[str]:
    comparison = COMPARISONS[name]
    if not record_of(name):
        return []
    lines = [f"## {comparison.title}", "", "```", command(comparison), "```", ""]
    lines += ["| method | " + " | ".join(comparison.columns) + " |", "|---" * (1 + len(comparison.columns)) + "|"]
    for method in comparison.methods:
        cells = [cell(values(name, method, column), column) for column in comparison.columns]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    lines.append("")
    for claim in comparison.claims:
        better = values(name, claim.better, claim.column)
        worse = values(name, claim.worse, claim.worse_column or claim.column)
        if better and worse:
            gap = 100 * (fmean(better) - fmean(worse))
            verdict = "holds" if gap > 0 else "does not hold"
            lines.append(f"- *{claim.words}*: {verdict} here, by {gap:+.2f} points.")
    if comparison.remark:
        lines += ["", comparison.remark]
    minutes = sum(s["seconds"]["total"] for of_seed in record_of(name).values() for s in of_seed.values()) / 60
    return [*lines, "", f"All runs together took {minutes:.1f} minutes, beside other work of the machine.", ""]


def write() -> None:
    lines = [
        "# Measured comparisons",
        "",
        "Every number here was written by `python docs/make_results.py write` from runs that",
        "`python docs/make_results.py run NAME --data-dir DIR` recorded in `docs/results`. Accuracies are per cent,",
        "mean and standard deviation over the seeds of the command. They are at a size that runs in minutes; the order",
        "of methods may be another one at the papers' sizes. Where an expected order does not come out, it says so.",
        "",
    ]
    for name in COMPARISONS:
        lines += page_of(name)
    (HERE / "results.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("names", nargs="*", choices=[*COMPARISONS, []], default=[])
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    if arguments.what == "run":
        for name in arguments.names or COMPARISONS:
            run(name, arguments.data_dir)
    write()


if __name__ == "__main__":
    main()
