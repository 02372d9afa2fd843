"""A personal model for a client that was not in training, from a finished run and the client's own rows."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import seeds
from plures.data import partition, sources
from plures.data.dataset import Dataset
from plures.data.population import Population
from plures.errors import DataError, UsageError
from plures.runs.scene import as_configured, reading_of
from plures.runs.state import RunState
from plures.simulate.new_clients import adapted_model, score_new_clients
from plures.simulate.work import Work
from plures.tree import Params, Tree


class Adapted(NamedTuple):
    """A new client's model, and numbers about it."""

    model: Params
    summary: dict[str, Any]


def from_rows(state: RunState, path: Path, epochs: int) -> Adapted:
    """The client's model after so many epochs on the rows of a file, and its accuracy before and after.

    Rows marked `is_test` in the file are what it is tested on; without any, a share of the rows is set aside.
    """
    scene = state.scene
    data = _read(state, path)
    if data.x.shape[1:] != tuple(scene.task.example.shape):
        raise DataError(f"{path}: rows have the shape {data.x.shape[1:]}, the run's {tuple(scene.task.example.shape)}.")
    data = with_classes_of_run(data, scene.class_names)
    if data.y.ndim != scene.population.y.dim() or data.target.kind != scene.task.kind:
        raise DataError(f"{path}: what is to be predicted of its rows is another thing than in the run.")
    if data.n_classes > scene.task.n_classes:
        raise DataError(f"{path}: labels go up to {data.y.max()}, the run has {scene.task.n_classes} classes.")
    train, test = own_rows(data, scene.config.seed, scene.config.test_share)
    x, y = torch.from_numpy(data.x).to(scene.task.example.dtype), torch.from_numpy(data.y)
    work = _work(state, x, y, train, test)
    found = score_new_clients(work, state.server, len(scene.population.train), epochs, state.round, scene.metric)
    summary: dict[str, Any] = {
        "method": scene.config.method,
        "epochs": epochs,
        "n_train": len(train),
        "n_test": len(test),
    }
    if found is not None:
        summary |= {key: value for key, value in found.to_json().items() if key != "n"}
    return Adapted(adapted_model(work, _message(state), epochs, state.round), summary)


def _read(state: RunState, path: Path) -> Dataset:
    """The rows of a file; those of a table by the schema of the run."""
    scene = state.scene
    reading = reading_of(scene.config)._replace(client=None)
    if reading.tokenizer is not None and reading.text is not None:
        return sources.load(str(path), None, reading)
    if not scene.schema or state.folder is None:
        return sources.load(str(path))
    reading = reading._replace(schema=str(state.folder / "schema.toml"))
    data = sources.load(str(path), None, reading)
    return data if data.encode is None else data.encode(np.arange(len(data.y)))


def with_classes_of_run(data: Dataset, known: tuple[str, ...]) -> Dataset:
    """The rows with their labels, which are words, numbered as in the run."""
    if not known or data.class_names == known:
        return data
    new = [word for word in data.class_names if word not in known]
    if new or not data.class_names:
        got = f"the label {new[0]!r}" if new else "labels that are numbers"
        raise DataError(f"{data.name} has {got}; the run's labels are {', '.join(known[:20])}.")
    numbers = np.array([known.index(word) for word in data.class_names])
    return data._replace(y=numbers[data.y], n_classes=len(known), class_names=known)


def own_rows(data: Dataset, seed: int, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a single client trains on and is tested on."""
    rows = np.arange(len(data.y))
    if data.n_train < len(rows):
        return rows[: data.n_train], rows[data.n_train :]
    if data.time is not None:
        return partition.latest_for_testing(rows, data.time, test_share)
    y = data.y if data.target.is_classes else np.zeros(len(rows), np.int64)
    return partition.split_train_test(rows, y, test_share, seeds.generator(seed, "test rows of a new client"))


def from_counts(state: RunState, counts: list[int]) -> Adapted:
    """The client's model from its numbers of rows of each class alone: no row is looked at."""
    task, config = state.scene.task, state.scene.config
    if task.kind != "classes":
        raise UsageError("class counts are for runs that predict classes; give rows with --client-data")
    if len(counts) != task.n_classes or min(counts) < 0 or sum(counts) == 0:
        raise UsageError(
            f"class counts must be {task.n_classes} numbers of rows, one for each class, not all 0; got {len(counts)}"
        )
    # Rows that exist in number only: with no epoch of training nothing reads them.
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = task.example.expand(len(y), *task.example.shape)
    work = _work(state, x, y, np.arange(len(y)), np.zeros(0, np.int64))
    about = {"method": config.method, "epochs": 0, "class_counts": counts}
    return Adapted(adapted_model(work, _message(state), 0, state.round), about)


def _message(state: RunState) -> Tree:
    with torch.no_grad():
        return state.scene.method.newcomer(state.scene.task, state.server)


def _work(state: RunState, x: Tensor, y: Tensor, train: np.ndarray, test: np.ndarray) -> Work:
    """The work of this one client."""
    task, seed = state.scene.task, state.scene.config.seed
    population = Population(x, y, [train], [test], task.n_classes, seed, task.smallest_batch)
    population = as_configured(population, state.scene.config)._replace(target=state.scene.population.target)
    return state.scene.work(state.store.initial)._replace(population=population, style="one_by_one")
