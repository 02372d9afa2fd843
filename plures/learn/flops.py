"""FLOPs of training: those of one client's batch, measured once, times the batches done.

Stacked clients run as grouped kernels, for which counting formulas differ; one client alone has plain ones. So the
arithmetic of a batch is measured alone, and every pass that a method makes (the second of SAM, the learning of
ALA's blend, FedFomo's validation) goes through `fit` or `measure`, which tell how many batches they did.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from plures.engine import KernelCount


class Counter:
    """FLOPs so far."""

    total = 0


_of_batch: dict[Hashable, int] = {}  # measured before
_open: list[Counter] = []  # the last one counts


@contextmanager
def count_batches() -> Iterator[Counter]:
    """Count the batches that `fit` and `measure` do in here."""
    counter = Counter()
    _open.append(counter)
    try:
        yield counter
    finally:
        _open.pop()


@contextmanager
def count_kernels() -> Iterator[Counter]:
    """Count what is computed in here, kernel by kernel."""
    counter = Counter()
    with KernelCount() as kernels:
        yield counter
    counter.total = kernels.flops


def add_batches(name: Callable[[], Hashable], n_batches: float, one_batch: Callable[[], Any]) -> None:
    """Batches were done. `name` gives something equal for batches that cost the same; `one_batch` does one."""
    if not _open or n_batches == 0:
        return
    key = name()
    if key not in _of_batch:
        with KernelCount() as kernels:
            one_batch()
        _of_batch[key] = kernels.flops
    _open[-1].total += round(n_batches * _of_batch[key])
