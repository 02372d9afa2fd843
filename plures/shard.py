"""Shard: the rows of one client, and the order in which a loop meets them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import seeds


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


class Plan(NamedTuple):
    """Which rows each of some clients meets in each step, with no place for clients that are done.

    Clients are sorted by number of steps, longest first, so that in step t the live ones are the
    first `live[t]`; their batches are `rows[start[t] : start[t] + live[t]]`.
    """

    sorted_clients: np.ndarray  # place in the plan -> place in the stack
    n_steps: np.ndarray  # steps of each client, in the order of the plan
    steps_an_epoch: np.ndarray
    live: np.ndarray  # [step]
    start: np.ndarray  # [step]
    rows: Tensor  # [client-step, batch]
    mask: Tensor  # [client-step, batch]
    keys: Tensor  # [client-step]


def batches_an_epoch(sizes: np.ndarray, batch: int, smallest: int) -> np.ndarray:
    """How many batches each client makes of its rows."""
    full, last = sizes // batch, sizes % batch
    return full + ((last >= smallest) | ((last > 0) & (full == 0)))


def plan(
    rows: np.ndarray, sizes: np.ndarray, keys: np.ndarray, n_steps: np.ndarray, batch: int, smallest: int, shuffle: bool
) -> Plan:
    """The batches of every client. `rows` is [client, longest]; `n_steps` is how many each one takes.

    Every epoch is a permutation that depends on the client's key and the epoch alone.
    """
    steps_an_epoch = batches_an_epoch(sizes, batch, smallest)
    n_steps = np.where(steps_an_epoch > 0, n_steps, 0)
    clients = np.argsort(-n_steps, kind="stable")
    rows, sizes, keys = rows[clients], sizes[clients], keys[clients]
    n_steps, steps_an_epoch = n_steps[clients], steps_an_epoch[clients]
    longest = int(n_steps[0]) if len(n_steps) else 0
    live = (n_steps[None, :] > np.arange(longest)[:, None]).sum(1)
    start = np.concatenate([[0], np.cumsum(live)])

    total = int(start[-1])
    mask = np.zeros((total, batch), bool)
    n_epochs = -(-n_steps // np.maximum(steps_an_epoch, 1))
    # One entry for every (client, epoch, row): sorted by its lot within (client, epoch).
    length = sizes * n_epochs
    client = np.repeat(np.arange(len(sizes)), length)
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    epoch, place = np.divmod(inside, np.maximum(sizes[client], 1))
    segment_key = seeds.mix(keys[client], epoch)
    if shuffle:
        lot = seeds.mix(segment_key, place)
        segment = np.cumsum(np.r_[0, (np.diff(client) != 0) | (np.diff(epoch) != 0)]) if len(client) else client
        source = place[_sorted_within(segment, lot)]
    else:
        source = place
    batch_in_epoch, column = np.divmod(place, batch)
    step = epoch * steps_an_epoch[client] + batch_in_epoch
    used = (batch_in_epoch < steps_an_epoch[client]) & (step < n_steps[client])
    owner = np.concatenate([np.arange(n) for n in live]) if total else np.zeros(0, np.int64)
    table = np.repeat(rows[owner, :1], batch, axis=1)  # padding repeats a row of the client's own
    client = client[used]
    where = start[step[used]] + client, column[used]
    table[where] = rows[client, source[used]]
    mask[where] = True
    number = np.repeat(np.arange(longest), live)
    return Plan(
        clients,
        n_steps,
        steps_an_epoch,
        live,
        start,
        torch.from_numpy(table),
        torch.from_numpy(mask.astype(np.float32)),
        torch.from_numpy(seeds.mix(keys[owner], number + (1 << 32))),
    )


def _sorted_within(segment: np.ndarray, lot: np.ndarray) -> np.ndarray:
    """The order by segment and then by lot, of 63 bits; as `np.lexsort`, which is slow, would have it."""
    bits = int(segment[-1]).bit_length() if len(segment) else 0
    both = (segment << (63 - bits)) | (lot >> bits)
    order = np.argsort(both, kind="stable")
    found = both[order]
    return np.lexsort((lot, segment)) if (found[1:] == found[:-1]).any() else order  # bits that were cut off decide
