"""An operation of one client that treats a whole stack at once when it is called under vmap.

A client function is written for one client and vmapped over many. In the middle of it stand loops over batches,
which must not run to the end of the longest client: such a loop is one operation, with a batching rule of its own.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from plures.engine import private

# (tensors, their stacked axes, number of clients, whether this is one client outside vmap) -> stacked results
Body = Callable[[list[Tensor], list[int | None], int, bool], list[Tensor]]


def per_client(body: Body, tensors: list[Tensor], shared: Container[int]) -> list[Tensor]:
    """Call `body` once: with a stack of one client, or under vmap with all clients.

    `shared` says which tensors, by their places, are tables of all clients that never get a client axis.
    """
    if not private.can_meet_vmap:
        return list(_Operation.apply(body, shared, *tensors))
    if private.peek_interpreter_stack() is None:
        return _one(body, tensors, shared)
    vmap = private.current_interpreter()
    if not isinstance(vmap, private.VmapInterpreter):
        raise TypeError("fit and measure are operations of a client: no gradient is taken through them")
    level, n = vmap.level(), vmap.batch_size()
    is_stacked = [private.maybe_get_level(x) == level for x in tensors]
    dims: list[int | None] = [0 if it_is else None for it_is in is_stacked]
    stacked = [_unwrapped(x) if it_is else x for x, it_is in zip(tensors, is_stacked, strict=True)]
    with vmap.lower():
        out = body(stacked, dims, n, False)
    return [private.add_batch_dim(x, 0, level) for x in out]


def _one(body: Body, tensors: list[Tensor], shared: Container[int]) -> list[Tensor]:
    dims: list[int | None] = [None if i in shared else 0 for i in range(len(tensors))]
    stacked = [x.unsqueeze(0) if dim == 0 else x for x, dim in zip(tensors, dims, strict=True)]
    return [x.squeeze(0) for x in body(stacked, dims, 1, True)]


def _unwrapped(x: Tensor) -> Tensor:
    """The stack of clients behind what vmap shows as one of them."""
    return private.get_unwrapped(x).movedim(private.maybe_get_bdim(x), 0)


class _Operation(torch.autograd.Function):
    """The same by torch's public interface, which is slower."""

    @staticmethod
    def forward(body: Body, shared: Container[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_one(body, list(tensors), shared))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise TypeError("fit and measure are operations of a client: no gradient is taken through them")

    @staticmethod
    def vmap(info: Any, in_dims: Any, body: Body, shared: Container[int], *tensors: Tensor) -> Any:
        axes = in_dims[2:]
        stacked = [x if axis is None else x.movedim(axis, 0) for x, axis in zip(tensors, axes, strict=True)]
        out = body(stacked, [None if axis is None else 0 for axis in axes], info.batch_size, False)
        return tuple(out), (0,) * len(out)
