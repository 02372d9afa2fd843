"""A personal model for a client that was not in training, from a finished run and the client's own rows."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import datasets, newcomers, partition, seeds
from .errors import DataError, UsageError
from .execute import Population
from .run import Run
from .tree import Params, Tree


class Adapted(NamedTuple):
    model: Params
    summary: dict[str, Any]


def from_rows(run: Run, path: Path, epochs: int) -> Adapted:
    """The client's model after so many epochs on the rows of a file, and its accuracy before and after.

    Rows marked `is_test` in the file are what it is tested on; without any, a share of the rows is set aside.
    """
    scene = run.scene
    data = datasets.load(str(path))
    if data.x.shape[1:] != tuple(scene.task.example.shape):
        raise DataError(f"{path}: rows have the shape {data.x.shape[1:]}, the run's {tuple(scene.task.example.shape)}.")
    if data.y.ndim != scene.population.y.dim() or data.n_classes > scene.task.n_classes:
        raise DataError(f"{path}: labels go up to {data.y.max()}, the run has {scene.task.n_classes} classes.")
    train, test = own_rows(data, scene.config.seed, scene.config.test_share)
    x, y = torch.from_numpy(data.x).to(scene.task.example.dtype), torch.from_numpy(data.y)
    population = _alone(run, x, y, train, test)
    found = newcomers.welcome(
        scene.method, scene.task, run.server, population, len(scene.population.train), epochs, "one_by_one"
    )
    summary: dict[str, Any] = {
        "method": scene.config.method,
        "epochs": epochs,
        "n_train": len(train),
        "n_test": len(test),
    }
    if found is not None:
        summary |= {key: value for key, value in found.to_json().items() if key != "n"}
    model = newcomers.own_model(scene.method, scene.task, _sent(run), population, epochs)
    return Adapted(model, summary)


def own_rows(data: datasets.Dataset, seed: int, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a single client trains on and is tested on."""
    rows = np.arange(len(data.y))
    if data.n_train < len(rows):
        return rows[: data.n_train], rows[data.n_train :]
    return partition.train_and_test(rows, data.y, test_share, seeds.generator(seed, "test rows of a new client"))


def from_counts(run: Run, counts: list[int]) -> Adapted:
    """The client's model from its numbers of rows of each class alone: no row is looked at."""
    scene = run.scene
    if len(counts) != scene.task.n_classes or min(counts) < 0 or sum(counts) == 0:
        raise UsageError(
            f"class counts must be {scene.task.n_classes} numbers of rows, one a class, not all 0; got {len(counts)}"
        )
    # Rows that exist in number only: with no epoch of training nothing reads them.
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = scene.task.example.expand(len(y), *scene.task.example.shape)
    population = _alone(run, x, y, np.arange(len(y)), np.zeros(0, np.int64))
    model = newcomers.own_model(scene.method, scene.task, _sent(run), population, 0)
    return Adapted(model, {"method": scene.config.method, "epochs": 0, "class_counts": counts})


def _sent(run: Run) -> Tree:
    with torch.no_grad():
        return run.scene.method.newcomer(run.scene.task, run.server)


def _alone(run: Run, x: torch.Tensor, y: torch.Tensor, train: np.ndarray, test: np.ndarray) -> Population:
    """A population of this one client."""
    scene = run.scene
    return Population(x, y, [train], [test], scene.task.n_classes, scene.config.seed, scene.task.smallest_batch)
