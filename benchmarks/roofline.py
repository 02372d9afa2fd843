"""How much of the machine's arithmetic training uses: GFLOP/s of a round over those of matrix products.

    python benchmarks/roofline.py [--repeats 5] [--data-dir DIR]

Two workers of one thread each train; two processes of one thread each multiply square matrices, at the same
moment, in turns with the training. What is counted is what the model needs, client by client (matrix products
and convolutions), so that work which stacking adds does not count. Then one process does the same under
torch's profiler, which tells what kernels the time goes to. Writes benchmarks/results/roofline.csv and kernels.csv.
"""

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import record
import torch
from torch.profiler import ProfilerActivity, profile

from plures.errors import DataError
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation

EVEN = {"data": "fashion-mnist", "partition": "iid", "clients": 20, "workers": 2, "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "rod-cnn, batch 40": EVEN | {"model": "rod-cnn", "batch": 40, "share": 0.1},
    "cnn4, batch 10": EVEN | {"model": "cnn4", "batch": 10, "share": 0.1},
    "cnn4, batch 10, uneven": EVEN | {"model": "cnn4", "batch": 10, "share": 0.1, "partition": "dirichlet:0.1"},
    "hncnn, batch 32": EVEN | {"model": "hncnn", "batch": 32, "share": 0.1},
    "digits mlp, batch 10": {"data": "digits", "model": "mlp", "clients": 100, "batch": 10, "epochs": 5, "workers": 2},
}
SIDE, PRODUCTS = 1024, 12  # of a matrix, and how many in a measurement
FIELDS = ["case", "repeats", "gflop_a_round", "ms_a_round", "gflops", "matmul_gflops", "share"]


def _multiply(go: Any, done: Any) -> None:
    """A process that multiplies when it is told to, and says how long it took."""
    torch.set_num_threads(1)
    a, b, out = (torch.randn(SIDE, SIDE) for _ in range(3))
    for _ in range(3):
        torch.mm(a, b, out=out)
    while go.recv():
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)
        done.send(time.perf_counter() - began)


class Matmul:
    """The rate of two processes together."""

    def __init__(self) -> None:
        self.pipes, self.processes = [], []
        for _ in range(2):
            (go_read, go), (done, done_write) = multiprocessing.Pipe(False), multiprocessing.Pipe(False)
            process = multiprocessing.get_context("fork").Process(target=_multiply, args=(go_read, done_write))
            process.start()
            self.pipes.append((go, done))
            self.processes.append(process)

    def gflops(self) -> float:
        for go, _ in self.pipes:
            go.send(True)
        each = [done.recv() for _, done in self.pipes]
        return sum(2 * SIDE**3 * PRODUCTS / seconds for seconds in each) / 1e9

    def close(self) -> None:
        for go, _ in self.pipes:
            go.send(False)
        for process in self.processes:
            process.join()


def measured(name: str, repeats: int, data_dir: str | None) -> dict[str, object]:
    options = CASES[name] | ({"data_dir": data_dir} if data_dir and CASES[name]["data"] != "digits" else {})
    run = Simulation(make_scene(make_config({"method": "fedavg", **options})), None, print)
    matmul = Matmul()
    run.play_round()
    seconds, rates, row = [], [matmul.gflops()], None
    for _ in range(repeats):
        row = run.play_round()
        seconds.append(row.train_seconds)
        rates.append(matmul.gflops())
    matmul.close()
    run.close()
    assert row is not None
    middle, best = statistics.median(seconds), statistics.median(rates)
    gflops = row.flops / middle / 1e9
    numbers = [row.flops / 1e9, middle * 1e3, gflops, best, gflops / best]
    return dict(zip(FIELDS, [name, repeats, *(round(x, 3) for x in numbers)], strict=True))


def kernels(name: str, data_dir: str | None) -> list[dict[str, object]]:
    """What share of the time of training goes to which kernels, of those with two per cent or more."""
    options = CASES[name] | {"workers": 1, "data_dir": data_dir}
    run = Simulation(make_scene(make_config({"method": "fedavg", **options})), None, print)
    run.play_round()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run.play_round()
    run.close()
    events = found.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares = sorted(((event.self_cpu_time_total / total, event.key) for event in events), reverse=True)
    return [{"case": name, "kernel": key, "share": round(share, 3)} for share, key in shares if share >= 0.02]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data-dir")
    parser.add_argument("--only", choices=list(CASES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    conditions, found = record.conditions(), []
    for name in [chosen.only] if chosen.only else CASES:
        try:
            found.append(measured(name, chosen.repeats, chosen.data_dir))
            print("  ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
        except DataError as error:
            print(f"{name}: left out: {error}")
    if chosen.only is None:
        command = f"roofline.py --repeats {chosen.repeats}"
        record.write("roofline", command, conditions, found)
        names = [name for name in ("rod-cnn, batch 40", "cnn4, batch 10") if name in {line["case"] for line in found}]
        record.write("kernels", command, conditions, [row for name in names for row in kernels(name, chosen.data_dir)])


if __name__ == "__main__":
    main()
