"""Where stacked tensors live: memory that worker processes share, a file past a limit, or the memory of a device.

Pages are taken when they are first written, so that a population of which few clients ever take
part costs little.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plures import devices, tree
from plures.files import telling_disk_failures
from plures.tree import Tree

_ALIGN = 64  # as torch allocates, so that kernels take the same path for the same numbers


def _rounded(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def table_bytes(template: Tree, n: int) -> int:
    """Bytes of n rows like the template."""
    return sum(_rounded(n * x.numel() * x.element_size()) for x in tree.leaves(template))


def table(template: Tree, n: int, folder: Path | None = None, device: torch.device = devices.CPU) -> Tree:
    """n rows like the template, of zeros, in shared memory, in a file of the folder, or on another device."""
    if device.type != "cpu":
        return tree.map(lambda x: torch.zeros((n, *x.shape), dtype=x.dtype, device=device), template)
    size = max(table_bytes(template, n), mmap.PAGESIZE)
    if folder is None:
        memory = mmap.mmap(-1, size)
    else:
        with telling_disk_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="rows-", dir=folder)
            try:
                os.unlink(name)  # the pages go when the run does, however it ends
                os.posix_fallocate(handle, 0, size)  # else a full disk would end the run by a signal, without a word
                memory = mmap.mmap(handle, size)
            finally:
                os.close(handle)
    at = 0

    def carve(x: Tensor) -> Tensor:
        nonlocal at
        count = n * x.numel()
        if count == 0:
            return torch.empty((n, *x.shape), dtype=x.dtype, device=devices.CPU)
        rows = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=at).view(n, *x.shape)
        at += _rounded(count * x.element_size())
        return rows

    return tree.map(carve, template)


class ClientStore:
    """The state of every client, one row each. A row that was never written is the initial state.

    Rows are on the device that computes; where they are too large for that, in a file, and on their way in each round.
    """

    def __init__(
        self, initial: Tree, n_clients: int, memory_limit: int, folder: Path | None, device: torch.device = devices.CPU
    ) -> None:
        self.initial, self.n_clients, self.device = initial, n_clients, device
        self.on_disk = folder is not None and table_bytes(initial, n_clients) > memory_limit
        self._place = devices.CPU if self.on_disk else device  # where the rows are kept
        self._rows = table(initial, n_clients, folder if self.on_disk else None, self._place)
        self.written: Tensor = table(torch.zeros((), dtype=torch.bool), n_clients)  # on the CPU

    def rows(self, ids: Tensor) -> Tree:
        """Copies of the rows of the given clients."""
        written, at = self.written[ids.cpu()].to(self.device), ids.to(self._place)

        def pick(table: Tensor, initial: Tensor) -> Tensor:
            shape = (-1, *[1] * initial.dim())
            return torch.where(written.reshape(shape), table[at].to(self.device), initial)

        return tree.map(pick, self._rows, self.initial)

    def put(self, ids: Tensor, new: Tree) -> None:
        """Replace the rows of the given clients."""
        at = ids.to(self._place)
        for whole, part in zip(tree.leaves(self._rows), tree.leaves_like(self._rows, new), strict=True):
            whole[at] = part.to(self._place)
        self.written[ids.cpu()] = True

    def written_rows(self, most: int) -> Iterator[tuple[Tensor, Tree]]:
        """The clients whose row was written, and these rows: so many at a time, or fewer."""
        ids = self.written.nonzero().squeeze(1)
        if len(ids):  # without any, split would give one empty block
            for some in ids.split(most):
                yield some, tree.rows(self._rows, some.to(self._place))
