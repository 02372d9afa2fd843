"""Splits: who has how many training rows of which class."""

from typing import NamedTuple

import numpy as np

from plures.errors import PluresError
from plures.report.numbers import MOST_CLIENTS
from plures.report.records import Group
from plures.runs.folders import open_scene
from plures.runs.scene import Scene

MOST_SPLITS = 6


class SplitTable(NamedTuple):
    counts: np.ndarray  # [client, class] training rows
    names: list[str]
    n_clients: int  # of all; the table may show fewer


def count_rows(scene: Scene) -> SplitTable:
    """The training rows of each client by class."""
    labels, n = scene.population.y.numpy(), scene.population.n_classes
    own = scene.split.train
    counts = np.array([np.bincount(labels[rows].ravel(), minlength=n) for rows in own[:MOST_CLIENTS]])
    names = [scene.names[k] if scene.names else str(k) for k in range(len(counts))]
    return SplitTable(counts, names, len(own))


def gather_splits(groups: list[Group], notes: list[str]) -> dict[str, SplitTable]:
    """Every split that is among the runs, up to some; those that cannot be shown become notes."""
    runs = [run for group in groups for run in group.runs]
    different = list({run.same: run for run in runs}.values())
    out: dict[str, SplitTable] = {}
    for run in different[:MOST_SPLITS]:
        label = f"{run.summary['data']}, {run.summary['partition']}, seed {run.seed}"
        try:
            scene = open_scene(run.folder)
            if scene.population.target.is_classes:
                out[label] = count_rows(scene)
        except PluresError as error:
            notes.append(f"The split of {run.folder.name} is not shown: {error}")
    return out
