"""Dataset: rows with labels as arrays, and the check that they are consistent."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from plures.errors import DataError


class Dataset(NamedTuple):
    """Rows with labels. The train part of the data set comes first, its test part follows."""

    name: str
    x: np.ndarray  # [row, ...], float32 ready for a model (images [channel, height, width]), or int64 tokens
    y: np.ndarray  # [row] or [row, position], int64 labels from 0 to n_classes - 1
    n_classes: int
    n_train: int  # rows of the train part; all of them if there is no test part
    client: np.ndarray | None  # [row], int64, the client of each row, if the data set has clients of its own
    n_tokens: int = 0  # size of the vocabulary; 0 if x does not hold tokens
    client_names: tuple[str, ...] = ()  # names of these clients 0, 1, ..., if they have any
    class_names: tuple[str, ...] = ()  # names of the classes 0, 1, ..., if they have any


def check(dataset: Dataset) -> None:
    """Refuse a data set with unequal lengths, labels out of range, or numbers that are not finite."""
    name, x, y, n_classes, n_train, client = dataset[:6]
    if y.size == 0 or x.size == 0:
        raise DataError(f"{name}: x has shape {x.shape} and y has {y.size} labels; at least one row is needed.")
    for key, column, most_axes in (("y", y, 2), ("client", client, 1)):
        if column is not None and (column.shape[:1] != (len(x),) or column.ndim > most_axes):
            raise DataError(
                f"{name}: {key!r} has shape {column.shape}, but x has {len(x)} rows; it needs one number for each row."
            )
    if not 1 <= n_train <= len(y):
        raise DataError(f"{name}: {n_train} of {len(y)} rows are for training; at least one must be.")
    check_range(name, "label", y, n_classes)
    if dataset.n_tokens:
        check_range(name, "token", x, dataset.n_tokens)
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            raise DataError(
                f"{name}: {bad.sum()} of {len(x)} rows of x hold NaN or infinity (as 32-bit floats), "
                f"the first is row {bad.argmax()}. Remove or repair these rows."
            )


def check_range(name: str | Path, what: str, values: np.ndarray, n: int, advice: str = "") -> None:
    """Refuse values that are not from 0 to n - 1."""
    outside = (values < 0) | (values >= n)
    if outside.any():
        row, value = np.argwhere(outside)[0][0], values[outside][0]
        raise DataError(f"{name}: the {what} of row {row} is {value}; {what}s must be from 0 to {n - 1}.{advice}")
