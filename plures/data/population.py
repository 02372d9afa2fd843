"""Population: which client has which rows, of two tables that all clients share."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import seeds
from plures.data.shard import Shard
from plures.errors import UsageError

Rows = Literal["train", "test", "validation", "pool"]


class Population(NamedTuple):
    """All clients' data: two tables, and who has which rows."""

    x: Tensor
    y: Tensor
    train: list[np.ndarray]
    test: list[np.ndarray]
    n_classes: int
    seed: int
    smallest: int  # a last batch of training with fewer rows is left out
    validation: Sequence[np.ndarray] = ()  # rows of each client that are kept apart, if any are
    pool: np.ndarray = np.zeros(0, np.int64)  # test rows of all clients together, on which every model is tested

    def eligible(self) -> list[int]:
        """The clients that have rows to train on; the others sit out."""
        return [i for i, rows in enumerate(self.train) if len(rows)]

    def parted(self, n_new: int) -> tuple["Population", "Population | None"]:
        """The clients that train, and the last n, which are new; None when there are none."""
        if n_new == 0:
            return self, None
        n = len(self.train) - n_new
        if n < 1:
            raise UsageError(f"{n_new} new clients of {len(self.train)} leave nobody to train; hold out fewer")
        old = self._replace(train=self.train[:n], test=self.test[:n])
        return old, self._replace(train=self.train[n:], test=self.test[n:])

    def with_public(self, n_each: int) -> tuple["Population", np.ndarray]:
        """The clients without n rows of each class, drawn from all of them, and these rows.

        No client gives its first row, so that none is left without any.
        """
        if self.y.dim() != 1:
            raise UsageError("this method needs some public rows of each class; rows with several labels have none")
        rng, labels = seeds.generator(self.seed, "public rows"), self.y.numpy()
        spare = np.concatenate([rows[1:] for rows in self.train])
        public = []
        for label in range(self.n_classes):
            rows = spare[labels[spare] == label]
            public.append(rng.choice(rows, min(n_each, len(rows)), replace=False))
        taken = np.sort(np.concatenate(public))
        return self._replace(train=[rows[~np.isin(rows, taken)] for rows in self.train]), taken

    def with_validation(self, share: float) -> "Population":
        """The clients without a share of their training rows, kept apart: one row at least, if a client has two."""
        if not share:
            return self
        train, validation = [], []
        for client, rows in enumerate(self.train):
            n = min(max(1, int(share * len(rows))), len(rows) - 1) if len(rows) > 1 else 0
            order = seeds.generator(self.seed, "validation", client).permutation(len(rows))
            train.append(np.sort(rows[order[n:]]))
            validation.append(np.sort(rows[order[:n]]))
        return self._replace(train=train, validation=validation)

    def with_pool(self, n_rows: int) -> "Population":
        """With so many of all clients' test rows, drawn at random, or with all of them if there are no more."""
        rows = np.unique(np.concatenate(self.test)) if self.test else self.pool
        if len(rows) > n_rows:
            rows = np.sort(seeds.generator(self.seed, "pool").choice(rows, n_rows, replace=False))
        return self._replace(pool=rows)

    def rows_of(self, client: int, part: Rows) -> np.ndarray:
        if part == "pool":
            return self.pool
        return {"train": self.train, "test": self.test, "validation": self.validation}[part][client]

    def sizes(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.train])

    def shards(self, ids: Sequence[int], part: Rows, purpose: str, round: int) -> Shard:
        """The shards of some clients, stacked (but for the tables)."""
        own = [self.rows_of(i, part) for i in ids]
        sizes = np.array([len(rows) for rows in own])
        rows = np.zeros((len(own), max(1, int(sizes.max(initial=0)))), np.int64)
        counts = np.zeros((len(own), self.n_classes), np.float32)
        labels = self.y.numpy()
        for i, client in enumerate(ids):
            rows[i, : sizes[i]] = own[i]
            counts[i] = np.bincount(labels[self.train[client]].ravel(), minlength=self.n_classes)
        return Shard(
            self.x,
            self.y,
            torch.from_numpy(rows),
            torch.from_numpy(sizes),
            torch.from_numpy(counts),
            torch.tensor([seeds.key_of(self.seed, purpose, round, i) for i in ids]),
            torch.full((len(own),), round),
            torch.full((len(own),), self.smallest),
        )
