"""Plures: personalized federated learning. Out of one model, many.

import plures
result = plures.run("fedala", data="digits", rounds=20)
result.summary["personal"]["mean"], result.models[3]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

from .config import make_config
from .fit import Fitted, Plateau, Solver, fit, measure
from .method import BARE, Each, Federation, Method, Pull, Same, Worn, setting
from .run import Result, Watcher, new_folder, set_scene
from .run import resume as _resume
from .run import start as _start
from .shard import Shard
from .task import Batch, Task, cross_entropy

__all__ = [
    "BARE",
    "Batch",
    "Each",
    "Federation",
    "Fitted",
    "Method",
    "Plateau",
    "Pull",
    "Result",
    "Same",
    "Shard",
    "Solver",
    "Task",
    "Worn",
    "compare",
    "cross_entropy",
    "fit",
    "measure",
    "resume",
    "run",
    "setting",
]


def run(method: str, *, out: str | Path | None = None, **options: Any) -> Result:
    """One run, with the options of the command line (`lr_decay` for `--lr-decay`).

    With `out` it leaves a run folder; without, nothing is written and `result.models` has the
    personal model of every client.
    """
    scene = set_scene(make_config({"method": method, **options}))
    folder = new_folder(scene.config, Path(out)) if out is not None else None
    return _start(scene, folder, lambda line: None, Watcher())


def compare(methods: list[str], *, seeds: Sequence[int] = (0,), **options: Any) -> dict[tuple[str, int], Result]:
    """The same split, schedule and start for several methods, for each seed: (method, seed) -> result."""
    from .comparison import Ask
    from .comparison import compare as compare_

    ask = Ask(methods, make_config(options), list(seeds))
    return compare_(ask, None, lambda line: None, lambda method, seed, folder: Watcher())


def resume(folder: str | Path) -> Result:
    """Go on with a run that stopped."""
    return _resume(Path(folder), lambda line: None, Watcher())
