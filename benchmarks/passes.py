"""What each pass of the engine gains: a round without it, and an eager round, over a round with all passes.

    python benchmarks/passes.py [--repeats 7] [--only CASE] [--quick]

All sides of a case (all passes, each one of them off, eager) are in this process, with one thread, and take turns:
the order moves on from turn to turn, so that a slow minute of the machine hits all. A gain is the median, over turns,
of a side's median round over that of all passes: 1 where a pass has nothing to do. Every round begins from the same
state, so that all have the same work. Without channels-last there is no winograd either, which builds on it.
Images, words and characters are random, since only their shapes matter. Writes benchmarks/results/passes.csv;
--quick is a test at the smallest size, and --only one case: neither is recorded.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import numpy as np
import record
import torch

from plures.data.dataset import Dataset
from plures.engine.choice import Pass
from plures.runs.config import make_config
from plures.runs.scene import GIVEN, Objects, Scene, make_scene
from plures.runs.simulation import Simulation

ALL = "traced"
ENGINES = [ALL, *[f"traced:{name}=off" for name in get_args(Pass)], "eager"]
TURN_SECONDS = 0.3


def random_images(shape: tuple[int, ...]) -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 4000)
    x = rng.normal(size=(len(y), *shape)).astype(np.float32) + y[:, None, None, None] / 10
    return Dataset("images", x.astype(np.float32), y, 10, len(y), None)


def random_words() -> Dataset:
    """Texts of up to 200 words, most of them much shorter; token 0 is padding."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 4000)
    x = rng.integers(1, 20000, (len(y), 200))
    x[np.arange(200) >= rng.integers(10, 80, (len(y), 1))] = 0
    return Dataset("words", x, y, 4, len(y), None, 20000)


def random_characters(length: int = 80) -> Dataset:
    """Lines of characters; every label is the next one."""
    x = np.random.default_rng(0).integers(0, 80, (1000, length + 1))
    return Dataset("characters", x[:, :-1], x[:, 1:], 80, len(x), None, 80)


class Case(NamedTuple):
    """What is measured."""

    options: dict[str, Any]
    data: Callable[[], Dataset] | None = None  # else the options name it
    played: int = 1  # rounds before the one that is measured


DIGITS = {"data": "digits", "model": "mlp", "partition": "dirichlet:0.1", "clients": 100, "epochs": 5}
EVEN = {"partition": "iid", "clients": 20, "steps": 5, "lr": 0.01}
CASES = {
    "mlp, FedAvg": Case(DIGITS),
    "mlp, FedALA, first blend": Case(DIGITS | {"method": "fedala"}),  # learned until the loss settles
    "mlp, FedALA": Case(DIGITS | {"method": "fedala"}, played=2),
    "cnn4": Case(EVEN | {"model": "cnn4"}, lambda: random_images((1, 28, 28))),
    "rod-cnn": Case(EVEN | {"model": "rod-cnn", "batch": 40}, lambda: random_images((1, 28, 28))),
    "fasttext": Case(EVEN | {"model": "fasttext", "steps": 20}, random_words),
    "charlstm": Case(EVEN | {"model": "charlstm", "clients": 10, "steps": 2}, random_characters),
    "resnet8": Case(EVEN | {"model": "resnet8"}, lambda: random_images((3, 32, 32))),
    "encoder": Case(EVEN | {"model": "models:PatchEncoder"}, lambda: random_images((1, 28, 28))),  # with dropout
}
QUICK = {"clients": 3, "epochs": 1, "steps": 1, "batch": 4, "share": 0.1}


class Side:
    """A run with one engine, which plays the same round again and again."""

    def __init__(self, scene: Scene, engine: str, n_played: int) -> None:
        config = scene.config.model_copy(update={"engine": engine})
        self.simulation = Simulation(scene._replace(config=config), None, print)
        for _ in range(n_played):
            self.simulation.play_round()
        state = self.simulation.state
        self.ids = torch.arange(state.store.n_clients)
        self.round, self.server, self.clients = state.round, state.server, state.store.rows(self.ids)

    def play(self) -> float:
        """The seconds of the round."""
        state = self.simulation.state
        state.round, state.server = self.round, self.server
        state.store.put(self.ids, self.clients)
        began = time.perf_counter()
        self.simulation.play_round()
        return time.perf_counter() - began

    def take_turn(self, least: float) -> list[float]:
        """The seconds of as many rounds as begin within a turn, and of one at least."""
        seconds = [self.play()]
        while sum(seconds) < least:
            seconds.append(self.play())
        return seconds


def measured(name: str, repeats: int, quick: bool) -> list[dict[str, object]]:
    case = CASES[name]
    options = {"method": "fedavg", "batch": 10, **case.options, **(QUICK if quick else {})}
    data = None if case.data is None else case.data()
    if quick and case.data is random_characters:
        data = random_characters(8)  # of a long line even one step takes seconds to trace
    if data is not None:
        options["data"] = GIVEN + data.name
    scene = make_scene(make_config(options), objects=Objects(data=data))
    sides = {engine: Side(scene, engine, case.played) for engine in ENGINES}
    for side in sides.values():
        side.play()
    turns: list[dict[str, list[float]]] = []
    for k in range(repeats):
        order = ENGINES[k % len(ENGINES) :] + ENGINES[: k % len(ENGINES)]
        turns.append({engine: sides[engine].take_turn(0.0 if quick else TURN_SECONDS) for engine in order})
    lines = []
    for engine, side in sides.items():
        rounds = [seconds for turn in turns for seconds in turn[engine]]
        ratios = [statistics.median(turn[engine]) / statistics.median(turn[ALL]) for turn in turns]
        usage = side.simulation.usage()
        side.simulation.close()
        lines.append(
            {
                "case": name,
                "engine": engine,
                "rounds": len(rounds),
                "median_ms": round(1e3 * statistics.median(rounds), 2),
                "fastest_ms": round(1e3 * min(rounds), 2),
                "gain": round(statistics.median(ratios), 3),
                "traced_steps": usage.traced,
                "eager_steps": usage.eager,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--quick", action="store_true", help="the smallest size, once: does it work at all?")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    conditions, found = record.conditions(), []
    repeats = 1 if chosen.quick else chosen.repeats
    for name in chosen.only or CASES:
        found += measured(name, repeats, chosen.quick)
        for line in found[-len(ENGINES) :]:
            print("  ".join(str(value) for value in line.values()), flush=True)
    if chosen.only is None and not chosen.quick:
        record.write("passes", f"passes.py --repeats {repeats}", conditions, found)


if __name__ == "__main__":
    main()
