"""Features once: the frozen lower part of a model is run once for every row, and training goes on from what it gives.

What it gives is kept in memory. If it took long, or is large, it is kept in a file as well, which is named by a hash of
the frozen weights and the rows: the next run of the same model on the same rows begins with it.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import engine
from plures._version import __version__
from plures.data.population import Population
from plures.learn.frozen import fingerprint
from plures.learn.lower import Lower
from plures.learn.stock import without_fast_path
from plures.learn.task import Task
from plures.simulate.work import Work

BLOCK = 64  # rows at a time, each block by one thread: so any number of threads gives the same bits
LONG_SECONDS, LARGE_BYTES = 5.0, 1 << 30  # from which on features are kept in a file
WORTH_A_WORD = 1e11  # FLOPs
PROBE = 8  # rows by which the time is estimated


class Features(NamedTuple):
    """What the lower part of a task gives for some rows."""

    task: Task  # which starts from them
    table: Tensor  # [used row, ...]
    rows: np.ndarray  # [used row], its number in the data
    seconds: float  # of computing them now; 0 if they were there
    flops: int

    def of(self, population: Population) -> Population:
        """Clients whose rows are in the table."""
        place = np.zeros(len(population.x), np.int64)
        place[self.rows] = np.arange(len(self.rows))
        train, test, validation = (
            [place[own] for own in part] for part in (population.train, population.test, population.validation)
        )
        return population._replace(
            x=self.table,
            y=population.y[torch.from_numpy(self.rows)],
            train=train,
            test=test,
            validation=validation,
            pool=place[population.pool],
        )

    def work(self, work: Work) -> Work:
        """The same work, from features."""
        return work._replace(task=self.task, population=self.of(work.population))


def rows_of(populations: Iterable[Population]) -> np.ndarray:
    """All rows that clients have, in their order."""
    parts = [
        own for each in populations for part in (each.train, each.test, each.validation, [each.pool]) for own in part
    ]
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def why_not(task: Task) -> str:
    """Why the frozen part of a task is not run once for every row; empty if it is, or if nothing is frozen."""
    if task.lower is None or not task.lower.pays:
        return ""
    if task.augments:
        return (
            "augmentation changes every image at random: the frozen part is run in every step, not once for every row"
        )
    return ""


def pays(task: Task) -> bool:
    """Whether the frozen part of a task is to be run once for every row."""
    return task.lower is not None and task.lower.pays and not task.augments


_known: dict[str, Features] = {}  # of this process, the newest last: a comparison has many runs on the same rows
MOST_KNOWN = 2  # those of all rows, and those of few by which a choice is made


def make_features(
    task: Task, x: Tensor, rows: np.ndarray, folder: Path, n_threads: int, say: Callable[[str], None]
) -> Features:
    """What the lower part of a task gives for some rows of a table: from memory, a file in `folder`, or computed."""
    assert task.lower is not None
    name = _name(task, x, rows)
    known = _known.get(name)
    if known is not None:
        if known.task.started_by(task):
            return known
        return known._replace(task=task.starting_from(task.lower), seconds=0.0, flops=0)
    path = folder / f"{name}.npy"
    began = time.perf_counter()
    table = _read(path, len(rows), task)
    seconds, flops = 0.0, 0
    if table is None:
        flops = len(rows) * task.lower.flops
        if flops > WORTH_A_WORD:
            say(f"frozen layers are run once for {len(rows)} rows, before the first round")
        table = _compute(task.lower, x, rows, n_threads)
        seconds = time.perf_counter() - began
        if seconds > LONG_SECONDS or table.nbytes > LARGE_BYTES:
            table = _keep(table, path)
    if len(_known) == MOST_KNOWN:
        del _known[next(iter(_known))]
    _known[name] = Features(task.starting_from(task.lower), table, rows, seconds, flops)
    return _known[name]


def estimate_seconds(task: Task, x: Tensor, n_rows: int, n_threads: int) -> float:
    """How long the features of so many rows will take, from a few rows."""
    assert task.lower is not None
    probe = np.arange(min(PROBE, len(x)))
    _compute(task.lower, x, probe[:2], 1)  # the first time, kernels are chosen
    began = time.perf_counter()
    _compute(task.lower, x, probe, 1)
    return (time.perf_counter() - began) * n_rows / len(probe) / n_threads


def _compute(lower: Lower, x: Tensor, rows: np.ndarray, n_threads: int) -> Tensor:
    """[row, ...], by blocks."""

    def run(block: Tensor) -> Tensor:
        with engine.DenseLayers():
            return lower.run(x[block])

    blocks = [torch.from_numpy(rows[at : at + BLOCK]) for at in range(0, len(rows), BLOCK)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with without_fast_path(), ThreadPoolExecutor(n_threads) as pool:
            return torch.cat(list(pool.map(run, blocks)))
    finally:
        torch.set_num_threads(before)


def _name(task: Task, x: Tensor, rows: np.ndarray) -> str:
    """A hash of all that features depend on."""
    assert task.lower is not None
    total = hashlib.sha256(f"{__version__} {torch.__version__} {task.lower.description}".encode())
    total.update(fingerprint(task.frozen).encode())
    used = x[torch.from_numpy(rows)].numpy()
    total.update(f"{used.dtype} {used.shape}".encode())
    total.update(np.ascontiguousarray(used).data)
    return total.hexdigest()[:40]


def _read(path: Path, n_rows: int, task: Task) -> Tensor | None:
    """The table in a file; None if there is none that is whole."""
    assert task.lower is not None
    row = task.lower.run(task.example.unsqueeze(0))[0]
    try:
        # A page of it is read when it is needed, and what is written to it stays in memory.
        found = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.shape == (n_rows, *row.shape) and found.dtype == row.dtype else None


def _keep(table: Tensor, path: Path) -> Tensor:
    """Write a table to a file. That this fails, without the right to write or on a full disk, is no reason to stop."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            np.save(file, table.numpy(), allow_pickle=False)
        os.replace(part, path)
        if table.nbytes <= LARGE_BYTES:
            return table
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except OSError:
        part.unlink(missing_ok=True)
        return table
