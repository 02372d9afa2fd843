"""Lookup: what pictures look for in an open run: a layer of its method, the states of its clients, predictions."""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.methods.base import Method
from plures.methods.messages import one_of
from plures.methods.spec import chain
from plures.report.numbers import MOST_CLIENTS
from plures.runs.scene import Scene
from plures.runs.state import RunState
from plures.tree import Params, Tree

T = TypeVar("T")


def find_layer(method: Method, kind: type[T]) -> T | None:
    """The method itself, an add-on of it or their host, whichever is of this kind; None if none is."""
    return next((layer for layer in chain(method) if isinstance(layer, kind)), None)


def find_part(client: Tree, kind: type[T]) -> T | None:
    """The part of a client's state that is of this kind, however deep; None if none is."""
    if isinstance(client, kind):
        return client
    inner = client.values() if isinstance(client, dict) else client if isinstance(client, tuple) else ()
    return next((found for one in inner if (found := find_part(one, kind)) is not None), None)


def each_client(state: RunState, ids: list[int]) -> Iterator[tuple[int, Tree, Tree]]:
    """(client, what it is served now, its state), one after another, up to as many as a figure can show."""
    method, task = state.scene.method, state.scene.task
    for client in ids[:MOST_CLIENTS]:
        only = torch.tensor([client])
        with torch.no_grad():
            message = method.serve(task, state.server, only)
        yield client, one_of(message, 0), tree.row(state.store.rows(only), 0)


def find_generic(state: RunState) -> Params | None:
    """The one model for all."""
    with torch.no_grad():
        return state.scene.method.generic(state.scene.task, state.server)


def predict(scene: Scene, params: Params, rows: np.ndarray) -> Tensor:
    """Logits of a whole model on some rows, in inference mode."""
    with torch.no_grad():
        return scene.task.logits(params, scene.population.x[rows].to(scene.task.example.dtype))


def spread_evenly(n: int, most: int) -> list[int]:
    """Up to so many of the places 0 to n - 1, the first and the last among them."""
    return [int(k) for k in np.unique(np.linspace(0, n - 1, min(most, n)).astype(int))]
