"""The arithmetic of training, counted: the FLOPs of one client's batch, measured once, times the batches done.

Stacked clients run as grouped kernels, for which counting formulas differ; one client alone has plain ones.
So the arithmetic of a batch is measured alone, and every pass that a method makes (the second of SAM, the
learning of ALA's blend, FedFomo's validation) goes through `fit` or `measure`, which tell how many batches
they did.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Counter:
    """What was done so far, in FLOPs."""

    total = 0


class _Kernels(TorchDispatchMode):
    """Counts matrix products and convolutions, also those of the backward pass."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.n += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


_of_batch: dict[Hashable, int] = {}  # measured before
_counters: list[Counter] = []  # open ones; the last one counts


@contextmanager
def counted() -> Iterator[Counter]:
    """Count the batches that `fit` and `measure` do in here."""
    counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.pop()


@contextmanager
def direct() -> Iterator[Counter]:
    """Count what is computed in here as it happens."""
    counter = Counter()
    with _Kernels() as kernels:
        yield counter
    counter.total = kernels.n


def add(name: Callable[[], Hashable], n_batches: float, one_batch: Callable[[], Any]) -> None:
    """Batches were done. `name` gives something equal for batches that cost the same; `one_batch` does one."""
    if not _counters or n_batches == 0:
        return
    key = name()
    if key not in _of_batch:
        with _Kernels() as kernels:
            one_batch()
        _of_batch[key] = kernels.n
    _counters[-1].total += round(n_batches * _of_batch[key])
