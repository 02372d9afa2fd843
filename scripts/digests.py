"""Does the code still compute the same, bit for bit? Digests of many short runs, written once and checked later.

    python scripts/digests.py write digests.json     before a change
    python scripts/digests.py check digests.json     after it, on the same machine: exit code 1 if any differs

For each case: the digest of the final state, and a hash of the numbers that the run reports (accuracies, losses,
bytes, FLOPs), so that scoring, new clients and attacks are covered as well. A digest depends on the kernels that
torch chooses, so a file is good for the machine, and the torch, that it was written with.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plures
from plures.methods import METHODS

SHORT: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.1", "clients": 12, "rounds": 3, "batch": 10}
# What is compared, by name: a later version may add other numbers, and seconds are never the same.
SUMMARY = ("bytes", "flops", "generic", "new_clients", "personal", "personal_epochs", "refused_updates", "to_goal")
ROUND = ("round", "loss", "bytes_down", "bytes_up", "refused", "flops", "update_norm", "update_variance")
SCORES = ("personal_mean", "personal_pooled", "personal_worst5", "generic_accuracy", "validation_mean")


def write_data(folder: Path) -> None:
    """Three small data sets, of which nothing is random but for a seed: images, words, characters."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 4, 240)
    images = rng.normal(0, 1, (240, 3, 32, 32)).astype(np.float32) + labels[:, None, None, None] / 4
    np.savez(folder / "images.npz", x=images, y=labels)
    words = rng.integers(2, 60, (240, 20)) + labels[:, None]
    words[rng.random(words.shape) < 0.4] = 0
    np.savez(folder / "words.npz", x=words.astype(np.int64), y=labels)
    (folder / "speakers").mkdir()
    for name, letters in (("ann", "abc "), ("bob", "bcd "), ("cid", "cde "), ("dan", "ade ")):
        spoken = "".join(rng.choice(list(letters), 600))
        (folder / "speakers" / f"{name}.txt").write_text(spoken, encoding="utf-8")


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name of a case -> what differs from SHORT."""
    images = {"data": str(folder / "images.npz"), "clients": 4, "rounds": 2, "lr": 0.01}
    words = {"data": str(folder / "words.npz"), "clients": 6, "model": "fasttext", "lr": 0.1}
    speech = {"data": str(folder / "speakers"), "partition": "natural", "clients": None, "model": "charlstm"}
    found: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS}
    addons = ("ditto+ala", "fedavg+sam", "fedrod+prox", "fedavg+scaffold", "fedrod+feddyn", "fedavg+brm", "fedprox+ft")
    found |= {name: {"method": name} for name in (*addons, "fedavg+c:c_epochs=2", "fedrep+ala", "fedavg+ala+ft")}
    variants = ("fedrod:head=hyper", "fedrod:loss=meta-bsm", "perfedavg:order=exact", "fedpermeta:share_head=true")
    found |= {name: {"method": name} for name in (*variants, "pfedhn:private=head", "afml:latent=unit")}
    for method in ("fedavg", "fedbn", "fedala", "scaffold", "afml", "pfedla"):
        found[f"{method}, BatchNorm"] = {"method": method, "model": "resnet8", **images}
        found[f"{method}, words"] = {"method": method, **words}
    for method in ("fedavg", "fedala", "ditto", "fedrep"):
        found[f"{method}, recurrent"] = {"method": method, **speech, "rounds": 2}
    for method in ("fedavg", "fedala", "fedrod", "ditto", "pfedhn"):
        found[f"{method}, participation"] = {"method": method, "participation": 0.3, "rounds": 5}
        found[f"{method}, Adam"] = {"method": method, "optimizer": "adam", "lr": 0.003}
        found[f"{method}, one by one"] = {"method": method, "executor": "one_by_one", "rounds": 2}
    for method in ("fedavg", "fedala", "fedrod", "ditto", "fedrep"):
        found[f"{method}, new clients"] = {"method": method, "new_clients": 3, "new_epochs": 2}
    for model in ("cnn4", "rod-cnn", "hncnn", "hncnn-bn", "resnet8-gn"):
        found[f"fedala, {model}"] = {"method": "fedala", "model": model, **images}
        found[f"ditto, {model}"] = {"method": "ditto", "model": model, **images}
    for attack in ("labels", "random", "replace"):
        found[f"fedavg, attack {attack}"] = {"method": "fedavg", "attack": attack}
        found[f"ditto, attack {attack}"] = {"method": "ditto", "attack": attack}
    for options in ({"momentum": 0.9}, {"weight_decay": 1e-3}, {"lr_decay": 0.9}, {"steps": 7}, {"epochs": 3}):
        found[f"fedrod, {next(iter(options))}"] = {"method": "fedrod", **options}
    for options in ({"workers": 2}, {"validation": 0.2}, {"unchosen": "refresh"}, {"personal_epochs": 2}):
        found[f"fedala, {next(iter(options))}"] = {"method": "fedala", "participation": 0.5, **options}
    for partition in (
        "iid",
        "dirichlet-class:0.3",
        "pathological:2",
        "labels:4",
        "main:2",
        "relabel:0.5",
        "longtail:20",
    ):
        found[f"fedavg, {partition}"] = {"method": "fedavg", "partition": partition}
    return found


def numbers_in(value: Any) -> Any:
    """The same without words, which may be put better one day."""
    if isinstance(value, dict):
        return {key: numbers_in(inner) for key, inner in value.items()}
    return None if isinstance(value, str) else value


def result_of(options: dict[str, Any]) -> dict[str, str]:
    """Digest of the final state, and hash of the reported numbers."""
    merged = {key: value for key, value in (SHORT | options).items() if value is not None}
    result = plures.run(merged.pop("method"), **merged)
    summary = {key: numbers_in(result.summary.get(key)) for key in SUMMARY}
    summary["bytes"] = [summary["bytes"][way] for way in ("down", "up")]  # the rest is by names of parts
    rounds = [{key: row[key] for key in (*ROUND, *SCORES)} for row in result.rounds]
    clients = [{key: row[key] for key in ("client", "n_train", "personal_accuracy")} for row in result.clients]
    numbers = json.dumps([summary, rounds, clients], sort_keys=True)
    return {"digest": result.summary["digest"], "numbers": hashlib.sha256(numbers.encode()).hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    known = json.loads(arguments.file.read_text("utf-8")) if arguments.what == "check" else {}
    here = {"torch": torch.__version__, "threads": 1}
    if known and known["machine"] != here:
        print(f"the file is of {known['machine']}, this is {here}: digests may differ for that reason alone")
    found: dict[str, dict[str, str]] = {}
    differ: list[str] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name, options in cases(Path(folder)).items():
            if arguments.only not in name:
                continue
            found[name] = result_of(options)
            if arguments.what == "check":
                expected = known["cases"].get(name)
                parts = (
                    ["not in the file"] if expected is None else [k for k in expected if expected[k] != found[name][k]]
                )
                print(f"{name:32} {'equal' if not parts else 'DIFFERS: ' + ', '.join(parts)}", flush=True)
                differ += [name] if parts else []
            else:
                print(f"{name:32} {found[name]['digest'][:16]}", flush=True)
    seconds = time.perf_counter() - began
    if arguments.what == "write":
        content = {"machine": here, "cases": found}
        arguments.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} digests written in {seconds:.0f} s: {arguments.file}")
        return 0
    print(f"{len(found) - len(differ)} of {len(found)} are equal ({seconds:.0f} s)")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
