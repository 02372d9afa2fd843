"""Loggers: the numbers of every round for other tools, as files. `--log tensorboard:DIR`, `--log mlflow:DIR`."""

import importlib
from collections.abc import Callable
from pathlib import Path

from plures.errors import UsageError, unknown
from plures.runs.callbacks import Callback, Callbacks
from plures.runs.results import Round

KINDS = ("tensorboard", "mlflow")


Maker = Callable[[str], Callback]  # from the name of a run


def makers(asked: list[str] | None) -> list[Maker]:
    """The loggers that `tensorboard:DIR` or `mlflow:DIR` ask for; a mistake is told before anything runs."""
    return [_maker(text) for text in asked or []]


def _maker(text: str) -> Maker:
    kind, _, folder = text.partition(":")
    if kind not in KINDS:
        raise unknown("logger", kind, KINDS)
    if not folder:
        raise UsageError(f"--log {text} has no folder; write --log {kind}:DIR")
    try:
        module = importlib.import_module(f"{__name__}.{kind}")
    except ImportError as error:
        raise UsageError(
            f"--log {kind} needs a package that is not installed ({error.name}): pip install 'plures[track]' brings it"
        ) from None
    return lambda name: module.Logger(Path(folder), name)


def with_loggers(first: Callback, asked: list[Maker], name: str) -> Callback:
    """A callback, and beside it the loggers of a run of this name."""
    return Callbacks([first, *[make(name) for make in asked]]) if asked else first


def numbers(row: Round) -> dict[str, float]:
    """What is known of a round."""
    return {key: float(value) for key, value in row.to_json().items() if value is not None and key != "round"}
