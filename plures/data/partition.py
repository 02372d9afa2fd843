"""Partitions: which rows of a data set each client has, and which of them are its test rows.

Each partition is a function from labels to one array of rows per client; some then permute labels or remove rows. It
succeeds by construction or raises an error with a reason, and all random numbers come from the generator that it is
given.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.data.dataset import Dataset
from plures.errors import DataError, UsageError, unknown
from plures.seeds import generator

_LEAST = 40  # rows that the dirichlet partition gives to every client, if there are enough
_CLIENTS = 20  # number of clients if none is given


class Split(NamedTuple):
    """The train rows and test rows of each client, sorted."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    labels: list[np.ndarray] | None = None  # each client's label for every class, if clients have permuted labels
    notes: tuple[str, ...] = ()  # what a user should know of it: rows, classes or clients that are left out


def _is_positive(value: float) -> bool:
    return value > 0


class Partition(NamedTuple):
    """A way to assign rows to clients."""

    description: str
    needs_value: bool
    value_help: str
    make: Callable[[Dataset, int, Any, np.random.Generator], list[np.ndarray]]
    allows: Callable[[float], bool] = _is_positive  # whether it takes this finite value
    keeps_test: bool = False  # clients are tested on the data set's own test part, if there is one
    n_clients: Callable[[Dataset], int] = lambda data: _CLIENTS  # number of clients if none is given
    finish: Callable[[Dataset, Split, Any, np.random.Generator], Split] | None = None  # a last change of the split
    second: float | None = None  # what a second value, after a comma, is if it is left out; None: it takes only one


def _of_classes(name: str, description: str, deal: Callable[..., list[np.ndarray]]) -> Partition:
    """A partition whose value is a number of classes K."""
    return Partition(
        f"{name}:K, {description}",
        True,
        f"a whole number of classes from 1, e.g. {name}:2",
        lambda data, n, value, rng: deal(data.y, n, int(value), rng),
        allows=_is_count,
    )


def parse(text: str) -> tuple[str, Any]:
    """The name and the value of a partition, e.g. of "dirichlet:0.1"; two values in a tuple, where it takes two."""
    name, colon, given = text.partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    kind = PARTITIONS[name]
    if not kind.needs_value:
        if colon:
            raise UsageError(f"partition {text!r}: {name} takes no value. Write {name!r}.")
        return name, None
    first, comma, second = given.partition(",") if kind.second is not None else (given, "", "")
    value = _number(first)
    if not math.isfinite(value) or not kind.allows(value):
        raise UsageError(f"partition {text!r}: {name} needs {kind.value_help}.")
    if kind.second is None:
        return name, value
    other = _number(second) if comma else kind.second
    if not (math.isfinite(other) and other > 0):
        raise UsageError(f"partition {text!r}: {name} needs {kind.value_help}.")
    return name, (value, other)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def make_split(
    dataset: Dataset,
    partition: str,
    n_clients: int | None,
    seed: int,
    test_share: float = 0.25,
    share: float = 1.0,
    min_rows: int = 0,
) -> Split:
    """Assign rows to clients, then choose a share of each client's rows of each label as test rows.

    If the number of clients is not given, there are 20; with `natural`, all clients that the data has. Clients with
    fewer than `min_rows` training rows are left out.
    """
    name, value = parse(partition)
    kind = PARTITIONS[name]
    if n_clients is not None and n_clients < 1:
        raise UsageError(f"the number of clients is {n_clients}; it must be at least 1.")
    if not 0 < test_share < 1:
        raise UsageError(f"the share of rows for testing is {test_share}; it must be more than 0 and less than 1.")
    if share < 1:
        used = draw_rows(dataset, share, generator(seed, "share of rows"))
        client = None if dataset.client is None else dataset.client[used]
        n_train = int((used < dataset.n_train).sum())
        time = None if dataset.time is None else dataset.time[used]
        some = dataset._replace(x=dataset.x[used], y=dataset.y[used], n_train=n_train, client=client, time=time)
        split = make_split(some, partition, n_clients, seed, test_share, min_rows=min_rows)
        return split._replace(train=[used[rows] for rows in split.train], test=[used[rows] for rows in split.test])
    if n_clients is None:
        n_clients = kind.n_clients(dataset)
    clients = kind.make(dataset, n_clients, value, generator(seed, "partition"))
    if kind.keeps_test and dataset.n_train < len(dataset.y):
        parts = [(rows[rows < dataset.n_train], rows[rows >= dataset.n_train]) for rows in clients]
    elif dataset.time is not None:
        parts = [latest_for_testing(rows, dataset.time[rows], test_share) for rows in clients]
    else:
        rng = generator(seed, "test rows")
        y = dataset.y if dataset.target.is_classes else np.zeros(len(dataset.y), np.int64)
        parts = [split_train_test(rows, y[rows], test_share, rng) for rows in clients]
    split = Split([train for train, _ in parts], [test for _, test in parts])
    split = split._replace(notes=_unused(partition, dataset, split, n_clients))
    if kind.finish is not None:
        split = kind.finish(dataset, split, value, generator(seed, name))
    return without_small_clients(split, min_rows)


def _unused(partition: str, dataset: Dataset, split: Split, n_clients: int) -> tuple[str, ...]:
    """What a partition leaves out, in words."""
    used = np.concatenate([*split.train, *split.test])
    n, n_unused = len(dataset.y), len(dataset.y) - len(used)
    if not n_unused or (partition == "natural" and n_clients < len(_own_clients(dataset)[0])):
        return ()
    words = f"{partition} with {n_clients} clients leaves out {n_unused} of {n} rows"
    if dataset.y.ndim == 1:
        missing = np.setdiff1d(dataset.y, dataset.y[used])
        if len(missing):
            words += f", and all rows of {'class' if len(missing) == 1 else 'classes'} {', '.join(map(str, missing))}"
    return (words,)


def without_small_clients(split: Split, min_rows: int) -> Split:
    """The clients that have at least so many training rows."""
    keep = [i for i, rows in enumerate(split.train) if len(rows) >= min_rows]
    if len(keep) == len(split.train):
        return split
    if not keep:
        most = max(len(rows) for rows in split.train)
        raise UsageError(f"min_rows {min_rows} leaves no client: the largest has {most} training rows.")
    words = (
        f"{len(split.train) - len(keep)} of {len(split.train)} clients have fewer than {min_rows} training rows "
        "(--min-rows) and are left out"
    )
    return Split(
        [split.train[i] for i in keep],
        [split.test[i] for i in keep],
        None if split.labels is None else [split.labels[i] for i in keep],
        (*split.notes, words),
    )


def draw_rows(dataset: Dataset, share: float, rng: np.random.Generator) -> np.ndarray:
    """A random share of the rows of each class, at least one row, sorted."""
    has_classes = dataset.y.ndim == 1 and dataset.target.is_classes
    labels = dataset.y if has_classes else np.zeros(len(dataset.y), np.int64)
    chosen = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen.append(rng.choice(rows, max(1, round(share * len(rows))), replace=False))
    return np.sort(np.concatenate(chosen))


def names_of_clients(dataset: Dataset, split: Split) -> tuple[str, ...]:
    """The names of the data's own clients, if each client of the split is one of them; else empty."""
    if dataset.client is None:
        return ()
    found = [np.unique(dataset.client[np.concatenate(rows)]) for rows in zip(split.train, split.test, strict=True)]
    own = [int(ids[0]) for ids in found if len(ids) == 1]
    if len(set(own)) < len(found):
        return ()
    return tuple(dataset.client_names[client] if dataset.client_names else str(client) for client in own)


def move_new_last(split: Split, n: int, seed: int) -> Split:
    """The same clients in the same order, except that n of them, drawn at random, come last: the new clients."""
    if n == 0:
        return split
    chosen = set(
        generator(seed, "new clients").choice(len(split.train), min(n, len(split.train)), replace=False).tolist()
    )
    order = sorted(range(len(split.train)), key=lambda i: (i in chosen, i))

    def reorder(parts: list[np.ndarray]) -> list[np.ndarray]:
        return [parts[i] for i in order]

    labels = reorder(split.labels) if split.labels else None
    return split._replace(train=reorder(split.train), test=reorder(split.test), labels=labels)


def relabel(y: np.ndarray, split: Split) -> np.ndarray:
    """The labels of all rows as their clients have permuted them."""
    if split.labels is None:
        return y
    new = y.copy()
    for own, rows in zip(split.labels, zip(split.train, split.test, strict=True), strict=True):
        for part in rows:
            new[part] = own[y[part]]
    return new


# --- the partitions ---


def iid(y: np.ndarray, n_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """All rows, assigned at random; sizes differ by at most one."""
    _check_enough("iid", len(y), n_clients)
    owner = np.empty(len(y), np.int64)
    owner[rng.permutation(len(y))] = np.arange(len(y)) % n_clients
    return _rows_of_clients(owner, n_clients)


def dirichlet(y: np.ndarray, n_clients: int, beta: float, rng: np.random.Generator) -> list[np.ndarray]:
    """All rows; each class is divided in shares from Dirichlet(beta), with a minimum number of rows per client.

    A client that already has an equal part of all rows, or more, gets nothing of the following classes, as in the
    practical setting of FedALA. In the end, clients below the minimum (40, or half an equal part) receive random rows
    of the largest clients.
    """
    _check_enough("dirichlet", len(y), n_clients)
    owner = np.empty(len(y), np.int64)
    sizes = np.zeros(n_clients, np.int64)
    for rows in _rows_of_classes(y, rng):
        below = sizes < len(y) / n_clients  # never empty: rows are left
        shares = np.where(below, _draw_shares(n_clients, beta, rng), 0)
        counts = _cut(len(rows), shares if shares.sum() > 0 else below / below.sum())
        owner[rows] = np.repeat(np.arange(n_clients), counts)
        sizes += counts
    _fill_up(owner, n_clients, min(_LEAST, len(y) // n_clients // 2), rng)
    return _rows_of_clients(owner, n_clients)


def dirichlet_class(
    y: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator, n_train: int | None = None
) -> list[np.ndarray]:
    """All rows; each class is divided in shares from Dirichlet(alpha), as in Fed-RoD. A client may get no rows.

    The first `n_train` rows and the others are divided separately, in the same shares.
    """
    owner = np.empty(len(y), np.int64)
    n_train = len(y) if n_train is None else n_train
    for rows in _rows_of_classes(y, rng):
        shares = _draw_shares(n_clients, alpha, rng)
        for part in (rows[rows < n_train], rows[rows >= n_train]):
            owner[part] = np.repeat(np.arange(n_clients), _cut(len(part), shares))
    return _rows_of_clients(owner, n_clients)


def dirichlet_client(y: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Equal sizes; every client draws its own shares of the classes from Dirichlet(alpha * shares in the data).

    As in Hsu et al. 2019: rows are drawn without replacement, one client after another. When a class is used up, the
    shares of the others are scaled up. The remainder of the rows, fewer than clients, is not used.
    """
    _check_enough("dirichlet-client", len(y), n_clients)
    classes = _rows_of_classes(y, rng)
    left = np.array([len(rows) for rows in classes])
    prior = left / left.sum()
    size = len(y) // n_clients
    owner = np.full(len(y), -1, np.int64)
    for client in range(n_clients):
        shares = rng.dirichlet(np.maximum(alpha * prior, 1e-12))
        missing = size
        while missing:
            open_shares = np.where(left > 0, shares, 0.0)
            if not open_shares.sum() > 0:  # false for NaN, too
                open_shares = left / left.sum()
            taken = np.minimum(rng.multinomial(missing, open_shares / open_shares.sum()), left)
            for c in np.flatnonzero(taken):
                start = len(classes[c]) - left[c]
                owner[classes[c][start : start + taken[c]]] = client
            left = left - taken
            missing -= int(taken.sum())
    return _rows_of_clients(owner, n_clients)


def shards(y: np.ndarray, n_clients: int, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows sorted by class, cut into k pieces per client of equal size, dealt at random, as in McMahan et al. 2017.

    The last rows, fewer than there are pieces, are not used.
    """
    _check_enough("shards", len(y), n_clients)
    size = len(y) // (n_clients * k)
    if size == 0:
        raise UsageError(
            f"shards:{k} cuts {n_clients * k} pieces, and the data has {len(y)} rows; use fewer clients or pieces."
        )
    order = np.concatenate(_rows_of_classes(y, rng))
    owner = np.full(len(y), -1, np.int64)
    owner_of_piece = np.repeat(np.arange(n_clients), k)[rng.permutation(n_clients * k)]
    owner[order[: size * n_clients * k]] = np.repeat(owner_of_piece, size)
    return _rows_of_clients(owner, n_clients)


def quantity(y: np.ndarray, n_clients: int, beta: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Random rows; the numbers of rows are shares from Dirichlet(beta), at least two rows each."""
    _check_enough("quantity", len(y), n_clients)
    sizes = 2 + _cut(len(y) - 2 * n_clients, _draw_shares(n_clients, beta, rng))
    owner = np.empty(len(y), np.int64)
    owner[rng.permutation(len(y))] = np.repeat(np.arange(n_clients), sizes)
    return _rows_of_clients(owner, n_clients)


def pathological(y: np.ndarray, n_clients: int, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """k classes per client, unequal sizes; clients form groups with the same classes, as in FedALA.

    All rows of a class are used if some client has it. The last classes may remain without a client.
    """
    classes = _rows_of_classes(y, rng)
    _check_k("pathological", k, len(classes))
    has = np.zeros((n_clients, len(classes)), bool)
    n_takers = -(-n_clients * k // len(classes))
    for c in range(len(classes)):
        has[np.flatnonzero(has.sum(1) < k)[:n_takers], c] = True
    # The last clients may still have too few classes: they get those that the fewest clients have.
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
    """k classes per client, with the same number of rows for each class and client, as in PLGU.

    The numbers of clients of two classes differ by at most one. The class with the fewest rows per client sets the
    number of rows; further rows of the other classes are not used.
    """
    classes = _rows_of_classes(y, rng)
    _check_k("labels", k, len(classes))
    has = _assign_classes(n_clients, k, len(classes), rng)
    takers = [np.flatnonzero(has[:, c]) for c in range(len(classes))]
    share = min(
        _equal_part("labels", y[rows[0]], len(rows), len(clients))
        for rows, clients in zip(classes, takers, strict=True)
        if len(clients)
    )
    if k * share < 2:
        raise UsageError(
            f"labels:{k} has one row for each of the {n_clients} clients, none of them to test on; use fewer clients."
        )
    owner = np.full(len(y), -1, np.int64)
    for rows, clients in zip(classes, takers, strict=True):
        owner[rows[: share * len(clients)]] = np.repeat(clients, share)
    return _rows_of_clients(owner, n_clients)


def main(y: np.ndarray, n_clients: int, k: int, rng: np.random.Generator) -> list[np.ndarray]:
    """All classes for every client; k main classes make 60 % of its rows; equal sizes, as in pFedLA.

    A client has equally many rows of each of its main classes, up to one row, and equally many of each of its other
    classes. The numbers of clients for which two classes are main differ by at most one. Clients are as large as the
    rows of the classes allow; the other rows are not used.
    """
    classes = _rows_of_classes(y, rng)
    if not 0 < 5 * k < 3 * len(classes):
        raise UsageError(
            f"main:{k} asks for {k} classes that make 60 % of a client's rows, each with more than any other class; "
            f"the data has {len(classes)} classes. Use at most {(3 * len(classes) - 1) // 5}."
        )
    is_main = _assign_classes(n_clients, k, len(classes), rng)
    supply = np.array([len(rows) for rows in classes])
    counts = _main_counts(is_main, k, supply)
    if counts is None:
        raise UsageError(
            f"main:{k} cannot give each of {n_clients} clients rows of all {len(classes)} classes and 60 % from {k} "
            f"of them: the smallest class has {supply.min()} rows. Use fewer clients or more main classes."
        )
    owner = np.full(len(y), -1, np.int64)
    for c, rows in enumerate(classes):
        owner[rows[: counts[:, c].sum()]] = np.repeat(np.arange(n_clients), counts[:, c])
    return _rows_of_clients(owner, n_clients)


def natural(dataset: Dataset, n_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The data's own clients, or a random choice of them, in their order.

    Only clients with rows in the train part count: the others could not train. Rows of clients that were not drawn are
    not used.
    """
    own, of_row = _own_clients(dataset)
    if n_clients > len(own):
        raise UsageError(
            f"natural cannot make {n_clients} clients: {dataset.name} has {len(own)} with rows to train on. "
            f"Use at most {len(own)}, or leave out the number to use them all."
        )
    chosen = np.sort(rng.choice(own, n_clients, replace=False))
    place = np.searchsorted(chosen, of_row).clip(max=n_clients - 1)
    return _rows_of_clients(np.where(chosen[place] == of_row, place, -1), n_clients)


def permute_labels(dataset: Dataset, split: Split, zeta: float, rng: np.random.Generator) -> Split:
    """Permute the labels of a random share 1 - zeta of the clients, each in its own way, as in AFML.

    So equal rows can have different labels at different clients. With zeta = 1 nothing changes; with zeta = 0 the
    labels of all clients are permuted.
    """
    n_clients = len(split.train)
    n_permuted = int((1 - zeta) * n_clients + 0.5 + 1e-9)  # 0.1 * 5 may be 0.4999...
    if n_permuted == 0:
        return split
    labels = [np.arange(dataset.n_classes) for _ in range(n_clients)]
    for client in rng.permutation(n_clients)[:n_permuted]:
        labels[client] = rng.permutation(dataset.n_classes)
    return split._replace(labels=labels)


def thin_classes(dataset: Dataset, split: Split, values: tuple[float, float], rng: np.random.Generator) -> Split:
    """Remove rows, so that the first class has `ratio` times as many as the last, as in Fed-RoD.

    The number of rows falls by the same factor from class to class. It is as large as the classes allow, and at least
    one. A client keeps its share of each class. Test rows are removed in the same shares, so that a client is tested on
    the mix of classes that it has.
    """
    ratio, _ = values
    n_clients = len(split.train)
    owners = {"train": np.full(len(dataset.y), -1, np.int64), "test": np.full(len(dataset.y), -1, np.int64)}
    for part, lists in (("train", split.train), ("test", split.test)):
        for client, rows in enumerate(lists):
            owners[part][rows] = client
    assigned = np.flatnonzero(owners["train"] >= 0)
    classes = [assigned[rows] for rows in _rows_of_classes(dataset.y[assigned], rng)]
    factors = ratio ** -(np.arange(len(classes)) / max(len(classes) - 1, 1))
    supply = np.array([len(rows) for rows in classes])
    with np.errstate(over="ignore"):  # a factor may be so small that the quotient is infinite
        most = (supply / factors).min()  # rows of the first class
    wanted = np.maximum((most * factors + 1e-9).astype(np.int64), 1)
    for rows, n_rows in zip(classes, wanted, strict=True):
        tests = rng.permutation(np.flatnonzero((owners["test"] >= 0) & (dataset.y == dataset.y[rows[0]])))
        n_tests = max(1, round(len(tests) * n_rows / len(rows)))
        for owner, some, n in ((owners["train"], rows, n_rows), (owners["test"], tests, n_tests)):
            some = some[np.argsort(owner[some], kind="stable")]
            # Evenly over the rows, sorted by client, so that every client keeps its share.
            ends = np.arange(len(some) + 1) * n // max(len(some), 1)
            owner[some[np.diff(ends) == 0]] = -1
    train, test = (_rows_of_clients(owners[part], n_clients) for part in ("train", "test"))
    return split._replace(train=train, test=test)


def _is_count(value: float) -> bool:
    return value >= 1 and value == int(value)


PARTITIONS: dict[str, Partition] = {
    "iid": Partition(
        "random rows, equally many for every client",
        False,
        "no value",
        lambda data, n, value, rng: iid(data.y, n, rng),
    ),
    "dirichlet": Partition(
        "dirichlet:BETA, classes in random shares (small BETA: very unequal), with a minimum of rows per client",
        True,
        "a number more than 0, e.g. dirichlet:0.1",
        lambda data, n, value, rng: dirichlet(data.y, n, value, rng),
    ),
    "dirichlet-class": Partition(
        "dirichlet-class:ALPHA, classes in random shares, test rows in the same shares; clients may have no rows",
        True,
        "a number more than 0, e.g. dirichlet-class:0.3",
        lambda data, n, value, rng: dirichlet_class(data.y, n, value, rng, data.n_train),
        keeps_test=True,
    ),
    "dirichlet-client": Partition(
        "dirichlet-client:ALPHA, equal sizes, every client with random shares of the classes (Hsu et al.)",
        True,
        "a number more than 0, e.g. dirichlet-client:0.3",
        lambda data, n, value, rng: dirichlet_client(data.y, n, value, rng),
    ),
    "shards": Partition(
        "shards:K, rows sorted by class and cut into K equal pieces per client, dealt at random (McMahan et al.)",
        True,
        "a whole number of pieces from 1, e.g. shards:2",
        lambda data, n, value, rng: shards(data.y, n, int(value), rng),
        allows=_is_count,
    ),
    "quantity": Partition(
        "quantity:BETA, random rows in numbers that differ (small BETA: very unequal), at least two",
        True,
        "a number more than 0, e.g. quantity:0.5",
        lambda data, n, value, rng: quantity(data.y, n, value, rng),
    ),
    "pathological": _of_classes(
        "pathological",
        "K classes per client, in groups of clients with the same classes and unequal sizes",
        pathological,
    ),
    "labels": _of_classes("labels", "K random classes per client, equal sizes", labels),
    "main": _of_classes("main", "all classes for every client, 60 % of its rows from K of them; equal sizes", main),
    "relabel": Partition(
        "relabel:ZETA, dirichlet:0.5 where a share 1 - ZETA of the clients have permuted labels",
        True,
        "a number from 0 (labels of all clients are permuted) to 1 (none are), e.g. relabel:0.5",
        lambda data, n, value, rng: dirichlet(data.y, n, 0.5, rng),
        allows=lambda value: 0 <= value <= 1,
        finish=permute_labels,
    ),
    "longtail": Partition(
        "longtail:RATIO,ALPHA, dirichlet-class:ALPHA (0.3 if left out) with RATIO times as many rows of the first "
        "class as of the last",
        True,
        "a number from 1, and if you like ALPHA, more than 0, after a comma, e.g. longtail:10,0.6",
        lambda data, n, values, rng: dirichlet_class(data.y, n, values[1], rng, data.n_train),
        allows=lambda value: value >= 1,
        keeps_test=True,
        finish=thin_classes,
        second=0.3,
    ),
    "natural": Partition(
        "the data's own clients: all, or as many as --clients says, at random",
        False,
        "no value",
        lambda data, n, value, rng: natural(data, n, rng),
        keeps_test=True,
        n_clients=lambda data: len(_own_clients(data)[0]),
    ),
}


# --- helpers of the partitions ---


def _check_enough(name: str, n_rows: int, n_clients: int) -> None:
    if n_rows < 2 * n_clients:
        raise UsageError(
            f"{name} cannot deal {n_rows} rows to {n_clients} clients: each needs at least 2, one to train "
            f"on and one to test on. Use at most {n_rows // 2} clients."
        )


def _check_k(name: str, k: int, n_classes: int) -> None:
    if not 1 <= k <= n_classes:
        raise UsageError(
            f"{name}:{k} asks for {k} classes per client; the data has {n_classes}, so use 1 to {n_classes}."
        )


def _equal_part(name: str, label: int, n_rows: int, n_takers: int) -> int:
    """How many rows of a class each client gets that has it: at least one."""
    if n_rows < n_takers:
        raise UsageError(
            f"{name} cannot deal the {n_rows} rows of class {label} to the {n_takers} clients that need one; "
            "use fewer clients or fewer classes per client."
        )
    return n_rows // n_takers


def _own_clients(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The data's own clients that have training rows, sorted, and the client of each row."""
    if dataset.client is None:
        raise UsageError(
            f"natural needs data with clients of its own, and {dataset.name} has none. Use another partition, "
            "e.g. dirichlet:0.1, or data with a client for each row."
        )
    return np.unique(dataset.client[: dataset.n_train]), dataset.client


def _assign_classes(n_clients: int, k: int, n_classes: int, rng: np.random.Generator) -> np.ndarray:
    """[client, class]: k classes for each client, at random among those that the fewest clients have."""
    has = np.zeros((n_clients, n_classes), bool)
    used = np.zeros(n_classes, np.int64)
    for client in range(n_clients):
        chosen = np.lexsort((rng.random(n_classes), used))[:k]  # the least used, so that counts differ by at most one
        used[chosen] += 1
        has[client, chosen] = True
    return has


def _main_counts(is_main: np.ndarray, k: int, supply: np.ndarray) -> np.ndarray | None:
    """[client, class]: how many rows of each class each client has, for clients as large as possible.

    None if there are too few rows for every client to have one of each class.
    """
    n_clients, n_classes = is_main.shape
    n_others = n_classes - k
    shares = np.where(is_main, 0.6 / k, 0.4 / n_others).sum(0)  # rows of each class per row of a client
    largest = int(min((supply + n_clients) / shares))  # rounding saves less than one row per client and class
    for size in range(largest, n_classes - 1, -1):
        of_main = (6 * size + 5) // 10
        base, more = divmod(of_main, k)
        base_others, more_others = divmod(size - of_main, n_others)
        counts = np.where(is_main, base, base_others)
        left = supply - counts.sum(0)
        if min(base, base_others) < 1 or left.min() < 0:
            continue
        for client in range(n_clients):
            for mine, n in ((is_main[client], more), (~is_main[client], more_others)):
                # the classes with most rows left
                chosen = np.argsort(np.where(mine, -left, supply.max() + 1), kind="stable")[:n]
                counts[client, chosen] += 1
                left[chosen] -= 1
        if left.min() >= 0:
            return counts
    return None


def _rows_of_classes(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each class that has any, shuffled, in the order of the classes."""
    if y.dtype.kind == "f":
        raise UsageError("rows have no classes, so they cannot be divided by class. Use the partition natural or iid.")
    if y.ndim > 1:
        raise UsageError(
            f"each row of the data has {y.shape[1]} labels, so rows cannot be divided by class. "
            "Use the partition natural or iid."
        )
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(y[order])) + 1)


def _rows_of_clients(owner: np.ndarray, n_clients: int) -> list[np.ndarray]:
    """The rows of each client, sorted, from the client of each row (-1: none)."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner + 1, minlength=n_clients + 1))
    return np.split(order, ends[:-1])[1:]


def _draw_shares(n: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """Shares from a symmetric Dirichlet distribution, or from its limit where floating point fails."""
    shares = rng.dirichlet(np.full(n, concentration))
    if shares.sum() > 0:  # false for NaN
        return shares
    if concentration > 1:
        return np.full(n, 1 / n)
    return np.eye(n)[rng.integers(n)]


def _cut(n_rows: int, shares: np.ndarray) -> np.ndarray:
    """How many rows each share gets: the rows are cut at the cumulative shares."""
    ends = np.cumsum(shares)
    ends /= ends[-1]  # the last is exactly 1, and clients without a share get nothing
    return np.diff((ends * n_rows + 1e-9).astype(np.int64), prepend=0)  # 0.8 * 10 may be 7.999...


def _fill_up(owner: np.ndarray, n_clients: int, least: int, rng: np.random.Generator) -> None:
    """Give clients with fewer than `least` rows random rows, each from the client that is the largest at that time."""
    sizes = np.bincount(owner, minlength=n_clients)
    missing = np.maximum(least - sizes, 0)
    wanted = int(missing.sum())
    # Taking rows one by one from the largest client brings the largest clients down to a common size: the greatest one
    # with enough rows above it. There are enough rows for `least` per client, so this size is not below `least`.
    height, top = least, int(sizes.max())
    while height < top:
        middle = (height + top + 1) // 2
        if np.maximum(sizes - middle, 0).sum() >= wanted:
            height = middle
        else:
            top = middle - 1
    given = np.maximum(sizes - height, 0)
    too_many = int(given.sum()) - wanted  # fewer than the clients that give, or the height could be greater
    given[rng.permutation(np.flatnonzero(given))[:too_many]] -= 1

    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each row within its client
    taken = order[place < np.repeat(given, sizes)]
    owner[rng.permutation(taken)] = np.repeat(np.arange(n_clients), missing)


def latest_for_testing(rows: np.ndarray, time: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of a client: the latest ones are for testing."""
    if len(rows) < 2:
        return rows, rows[:0]
    n_test = min(max(round(test_share * len(rows)), 1), len(rows) - 1)
    order = rows[np.argsort(time, kind="stable")]
    return np.sort(order[:-n_test]), np.sort(order[-n_test:])


def split_train_test(
    rows: np.ndarray, y: np.ndarray, test_share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of a client, with labels `y`: a share of each label is for testing, by largest remainder.

    At least one row is for testing and one for training; a single row is for training. If possible, every label keeps a
    row for training. Rows with a label for each position are not told apart by label.
    """
    if len(rows) < 2:
        return rows, rows[:0]
    if y.ndim > 1:
        y = np.zeros(len(rows), np.int64)
    wanted = min(max(round(test_share * len(rows)), 1), len(rows) - 1)
    order = rng.permutation(len(rows))
    order = order[np.argsort(y[order], kind="stable")]
    _, counts = np.unique(y, return_counts=True)
    tie_breakers = rng.permutation(len(counts))
    taken = np.floor(test_share * counts).astype(np.int64)  # leaves at least one row
    while taken.sum() < wanted:
        remainder = np.round(test_share * counts - taken, 9)
        taken[np.lexsort((tie_breakers, -remainder, -np.minimum(counts - taken, 2)))[0]] += 1
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_test = np.zeros(len(rows), bool)
    is_test[order[place < np.repeat(taken, counts)]] = True
    return rows[~is_test], rows[is_test]


# --- split files ---


def split_to_json(split: Split) -> str:
    """The text of a split file: {"train": [[row, ...], ...], "test": [...]}, with one list per client.

    If labels are permuted, there is also "labels": [[label of class 0, ...], ...].
    """
    parts = {part: lists for part, lists in split._asdict().items() if part != "notes" and lists is not None}
    return json.dumps({part: [rows.tolist() for rows in lists] for part, lists in parts.items()}) + "\n"


def read_split(path: Path, n_rows: int, n_classes: int) -> Split:
    """The split in a file, for a data set of `n_rows` rows: first its train part, then its test part."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"split file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"split file {path} is not JSON: {error}.") from error
    shape = 'it must be {"train": [[row, ...], ...], "test": [[row, ...], ...]}, with one list of rows per client'
    if not isinstance(content, dict) or set(content) - {"labels"} != {"train", "test"}:
        got = f"the keys {sorted(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(f"split file {path} holds {got}; {shape}.")
    for part, clients in content.items():
        if not isinstance(clients, list) or not all(isinstance(rows, list) for rows in clients):
            raise DataError(f"split file {path}: {part!r} is not a list of lists; {shape}.")
    n_train, n_test = len(content["train"]), len(content["test"])
    if n_train != n_test or n_train == 0:
        raise DataError(
            f"split file {path} has {n_train} clients in 'train' and {n_test} in 'test'; "
            "both must have the same number, at least one."
        )
    labels = content.pop("labels", None)
    user: dict[int, str] = {}  # row -> part and client that use it
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
    return Split(train, test, None if labels is None else _read_labels(path, labels, n_train, n_classes))


def _read_labels(path: Path, labels: list[list[Any]], n_clients: int, n_classes: int) -> list[np.ndarray]:
    """Each client's labels for the classes: a permutation of the labels."""
    if len(labels) != n_clients:
        raise DataError(
            f"split file {path} has {n_clients} clients in 'train' and {len(labels)} in 'labels'; "
            "both must have the same number, unless there are no 'labels'."
        )
    for client, own in enumerate(labels):
        if not all(type(label) is int for label in own) or sorted(own) != list(range(n_classes)):
            raise DataError(
                f"split file {path}: 'labels' of client {client} is {str(own)[:40]}; it must have "
                f"each of the whole numbers from 0 to {n_classes - 1} once, in any order."
            )
    return [np.array(own, np.int64) for own in labels]
