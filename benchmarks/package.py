"""What speed.py uses of Plures: of this checkout, or with `--package PATH` of another one, which may be version 0.1.0.

It must be imported before anything of Plures, since it puts the other checkout first on the path.
"""

# ruff: noqa: I001 (the modules of 0.1.0 are not found here)

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
options.add_argument(
    "--package", type=Path, metavar="PATH", help="measure the Plures of another checkout; nothing is recorded"
)
_other: Path | None = options.parse_known_args()[0].package
if _other is not None:
    sys.path.insert(0, str(_other.resolve()))

import plures  # noqa: E402

if find_spec("plures.run") is not None:  # version 0.1.0, which had no rooms
    from plures.config import make_config
    from plures.errors import DataError
    from plures.models import maker as model_maker
    from plures.rows import append_round
    from plures.run import Run as Simulation
    from plures.run import Scene
    from plures.run import set_scene as make_scene
    from plures.shard import batches_an_epoch as batches_per_epoch
    from plures.show import Progresses as ProgressReport
else:
    from plures.cli.view import ProgressReport
    from plures.data.batches import batches_per_epoch as batches_with
    from plures.errors import DataError
    from plures.models.names import model_maker
    from plures.runs.config import make_config
    from plures.runs.results import append_round
    from plures.runs.scene import Scene, make_scene
    from plures.runs.simulation import Simulation

    def batches_per_epoch(sizes, batch, smallest):
        """As every version counts them that keeps a smaller last batch."""
        return batches_with(sizes, batch, smallest, "keep")


__all__ = [
    "DataError",
    "ProgressReport",
    "Scene",
    "Simulation",
    "append_round",
    "batches_per_epoch",
    "checkout",
    "make_config",
    "make_scene",
    "model_maker",
    "options",
    "save",
    "state_of",
]


def checkout() -> str:
    """The folder of the Plures that is measured."""
    return str(Path(str(plures.__file__)).resolve().parent.parent)


def state_of(simulation: Any) -> Any:
    """The state of a run; in 0.1.0 a run was its own state."""
    return getattr(simulation, "state", simulation)


def save(simulation: Any) -> None:
    """Write a checkpoint."""
    if hasattr(simulation, "state"):
        simulation.state.save(simulation.manifest())
    else:
        simulation.save()
