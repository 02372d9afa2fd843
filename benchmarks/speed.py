"""Seconds of a round against a plain PyTorch loop, against other libraries, or against another version of Plures.

    python benchmarks/speed.py [--repeats 5] [--only CASE] [--data-dir DIR] [--envs DIR] [--package CHECKOUT]
    python benchmarks/speed.py --against CHECKOUT [--repeats 5] [--only CASE] [--data-dir DIR]

Both sides train the same clients for the same number of steps on the same split. The plain loop is what one writes
first (`plain.py`): an nn.Module, torch.optim.SGD and a DataLoader, one client after another, with two threads, in a
process of its own. Ours runs with two workers of one thread each. The sides take turns, so that a slow minute of the
machine hits all: one round of the loop, and then as many of ours as take about as long, for a run has one round after
the other, and a short one after a pause is a slow one. Medians of all rounds are compared. With --envs, a folder of
environments as benchmarks/libraries/README.md makes them, so do flwr, fluke-fl and pfl. Writes
benchmarks/results/speed.csv, one line for each case, method and side.

With --package the Plures of another checkout is measured instead, as version 0.1.0. With --against two are compared:
the other checkout and this one play the same case in a process each, turn by turn (old, new, old, new, ...). Each turn
of the one is compared with the next turn of the other; the median of these ratios, and the lowest and the highest, are
written to benchmarks/results/before_after.csv.
"""

import argparse
import io
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import package
import plain
import record
import torch
from package import DataError, Scene, Simulation, make_config, make_scene
from rich.console import Console

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
TURN_SECONDS, MOST_ROUNDS = 1.0, 50  # in a turn of a version of Plures that is compared with another


def n_steps_of(scene: Scene, method: str) -> int:
    """Steps of a round; Ditto trains two models."""
    sizes = np.array([len(rows) for rows in scene.population.train])
    once = int(package.batches_per_epoch(sizes, scene.config.batch, 1).sum()) * scene.config.epochs
    return once * (2 if method == "ditto" else 1)


def options_of(case: str, method: str, data_dir: str | None) -> dict[str, Any]:
    options = {"method": method, "batch": 10, "epochs": 1, "lr": 0.05, "workers": 2} | CASES[case][0]
    return options | ({"data_dir": data_dir} if data_dir and options["data"] != "digits" else {})


def rounds_of(ours: Simulation, tests: bool) -> Callable[[], float]:
    """A function that plays a round and returns its seconds."""

    torch.set_num_threads(1)  # as in every run: a second thread of this process would take time from its workers

    def our_round() -> float:
        began = time.perf_counter()
        ours.play_round()
        if tests:
            ours.evaluate()
        return time.perf_counter() - began

    return our_round


def measured(case: str, method: str, repeats: int, data_dir: str | None, envs: Path | None) -> list[dict[str, object]]:
    options, tests = options_of(case, method, data_dir), CASES[case][2]
    scene = make_scene(make_config(options))
    ours = Simulation(scene, None, print)
    our_round = rounds_of(ours, tests)
    n_steps = n_steps_of(scene, method)
    spawn = multiprocessing.get_context("spawn")  # so that it has nothing of how ours handles memory and threads
    here, there = spawn.Pipe()
    loop = spawn.Process(target=play_plain_rounds, args=(there, options, tests), daemon=True)
    loop.start()

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


def turn_of(play: Callable[[], float], turn: float, most: int = 10) -> list[float]:
    """The seconds of as many rounds as begin within a turn; of one at least, and of `most` at most."""
    seconds = [play()]
    while sum(seconds) < turn and len(seconds) < most:
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scene = make_scene(make_config(options_of(case, method, data_dir)))
        run = Simulation(scene, folder, print)
        state = package.state_of(run)
        progress = package.ProgressReport(Console(file=io.StringIO()), method, folder / "log.txt", quiet=True)
        progress.started(state)
        rounds: list[float] = []
        written: list[float] = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            row = run.play_round()
            run.evaluate()
            rounds.append(time.perf_counter() - began)
            began = time.perf_counter()
            package.save(run)
            saved = time.perf_counter()
            package.append_round(folder, row)
            progress.played(state, row)
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


class Version:
    """A checkout of Plures that plays rounds of a case, in a process of its own."""

    def __init__(self, checkout: Path, case: str, method: str, data_dir: str | None) -> None:
        command = [sys.executable, __file__, "--package", str(checkout), "--serve", case, method]
        command += ["--data-dir", data_dir] if data_dir else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found = self.read()  # when it has started
        assert found == str(checkout.resolve()), f"{found} is not {checkout}"

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the process of a version ended; see above")
        return json.loads(line)

    def play(self, seconds: float) -> list[float]:
        """The seconds of each round of a turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.communicate()  # the end of its input is the end of the process


def serve(case: str, method: str, data_dir: str | None) -> None:
    """The process of a version: a turn of rounds for every line that is read, answered with their seconds."""
    scene = make_scene(make_config(options_of(case, method, data_dir)))
    run = Simulation(scene, None, lambda line: print(line, file=sys.stderr))
    play = rounds_of(run, CASES[case][2])
    for _ in range(2 if method == "fedala" else 1):
        play()
    print(json.dumps(package.checkout()), flush=True)
    for line in sys.stdin:
        print(json.dumps(turn_of(play, float(line), MOST_ROUNDS)), flush=True)
    run.close()


def compared(other: Path, case: str, method: str, repeats: int, data_dir: str | None) -> dict[str, object]:
    """The other checkout and this one, turn by turn."""
    old, new = (Version(checkout, case, method, data_dir) for checkout in (other, HERE.parent))
    turns = [(old.play(TURN_SECONDS), new.play(TURN_SECONDS)) for _ in range(repeats)]
    old.close()
    new.close()
    ratios = [statistics.median(before) / statistics.median(after) for before, after in turns]
    before, after = ([x for turn in turns for x in turn[side]] for side in (0, 1))
    return {
        "case": case,
        "method": method,
        "turns": repeats,
        "old_ms": _ms(before)[0],
        "new_ms": _ms(after)[0],
        "new_is_faster_by": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[package.options])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--data-dir")
    parser.add_argument("--envs", type=Path)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare another checkout with this one")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.serve:
        return serve(*chosen.serve, chosen.data_dir)
    conditions, found = record.conditions(), []
    for case in chosen.only or CASES:
        for method in CASES[case][1]:
            try:
                make_scene(make_config(options_of(case, method, chosen.data_dir)))
            except DataError as error:
                print(f"{case}: left out: {error}")
                break
            if chosen.against is not None:
                lines = [compared(chosen.against, case, method, chosen.repeats, chosen.data_dir)]
            else:
                lines = measured(case, method, chosen.repeats, chosen.data_dir, chosen.envs)
                if CASES[case][2]:
                    for name in ("fedavg", "fedala"):
                        lines += bookkeeping(case, name, 5, chosen.data_dir)
            for line in lines:
                print("  ".join(str(value) for value in line.values()), flush=True)
            found += lines
    if chosen.only is None and chosen.package is None:
        name = "speed" if chosen.against is None else "before_after"
        against = "" if chosen.against is None else "--against CHECKOUT "
        record.write(name, f"speed.py {against}--repeats {chosen.repeats}", conditions, found)


if __name__ == "__main__":
    main()
