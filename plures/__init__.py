"""Plures: personalized federated learning. Out of one model, many.

import plures
result = plures.run("fedala", data="digits", rounds=20)
result.summary["personal"]["mean"], result.models[3]
"""

import importlib
from typing import TYPE_CHECKING, Any

from plures._version import __version__

if TYPE_CHECKING:
    from plures import tree
    from plures.api import compare, resume, run, tune
    from plures.data.batches import Batch
    from plures.data.dataset import Dataset
    from plures.data.shard import Shard
    from plures.learn.fit import Fitted, fit, measure
    from plures.learn.losses import cross_entropy
    from plures.learn.solver import Plateau, Solver
    from plures.learn.task import Task
    from plures.methods import ADDONS, METHODS
    from plures.methods.addons.base import Addon
    from plures.methods.base import (
        NO_TERMS,
        AddonTerms,
        Averaged,
        Federation,
        Method,
        Penalty,
        fine_tune,
        setting,
        with_penalties,
    )
    from plures.methods.messages import Each, Same
    from plures.report.figure import Choice
    from plures.report.insides.base import Opened, Picture
    from plures.runs.callbacks import Callback
    from plures.runs.loop import Result

# Where each public name lives. A name is imported when it is first asked for: the command line starts without torch.
_HOME = {
    "ADDONS": "plures.methods",
    "Addon": "plures.methods.addons.base",
    "AddonTerms": "plures.methods.base",
    "Averaged": "plures.methods.base",
    "Batch": "plures.data.batches",
    "Callback": "plures.runs.callbacks",
    "Choice": "plures.report.figure",
    "Dataset": "plures.data.dataset",
    "Each": "plures.methods.messages",
    "Federation": "plures.methods.base",
    "Fitted": "plures.learn.fit",
    "METHODS": "plures.methods",
    "Method": "plures.methods.base",
    "NO_TERMS": "plures.methods.base",
    "Opened": "plures.report.insides.base",
    "Penalty": "plures.methods.base",
    "Picture": "plures.report.insides.base",
    "Plateau": "plures.learn.solver",
    "Result": "plures.runs.loop",
    "Same": "plures.methods.messages",
    "Shard": "plures.data.shard",
    "Solver": "plures.learn.solver",
    "Task": "plures.learn.task",
    "compare": "plures.api",
    "cross_entropy": "plures.learn.losses",
    "fine_tune": "plures.methods.base",
    "fit": "plures.learn.fit",
    "measure": "plures.learn.fit",
    "resume": "plures.api",
    "run": "plures.api",
    "setting": "plures.methods.base",
    "tune": "plures.api",
    "with_penalties": "plures.methods.base",
}

__all__ = [
    "ADDONS",
    "METHODS",
    "NO_TERMS",
    "Addon",
    "AddonTerms",
    "Averaged",
    "Batch",
    "Callback",
    "Choice",
    "Dataset",
    "Each",
    "Federation",
    "Fitted",
    "Method",
    "Opened",
    "Penalty",
    "Picture",
    "Plateau",
    "Result",
    "Same",
    "Shard",
    "Solver",
    "Task",
    "__version__",
    "compare",
    "cross_entropy",
    "fine_tune",
    "fit",
    "measure",
    "resume",
    "run",
    "setting",
    "tree",
    "tune",
    "with_penalties",
]


def __getattr__(name: str) -> Any:
    if name == "tree":
        return importlib.import_module("plures.tree")
    if name not in _HOME:
        raise AttributeError(f"module 'plures' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
