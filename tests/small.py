"""Small worlds for tests: a few clients of digits, unlike in size, and tiny models."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from plures.data import partition, sources
from plures.data.population import Population
from plures.learn.frozen import ALL_TRAIN, Chosen
from plures.learn.solver import Solver
from plures.learn.task import Task, build
from plures.methods.spec import make_method
from plures.runs.config import make_config
from plures.runs.scene import Scene, announce, as_configured
from plures.runs.simulation import Simulation
from plures.simulate.workers import one_thread

# Training rows of the clients: one row, fewer than a batch, one class, and some more. None makes a
# batch of two: BatchNorm turns two rows into plus and minus one, and enlarges rounding without bound.
SIZES = (1, 4, 13, 20, 31, 48)


class TinyNorm(nn.Module):
    """A convolution, BatchNorm on maps and on features, dropout, and a head."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(36, 12)
        self.second = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(12, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)  # smooth: no kink makes rounding jump
        return self.head(self.drop(torch.tanh(self.second(self.hidden(x)))))


class HarshNorm(TinyNorm):
    """The same in double precision and with kinks: with batches of two rows, what enlarges rounding most."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__(shape, n_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(self.drop(torch.relu(self.second(self.hidden(x)))))


class TinyMlp(nn.Module):
    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 8)
        self.head = nn.Linear(8, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class DeepMlp(nn.Module):
    """Two hidden layers with BatchNorm after the first, in case some of it is to be frozen."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x.flatten(1))))
        return self.head(torch.tanh(self.hidden(x)))


MODELS = {"mlp": TinyMlp, "norm": TinyNorm, "harsh": HarshNorm, "deep": DeepMlp}


def small_split(sizes: tuple[int, ...] = SIZES) -> partition.Split:
    """Disjoint rows of digits; the client with 13 rows has one class only."""
    data = sources.load("digits")
    rng = np.random.default_rng(1)
    free = rng.permutation(len(data.y))
    train, test = [], []
    for size in sizes:
        pool = free[data.y[free] == 3] if size == 13 else free
        train.append(np.sort(pool[:size]))
        test.append(np.sort(pool[size : size + 5]))
        free = np.setdiff1d(free, pool[: size + 5], assume_unique=True)
        rng.shuffle(free)
    return partition.Split(train, test)


@lru_cache
def task_of(model: str, seed: int, chosen: Chosen = ALL_TRAIN) -> Task:
    """One task for all tests, so that its steps are compiled once."""
    data = sources.load("digits")
    x = torch.from_numpy(data.x).to(torch.float64 if model == "harsh" else torch.float32)
    return build(lambda: MODELS[model](tuple(x.shape[1:]), 10), x[0], 10, seed, chosen=chosen)


def scene_of(method: str = "fedavg", model: str = "mlp", split: partition.Split | None = None, **options) -> Scene:
    """A scene with one of the tiny models."""
    config = make_config({"method": method, "batch": 5, "lr": 0.1, "rounds": 3, "last_batch": "keep", **options})
    data = sources.load("digits")
    split = split or small_split()
    task = task_of(model, config.seed, Chosen(config.freeze or "", config.train or "", config.adapter or ""))
    x, y = torch.from_numpy(data.x).to(task.example.dtype), torch.from_numpy(data.y)
    population = Population(x, y, split.train, split.test, 10, config.seed, task.smallest_batch)
    population = as_configured(population, config)
    config = config.model_copy(update={"clients": len(split.train)})
    chosen = make_method(method, config.settings, config.solver())
    return Scene(config, *announce(config, chosen, task, population), split)


def run_of(method: str = "fedavg", model: str = "mlp", folder: Path | None = None, **options) -> Simulation:
    """A simulation with one of the tiny models, before its first round."""
    return Simulation(scene_of(method, model, **options), folder, lambda line: None)


def played(run: Simulation, n_rounds: int) -> Simulation:
    """The run after some rounds, closed; its state can still be looked at."""
    try:
        with one_thread():
            for _ in range(n_rounds):
                run.play_round()
    finally:
        run.close()
    return run


def took_part(run: Simulation) -> list[int]:
    """The clients that have trained at least once: the others are served as new ones."""
    return run.state.store.written.nonzero().squeeze(1).tolist()


def shard_of(task: Task, x: Tensor, y: Tensor, key: int = 7, round: int = 0):
    """All rows of two small tables as the shard of one client."""
    population = Population(x, y, [np.arange(len(y))], [np.arange(len(y))], task.n_classes, key, task.smallest_batch)
    stacked = population.shards([0], "train", "train", round)
    return type(stacked)(stacked.x, stacked.y, *[part[0] for part in stacked[2:]])


def solver_of(**values) -> Solver:
    return Solver(**{"batch": 5, "lr": 0.1, **values})
