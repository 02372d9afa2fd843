"""Steps per second of the executors against a plain PyTorch loop, in one run.

    python benchmarks/speed.py [--repeats 5] [--method fedavg] [--only digits|fashion-mnist]

Both sides train the same clients for the same number of steps on the same split. The plain loop is
what one writes first: an nn.Module, torch.optim.SGD and a DataLoader, one client after another, with
two threads. Ours runs with two workers of one thread each. The sides take turns, so that a slow
minute of the machine hits both; medians are compared.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from plures import models
from plures.config import make_config
from plures.errors import DataError
from plures.execute import batches_an_epoch
from plures.run import Run, Scene, set_scene

CASES = {
    "digits": {"data": "digits", "model": "mlp", "clients": 100, "batch": 10, "epochs": 5},
    "fashion-mnist": {"data": "fashion-mnist", "model": "cnn4", "clients": 20, "batch": 10, "epochs": 5, "lr": 0.01},
}


def a_tenth(scene: Scene) -> Scene:
    """Every tenth row of each client."""
    population = scene.population
    train, test = ([rows[::10] for rows in part] for part in (population.train, population.test))
    return scene._replace(population=population._replace(train=train, test=test))


def plain_round(scene: Scene, start: torch.nn.Module) -> int:
    """One round of plain PyTorch: returns the number of steps."""
    config, population = scene.config, scene.population
    n_steps = 0
    for rows in population.train:
        if not len(rows):
            continue
        model = copy.deepcopy(start)
        solver = torch.optim.SGD(model.parameters(), lr=config.lr)
        data = TensorDataset(population.x[rows], population.y[rows])
        loader = DataLoader(data, batch_size=config.batch, shuffle=True)
        for _ in range(config.epochs):
            for x, y in loader:
                solver.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                solver.step()
                n_steps += 1
    return n_steps


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(name: str, method: str, repeats: int) -> None:
    config = make_config({"method": method, "partition": "dirichlet:0.1", "workers": 2, **CASES[name]})
    scene = set_scene(config)
    if name != "digits":
        scene = a_tenth(scene)
    sizes = np.array([len(rows) for rows in scene.population.train])
    n_steps = int(batches_an_epoch(sizes, config.batch, 1).sum()) * config.epochs
    shape = tuple(scene.population.x.shape[1:])
    start = models.maker(config.model, shape, scene.population.n_classes)()

    ours = Run(scene, None, print)
    alone = Run(scene._replace(config=config.model_copy(update={"executor": "one_by_one"})), None, print)

    def plain() -> None:
        torch.set_num_threads(2)
        assert plain_round(scene, start) == n_steps
        torch.set_num_threads(1)

    sides = {
        "plain PyTorch loop, 2 threads": plain,
        "one_by_one, 2 workers": alone.play_round,
        "vectorised, 2 workers": ours.play_round,
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for call in sides.values():
        call()
    for _ in range(repeats):
        for side, call in sides.items():
            seconds[side].append(timed(call))
    ours.close()
    alone.close()
    print(f"\n{name}: {config.model}, {config.clients} clients of {sizes.min()} to {sizes.max()} rows, {method}")
    base = statistics.median(seconds["plain PyTorch loop, 2 threads"])
    for side, values in seconds.items():
        middle = statistics.median(values)
        print(f"  {side:32} {n_steps / middle:10.0f} steps/s  {middle * 1e3:9.1f} ms a round  {base / middle:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--only", choices=list(CASES))
    chosen = parser.parse_args()
    for name in CASES:
        if chosen.only in (None, name):
            try:
                measure(name, chosen.method, chosen.repeats)
            except DataError as error:
                print(f"\n{name}: left out: {error}")


if __name__ == "__main__":
    main()
