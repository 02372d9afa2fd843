"""In place: what is done element by element to a value that nothing else reads is written over that value.

A new tensor of some megabytes lies in memory that has left the cache, and to write it takes as long as all the
arithmetic of the kernel. This pass is for a whole function, in its last form: only there is it known who reads a value.
"""

from typing import Any

import torch
from torch import Tensor, fx

from plures.engine import private

aten = torch.ops.aten

LARGE = 1 << 25  # numbers, counted with the prime that stands for the clients: some thousands for each
_VIEWS: tuple[Any, ...] = (
    *(aten.view.default, private.UNSAFE_VIEW, torch.reshape),
    *(aten.permute.default, aten.transpose.int, aten.unsqueeze.default),
)
_TORCH = {  # kernels that are called by a name of torch's and take `out`, and at which places they may be written over
    **{
        aten.add.Tensor: (torch.add, (0, 1)),
        aten.mul.Tensor: (torch.mul, (0, 1)),
        aten.sub.Tensor: (torch.sub, (0, 1)),
    },
    **{aten.div.Tensor: (torch.div, (0, 1)), aten.mul.Scalar: (torch.mul, (0,)), aten.div.Scalar: (torch.div, (0,))},
    **{aten.add.Scalar: (torch.add, (0,)), aten.sub.Scalar: (torch.sub, (0,)), aten.exp.default: (torch.exp, (0,))},
    **{aten.baddbmm.default: (torch.baddbmm, (0,))},
    **{aten.tanh.default: (torch.tanh, (0,)), aten.sigmoid.default: (torch.sigmoid, (0,))},
}
_BACKWARD = {  # gradients: written over the gradient that they start from
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
}


def apply(graph: fx.Graph) -> None:
    """Rewrite a graph in which every node has a reader, and outputs are read by the output."""
    written: set[fx.Node] = set()  # nodes that write over what they read, and so give memory that nothing else reads
    for node in graph.nodes:
        before = node.target
        if node.target is aten.relu.default and _is_free(node.args[0], node, written):
            node.target = torch.relu_
        elif node.target in _TORCH:
            name, places = _TORCH[node.target]
            free: list[Any] = [node.args[i] for i in places if _is_free(node.args[i], node, written)]
            if free:
                node.target, node.kwargs = name, {**node.kwargs, "out": free[0]}
        elif node.target in _BACKWARD and _is_free(node.args[0], node, written):
            node.target, node.kwargs = _BACKWARD[node.target], {**node.kwargs, "grad_input": node.args[0]}
        if node.target is not before:
            written.add(node)


def _is_free(x: Any, reader: fx.Node, written: set[fx.Node]) -> bool:
    """Whether nothing but `reader` reads a value, which is as large as what `reader` gives."""
    if not isinstance(x, fx.Node) or len(x.users) != 1:
        return False
    value, given = x.meta.get("val"), reader.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(given, Tensor) or value.numel() < LARGE:
        return False
    if value.shape != given.shape or value.dtype != given.dtype:
        return False
    while x.target in _VIEWS:
        x = x.args[0]
        if not isinstance(x, fx.Node) or len(x.users) != 1:
            return False
    return x in written or _is_new(x)


def _is_new(node: fx.Node) -> bool:
    """Whether it gives memory of its own, which no other node gave."""
    schema: Any = getattr(node.target, "_schema", None)  # of a kernel; other functions have none
    returns: list[Any] = [] if schema is None else list(schema.returns)
    return len(returns) == 1 and returns[0].alias_info is None and node.target is not private.UNSAFE_VIEW
