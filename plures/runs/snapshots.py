"""Snapshots: what a run keeps of its way, for a report to show later. No number of the run depends on them.

A run with a folder writes `pictures/ROUND.safetensors` at its start and at evaluated rounds: what its method wants to
show, and what one client has and would be sent. Files are few: when there would be too many, every second one goes
and the spacing doubles. Which ones are left depends on the round alone, so a run that was resumed leaves the same
files.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from plures import tree
from plures.errors import DataError
from plures.files import telling_disk_failures, write_bytes
from plures.methods.messages import one_of
from plures.runs.callbacks import Callback
from plures.runs.checkpoint import stored
from plures.runs.results import Round
from plures.runs.state import RunState

FOLDER = "pictures"
MOST = 32  # files
MOST_BYTES = 64 << 20  # of all files together


class Snapshots(Callback):
    """Keeps snapshots of a simulated run."""

    def started(self, state: RunState) -> None:
        keep(state)

    def played(self, state: RunState, row: Round) -> None:
        keep(state)


def keep(state: RunState) -> None:
    """Write the snapshot of this round if its turn has come, and drop those that are now too many."""
    every = state.scene.config.eval_every
    if state.folder is None or not every or state.round % every:
        return
    tensors = snapshot(state)
    allowed = min(MOST, MOST_BYTES // max(1, sum(x.nbytes for x in tensors.values())))
    if not allowed:
        return
    folder, number = state.folder / FOLDER, state.round // every
    apart = spacing(number, allowed)
    if number % apart == 0:
        write_bytes(folder / f"{state.round:06d}.safetensors", save(tensors, metadata={"sha256": _sum(tensors)}))
    for path in folder.glob("[0-9]*.safetensors"):
        if int(path.stem) // every % apart:
            with telling_disk_failures(folder):
                path.unlink()


def _sum(tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of a snapshot's tensors, by name."""
    total = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.contiguous().numpy().tobytes())
    return total.hexdigest()


def snapshot(state: RunState) -> dict[str, Tensor]:
    """The snapshot of this moment: what the method shows, and one client's message and state."""
    method, task, ids = state.scene.method, state.scene.task, torch.tensor([shown_client(state)])
    with torch.no_grad():
        shown, message = method.snapshot(task, state.server), method.send(task, state.server, ids)
    parts = {"method": shown, "received": one_of(message, 0), "client": tree.row(state.store.rows(ids), 0)}
    return {name: x for prefix, part in parts.items() for name, x in stored(prefix, part).items()}


def spacing(number: int, allowed: int) -> int:
    """How far apart snapshots are at the given one, counted from 0: a power of two that leaves few enough."""
    apart = 1
    while number // apart >= allowed:
        apart *= 2
    return apart


def shown_client(state: RunState) -> int:
    """The client that is shown: the one in the middle by number of rows."""
    order = sorted(state.scored or state.eligible, key=lambda i: (int(state.sizes[i]), i))
    return order[len(order) // 2]


def read(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Round -> tensors by name, of a run folder; none if it has no snapshots."""
    found = sorted((folder / FOLDER).glob("[0-9]*.safetensors"))
    return {int(path.stem): _read_one(path) for path in found}


def _read_one(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            known = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError) as error:
        raise DataError(f"the snapshot {path} cannot be read: {error}") from None
    if known is not None and known != _sum(tensors):
        raise DataError(f"the snapshot {path} has changed since it was written")
    return tensors


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those below a name, without it."""
    return {name.removeprefix(prefix + "/"): x for name, x in tensors.items() if name.startswith(prefix + "/")}
