"""Objects: data that Python users have in memory, as a data set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plures.data.dataset import Dataset
from plures.data.readers import KEYS, as_dataset, from_arrays
from plures.data.reading import Reading
from plures.data.tables import from_frame, table_dataset
from plures.errors import DataError, UsageError


def from_object(data: Any, reading: Reading) -> Dataset:
    """A data set from a `Dataset`, arrays, a data frame, or data of each client.

    A data frame (of pandas, or a Hugging Face `Dataset`) is read as a table. A dict from the names of clients, or a
    list, holds a tuple (x, y) or a torch `Dataset` of rows (x, y) for each client.
    """
    if hasattr(data, "column_names") and hasattr(data, "to_pandas"):
        data = data.to_pandas()
    if is_frame(data):
        return table_dataset("frame", from_frame("frame", data), reading)
    if reading.is_table:
        raise UsageError("client, target and the like are for tables: give a data frame or a file of a table")
    if isinstance(data, Mapping) and data and not set(data) & set(KEYS):
        return _join_clients([str(name) for name in data], list(data.values()))
    if isinstance(data, Sequence) and not isinstance(data, (str, tuple, Dataset)):
        return _join_clients([str(k) for k in range(len(data))], list(data))
    return as_dataset("arrays", data)


def is_frame(data: Any) -> bool:
    """Whether it is a data frame of pandas, or is built like one."""
    return hasattr(data, "columns") and hasattr(data, "iloc")


def _join_clients(names: list[str], parts: list[Any]) -> Dataset:
    """One data set of the rows of all clients."""
    if not parts:
        raise DataError("the data has no client.")
    pairs = [_rows_of(name, part) for name, part in zip(names, parts, strict=True)]
    shapes = {x.shape[1:] for x, _ in pairs}
    if len(shapes) > 1:
        raise DataError(f"rows of different clients have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    client = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    arrays = {"x": np.concatenate([x for x, _ in pairs]), "y": np.concatenate([y for _, y in pairs]), "client": client}
    return from_arrays("clients", arrays)._replace(client_names=tuple(names))


def _rows_of(name: str, part: Any) -> tuple[np.ndarray, np.ndarray]:
    """The rows and labels of one client."""
    if isinstance(part, tuple) and len(part) == 2:
        x, y = (np.asarray(one) for one in part)
    elif hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        rows = [part[k] for k in range(len(part))]
        if not rows or not all(isinstance(row, (tuple, list)) and len(row) == 2 for row in rows):
            raise DataError(f"the data of client {name!r} must hold at least one row, each a pair (x, y).")
        x, y = np.stack([np.asarray(row[0]) for row in rows]), np.array([int(row[1]) for row in rows])
    else:
        raise UsageError(f"the data of client {name!r} is a tuple (x, y) or a torch Dataset, got {type(part).__name__}")
    if len(x) != len(y) or not len(y):
        raise DataError(f"client {name!r} has {len(x)} rows and {len(y)} labels; it needs as many, and at least one.")
    return x, y
