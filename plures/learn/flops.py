"""FLOPs of training: those of one client's batch, measured once, times the batches done.

Stacked clients run as grouped kernels, for which counting formulas differ; one client alone has plain ones. So the
arithmetic of a batch is measured alone, and every pass that a method makes (the second of SAM, the learning of
ALA's blend, FedFomo's validation) goes through `fit` or `measure`, which tell how many batches they did to the meter
that is open (`engine.metered`).
"""

from collections.abc import Callable, Hashable
from typing import Any

from plures.engine import KernelCount, count_flops, is_metered

_of_batch: dict[Hashable, int] = {}  # measured before


def add_batches(name: Callable[[], Hashable], n_batches: float, one_batch: Callable[[], Any]) -> None:
    """Batches were done. `name` gives something equal for batches that cost the same; `one_batch` does one."""
    if not is_metered() or n_batches == 0:
        return
    key = name()
    if key not in _of_batch:
        with KernelCount() as kernels:
            one_batch()
        _of_batch[key] = kernels.flops
    count_flops(round(n_batches * _of_batch[key]))
