"""Population: all clients and which rows each of them has; all rows are in two tables."""

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import seeds
from plures.data.batches import LAST_BATCH, LastBatch
from plures.data.dataset import Target
from plures.data.shard import Shard
from plures.errors import UsageError

Rows = Literal["train", "test", "validation", "pool"]


def _fingerprint(arrays: Sequence[np.ndarray]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        total.update(f"{array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def draw_validation(train: Sequence[np.ndarray], share: float, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The training rows that are left of each client, and a share of them for validation: at least one row of two."""
    left, validation = [], []
    for client, rows in enumerate(train):
        n = min(max(1, int(share * len(rows))), len(rows) - 1) if len(rows) > 1 else 0
        order = seeds.generator(seed, "validation", client).permutation(len(rows))
        left.append(np.sort(rows[order[n:]]))
        validation.append(np.sort(rows[order[:n]]))
    return left, validation


class Population(NamedTuple):
    """The data of all clients: two tables, and which rows of them each client has."""

    x: Tensor
    y: Tensor
    train: list[np.ndarray]
    test: list[np.ndarray]
    n_classes: int
    seed: int
    smallest: int  # in training, a last batch with fewer rows is left out
    validation: Sequence[np.ndarray] = ()  # validation rows of each client, if there are any
    pool: np.ndarray = np.zeros(0, np.int64)  # test rows from all clients, on which every personal model is tested
    last_batch: LastBatch = "keep"  # in training, what becomes of rows that fill no batch
    target: Target = Target()
    work: tuple[int, int] | None = None  # least and most epochs (or steps) of a round, if clients do different amounts
    moved: tuple[Tensor, Tensor] | None = None  # x and y on the device that models compute on, if that is not the CPU

    def fingerprints(self) -> dict[str, str]:
        """What all rows are, and who has which: changed data must not be taken for the same."""
        return {
            "rows": _fingerprint([self.x.numpy(), self.y.numpy()]),
            "split": _fingerprint([*self.train, *self.test]),
        }

    def on(self, device: torch.device) -> "Population":
        """The clients with their rows on a device as well: there is where shards look for them."""
        return self if device.type == "cpu" else self._replace(moved=(self.x.to(device), self.y.to(device)))

    def eligible(self) -> list[int]:
        """The clients that have training rows; the others never take part."""
        return [i for i, rows in enumerate(self.train) if len(rows)]

    def split_new(self, n_new: int) -> tuple["Population", "Population | None"]:
        """The clients that train, and the last n_new clients, which are held out as new; None if n_new is 0."""
        if n_new == 0:
            return self, None
        n = len(self.train) - n_new
        if n < 1:
            raise UsageError(f"{n_new} new clients of {len(self.train)} leave no client to train; hold out fewer")
        old = self._replace(train=self.train[:n], test=self.test[:n])
        return old, self._replace(train=self.train[n:], test=self.test[n:])

    def with_public(self, n_each: int) -> tuple["Population", np.ndarray]:
        """The clients without n_each rows of each class, drawn at random from all clients, and these rows.

        Every client keeps its first row, so that none is left without any.
        """
        if self.y.dim() != 1 or not self.target.is_classes:
            raise UsageError("this method needs some public rows of each class; these rows have no class of their own")
        rng, labels = seeds.generator(self.seed, "public rows"), self.y.numpy()
        spare = np.concatenate([rows[1:] for rows in self.train])
        public = []
        for label in range(self.n_classes):
            rows = spare[labels[spare] == label]
            public.append(rng.choice(rows, min(n_each, len(rows)), replace=False))
        drawn = np.sort(np.concatenate(public))
        return self._replace(train=[rows[~np.isin(rows, drawn)] for rows in self.train]), drawn

    def with_rows_for_all(self, rows: np.ndarray) -> "Population":
        """The clients with these rows besides their own training rows."""
        return self._replace(train=[np.union1d(own, rows) for own in self.train])

    def with_validation(self, share: float) -> "Population":
        """The clients with a share of their training rows as validation rows: at least one row, if a client has two."""
        if not share:
            return self
        train, validation = draw_validation(self.train, share, self.seed)
        return self._replace(train=train, validation=validation)

    def with_pool(self, n_rows: int) -> "Population":
        """The same with a pool of n_rows test rows, drawn at random from all clients; all rows if there are fewer."""
        rows = np.unique(np.concatenate(self.test)) if self.test else self.pool
        if len(rows) > n_rows:
            rows = np.sort(seeds.generator(self.seed, "pool").choice(rows, n_rows, replace=False))
        return self._replace(pool=rows)

    def rows_of(self, client: int, part: Rows) -> np.ndarray:
        """The rows of a client; those of the pool are the same for all clients."""
        if part == "pool":
            return self.pool
        return {"train": self.train, "test": self.test, "validation": self.validation}[part][client]

    def most_tested(self) -> int:
        """The largest number of test rows, or validation rows, of a client."""
        return max((len(rows) for rows in (*self.test, *self.validation)), default=0)

    def sizes(self) -> Tensor:
        """[client], numbers of training rows."""
        return torch.tensor([len(rows) for rows in self.train])

    def shards(self, ids: Sequence[int], part: Rows, purpose: str, round: int) -> Shard:
        """The shards of some clients, stacked except for the tables."""
        own = [self.rows_of(i, part) for i in ids]
        sizes = np.array([len(rows) for rows in own])
        rows = np.zeros((len(own), max(1, int(sizes.max(initial=0)))), np.int64)
        counts = np.zeros((len(own), self.n_classes), np.float32)
        labels = self.y.numpy()
        for i, client in enumerate(ids):
            rows[i, : sizes[i]] = own[i]
            if self.target.is_classes:
                counts[i] = np.bincount(labels[self.train[client]].ravel(), minlength=self.n_classes)
        x, y = self.moved or (self.x, self.y)
        found = Shard(
            x,
            y,
            torch.from_numpy(rows),
            torch.from_numpy(sizes),
            torch.from_numpy(counts),
            torch.tensor([seeds.key_of(self.seed, purpose, round, i) for i in ids]),
            torch.full((len(own),), round),
            torch.full((len(own),), self.smallest),
            torch.full((len(own),), LAST_BATCH.index(self.last_batch)),
            torch.tensor([self._amount(round, i) for i in ids]),
        )
        return Shard(*[part.to(x.device) for part in found])

    def _amount(self, round: int, client: int) -> int:
        """How many epochs, or steps, a client trains in a round, where this is drawn."""
        if self.work is None:
            return 0
        least, most = self.work
        return int(seeds.generator(self.seed, "work", round, client).integers(least, most, endpoint=True))
