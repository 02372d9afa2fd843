"""Record: the kernels that a function calls, as a graph.

The function is called once with tensors that have shapes and no memory (torch's meta device). Each kernel it calls,
below vmap and autograd, becomes a node. torch's own `make_fx` gives the same graph, more slowly.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from plures.engine import private

aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)  # what they give is what they are given

map_aggregate = fx.node.map_aggregate


class CannotRecord(Exception):
    """A kernel that would not do the same in a graph, in words."""


def record(fn: Callable[..., Sequence[Any]], shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> fx.GraphModule:
    """The kernels of `fn(*tensors)`, which gives tensors in a row, for tensors of these shapes and types."""
    inputs = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in shapes]
    recorder = _Recorder()
    for i, x in enumerate(inputs):
        recorder.know(x, recorder.graph.placeholder(f"input_{i}"))
    with recorder:
        outputs = fn(*inputs)
    recorder.graph.output([None if x is None else recorder.node_of(x) for x in outputs])
    return fx.GraphModule(recorder.constants, recorder.graph)


class _Recorder(private.TorchDispatchMode or object):  # type: ignore[misc]
    """Sees every kernel call, and makes a node of it."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), nn.Module()
        self._nodes: dict[int, fx.Node] = {}  # by the identity of a tensor
        self._alive: list[Tensor] = []  # an identity must not be given to another tensor

    def know(self, x: Tensor, node: fx.Node) -> None:
        """The node that gives a tensor; it holds the tensor, for its shape, under `val`."""
        node.meta["val"] = x
        self._nodes[id(x)] = node
        self._alive.append(x)

    def node_of(self, x: Tensor) -> fx.Node:
        """The node that gives a tensor. One that no kernel in here gave is a constant."""
        if id(x) not in self._nodes:
            name = f"constant_{len(self._alive)}"
            self.constants.register_buffer(name, x)
            self.know(x, self.graph.get_attr(name))
        return self._nodes[id(x)]

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: list[Tensor] = []

        def note(x: Any) -> Any:
            if isinstance(x, Tensor):
                tensors.append(x)
            return x

        def to_node(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self.node_of(x)
            return CPU if isinstance(x, torch.device) else x

        def to_shape(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x if x.is_meta else x.to(META)
            return META if isinstance(x, torch.device) else x

        both = (args, kwargs or {})
        map_aggregate(both, note)
        if kernel in (*SAME, private.ITEM) and not tensors[0].is_meta:  # a constant, or the number in one
            return kernel(*args, **(kwargs or {}))
        if kernel._schema.is_mutable and tensors and not tensors[0].is_meta:
            raise CannotRecord(f"{kernel} changes a tensor that was there before")
        shape_args, shape_kwargs = map_aggregate(both, to_shape)
        if not tensors:  # a tensor is made
            shape_kwargs = {**shape_kwargs, "device": META}
        given = kernel(*shape_args, **shape_kwargs)
        if kernel in SAME:
            self._nodes[id(given)] = self.node_of(tensors[0])
            self._alive.append(given)
            return given
        node = self.graph.call_function(kernel, *map_aggregate(both, to_node))
        if isinstance(given, Tensor):
            self.know(given, node)
            return given
        node.meta["val"] = given
        for i, part in enumerate(given if isinstance(given, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self.know(part, self.graph.call_function(operator.getitem, (node, i)))
        return given
