"""The engine: a function of one client's batch becomes a fast step of a whole stack of clients.

`compile_step` is its door; the eager step is the reference. Nothing here knows a method, a model or a run.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from plures import tree
from plures.data.batches import Batch
from plures.engine import eager
from plures.engine.choice import Engine, Meter, Usage, count, count_flops, current, is_metered, metered, using
from plures.engine.costs import GROUP_BYTES, Cost, Size, convolutions, cost_of, is_faster_alone
from plures.engine.eager import Signature, over_clients
from plures.engine.gradients import Gradient
from plures.engine.late import Late
from plures.engine.onednn import DenseLayers
from plures.engine.operation import per_client
from plures.engine.private import KernelCount
from plures.engine.steps import Live, Step, Steps
from plures.engine.trace import NotTraced, Role, name_of, trace_step, trace_values

__all__ = [
    "GROUP_BYTES",
    "Cost",
    "DenseLayers",
    "Engine",
    "Gradient",
    "KernelCount",
    "Late",
    "Live",
    "Meter",
    "Signature",
    "Size",
    "Step",
    "Steps",
    "Usage",
    "Values",
    "compile_step",
    "compile_values",
    "convolutions",
    "cost_of",
    "count",
    "count_flops",
    "current",
    "eager_step",
    "is_faster_alone",
    "is_metered",
    "metered",
    "name_of",
    "over_clients",
    "per_client",
    "using",
]

ASKED_FOR = "the engine is eager"
ONE_BY_ONE = "clients run one by one"
ELSEWHERE = "the fast engine is for the CPU, and the tensors are on {}"


class Values(NamedTuple):
    """What a function of a stack of clients gives, in a row, and the structure that it has."""

    run: Callable[[list[Tensor]], list[Tensor]]
    spec: tree.Spec


_steps: dict[Hashable, Step] = {}
_values: dict[Hashable, Values] = {}


def compile_step(
    objective: Callable[..., Tensor], signature: Signature, tensors: list[Tensor], repeats: bool, stacked: bool = True
) -> Step:
    """The losses and gradients of a stack of clients, as fast as can be.

    `objective(params, batch, *given)` is the loss of one client; `signature` says how the tensors of a step, of
    which `tensors` is an example, are its arguments; `repeats` says whether the same batches come again in every
    epoch, and `stacked` whether clients are stacked at all. Steps are kept: equal objectives are compiled once.
    """
    plain = eager_step(objective, signature)
    engine = current()
    if not stacked or engine.kind == "eager":
        return Step(plain, engine.why_eager or ASKED_FOR if stacked else ONE_BY_ONE)
    device = tensors[0].device
    if device.type != "cpu":
        return Step(plain, ELSEWHERE.format(device.type))
    key = (engine, name_of(objective), signature, repeats, _shapes(tensors, signature.dims))
    if key not in _steps:
        roles: list[Role] = ["trained"] * signature.n_params
        roles += ["drawn" if field == "key" else "batch" for field in Batch._fields]
        roles += ["given"] * len(signature.given_dims)
        try:
            found = trace_step(plain, tensors, signature.dims, roles, repeats, engine)
            _steps[key] = Step(found.run, "", *found[1:])
        except NotTraced as reason:
            _steps[key] = Step(plain, str(reason))
    return _steps[key]


def eager_step(objective: Callable[..., Tensor], signature: Signature) -> Callable[[Any], Any]:
    """The reference: the same step by vmap and autograd."""
    return eager.step(over_clients(objective, signature), signature.n_params)


def compile_values(fn: Callable[..., tree.Tree], signature: Signature, tensors: list[Tensor]) -> Values:
    """What `fn(params, batch, *given)` gives for a stack of clients, without gradients; kept like steps."""
    engine = current()
    key = (engine, name_of(fn), signature, _shapes(tensors, signature.dims), tensors[0].device)
    if key not in _values:
        call = over_clients(fn, signature)

        def plain(values: list[Tensor]) -> list[Tensor]:
            return tree.leaves(call(*values))

        _, spec = tree.flatten(call(*tensors))
        run: Callable[[list[Tensor]], list[Tensor]] = plain
        if engine.kind == "traced" and tensors[0].device.type == "cpu":
            try:
                run = trace_values(plain, tensors, signature.dims, engine)
            except NotTraced as reason:
                count(0, (f"evaluation: {reason}",))
        _values[key] = Values(run, spec)
    return _values[key]


def _shapes(tensors: list[Tensor], dims: list[int | None]) -> Hashable:
    return tuple((d, x.shape[1:] if d == 0 else x.shape, x.dtype) for x, d in zip(tensors, dims, strict=True))
