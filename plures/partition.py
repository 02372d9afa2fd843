"""Partitions: which rows of a data set each client has, and which of these it is tested on.

Each partition is a function from labels to one array of rows a client. It is feasible by construction
or refuses with a reason, and its randomness comes from the generator it is given.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .datasets import Dataset
from .errors import DataError, UsageError, unknown
from .seeds import generator

_LEAST = 40  # rows that the dirichlet partition gives to every client, if there are enough


class Split(NamedTuple):
    """The rows of each client, sorted."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    labels: list[np.ndarray] | None = None  # each client's name for every class, where clients rename them


class Partition(NamedTuple):
    """A way to deal rows to clients."""

    description: str
    needs_value: bool
    value_help: str
    make: Callable[[Dataset, int, Any, np.random.Generator], list[np.ndarray]]
    counts: bool = False  # the value is a whole number from 1
    keeps_test: bool = False  # the data set's own test part, if there is one, is what clients are tested on


def parse(text: str) -> tuple[str, float | None]:
    """The name and the value of a partition, e.g. of "dirichlet:0.1"."""
    name, colon, given = text.partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    kind = PARTITIONS[name]
    if not kind.needs_value:
        if colon:
            raise UsageError(f"partition {text!r}: {name} takes no value. Write {name!r}.")
        return name, None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (kind.counts and value != int(value)):
        raise UsageError(f"partition {text!r}: {name} needs {kind.value_help}.")
    return name, value


def make_split(dataset: Dataset, partition: str, n_clients: int, seed: int, test_share: float = 0.25) -> Split:
    """Deal the rows to clients, then set aside a share of each client's rows of each label for testing."""
    name, value = parse(partition)
    if n_clients < 1:
        raise UsageError(f"the number of clients is {n_clients}; it must be at least 1.")
    if not 0 < test_share < 1:
        raise UsageError(f"the share of rows for testing is {test_share}; it must be more than 0 and less than 1.")
    kind = PARTITIONS[name]
    clients = kind.make(dataset, n_clients, value, generator(seed, "partition"))
    if kind.keeps_test and dataset.n_train < len(dataset.y):
        is_train = [rows < dataset.n_train for rows in clients]
        return Split(
            [rows[here] for rows, here in zip(clients, is_train, strict=True)],
            [rows[~here] for rows, here in zip(clients, is_train, strict=True)],
        )
    rng = generator(seed, "test rows")
    parts = [train_and_test(rows, dataset.y[rows], test_share, rng) for rows in clients]
    return Split([train for train, _ in parts], [test for _, test in parts])


def relabelled(y: np.ndarray, split: Split) -> np.ndarray:
    """The labels with every client's own names for the classes."""
    if split.labels is None:
        return y
    new = y.copy()
    for own, rows in zip(split.labels, zip(split.train, split.test, strict=True), strict=True):
        for part in rows:
            new[part] = own[y[part]]
    return new


# --- the partitions ---


def iid(y: np.ndarray, n_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """All rows, dealt at random: sizes differ by at most one."""
    _check_enough("iid", len(y), n_clients)
    owner = np.empty(len(y), np.int64)
    owner[rng.permutation(len(y))] = np.arange(len(y)) % n_clients
    return _rows_of_clients(owner, n_clients)


def dirichlet(y: np.ndarray, n_clients: int, beta: float, rng: np.random.Generator) -> list[np.ndarray]:
    """All rows; each class is dealt in shares from Dirichlet(beta), with a least number of rows a client.

    A client that holds an equal part of all rows or more gets nothing of the classes that follow, as in
    the practical setting of FedALA. In the end clients below the least number, 40 or half an equal part,
    are filled up with random rows of the largest clients.
    """
    _check_enough("dirichlet", len(y), n_clients)
    owner = np.empty(len(y), np.int64)
    sizes = np.zeros(n_clients, np.int64)
    for rows in _rows_of_classes(y, rng):
        below = sizes < len(y) / n_clients  # never empty, as rows are left
        shares = np.where(below, _shares(n_clients, beta, rng), 0)
        counts = _cut(len(rows), shares if shares.sum() > 0 else below / below.sum())
        owner[rows] = np.repeat(np.arange(n_clients), counts)
        sizes += counts
    _fill_up(owner, n_clients, min(_LEAST, len(y) // n_clients // 2), rng)
    return _rows_of_clients(owner, n_clients)


def dirichlet_class(
    y: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator, n_train: int | None = None
) -> list[np.ndarray]:
    """All rows; each class is dealt in shares from Dirichlet(alpha), as Fed-RoD does. A client may get none.

    The first `n_train` rows and the others are dealt apart, in the same shares.
    """
    owner = np.empty(len(y), np.int64)
    n_train = len(y) if n_train is None else n_train
    for rows in _rows_of_classes(y, rng):
        shares = _shares(n_clients, alpha, rng)
        for part in (rows[rows < n_train], rows[rows >= n_train]):
            owner[part] = np.repeat(np.arange(n_clients), _cut(len(part), shares))
    return _rows_of_clients(owner, n_clients)


def pathological(y: np.ndarray, n_clients: int, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """k classes a client, unequal sizes; clients form groups with the same classes, as in FedALA.

    Every row of a class that some client has is dealt. The walk over the classes may end before the last
    ones, which then nobody has.
    """
    classes = _rows_of_classes(y, rng)
    _check_k("pathological", k, len(classes))
    has = np.zeros((n_clients, len(classes)), bool)
    n_takers = -(-n_clients * k // len(classes))
    for c in range(len(classes)):
        has[np.flatnonzero(has.sum(1) < k)[:n_takers], c] = True
    # The walk may leave the last clients with too few classes: they get the ones that the fewest have.
    for client in np.flatnonzero(has.sum(1) < k):
        order = np.lexsort((has.sum(0), has[client]))
        has[client, order[: k - has[client].sum()]] = True

    owner = np.full(len(y), -1, np.int64)
    for c, rows in enumerate(classes):
        takers = np.flatnonzero(has[:, c])
        if len(takers) == 0:
            continue
        equal = _equal_part("pathological", y[rows[0]], len(rows), len(takers))
        counts = rng.integers(max(equal // 10, 1), equal, len(takers), endpoint=True)
        counts[-1] = len(rows) - counts[:-1].sum()
        owner[rows] = np.repeat(takers, counts)
    return _rows_of_clients(owner, n_clients)


def labels(y: np.ndarray, n_clients: int, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """k classes a client, the same number of rows of each class and client, as in PLGU.

    The numbers of clients of two classes differ by at most one. The class that is scarcest for its
    clients sets the number of rows; what is left of the others is not used.
    """
    classes = _rows_of_classes(y, rng)
    _check_k("labels", k, len(classes))
    takers: list[list[int]] = [[] for _ in classes]
    used = np.zeros(len(classes), np.int64)
    for client in range(n_clients):
        chosen = np.lexsort((rng.random(len(classes)), used))[:k]  # the least used, so that all stay within one
        used[chosen] += 1
        for c in chosen:
            takers[c].append(client)
    share = min(
        _equal_part("labels", y[rows[0]], len(rows), len(clients))
        for rows, clients in zip(classes, takers, strict=True)
        if clients
    )
    if k * share < 2:
        raise UsageError(
            f"labels:{k} has one row for each of the {n_clients} clients, none of them to test on; use fewer clients."
        )
    owner = np.full(len(y), -1, np.int64)
    for rows, clients in zip(classes, takers, strict=True):
        owner[rows[: share * len(clients)]] = np.repeat(np.array(clients, np.int64), share)
    return _rows_of_clients(owner, n_clients)


PARTITIONS: dict[str, Partition] = {
    "iid": Partition(
        "random rows, as many for every client",
        False,
        "no value",
        lambda data, n, value, rng: iid(data.y, n, rng),
    ),
    "dirichlet": Partition(
        "dirichlet:BETA, classes in random shares (the smaller BETA, the less alike), at least some rows a client",
        True,
        "a number more than 0, e.g. dirichlet:0.1",
        lambda data, n, value, rng: dirichlet(data.y, n, value, rng),
    ),
    "dirichlet-class": Partition(
        "dirichlet-class:ALPHA, classes in random shares, test rows in the same ones; clients may have no rows",
        True,
        "a number more than 0, e.g. dirichlet-class:0.3",
        lambda data, n, value, rng: dirichlet_class(data.y, n, value, rng, data.n_train),
        keeps_test=True,
    ),
    "pathological": Partition(
        "pathological:K, K classes a client, in groups of clients with the same classes and unequal sizes",
        True,
        "a whole number of classes from 1, e.g. pathological:2",
        lambda data, n, value, rng: pathological(data.y, n, int(value), rng),
        counts=True,
    ),
    "labels": Partition(
        "labels:K, K classes a client at random, equal sizes",
        True,
        "a whole number of classes from 1, e.g. labels:2",
        lambda data, n, value, rng: labels(data.y, n, int(value), rng),
        counts=True,
    ),
}


# --- what they are made of ---


def _check_enough(name: str, n_rows: int, n_clients: int) -> None:
    if n_rows < 2 * n_clients:
        raise UsageError(
            f"{name} cannot deal {n_rows} rows to {n_clients} clients: each needs at least 2, one to train "
            f"and one to test on. Use at most {n_rows // 2} clients."
        )


def _check_k(name: str, k: int, n_classes: int) -> None:
    if not 1 <= k <= n_classes:
        raise UsageError(
            f"{name}:{k} asks for {k} classes a client; the data has {n_classes}, so use 1 to {n_classes}."
        )


def _equal_part(name: str, label: int, n_rows: int, n_takers: int) -> int:
    """Rows of a class for each of the clients that have it, at least one."""
    if n_rows < n_takers:
        raise UsageError(
            f"{name} cannot deal the {n_rows} rows of class {label} to the {n_takers} clients that need one; "
            "use fewer clients or fewer classes a client."
        )
    return n_rows // n_takers


def _rows_of_classes(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each class that has any, in the order of the classes, each shuffled."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(y[order])) + 1)


def _rows_of_clients(owner: np.ndarray, n_clients: int) -> list[np.ndarray]:
    """The rows of each client, sorted, from the client of each row (-1: nobody's)."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner + 1, minlength=n_clients + 1))
    return np.split(order, ends[:-1])[1:]


def _shares(n: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Shares from a symmetric Dirichlet distribution, or its limit where floating point gives out."""
    shares = rng.dirichlet(np.full(n, concentration))
    if shares.sum() > 0:  # false for NaN
        return shares
    if concentration > 1:
        return np.full(n, 1 / n)
    return np.eye(n)[rng.integers(n)]


def _cut(n_rows: int, shares: np.ndarray) -> np.ndarray:
    """How many of the rows each share is: the rows are cut at the cumulative shares."""
    ends = np.cumsum(shares)
    ends /= ends[-1]  # so that the end is exactly 1, and clients without a share get nothing
    return np.diff((ends * n_rows + 1e-9).astype(np.int64), prepend=0)  # 0.8 * 10 may come as 7.999...


def _fill_up(owner: np.ndarray, n_clients: int, least: int, rng: np.random.Generator) -> None:
    """Give clients with fewer than `least` rows random ones, each from the client that is largest by then."""
    sizes = np.bincount(owner, minlength=n_clients)
    missing = np.maximum(least - sizes, 0)
    wanted = int(missing.sum())
    # Taking rows one by one from the largest brings the largest ones down to a common height: the
    # greatest with enough rows above it. All rows are enough for `least` each, so it is not below that.
    height, top = least, int(sizes.max())
    while height < top:
        middle = (height + top + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= wanted:
            height = middle
        else:
            top = middle - 1
    given = np.maximum(sizes - height, 0)
    too_many = int(given.sum()) - wanted  # fewer than there are givers, or the height could be greater
    given[rng.permutation(np.flatnonzero(given))[:too_many]] -= 1

    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of the row within its client
    taken = order[place < np.repeat(given, sizes)]
    owner[rng.permutation(taken)] = np.repeat(np.arange(n_clients), missing)


def train_and_test(
    rows: np.ndarray, y: np.ndarray, test_share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of a client, with labels `y`: a share of each label for testing, by largest remainder.

    At least one row is for testing and one for training; a single row is for training. While it can be
    helped, no label loses its last row for training.
    """
    if len(rows) < 2:
        return rows, rows[:0]
    wanted = min(max(round(test_share * len(rows)), 1), len(rows) - 1)
    order = rng.permutation(len(rows))
    order = order[np.argsort(y[order], kind="stable")]
    _, counts = np.unique(y, return_counts=True)
    lots = rng.permutation(len(counts))
    taken = np.floor(test_share * counts).astype(np.int64)  # leaves at least one row
    while taken.sum() < wanted:
        remainder = np.round(test_share * counts - taken, 9)
        taken[np.lexsort((lots, -remainder, -np.minimum(counts - taken, 2)))[0]] += 1
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_test = np.zeros(len(rows), bool)
    is_test[order[place < np.repeat(taken, counts)]] = True
    return rows[~is_test], rows[is_test]


# --- split files ---


def split_to_json(split: Split) -> str:
    """The text of a split file: {"train": [[row, ...], ...], "test": [...]}, one list a client."""
    return json.dumps({part: [rows.tolist() for rows in lists] for part, lists in split._asdict().items()}) + "\n"


def read_split(path: Path, n_rows: int) -> Split:
    """The split in a file, for a data set of `n_rows` rows (those of its train part, then those of its test part)."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"split file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"split file {path} is not JSON: {error}.") from error
    shape = 'it must be {"train": [[row, ...], ...], "test": [[row, ...], ...]}, one list of rows a client'
    if not isinstance(content, dict) or set(content) != {"train", "test"}:
        got = f"the keys {sorted(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(f"split file {path} holds {got}; {shape}.")
    for part, clients in content.items():
        if not isinstance(clients, list) or not all(isinstance(rows, list) for rows in clients):
            raise DataError(f"split file {path}: {part!r} is not a list of lists; {shape}.")
    n_train, n_test = len(content["train"]), len(content["test"])
    if n_train != n_test or n_train == 0:
        raise DataError(
            f"split file {path} has {n_train} clients in 'train' and {n_test} in 'test'; "
            "there must be as many, and at least one."
        )
    user: dict[int, str] = {}  # who uses the row
    for part, clients in content.items():
        for client, rows in enumerate(clients):
            here = f"{part!r} of client {client}"
            for row in rows:
                if type(row) is not int or not 0 <= row < n_rows:
                    raise DataError(
                        f"split file {path}: {here} has row {str(row)[:40]}; "
                        f"the data set has {n_rows} rows, so use whole numbers from 0 to {n_rows - 1}."
                    )
                if row in user:
                    raise DataError(f"split file {path}: row {row} is in {user[row]} and in {here}; use each row once.")
                user[row] = here
    train, test = ([np.array(sorted(rows), np.int64) for rows in content[part]] for part in ("train", "test"))
    return Split(train, test)
