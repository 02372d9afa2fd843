"""Landscape: the loss of models in a plane, or along a direction, at a bounded cost."""

from collections.abc import Callable

import numpy as np
import torch

from plures import seeds, tree
from plures.learn.task import Task
from plures.report.insides.lookup import predict
from plures.runs.scene import Scene
from plures.tree import Params

FLOPS = 2e11  # that may be spent on one picture of a loss: some seconds
GRID = 17  # points along each side of a plane


def few_rows(task: Task, rows: np.ndarray, n_passes: int) -> np.ndarray:
    """As many of the rows, spread evenly, as can be passed so often in reasonable time."""
    n = max(16, int(FLOPS / max(1, task.flops) / n_passes))
    return rows if len(rows) <= n else rows[np.linspace(0, len(rows) - 1, n).astype(int)]


def measure_loss(scene: Scene, params: Params, rows: np.ndarray) -> float:
    """Mean loss of a model on some rows, in inference mode."""
    return float(scene.task.row_losses(predict(scene, params, rows), scene.population.y[rows]).mean())


def make_side(low: float, high: float) -> np.ndarray:
    """The points along one side of a plane."""
    return np.linspace(low, high, GRID)


def measure_plane(
    scene: Scene, rows: np.ndarray, x: np.ndarray, y: np.ndarray, model_at: Callable[[float, float], Params]
) -> np.ndarray:
    """[y, x]: loss of the model at each point of a plane, on some of the rows."""
    some = few_rows(scene.task, rows, len(x) * len(y))
    return np.array([[measure_loss(scene, model_at(float(a), float(b)), some) for a in x] for b in y])


def make_direction(task: Task, params: Params, number: int) -> Params:
    """A random direction in which every filter is as long as the model's own; biases and norms stay."""
    out = {}
    for k, (name, x) in enumerate(params.items()):
        if x.dim() < 2 or tree.is_statistic(name) or task.is_norm(name):
            out[name] = torch.zeros_like(x)
            continue
        drawn = seeds.normal(torch.tensor(seeds.key_of("landscape", number)), x.shape, k).to(x.dtype)
        axes = tuple(range(1, x.dim()))
        own, its = (value.square().sum(axes, keepdim=True).sqrt() for value in (x, drawn))
        out[name] = drawn * own / its.clamp(min=1e-12)
    return out
