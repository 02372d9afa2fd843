"""Names of torch that are not its public interface: all that we use stand here, with what replaces a missing one.

Each may go with a new version of torch. Then it is None here, `missing` names it, and what needs it takes the
public and slower way: steps run eager, operations are made by `torch.autograd.Function`, shapes are learned from
real tensors. Nothing else in the package names a private thing of torch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from plures import registry

used: list[str] = []  # every private name below
missing: list[str] = []  # those that this torch does not have


def _name(path: str) -> Any:
    """What a dotted path names; None, and a note in `missing`, if this torch does not have it."""
    used.append(path)
    try:
        return registry.find_dotted(path)
    except (ImportError, AttributeError):
        missing.append(path)
        return None


def _kernel(name: str, overload: str = "default") -> Any:
    """A kernel by its name in a graph. A missing one is None, which equals no node of a graph."""
    packet = _name(f"torch.ops.aten.{name}")
    return None if packet is None else getattr(packet, overload)


# How vmap is told of an operation that treats many clients at once. Without: `torch.autograd.Function`.
peek_interpreter_stack = _name("torch._C._functorch.peek_interpreter_stack")
maybe_get_level = _name("torch._C._functorch.maybe_get_level")
maybe_get_bdim = _name("torch._C._functorch.maybe_get_bdim")
get_unwrapped = _name("torch._C._functorch.get_unwrapped")
add_batch_dim = _name("torch._C._functorch._add_batch_dim")
current_interpreter = _name("torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter")
VmapInterpreter = _name("torch._functorch.pyfunctorch.VmapInterpreter")
can_meet_vmap = None not in (
    *(peek_interpreter_stack, maybe_get_level, maybe_get_bdim, get_unwrapped),
    *(add_batch_dim, current_interpreter, VmapInterpreter),
)

# Tracing a step into a graph. Without: every step runs eager.
_DispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode")
TorchDispatchMode: Any = None
if _DispatchMode is not None:

    class TorchDispatchMode(_DispatchMode):  # type: ignore[misc, no-redef, valid-type]
        """Sees every kernel. Nobody compiles in here; else torch would import its compiler: a second and 45 MB."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False


can_trace = can_meet_vmap and TorchDispatchMode is not None

# Kernels that graphs hold. Without one, the pass that looks for it finds nothing.
UNSAFE_VIEW = _kernel("_unsafe_view")
ITEM = _kernel("_local_scalar_dense")
SHIFT_RIGHT = _kernel("__rshift__", "Scalar")
TO_COPY = _kernel("_to_copy")
LOG_SOFTMAX = _kernel("_log_softmax")
LOG_SOFTMAX_BACKWARD = _kernel("_log_softmax_backward_data")
EMBEDDING_BAG = _kernel("_embedding_bag_forward_only")
log_softmax = _name("torch._log_softmax")
log_softmax_backward = _name("torch._log_softmax_backward_data")

# Kernels of oneDNN. Without: products stay with torch's own.
linear = _name("torch.ops.mkldnn._linear_pointwise.default")
convolve_packed = _name("torch.ops.mkldnn._convolution_pointwise.default")
pack_convolution = _name("torch.ops.mkldnn._reorder_convolution_weight.default")
has_onednn = None not in (linear, convolve_packed, pack_convolution)


def why_not_traced() -> str:
    """Why no step can be traced with this torch; empty if steps can."""
    return "" if can_trace else f"this torch ({torch.__version__}) has no {', '.join(missing)}"


FakeTensorMode = _name("torch._subclasses.FakeTensorMode")


def shapes_only() -> Any:
    """A context in which tensors have shapes and no memory; without the means for it, one that changes nothing."""
    return FakeTensorMode(allow_non_fake_inputs=True) if FakeTensorMode is not None else nullcontext()


def shape_of(mode: Any, x: Tensor) -> Tensor:
    """A tensor as it is inside `shapes_only`."""
    return mode.from_tensor(x) if mode is not None else x


flop_registry = _name("torch.utils.flop_counter.flop_registry")

if TorchDispatchMode is not None and flop_registry is not None:

    class KernelCount(TorchDispatchMode):
        """Counts the kernels that are called inside it, and the FLOPs of products and convolutions among them."""

        def __init__(self) -> None:
            super().__init__()
            self.n = self.flops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.n += 1
            out = func(*args, **(kwargs or {}))
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
            return out

else:

    class KernelCount:  # type: ignore[no-redef]
        """The same by torch's public counter, which takes longer and counts FLOPs only."""

        def __init__(self) -> None:
            self.n = self.flops = 0
            self._counter = FlopCounterMode(display=False)

        def __enter__(self) -> "KernelCount":
            self._counter.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._counter.__exit__(*error)
            self.flops = int(self._counter.get_total_flops())


# Arithmetic on lists of tensors in one call. Without: the same, tensor by tensor.


def _each(method: str) -> Callable[..., Any]:
    """A function on lists of tensors that calls a method of each tensor."""

    def apply(tensors: list[Tensor], *others: Any, **options: Any) -> list[Tensor]:
        columns = [other if isinstance(other, (list, tuple)) else [other] * len(tensors) for other in others]
        return [getattr(x, method)(*row, **options) for x, *row in zip(tensors, *columns, strict=True)]

    return apply


foreach_add = _name("torch._foreach_add") or _each("add")
foreach_add_ = _name("torch._foreach_add_") or _each("add_")
foreach_mul_ = _name("torch._foreach_mul_") or _each("mul_")
foreach_div = _name("torch._foreach_div") or _each("div")
foreach_lerp_ = _name("torch._foreach_lerp_") or _each("lerp_")
foreach_sqrt_ = _name("torch._foreach_sqrt_") or _each("sqrt_")
foreach_addcmul_ = _name("torch._foreach_addcmul_") or _each("addcmul_")
foreach_addcdiv_ = _name("torch._foreach_addcdiv_") or _each("addcdiv_")
foreach_clamp_min_ = _name("torch._foreach_clamp_min_") or _each("clamp_min_")
foreach_clamp_max_ = _name("torch._foreach_clamp_max_") or _each("clamp_max_")
