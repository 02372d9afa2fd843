"""Memory: what a run will need, estimated before any of it is taken, and how the C library is to handle it."""

import ctypes
import os
from typing import NamedTuple

from plures import tree
from plures.errors import UsageError
from plures.files import in_bytes
from plures.simulate.shapes import Shapes

KEPT_BYTES = 256 << 20  # of freed memory that a process keeps
_MALLOPT = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3}  # numbers of glibc


def keep_freed_memory() -> None:
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
        """For messages."""
        return (
            f"{in_bytes(self.server)} at the server, {in_bytes(self.messages)} of messages per round, "
            f"{in_bytes(self.clients)} kept by clients"
        )


def forecast(shapes: Shapes, n_clients: int, n_cohort: int) -> Forecast:
    """The sizes of all that a run keeps, from shapes alone."""
    n_messages = n_cohort if shapes.is_each else 1
    return Forecast(_bytes(shapes.server), n_messages * _bytes(shapes.train), n_clients * _bytes(shapes.kept))


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
