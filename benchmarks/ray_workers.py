"""Time of a round with one Ray worker and with two, beside the same work without Ray.

    python benchmarks/ray_workers.py [--repeats 7]

The sides take turns, so that a slow minute of the machine hits all of them; medians are compared.
Writes benchmarks/results/ray_workers.csv, and the table in docs/ray.md.
"""

import argparse
import re
import statistics
import time
from pathlib import Path

import record
import torch

from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from plures.simulate import ray

ROOT = Path(__file__).parent.parent
CASES = {
    "small model": {"model": "mlp", "clients": 100, "epochs": 5},
    "larger model": {"model": "resnet8", "clients": 20, "steps": 4},
}
SIDES = {
    "one process": {"executor": "vectorised", "workers": 1},
    "2 forked workers": {"executor": "vectorised", "workers": 2},
    "ray, 1 worker": {"executor": "ray", "workers": 1},
    "ray, 2 workers": {"executor": "ray", "workers": 2},
}
FIELDS = ["case", "model", "clients", "side", "repeats", "median_ms", "fastest_ms", "median_of_one_ray_worker_over_it"]


def measured(case: str, repeats: int) -> list[dict[str, object]]:
    """Milliseconds of a round, of every side."""
    scene = make_scene(make_config({"method": "fedavg", "data": "digits", "batch": 10, **CASES[case]}))
    forked_first = sorted(SIDES, key=lambda side: SIDES[side]["executor"] == "ray")  # fork before Ray has threads
    runs, seconds = {}, {side: [] for side in SIDES}

    def start(side: str) -> None:
        runs[side] = Simulation(scene._replace(config=scene.config.model_copy(update=SIDES[side])), None, print)

    for side in forked_first[:2]:
        start(side)
    with ray.cluster(None, 2):
        for side in forked_first[2:]:
            start(side)
        for run in runs.values():
            run.play_round()
        for _ in range(repeats):
            for side, run in runs.items():
                began = time.perf_counter()
                run.play_round()
                seconds[side].append(time.perf_counter() - began)
        assert len({run.state.digest() for run in runs.values()}) == 1
        for run in runs.values():
            run.close()
    base = statistics.median(seconds["ray, 1 worker"])
    return [
        {
            "case": case,
            "model": scene.config.model,
            "clients": scene.config.clients,
            "side": side,
            "repeats": repeats,
            "median_ms": f"{1000 * statistics.median(values):.1f}",
            "fastest_ms": f"{1000 * min(values):.1f}",
            "median_of_one_ray_worker_over_it": f"{base / statistics.median(values):.2f}",
        }
        for side, values in seconds.items()
    ]


def table(rows: list[dict[str, object]]) -> str:
    titles = ["model", "clients", "who", "median ms per round", "fastest ms"]
    titles.append("times as fast as one Ray worker (medians)")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [row[field] for field in FIELDS if field not in ("case", "repeats")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    conditions = record.conditions()
    rows = [row for case in CASES for row in measured(case, repeats)]
    record.write("ray_workers", f"ray_workers.py --repeats {repeats}", conditions, rows)
    page = ROOT / "docs" / "ray.md"
    marks = re.compile(r"(<!-- workers -->\n).*?(<!-- end -->)", re.DOTALL)
    text = f"{repeats} rounds of every side; {conditions}.\n\n{table(rows)}"
    page.write_text(marks.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page.read_text("utf-8")), "utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
