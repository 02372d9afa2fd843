"""Chooses defaults that papers do not give: a small search on validation rows, on digits and a tenth of Fashion-MNIST.

    python scripts/search_defaults.py [METHOD ...] [--data-dir DIR]     search, and go on where it stopped
    python scripts/search_defaults.py --table                           print what was found

For each method, every combination of the values below is run on two data sets and two splits (two seeds each, 20
clients, 30 rounds), and scored by the mean accuracy of personal models on validation rows, a fifth of the training rows
of each client. Test rows play no part. A default is the combination with the best mean over all cases; ties within a
quarter of a point go to the value that stands first. Writes docs/results/defaults.json, a line for each run.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import plures
from plures.errors import RunFailed

HERE = Path(__file__).parent
FILE = HERE.parent / "docs" / "results" / "defaults.json"
SEEDS = (10, 11)  # beside those of the tables
ROUNDS = 30
SPLITS = ("dirichlet:0.1", "labels:4")
META_SPLITS = ("relabel:0.1", "relabel:0.5")
DATA: dict[str, dict[str, Any]] = {"digits": {}, "fashion-mnist": {"share": 0.1}}


def every(**values: list[Any]) -> list[dict[str, Any]]:
    """All combinations of the values of each setting."""
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


MIXERS = [
    *every(mixer_optimizer=["adam"], mixer_lr=[0.0005, 0.0007, 0.001, 0.002, 0.005]),
    *every(mixer_optimizer=["sgd"], mixer_lr=[0.1, 0.2, 0.3, 1.0]),
]
# Method -> splits, and the settings that are tried.
SPACES: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    "pfedhn": (SPLITS, every(hyper_lr=[0.01, 0.003, 0.03, 0.1])),
    "plgu-ghn": (SPLITS, every(hyper_lr=[0.01, 0.003, 0.03, 0.1])),
    "perfedavg": (SPLITS, every(alpha=[0.01, 0.001, 0.03, 0.05, 0.1])),
    "mtl": (SPLITS, every(strength=[0.001, 0.0001, 0.003, 0.01, 0.03, 0.1, 0.3])),
    "apple": (SPLITS, every(weights_lr=[0.001, 0.003, 0.01], one_hot=[False, True], mu=[0.1, 0.01])),
    "afml": (META_SPLITS, every(inner_lr=[0.01, 0.03, 0.1, 0.3], server_lr=[0.003, 0.01])),
    "fedmeta": (META_SPLITS, every(inner_lr=[0.01, 0.03, 0.1, 0.3], server_lr=[0.003, 0.01])),
    "fedpermeta": (META_SPLITS, every(inner_lr=[0.01, 0.03, 0.1, 0.3])),
    # Clients that are alike must gain, too: their mixtures are not to end as their own models.
    "pfedla": ((*SPLITS, "iid"), MIXERS),
    "heurpfedla": ((*SPLITS, "iid"), MIXERS),
}


def cases(method: str) -> list[tuple[dict[str, Any], str, str, int]]:
    """Settings, data set, split and seed of every run."""
    splits, grid = SPACES[method]
    return [(s, data, split, seed) for s in grid for data in DATA for split in splits for seed in SEEDS]


def name_of(method: str, settings: dict[str, Any], data: str, split: str, seed: int) -> str:
    chosen = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{method}:{chosen} {data} {split} {seed}"


def score(method: str, settings: dict[str, Any], data: str, split: str, seed: int, data_dir: str | None) -> float:
    """Accuracy on validation rows at the end; 0 for a run that diverges."""
    options = DATA[data] | ({"data_dir": data_dir} if data_dir and data != "digits" else {})
    try:
        found = plures.run(
            method,
            settings=settings,
            data=data,
            partition=split,
            seed=seed,
            rounds=ROUNDS,
            validation=0.2,
            eval_every=10,
            pool_rows=0,
            workers=2,
            **options,
        )
    except RunFailed:
        return 0.0
    return float(found.rounds[-1]["validation_mean"])


def read() -> dict[str, float]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def table(known: dict[str, float]) -> list[str]:
    """A line for each combination of each method: its mean over all cases, and whether it is the best."""
    lines = []
    for method, (_, grid) in SPACES.items():
        means: dict[str, float] = {}
        for settings in grid:
            found = [known.get(name_of(method, s, *rest)) for s, *rest in cases(method) if s == settings]
            if found and None not in found:
                chosen = ",".join(f"{key}={value}" for key, value in settings.items())
                means[chosen] = statistics.fmean(x for x in found if x is not None)
        best = next((c for c, m in means.items() if m > max(means.values()) - 0.0025), None)
        lines += [f"{method:12} {c:45} {100 * m:6.2f}{'  <- default' if c == best else ''}" for c, m in means.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--data-dir")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    known = read()
    if not given.table:
        for method in given.methods or SPACES:
            for settings, data, split, seed in cases(method):
                name = name_of(method, settings, data, split, seed)
                if name not in known:
                    known[name] = score(method, settings, data, split, seed, given.data_dir)
                    FILE.write_text(json.dumps(known, indent=1) + "\n")
                    print(f"{name}: {100 * known[name]:.2f}", file=sys.stderr)
    print("\n".join(table(known)))


if __name__ == "__main__":
    main()
