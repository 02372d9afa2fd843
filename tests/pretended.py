"""A pretended accelerator, to see that every tensor of a run is made, and stays, where it belongs.

There is none on the machines that test. So numbers are computed by the CPU, but torch is told that their tensors are on
another device: `PRETENDED`, of a type that this torch knows and cannot use. As on a real one, a tensor gets there only
by being made there or moved there; an operation that meets tensors of both kinds fails, and so does reading one as a
numpy array. What torch allows is allowed: single numbers of the CPU beside tensors of a device. What it allows and
should not happen in a run fails as well: tensors of the CPU as indices, and copies in passing.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plures import devices

PRETENDED = torch.device("lazy")
aten = torch.ops.aten
MOVES = (aten._to_copy.default,)
NO_NUMBERS = (aten.cat.default, aten.stack.default)  # where torch takes no number of the CPU
RESHAPES = (aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims, aten.unsqueeze_.default, aten.t_.default)


class WrongDevice(RuntimeError):
    """A tensor is not where it belongs."""


class There(torch.Tensor):
    """A tensor on the pretended device; `inner` has its numbers."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=PRETENDED,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})

    def __repr__(self):
        return f"There({self.inner})"

    def tolist(self):
        return self.inner.tolist()

    def untyped_storage(self):
        return self.inner.untyped_storage()


class Pretending(TorchDispatchMode):
    """Meets every operation, so that those that make tensors on the device are met, too."""

    def __init__(self, without_double):
        super().__init__()
        self.without_double = without_double
        self.moved = []  # shapes of what came from the CPU

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = _compute(func, args, kwargs or {})
        if self.without_double and any(isinstance(x, There) and x.dtype == torch.float64 for x in tree_leaves(out)):
            raise WrongDevice(f"{func} makes a float64 tensor on a device that has none")
        if func in MOVES and isinstance(out, There) and not isinstance(args[0], There):
            self.moved.append(tuple(out.shape))
        return out


def _compute(func, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, There)]
    if there and func not in MOVES:
        others = [x for x in tensors if not isinstance(x, There) and (x.dim() or func in NO_NUMBERS)]
        if others:
            shapes = ", ".join(str(tuple(x.shape)) for x in others)
            raise WrongDevice(f"{func} meets tensors of both devices; those on the CPU have the shapes {shapes}")
    stays = bool(there)
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == PRETENDED.type
        if stays or torch.device(kwargs["device"]).type == "cpu":
            kwargs = kwargs | {"device": torch.device("cpu")}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if there and func in RESHAPES:  # the shape of the tensor itself changes
        args[0].data, args[0].inner = There(out), out
        return args[0]
    return tree_map(_there, out) if stays else out


def _inner(x):
    return x.inner if isinstance(x, There) else x


def _there(x):
    return There(x) if isinstance(x, torch.Tensor) else x


@contextmanager
def pretending(monkeypatch, without_double=False):
    """`--device cuda` means the pretended one in here. With `without_double`, it has no float64, as mps has none."""
    monkeypatch.setattr(devices, "find", lambda name: devices.CPU if name == "cpu" else PRETENDED)
    if without_double:
        monkeypatch.setattr(devices, "WITHOUT_DOUBLE", {PRETENDED.type})
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers) moves them in the open, where the mode sees it
    try:
        with Pretending(without_double) as mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
