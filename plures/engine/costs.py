"""What a stacked step costs, as far as the choice of stacks goes by it: only ratios matter."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from plures.engine.passes.channels_last import WIDE

GROUP_BYTES = 1 << 30  # that the stacked tensors of a group of clients may take
CACHE_BYTES = 24 << 20  # that the outputs of its layers may take, if it has more than a few clients
WEIGHT_BYTES = 32 << 20  # that its weights may take, if they are trained and some are of convolutions
A_FEW = 4


class Size(NamedTuple):
    """Of a model: what the cost of its steps is estimated from."""

    flops: int  # of the forward pass of one row
    n_kernels: int  # that a forward pass calls, however many rows it has
    row_bytes: int  # of the outputs of all layers for one row
    weight_bytes: int
    has_convolutions: bool
    elsewhere: bool = False  # whether it computes on another device than the CPU


class Cost(NamedTuple):
    """What a step of a stack costs, in seconds of an imagined core, and how many clients a stack may have."""

    step: float  # the arithmetic of one client
    overhead: float  # for however many clients
    most: int  # clients in a stack

    def of(self, n_steps: Sequence[int]) -> float:
        """Of a whole stack, from the numbers of steps of its clients."""
        return max(n_steps) * self.overhead + sum(n_steps) * self.step


def cost_of(model: Size, batch: int, n_passes: int, client_bytes: int) -> Cost:
    """Of steps that pass through the model so many times with batches of this size."""
    if model.elsewhere:  # a guess: a call costs as much for many clients as for one, and memory is the only bound
        return Cost(0.0, 1.0, max(1, GROUP_BYTES // client_bytes))
    step = n_passes * model.flops * batch / 2e10
    calls = max(7e-4, 1e-5 * n_passes * model.n_kernels)  # a recurrent net calls very many kernels
    # Kernels for convolutions are slower for one client than for four in a stack.
    overhead = calls + (0.4 * step if model.has_convolutions else 0.0)
    in_cache = max(A_FEW, CACHE_BYTES // (batch * model.row_bytes))
    if model.has_convolutions and n_passes > 1:  # in a test, of one pass, all clients may share the weights
        in_cache = min(in_cache, WEIGHT_BYTES // model.weight_bytes)
    return Cost(step, overhead, max(1, min(in_cache, GROUP_BYTES // client_bytes)))


def convolutions(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """One client's kernels, [out, in, height, width], among some tensors of a stack."""
    one = [x[0] if d == 0 else x for x, d in zip(tensors, dims, strict=False)]
    return [x for x in one if x.dim() == 4]


def is_faster_alone(kernels: Sequence[Tensor]) -> bool:
    """Whether a single client runs faster as it is than as a stack of one: narrow convolutions do."""
    return any(len(x) % WIDE for x in kernels)
