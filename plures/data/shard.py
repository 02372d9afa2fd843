"""Shard: the rows of one client in one round."""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds


class Shard(NamedTuple):
    """One client's data in one round.

    `x` and `y` are the tables that `rows` point into. In a simulation all clients share them, so
    that nothing is copied; on a real client they hold its own rows.
    """

    x: Tensor
    y: Tensor
    rows: Tensor  # [longest], the client's rows first, then padding
    size: Tensor  # how many rows the client has
    counts: Tensor  # [class], its rows of each class
    key: Tensor  # from (seed, round, client): the order of examples and what is drawn while training
    round: Tensor  # counted from 0
    smallest: Tensor  # a last batch with fewer rows is left out, unless it is the only one

    def take(self, fraction: float, purpose: str) -> "Shard":
        """A random share of the rows, at least one; the same for the same round and purpose."""
        first, _ = self.split(fraction, purpose)
        return first

    def split(self, fraction: float, purpose: str) -> tuple["Shard", "Shard"]:
        """A random share of the rows, and the others. A client with one row has it in both."""
        salt = seeds.mix(self.key, torch.tensor(seeds.key_of(purpose)))
        return self._cut(fraction, seeds.mix(salt, torch.arange(self.rows.shape[-1])))

    def lasting_split(self, fraction: float, purpose: str) -> tuple["Shard", "Shard"]:
        """The same of a client's whole shard, but equal in all rounds: what is set aside once is never trained on.

        It goes by places, not by rows of the table: a real client's table is its own, and it sets aside the same.
        """
        places = torch.arange(self.rows.shape[-1])
        return self._cut(fraction, seeds.mix(torch.tensor(seeds.key_of(purpose)), places))

    def _cut(self, fraction: float, lots: Tensor) -> tuple["Shard", "Shard"]:
        """The rows with the smallest lots, and the others."""
        place = torch.arange(self.rows.shape[-1])
        lot = torch.where(place < self.size, lots, seeds.LARGEST)
        rows = self.rows[lot.argsort(stable=True)]
        wanted = (self.size * fraction + 1e-6).floor().to(self.size.dtype)  # 0.29 * 100 is 28.999...
        n_first = torch.minimum(wanted.clamp(min=1), self.size)
        n_rest = self.size - n_first
        rest = rows[(place + n_first) % len(place)]
        alone = n_rest == 0
        return (
            self._replace(rows=rows, size=n_first),
            self._replace(rows=torch.where(alone, rows, rest), size=torch.where(alone, n_first, n_rest)),
        )
