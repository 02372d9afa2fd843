"""Pictures: what a run keeps of its way, for a report to show later. No number of the run depends on them.

A run with a folder writes `pictures/ROUND.safetensors` at its start and at evaluated rounds: what its method says
is worth a picture, and what one client has and would be sent. Files are few: when there would be too many, every
second one goes and the spacing doubles. Which ones are left depends on the round alone, so a run that stopped and
went on leaves the same files.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from . import checkpoint, tree
from .method import Each

if TYPE_CHECKING:
    from .run import Run

MOST = 32  # files
MOST_BYTES = 64 << 20  # of all files together


def keep(run: "Run") -> None:
    """Write the picture of this round if its turn has come, and drop those that are now too many."""
    every = run.scene.config.eval_every
    if run.folder is None or not every or run.round % every:
        return
    tensors = taken(run)
    allowed = min(MOST, MOST_BYTES // max(1, sum(x.nbytes for x in tensors.values())))
    if not allowed:
        return
    folder, number = run.folder / "pictures", run.round // every
    apart = spacing(number, allowed)
    if number % apart == 0:
        folder.mkdir(exist_ok=True)
        checkpoint.write_bytes(folder / f"{run.round:06d}.safetensors", save(tensors))
    for path in folder.glob("[0-9]*.safetensors"):
        if int(path.stem) // every % apart:
            path.unlink()


def taken(run: "Run") -> dict[str, Tensor]:
    """The picture of this moment: what the method shows, and one client's message and state."""
    method, task, ids = run.scene.method, run.scene.task, torch.tensor([shown_client(run)])
    with torch.no_grad():
        shown, message = method.picture(task, run.server), method.send(task, run.server, ids)
    received = tree.row(message.tree, 0) if isinstance(message, Each) else message.tree
    parts = {"method": shown, "received": received, "client": tree.row(run.store.rows(ids), 0)}
    return {name: x for prefix, part in parts.items() for name, x in checkpoint.named(prefix, part).items()}


def spacing(number: int, allowed: int) -> int:
    """How far apart pictures are at the given one, counted from 0: a power of two that leaves few enough."""
    apart = 1
    while number // apart >= allowed:
        apart *= 2
    return apart


def shown_client(run: "Run") -> int:
    """The client that is shown: the one in the middle by number of rows."""
    sizes = run.scene.population.sizes()
    order = sorted(run.scored or run.eligible, key=lambda i: (int(sizes[i]), i))
    return order[len(order) // 2]


def read(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Round -> tensors by name, of a run folder; none if it has no pictures."""
    found = sorted((folder / "pictures").glob("[0-9]*.safetensors"))
    return {int(path.stem): load_file(path) for path in found}


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those below a name, without it."""
    return {name.removeprefix(prefix + "/"): x for name, x in tensors.items() if name.startswith(prefix + "/")}
