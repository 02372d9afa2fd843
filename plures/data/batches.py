"""Batches: which rows each training step of each client uses, planned ahead for a whole stack of clients."""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from plures import seeds

# What becomes of rows that fill no batch. `even`: all batches of a client are of nearly equal size. `drop`: these rows
# are left out of the epoch, unless there are no others. `keep`: they make a batch of their own, of whatever size.
LastBatch = Literal["even", "drop", "keep"]
LAST_BATCH: tuple[LastBatch, ...] = get_args(LastBatch)


class Batch(NamedTuple):
    """Rows of one client, padded to the batch size."""

    x: Tensor  # [batch, ...]
    y: Tensor  # [batch] or [batch, position]
    mask: Tensor  # [batch], 1 for a row, 0 for padding (which repeats a row of the same client)
    counts: Tensor  # [class], the client's training rows of each class
    key: Tensor  # for random numbers in this step

    def part(self, k: int, n: int) -> "Batch":
        """Every n-th row, starting at row k; the parts for all k share no row.

        If a batch has fewer than n rows, some parts would be empty; in those, one row of padding counts.
        """
        mask = self.mask[k::n]
        first = (torch.arange(len(mask)) == 0).to(mask.dtype)
        mask = torch.where(mask.sum() > 0, mask, first)
        return self._replace(x=self.x[k::n], y=self.y[k::n], mask=mask)


class Plan(NamedTuple):
    """Which rows each client uses in each step, without entries for clients that have finished.

    Clients are sorted by number of steps, longest first. So the clients that still train in step t are the first
    `live[t]`, and their batches are `rows[start[t] : start[t] + live[t]]`.
    """

    sorted_clients: np.ndarray  # position in the plan -> position in the stack
    n_steps: np.ndarray  # [client], how many steps each client takes, in the order of the plan
    steps_per_epoch: np.ndarray  # [client]
    live: np.ndarray  # [step]
    start: np.ndarray  # [step]
    rows: Tensor  # [client-step, batch]
    mask: Tensor  # [client-step, batch]
    keys: Tensor  # [client-step]

    def on(self, device: torch.device) -> "Plan":
        """The same with the tensors that batches are cut by on a device."""
        return self._replace(rows=self.rows.to(device), mask=self.mask.to(device), keys=self.keys.to(device))


def batches_per_epoch(sizes: np.ndarray, batch: int, smallest: int, last_batch: LastBatch) -> np.ndarray:
    """How many batches the rows of each client make; none has fewer rows than `smallest`, unless it is the only one."""
    full, last = sizes // batch, sizes % batch
    only = (last > 0) & (full == 0)
    if last_batch == "drop":
        return full + only
    if last_batch == "keep":
        return full + ((last >= smallest) | only)
    n = -(-sizes // batch)
    too_small = (n > 1) & (sizes // np.maximum(n, 1) < smallest)  # only where a batch has hardly more rows than that
    return np.where(too_small, full, n)


def plan_batches(
    rows: np.ndarray,
    sizes: np.ndarray,
    keys: np.ndarray,
    n_steps: np.ndarray,
    batch: int,
    smallest: int,
    shuffle: bool,
    last_batch: LastBatch,
) -> Plan:
    """The batches of every client. `rows` is [client, longest]; `n_steps` is [client], how many steps each one takes.

    Every epoch is a permutation that depends only on the client's key and the number of the epoch.
    """
    steps_per_epoch = batches_per_epoch(sizes, batch, smallest, last_batch)
    n_steps = np.where(steps_per_epoch > 0, n_steps, 0)
    clients = np.argsort(-n_steps, kind="stable")
    rows, sizes, keys = rows[clients], sizes[clients], keys[clients]
    n_steps, steps_per_epoch = n_steps[clients], steps_per_epoch[clients]
    longest = int(n_steps[0]) if len(n_steps) else 0
    live = (n_steps[None, :] > np.arange(longest)[:, None]).sum(1)
    start = np.concatenate([[0], np.cumsum(live)])

    total = int(start[-1])
    mask = np.zeros((total, batch), bool)
    n_epochs = -(-n_steps // np.maximum(steps_per_epoch, 1))
    # One entry for every (client, epoch, row), sorted by random numbers within each (client, epoch).
    length = sizes * n_epochs
    client = np.repeat(np.arange(len(sizes)), length)
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    epoch, place = np.divmod(inside, np.maximum(sizes[client], 1))
    segment_key = seeds.mix(keys[client], epoch)
    if shuffle:
        sort_keys = seeds.mix(segment_key, place)
        segment = np.cumsum(np.r_[0, (np.diff(client) != 0) | (np.diff(epoch) != 0)]) if len(client) else client
        source = place[_sort_within(segment, sort_keys)]
    else:
        source = place
    if last_batch == "even":
        n = steps_per_epoch[client]
        batch_in_epoch, column = _deal(place, np.minimum(sizes[client], n * batch), n)
    else:
        batch_in_epoch, column = np.divmod(place, batch)
    step = epoch * steps_per_epoch[client] + batch_in_epoch
    used = (batch_in_epoch < steps_per_epoch[client]) & (step < n_steps[client])
    owner = np.concatenate([np.arange(n) for n in live]) if total else np.zeros(0, np.int64)
    table = np.repeat(rows[owner, :1], batch, axis=1)  # padding repeats a row of the same client
    client = client[used]
    where = start[step[used]] + client, column[used]
    table[where] = rows[client, source[used]]
    mask[where] = True
    number = np.repeat(np.arange(longest), live)
    return Plan(
        clients,
        n_steps,
        steps_per_epoch,
        live,
        start,
        torch.from_numpy(table),
        torch.from_numpy(mask.astype(np.float32)),
        torch.from_numpy(seeds.mix(keys[owner], number + (1 << 32))),
    )


def _deal(place: np.ndarray, size: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a row and its place in it, where `size` rows are dealt into n batches, the first ones one larger."""
    each, more = np.divmod(size, np.maximum(n, 1))
    ahead = more * (each + 1)  # rows in the larger batches
    in_larger = place < ahead
    after = place - ahead
    batch = np.where(in_larger, place // (each + 1), more + after // np.maximum(each, 1))
    column = np.where(in_larger, place % (each + 1), after % np.maximum(each, 1))
    return batch, column


def _sort_within(segment: np.ndarray, sort_keys: np.ndarray) -> np.ndarray:
    """The order by segment, then by sort_keys (63 bits): the same as that of `np.lexsort`, which is slow."""
    bits = int(segment[-1]).bit_length() if len(segment) else 0
    both = (segment << (63 - bits)) | (sort_keys >> bits)
    order = np.argsort(both, kind="stable")
    found = both[order]
    return np.lexsort((sort_keys, segment)) if (found[1:] == found[:-1]).any() else order  # cut-off bits decide


class Batches(NamedTuple):
    """The planned batches of a stack of clients, and the tables that their rows are in."""

    x: Tensor
    y: Tensor
    counts: Tensor  # [client, class], in the order of the plan
    plan: Plan

    def cut(self, at: Any, counts: Tensor) -> Batch:
        """The batches at some rows of the plan, stacked. `counts` belongs to their clients."""
        rows = self.plan.rows[at]
        x, y = (table.index_select(0, rows.reshape(-1)).unflatten(0, rows.shape) for table in (self.x, self.y))
        return Batch(x, y, self.plan.mask[at], counts, self.plan.keys[at])

    def n_full(self, steps: np.ndarray) -> float:
        """The rows in the first `steps` steps of each client, counted in full batches."""
        rows = self.plan.mask.sum(1).cpu().numpy()
        t = np.repeat(np.arange(len(self.plan.live)), self.plan.live)
        client = np.arange(len(rows)) - np.repeat(self.plan.start[:-1], self.plan.live)
        return float(rows[t < steps[client]].sum()) / self.plan.mask.shape[1]
