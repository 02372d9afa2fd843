"""Shard: the rows of one client in one round."""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds


class Shard(NamedTuple):
    """One client's data in one round.

    `rows` are indices into the tables `x` and `y`. In a simulation all clients share these tables, so that nothing is
    copied; on a real client they hold its own rows.
    """

    x: Tensor
    y: Tensor
    rows: Tensor  # [longest], the client's rows first, then padding
    size: Tensor  # how many rows the client has
    counts: Tensor  # [class], its rows of each class
    key: Tensor  # from (seed, round, client): for the order of rows and random numbers in training
    round: Tensor  # counted from 0
    smallest: Tensor  # a last batch with fewer rows is left out, unless it is the only one
    last_batch: Tensor  # what becomes of rows that fill no batch: a place in `batches.LAST_BATCH`
    work: Tensor  # epochs or steps of this client in this round, where clients do different amounts of work

    def take(self, fraction: float, purpose: str) -> "Shard":
        """A random share of the rows, at least one row; the same for the same round and purpose."""
        first, _ = self.split(fraction, purpose)
        return first

    def split(self, fraction: float, purpose: str) -> tuple["Shard", "Shard"]:
        """A random share of the rows, and the others. A client with one row has it in both parts."""
        salt = seeds.mix(self.key, torch.tensor(seeds.key_of(purpose)))
        return self._cut(fraction, seeds.mix(salt, torch.arange(self.rows.shape[-1])))

    def fixed_split(self, fraction: float, purpose: str) -> tuple["Shard", "Shard"]:
        """As `split`, but the same in all rounds: rows that are set aside once are never trained on.

        It depends on positions in the shard, not on rows of the table, so that a real client, which has a table of its
        own, sets the same rows aside.
        """
        places = torch.arange(self.rows.shape[-1])
        return self._cut(fraction, seeds.mix(torch.tensor(seeds.key_of(purpose)), places))

    def _cut(self, fraction: float, random: Tensor) -> tuple["Shard", "Shard"]:
        """The rows with the smallest random numbers, and the others."""
        place = torch.arange(self.rows.shape[-1])
        sort_keys = torch.where(place < self.size, random, seeds.LARGEST)
        rows = self.rows[sort_keys.argsort(stable=True)]
        wanted = (self.size * fraction + 1e-6).floor().to(self.size.dtype)  # 0.29 * 100 is 28.999...
        n_first = torch.minimum(wanted.clamp(min=1), self.size)
        n_rest = self.size - n_first
        rest = rows[(place + n_first) % len(place)]
        alone = n_rest == 0
        return (
            self._replace(rows=rows, size=n_first),
            self._replace(rows=torch.where(alone, rows, rest), size=torch.where(alone, n_first, n_rest)),
        )
