"""What a run will need of memory, told before any of it is taken, and how the C library is to handle it."""

import ctypes
import os
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode  # private in torch: tensors with shapes and no memory

from . import tree
from .errors import UsageError
from .method import Each, Federation, Method
from .task import Task

KEPT_BYTES = 256 << 20  # of what was freed, by a process
_MALLOPT = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3}  # numbers of glibc


def keep_what_is_freed() -> None:
    """Let the C library keep memory that is freed, for the next step takes as much.

    Else every stacked tensor of some megabytes comes on fresh pages, whose first touch takes longer than the
    arithmetic. Where there is no glibc, all stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MALLOPT["M_MMAP_THRESHOLD"], 32 << 20)  # glibc takes no more
        mallopt(_MALLOPT["M_TRIM_THRESHOLD"], KEPT_BYTES)
        mallopt(_MALLOPT["M_TOP_PAD"], 32 << 20)


class Forecast(NamedTuple):
    """Bytes."""

    server: int  # what the server keeps
    messages: int  # what is sent in a round
    clients: int  # what all clients keep; beyond a limit it is kept in a file

    @property
    def held(self) -> int:
        """What has to be in memory at once; a merge makes a second server state beside the first."""
        return 2 * self.server + 2 * self.messages

    def in_words(self) -> str:
        return (
            f"{in_bytes(self.server)} at the server, {in_bytes(self.messages)} of messages a round, "
            f"{in_bytes(self.clients)} kept by clients"
        )


def in_bytes(n: float) -> str:
    """1,234,567 -> 1.2 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def forecast(method: Method, task: Task, sizes: torch.Tensor, n_cohort: int) -> Forecast:
    """The sizes of all that a run keeps, from shapes alone."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        params: tree.Params = {name: fake.from_tensor(x) for name, x in task.initial.items()}
        server = method.init_server(task, params, Federation(sizes.clone(), torch.tensor(0)))
        client = method.init_client(task, params)
        message = method.send(task, server, torch.arange(1))
        n_messages = n_cohort if isinstance(message, Each) else 1
        return Forecast(_bytes(server), n_messages * _bytes(message.tree), len(sizes) * _bytes(client))


def _bytes(of: tree.Tree) -> int:
    return sum(x.numel() * x.element_size() for x in tree.leaves(of))


def available() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(needed: Forecast) -> None:
    """A sentence instead of a process that is killed."""
    free = available()
    if needed.held > 0.9 * free:
        raise UsageError(
            f"the run would need about {in_bytes(needed.held)} of memory ({needed.in_words()}), and "
            f"{in_bytes(free)} are free. Choose fewer clients, a smaller model, or a method that keeps less (for "
            "fedfomo and apple, lower models=)."
        )
