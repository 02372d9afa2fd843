"""Seconds of a round against a plain PyTorch loop, and against other libraries, in one run.

    python benchmarks/speed.py [--repeats 5] [--only CASE] [--data-dir DIR] [--envs DIR]

Both sides train the same clients for the same number of steps on the same split. The plain loop is what one writes
first (`plain.py`): an nn.Module, torch.optim.SGD and a DataLoader, one client after another, with two threads, in a
process of its own. Ours runs with two workers of one thread each. The sides take turns, so that a slow minute of the
machine hits all: one round of the loop, and then as many of ours as take about as long, for a run has one round after
the other, and a short one after a pause is a slow one. Medians of all rounds are compared. With --envs, a folder of
environments as benchmarks/libraries/README.md makes them, so do flwr, fluke-fl and pfl. Writes
benchmarks/results/speed.csv, one line for each case, method and side.
"""

import argparse
import io
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain
import record
import torch
from rich.console import Console

from plures.cli import view
from plures.data.batches import batches_per_epoch
from plures.errors import DataError
from plures.runs import results
from plures.runs.config import make_config
from plures.runs.scene import Scene, make_scene
from plures.runs.simulation import Simulation

HERE = Path(__file__).parent
OURS, LOOP = "plures, 2 workers", "plain loop, 2 threads"
DIGITS = {"data": "digits", "model": "mlp", "clients": 100, "batch": 10, "epochs": 5}
FOUR = ["fedavg", "fedala", "ditto", "fedrod"]
CASES: dict[str, tuple[dict[str, Any], list[str], bool]] = {  # options, methods, whether all are tested every round
    "digits": (DIGITS | {"partition": "dirichlet:0.1"}, FOUR, False),
    "digits-iid": (DIGITS | {"partition": "iid"}, FOUR, False),
    "fashion-mnist": (
        {"data": "fashion-mnist", "share": 0.1, "model": "cnn4", "clients": 20, "partition": "dirichlet:0.1"},
        ["fedavg"],
        True,
    ),
    "agnews": (
        {"data": "agnews", "model": "fasttext", "clients": 20, "partition": "dirichlet:0.1"},
        ["fedavg"],
        False,
    ),
}
LIBRARIES = {  # the driver of each, and which of our methods it has
    "flower": ("run_flower.py", ["fedavg"]),
    "fluke": ("run_fluke.py", FOUR),
    "pfl": ("run_apple_pfl.py", ["fedavg"]),
}
FIELDS = ["case", "method", "side", "repeats", "steps", "median_ms", "fastest_ms", "ours_is_faster_by"]


def n_steps_of(scene: Scene, method: str) -> int:
    """Steps of a round; Ditto trains two models."""
    sizes = np.array([len(rows) for rows in scene.population.train])
    once = int(batches_per_epoch(sizes, scene.config.batch, 1).sum()) * scene.config.epochs
    return once * (2 if method == "ditto" else 1)


def measured(case: str, method: str, repeats: int, data_dir: str | None, envs: Path | None) -> list[dict[str, object]]:
    options, _, tests = CASES[case]
    options = {"batch": 10, "epochs": 1, "lr": 0.05, "workers": 2} | options
    if data_dir and options["data"] != "digits":
        options |= {"data_dir": data_dir}
    scene = make_scene(make_config({"method": method, **options}))
    ours = Simulation(scene, None, print)
    n_steps = n_steps_of(scene, method)
    spawn = multiprocessing.get_context("spawn")  # so that it has nothing of how ours handles memory and threads
    here, there = spawn.Pipe()
    loop = spawn.Process(target=play_plain_rounds, args=(there, {"method": method, **options}, tests), daemon=True)
    loop.start()

    def our_round() -> float:
        began = time.perf_counter()
        ours.play_round()
        if tests:
            ours.evaluate()
        return time.perf_counter() - began

    def plain_round() -> float:
        here.send(None)
        took, steps = here.recv()
        assert steps == n_steps, (steps, n_steps)
        return float(took)

    sides: dict[str, Callable[[], float]] = {LOOP: plain_round, OURS: our_round}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for call in sides.values():
        call()
        if method == "fedala":
            call()  # the blend is first learned in the second round, until it settles
    for _ in range(repeats):
        turn = plain_round()
        seconds[LOOP].append(turn)
        seconds[OURS] += turn_of(our_round, turn)
    if envs is not None and case != "agnews":  # they have no bags of words
        seconds |= against_libraries(scene, tests, envs, repeats, our_round, seconds[OURS])
    ours.close()
    loop.kill()
    base = statistics.median(seconds[OURS])
    return [
        dict(
            zip(
                FIELDS,
                [case, method, side, len(each), n_steps, *_ms(each), round(statistics.median(each) / base, 2)],
                strict=True,
            )
        )
        for side, each in seconds.items()
    ]


def turn_of(play: Callable[[], float], turn: float) -> list[float]:
    """The seconds of as many rounds as begin within a turn; of one at least, and of ten at most."""
    seconds = [play()]
    while sum(seconds) < turn and len(seconds) < 10:
        seconds.append(play())
    return seconds


def play_plain_rounds(there: Any, options: dict[str, Any], tests: bool) -> None:
    """In a process of its own: a round for every message, answered with its seconds and steps."""
    loop = plain.Federation(make_scene(make_config(options)))
    torch.set_num_threads(2)
    while True:
        there.recv()
        loop.n_steps = 0
        began = time.perf_counter()
        plain.ROUNDS[options["method"]](loop)
        if tests:
            plain.evaluated(loop)
        there.send((time.perf_counter() - began, loop.n_steps))


def bookkeeping(case: str, method: str, repeats: int, data_dir: str | None) -> list[dict[str, object]]:
    """What writing costs a round: its share of a checkpoint, its row of rounds.csv, and its line of the log."""
    options = {"batch": 10, "lr": 0.05, "workers": 2, "method": method} | CASES[case][0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scene = make_scene(make_config(options | ({"data_dir": data_dir} if data_dir else {})))
        run = Simulation(scene, folder, print)
        progress = view.Progresses(Console(file=io.StringIO()), method, folder / "log.txt", quiet=True)
        progress.started(run)
        rounds: list[float] = []
        written: list[float] = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            row = run.play_round()
            run.evaluate()
            rounds.append(time.perf_counter() - began)
            began = time.perf_counter()
            run.save()
            saved = time.perf_counter()
            results.append_round(folder, row)
            progress.played(run, row)
            logged = time.perf_counter()
            written.append((saved - began) / scene.config.checkpoint_every + logged - saved)
        progress.ended()
        run.close()
    of_round = statistics.median(rounds[1:])
    sides = {OURS: rounds[1:], "of it, checkpoint and log": written[1:]}
    shares = [1.0, round(statistics.median(written[1:]) / of_round, 4)]
    return [
        dict(zip(FIELDS, [f"{case} written", method, side, repeats, 0, *_ms(each), share], strict=True))
        for (side, each), share in zip(sides.items(), shares, strict=True)
    ]


def _ms(seconds: list[float]) -> tuple[float, float]:
    return round(1e3 * statistics.median(seconds), 1), round(1e3 * min(seconds), 1)


def against_libraries(
    scene: Scene, tests: bool, envs: Path, repeats: int, our_round: Callable[[], float], ours: list[float]
) -> dict[str, list[float]]:
    """Each library plays the rounds in a process of its own, twice, in turns with ours."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.npz"
        write_case(scene, tests, path)
        for _ in range(2):
            for name, (script, methods) in LIBRARIES.items():
                python = envs / name / "bin" / "python"
                if scene.config.method not in methods or not python.exists():
                    continue
                command = [str(python), str(HERE / "libraries" / script), str(path), "--rounds", str(max(repeats, 5))]
                command += ["--method", scene.config.method]
                output = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if output.returncode:
                    print(f"{name} failed: {output.stderr[-600:]}")
                    continue
                line = json.loads(output.stdout.strip().splitlines()[-1])
                found.setdefault(f"{line['library']} {line['version']}", []).extend(line["seconds"])
                ours += turn_of(our_round, statistics.median(line["seconds"]))
    return found


def write_case(scene: Scene, tests: bool, path: Path) -> None:
    """The same rows, split and settings for other libraries."""
    config, population = scene.config, scene.population
    parts: dict[str, np.ndarray] = {}
    for part, each in (("train", population.train), ("test", population.test)):
        parts[f"{part}_rows"] = np.concatenate(list(each)).astype(np.int64)
        parts[f"{part}_offsets"] = np.cumsum([0, *map(len, each)]).astype(np.int64)
    settings = {"model": config.model, "batch": config.batch, "epochs": config.epochs, "lr": config.lr}
    settings |= {"evaluate": tests, "n_classes": population.n_classes}
    np.savez(path, x=population.x.numpy(), y=population.y.numpy(), settings=np.array(json.dumps(settings)), **parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--data-dir")
    parser.add_argument("--envs", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    conditions, found = record.conditions(), []
    for case in chosen.only or CASES:
        for method in CASES[case][1]:
            try:
                lines = measured(case, method, chosen.repeats, chosen.data_dir, chosen.envs)
            except DataError as error:
                print(f"{case}: left out: {error}")
                break
            if CASES[case][2]:
                lines += [line for name in ("fedavg", "fedala") for line in bookkeeping(case, name, 5, chosen.data_dir)]
            for line in lines:
                print("  ".join(str(value) for value in line.values()), flush=True)
            found += lines
    if chosen.only is None:
        record.write("speed", f"speed.py --repeats {chosen.repeats}", conditions, found)


if __name__ == "__main__":
    main()
