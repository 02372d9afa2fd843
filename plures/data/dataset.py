"""Dataset: rows with what is to be predicted of them, as arrays, and the check that they are consistent."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from plures.errors import DataError

# What is predicted: one of several classes; several labels at once, each of which is there or not; a number; or how
# often something happens.
TaskKind = Literal["classes", "labels", "number", "count"]
TASK_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)


class Target(NamedTuple):
    """What is predicted of a row. The numbers that models are trained on are (value - shift) / scale."""

    kind: TaskKind = "classes"
    shift: float = 0.0
    scale: float = 1.0

    @property
    def is_classes(self) -> bool:
        return self.kind == "classes"

    @property
    def is_real(self) -> bool:
        """Whether it is a number of its own, and not a class or labels."""
        return self.kind in ("number", "count")


class Dataset(NamedTuple):
    """Rows with labels. The train part of the data set comes first, its test part follows."""

    name: str
    x: np.ndarray  # [row, ...], float32 ready for a model (images [channel, height, width]), or int64 tokens
    y: np.ndarray  # [row] or [row, position], int64 labels from 0 to n_classes - 1; else float32, see `Target`
    n_classes: int  # what a model gives for a row: a logit for each class or label, or one number
    n_train: int  # rows of the train part; all of them if there is no test part
    client: np.ndarray | None  # [row], int64, the client of each row, if the data set has clients of its own
    n_tokens: int = 0  # size of the vocabulary; 0 if x does not hold tokens
    client_names: tuple[str, ...] = ()  # names of these clients 0, 1, ..., if they have any
    class_names: tuple[str, ...] = ()  # names of the classes 0, 1, ..., if they have any
    target: Target = Target()
    time: np.ndarray | None = None  # [row], when it was; the latest rows of a client are its test rows
    # Of tables and texts: makes the data set anew, with scales, categories and words from these training rows alone.
    encode: "Callable[[np.ndarray], Dataset] | None" = None
    notes: tuple[str, ...] = ()  # what a user should know of the rows: how many were left out, and the like
    schema: str = ""  # of a table, as TOML: columns, their kinds, scales and categories


def check(dataset: Dataset) -> None:
    """Refuse a data set with unequal lengths, labels out of range, or numbers that are not finite."""
    name, x, y, n_classes, n_train, client, target = *dataset[:6], dataset.target
    if y.size == 0 or x.size == 0:
        raise DataError(f"{name}: x has shape {x.shape} and y has {y.size} labels; at least one row is needed.")
    for key, column, most_axes in (("y", y, 2), ("client", client, 1)):
        if column is not None and (column.shape[:1] != (len(x),) or column.ndim > most_axes):
            raise DataError(
                f"{name}: {key!r} has shape {column.shape}, but x has {len(x)} rows; it needs one number for each row."
            )
    if not 1 <= n_train <= len(y):
        raise DataError(f"{name}: {n_train} of {len(y)} rows are for training; at least one must be.")
    if target.is_classes:
        check_range(name, "label", y, n_classes)
    else:
        _check_numbers(name, target.kind, y, n_classes)
    if dataset.n_tokens:
        check_range(name, "token", x, dataset.n_tokens)
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            raise DataError(
                f"{name}: {bad.sum()} of {len(x)} rows of x hold NaN or infinity (as 32-bit floats), "
                f"the first is row {bad.argmax()}. Remove or repair these rows."
            )


def _check_numbers(name: str, kind: TaskKind, y: np.ndarray, n_outputs: int) -> None:
    """Refuse what is to be predicted if it is not of its kind."""
    if kind == "labels" and (y.ndim != 2 or y.shape[1] != n_outputs or not np.isin(y, (0, 1)).all()):
        raise DataError(f"{name}: labels have shape {y.shape}; each row needs 0 or 1 for each of {n_outputs} labels.")
    if kind != "labels" and y.ndim != 1:
        raise DataError(f"{name}: what is to be predicted has shape {y.shape}; it needs one number for each row.")
    bad = ~np.isfinite(y) | ((y < 0) if kind == "count" else False)
    if bad.any():
        value, row = y[bad].flat[0], np.argwhere(bad)[0][0]
        rule = "a finite number" if kind != "count" else "a number that is not negative"
        raise DataError(f"{name}: what is to be predicted of row {row} is {value}; it must be {rule}.")


def check_range(name: str | Path, what: str, values: np.ndarray, n: int, advice: str = "") -> None:
    """Refuse values that are not from 0 to n - 1."""
    outside = (values < 0) | (values >= n)
    if outside.any():
        row, value = np.argwhere(outside)[0][0], values[outside][0]
        raise DataError(f"{name}: the {what} of row {row} is {value}; {what}s must be from 0 to {n - 1}.{advice}")
