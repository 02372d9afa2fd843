"""Seconds and memory of a round as the population, the cohort, the model and the number of steps grow.

    python benchmarks/scale.py [--repeats 7]

Clients have 18 rows the size of a digit each, drawn at random, and private state (Ditto's own model, FedALA's
model and blend). Every line is a process of its own. State beyond --memory-limit-mb is kept in a file, as a user
sets it; `anonymous_mb` is what the processes hold of memory that is not backed by a file, data included. Writes
benchmarks/results/scale.csv.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from plures.runs.state import RunState
from plures.simulate.client_store import table_bytes

ROWS = 18  # of a client: as many as digits has for 100
BASE = {"population": 1000, "cohort": 100, "hidden": 64, "steps": 10, "method": "ditto"}
LINES: list[dict[str, Any]] = [
    *[BASE | {"population": n, "method": method} for method in ("ditto", "fedala") for n in (100, 1000, 10000, 100000)],
    *[BASE | {"cohort": n} for n in (10, 300, 1000)],
    *[BASE | {"hidden": n} for n in (256, 1024)],
    *[BASE | {"steps": n} for n in (1, 100)],
]


def make_data(path: Path, population: int) -> None:
    rng = np.random.default_rng(0)
    n = population * ROWS
    y = rng.integers(0, 10, n)
    x = rng.normal(size=(n, 64)).astype(np.float32)
    x[np.arange(n), y] += 2  # something to learn
    np.savez(path, x=x, y=y, client=np.repeat(np.arange(population), ROWS))


def measured(line: dict[str, Any], repeats: int, limit_mb: int) -> dict[str, Any]:
    """One line, in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "clients.npz", line["population"])
        options = {
            "data": str(Path(folder) / "clients.npz"),
            "partition": "natural",
            "model": "mlp" if line["hidden"] == 64 else f"{Path(__file__).stem}:Wide{line['hidden']}",
            "participation": line["cohort"] / line["population"],
            "steps": line["steps"],
            "batch": 10,
            "workers": 2,
            "rounds": 1000,
            "memory_limit_mb": limit_mb,
        }
        began = time.perf_counter()
        scene = make_scene(make_config({"method": line["method"], **options}))
        run = Simulation(scene, Path(folder) / "run", print)
        run.play_round()
        start = time.perf_counter() - began
        if line["method"] == "fedala":
            settle(run.state)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            run.play_round()
            seconds.append(time.perf_counter() - began)
        found = {
            "repeats": repeats,
            "start_s": round(start, 1),
            "median_ms": round(1e3 * statistics.median(seconds), 1),
            "fastest_ms": round(1e3 * min(seconds), 1),
            "state_mb": round(table_bytes(run.state.store.initial, line["population"]) / 1e6, 1),
            "anonymous_mb": round(_anonymous_mb()),
        }
        run.close()
    return line | found


def settle(state: RunState) -> None:
    """Let all clients have taken part five times: who is drawn for the second time learns its blend for long.

    Of a small population more clients of a round would do so than of a large one.
    """
    for ids in torch.arange(state.store.n_clients).split(1000):
        clients = state.store.rows(ids)
        state.store.put(ids, clients._replace(rounds=torch.full_like(clients.rounds, 5)))


class _Wide(torch.nn.Module):
    hidden_size = 0

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(shape[0], self.hidden_size)
        self.head = torch.nn.Linear(self.hidden_size, n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x)))


class Wide256(_Wide):
    hidden_size = 256


class Wide1024(_Wide):
    hidden_size = 1024


def _anonymous_mb() -> float:
    """Of this process and its workers; what they share is counted once."""
    own = os.getpid()
    children = subprocess.run(["pgrep", "-P", str(own)], capture_output=True, text=True).stdout.split()
    total = 0
    for process in [str(own), *children]:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(row.split()[1]) for row in text.splitlines() if row.startswith("Pss_Anon"))
    return total / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-limit-mb", type=int, default=256)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measured(json.loads(chosen.one), chosen.repeats, chosen.memory_limit_mb)))
        return
    conditions, found = record.conditions(), []
    for line in LINES:
        words = ["--repeats", str(chosen.repeats), "--memory-limit-mb", str(chosen.memory_limit_mb)]
        one = [sys.executable, __file__, *words, "--one", json.dumps(line)]
        output = subprocess.run(one, capture_output=True, text=True, cwd=Path(__file__).parent)
        if output.returncode:
            sys.exit(output.stderr)
        found.append(json.loads(output.stdout.strip().splitlines()[-1]))
        print("  ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    command = f"scale.py --repeats {chosen.repeats} --memory-limit-mb {chosen.memory_limit_mb}"
    record.write("scale", command, conditions, found)


if __name__ == "__main__":
    main()
