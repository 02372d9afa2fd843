"""Pretrained models with frozen bodies and adapters beside models from scratch: the tables of docs/pretrained.md.

    python docs/make_pretrained.py run [news | cifar10] --data-dir DIR     resumes where it was stopped
    python docs/make_pretrained.py write

Each line is tuned first, with the same number of trials on validation rows of another seed (`plures tune`: learning
rate and the method's own settings). Records are in docs/results/pretrained.json. Every run is of one process with one
thread.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import plures
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.simulate import features

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "results" / "pretrained.json", HERE / "pretrained.md"
BEGIN, END = "<!-- {} begins -->", "<!-- {} ends -->"
TRIALS, TUNED_ON, SCORED_ON = 8, 1, 0  # and the seeds


class Line(NamedTuple):
    """A run of a table."""

    title: str
    method: str
    options: dict[str, Any]


FROZEN_TEXT = {"model": "minilm", "freeze": "body", "lr": 0.1}
FROZEN_IMAGE = {"model": "efficientnet-lite0", "freeze": "body", "lr": 0.01}
PERSONAL = "fedavg+keep:private=*.adapter"
TABLES: dict[str, tuple[dict[str, Any], list[Line]]] = {
    "news": (
        {"data": "agnews", "share": 0.1, "clients": 20, "partition": "dirichlet:0.1", "rounds": 20, "eval_every": 0},
        [
            Line("`fasttext` from scratch, Local", "local", {"model": "fasttext", "lr": 0.5}),
            Line("`fasttext` from scratch, FedAvg", "fedavg", {"model": "fasttext", "lr": 0.5}),
            Line("`fasttext` from scratch, FedRep", "fedrep", {"model": "fasttext", "lr": 0.5}),
            Line("`minilm`, frozen body, Local", "local", FROZEN_TEXT),
            Line("`minilm`, frozen body, FedAvg", "fedavg", FROZEN_TEXT),
            Line("`minilm`, frozen body, FedRep", "fedrep", FROZEN_TEXT),
            Line("`minilm`, frozen body, Ditto", "ditto", FROZEN_TEXT),
            Line(
                "`minilm`, personal LoRA in the last layer, shared head",
                PERSONAL,
                {"model": "minilm", "adapter": "lora:rank=4,layers=*layer.5.attention*", "lr": 0.1},
            ),
        ],
    ),
    "cifar10": (
        {"data": "cifar10", "share": 0.05, "clients": 20, "partition": "dirichlet:0.1", "rounds": 20, "eval_every": 0},
        [
            Line("`resnet8` from scratch, Local", "local", {"model": "resnet8"}),
            Line("`resnet8` from scratch, FedAvg", "fedavg", {"model": "resnet8"}),
            Line("`resnet8` from scratch, FedPer: personal heads", "fedper", {"model": "resnet8"}),
            Line("`efficientnet-lite0`, frozen body, Local: personal heads", "local", FROZEN_IMAGE),
            Line("`efficientnet-lite0`, frozen body, FedAvg", "fedavg", FROZEN_IMAGE),
            Line("`efficientnet-lite0`, frozen body, Ditto", "ditto", FROZEN_IMAGE),
            Line(
                "`efficientnet-lite0`, personal LoRA in the last layer, shared head",
                PERSONAL,
                {"model": "efficientnet-lite0", "adapter": "lora:rank=4,layers=top.conv", "lr": 0.01},
            ),
        ],
    ),
}


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}


def run(name: str, data_dir: str) -> None:
    common, lines = TABLES[name]
    record = read_record()
    done = record.setdefault(name, {})
    for line in lines:
        if line.title in done:
            continue
        options = common | line.options | {"seed": SCORED_ON}
        spec = tuned(line.method, options | {"data_dir": data_dir})
        made = of_features(spec, options | {"data_dir": data_dir})
        began, cpu = time.perf_counter(), time.process_time()
        summary = plures.run(spec, **options, data_dir=data_dir).summary
        done[line.title] = {
            "command": command_of(spec, options),
            "mean": summary["personal"]["mean"],
            "worst5": summary["personal"]["worst5"],
            "bytes": summary["bytes"]["up"] + summary["bytes"]["down"],
            "rounds_seconds": summary["seconds"]["total"],
            "seconds": time.perf_counter() - began,
            "processor_seconds": time.process_time() - cpu,
            "features": made,
            "load": os.getloadavg()[0],
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        print(line.title, done[line.title], flush=True)


def tuned(method: str, options: dict[str, Any]) -> str:
    """The method with what was found for it."""
    rest = {key: value for key, value in options.items() if key not in ("data", "model", "seed")}
    found = plures.tune(
        [method],
        trials=TRIALS,
        search=("lr",),
        seeds=(TUNED_ON,),
        data=options["data"],
        model=options["model"],
        options=rest,
    )
    return found[method].spec


def of_features(method: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Compute the features of a run before it: what that took, and how many rows there are."""
    scene = make_scene(make_config({"method": method} | options))
    if not scene.has_features:
        return None
    cpu = time.process_time()
    found = scene.features()
    assert found is not None
    table = {"rows": len(found.rows), "bytes": found.table.nbytes, "seconds": found.seconds}
    return table | {"processor_seconds": time.process_time() - cpu, "block": features.BLOCK}


def command_of(method: str, options: dict[str, Any]) -> str:
    quote = {key: f"'{value}'" if "*" in str(value) else str(value) for key, value in options.items()}
    given = [(key, value) for key, value in quote.items() if not (key == "lr" and "lr=" in method)]
    words = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given)
    return f"plures run {repr(method) if '*' in method else method} {words} --workers 1"


def in_megabytes(n: float) -> str:
    return f"{n / 1e6:.3g} MB" if n else "none"


def table_of(name: str) -> list[str]:
    done = read_record().get(name, {})
    rows = ["| model and method | accuracy | worst 5 % | bytes sent in all | seconds | processor seconds |"]
    rows += ["|---|---|---|---|---|---|"]
    for title, one in done.items():
        cells = [f"{100 * one['mean']:.2f}", f"{100 * one['worst5']:.2f}", in_megabytes(one["bytes"])]
        cells += [f"{one['seconds']:.1f}", f"{one['processor_seconds']:.1f}"]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    made = [(title, one["features"]) for title, one in done.items() if one["features"] and one["features"]["seconds"]]
    said = []
    for title, found in dict((each[1]["bytes"], each) for each in reversed(made)).values():
        said.append(
            f"Before {title} the features of {found['rows']:,} rows ({in_megabytes(found['bytes'])}) were computed, in "
            f"{found['processor_seconds']:.1f} processor seconds ({found['seconds']:.1f} s)."
        )
    loads = [one["load"] for one in done.values()]
    said.append(
        "Accuracy is the mean over clients of their personal models, on one seed; each line is tuned with "
        f"{TRIALS} trials on validation rows of another. The machine has {os.cpu_count()} cores and was "
        f"busy with other work (load {min(loads):.0f} to {max(loads):.0f}), so seconds say little; processor seconds "
        "of one run may be compared with those of another. Both are without the features."
    )
    return [*rows, "", *said, "", "```", *[one["command"] for one in done.values()], "```"]


def write() -> None:
    text = PAGE.read_text("utf-8")
    for name in TABLES:
        if read_record().get(name):
            begin, end = BEGIN.format(name), END.format(name)
            before, after = text.partition(begin)[0], text.partition(end)[2]
            text = before + "\n".join([begin, "", *table_of(name), "", end]) + after
    PAGE.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "write"))
    parser.add_argument("tables", nargs="*", choices=(*TABLES, []))
    parser.add_argument("--data-dir", default=os.environ.get("PLURES_DATA", ""))
    given = parser.parse_args()
    if given.command == "run":
        for name in given.tables or TABLES:
            run(name, given.data_dir)
    else:
        write()


if __name__ == "__main__":
    main()
