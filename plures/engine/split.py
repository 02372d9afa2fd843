"""Split: the graph of a traced step as functions: the whole of it, or a part that can be computed early and the rest.

What depends on batches alone can be computed for many steps at once, before their weights are known. The graph is
split where weights come in, if all that crosses the border has a row for each client, so that rows of many steps
can be computed together and handed out step by step.
"""

import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx

from plures.engine import private
from plures.engine.passes import in_place
from plures.engine.passes.embedding_sums import whole_numbers

aten = torch.ops.aten

# A view of an early value is taken again in the late part, instead of being handed over.
VIEWS = (
    *(aten.transpose.int, aten.t.default, aten.permute.default, aten.view.default, private.UNSAFE_VIEW),
    *(aten.unsqueeze.default, aten.squeeze.dims, aten.expand.default, aten.select.int, torch.reshape),
)
# Views that never copy, however their input lies in memory.
SURE_VIEWS = (aten.transpose.int, aten.t.default, aten.permute.default, aten.unsqueeze.default, aten.select.int)
FILLS = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)


def _size(x: Tensor, axis: int) -> int:
    return x.shape[axis]


# Called by these names, small kernels cost about half of what they cost by their names in a graph.
DIRECT: dict[Any, Callable[..., Any]] = {
    **{aten.view.default: torch.reshape, private.UNSAFE_VIEW: torch.reshape},
    **{aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dims: torch.squeeze, aten.select.int: torch.select},
    **{aten.transpose.int: torch.transpose, aten.t.default: torch.t, aten.permute.default: torch.permute},
    **{aten.expand.default: torch.broadcast_to, aten.cat.default: torch.cat, aten.where.self: torch.where},
    **{aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div},
    **{aten.add.Scalar: torch.add, aten.sub.Scalar: torch.sub, aten.mul.Scalar: torch.mul, aten.div.Scalar: torch.div},
    **{aten.bmm.default: torch.bmm, aten.mm.default: torch.mm, aten.baddbmm.default: torch.baddbmm},
    **{aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean, aten.clamp.default: torch.clamp},
    **{aten.relu.default: torch.relu, aten.tanh.default: torch.tanh, aten.sigmoid.default: torch.sigmoid},
    **{aten.neg.default: torch.neg, aten.exp.default: torch.exp, aten.log.default: torch.log, aten.ne.Scalar: torch.ne},
    **{aten.sqrt.default: torch.sqrt, aten.rsqrt.default: torch.rsqrt, aten.pow.Tensor_Scalar: torch.pow},
    **{aten.gather.default: torch.gather, aten.scatter_add.default: torch.scatter_add},
    **{aten.embedding.default: torch.embedding, private.LOG_SOFTMAX: private.log_softmax},
    private.LOG_SOFTMAX_BACKWARD: private.log_softmax_backward,
    **{aten.sym_size.int: _size, aten.arange.start_step: whole_numbers},
}
DIRECT = {graph_name: name for graph_name, name in DIRECT.items() if None not in (graph_name, name)}

Place = Literal["early", "late", "both"]


class Parts(NamedTuple):
    """A graph in parts. All take the inputs of the whole graph in a row, and read those that they need."""

    early: Callable[[list[Tensor]], list[Tensor]]  # values from early inputs, each with a row for every client
    views: Callable[[list[Tensor]], list[Tensor]]  # of late inputs; they stay good while these are changed in place
    late: Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Any]]  # inputs, early values, views -> results
    kept_bytes: int  # of the early values of one client
    # The first result (the losses) may be left for after: then `late` gives `n_after` values in its place, with a
    # row for every client, from which, and the early inputs, `after` computes it.
    after: Callable[[list[Tensor], list[Tensor]], Tensor] | None = None
    n_after: int = 1


class Splitter(NamedTuple):
    """How a graph is turned into functions."""

    module: fx.GraphModule
    direct_calls: bool = True
    in_place: bool = True

    def whole(self) -> Any:
        """All of the graph, to be called with its inputs."""
        return self._function(list(self.module.graph.nodes), [], _output(self.module.graph).args[0])

    def parts(self, is_early: list[bool], stays: list[bool], n: int, leave_first: bool = False) -> Parts | None:
        """Split the graph; None if nothing can be computed early.

        `is_early` marks the inputs that early values are computed from, `stays` those that may be read by both parts.
        The graph was traced for n clients, a prime; its first early input has a row for each client. With
        `leave_first`, what only the first result needs is left for after, where that is possible.
        """
        graph = self.module.graph
        place, border, taken_late = _cut(graph, is_early, stays, n)
        if not border:
            return None
        first = self._function([node for node in graph.nodes if place[node] != "late"], [], list(border))
        rest = [node for node in graph.nodes if place[node] != "early" or node in taken_late]
        first_result, *results = cast(list[Any], _output(graph).args[0])
        left = _left_for_after(graph, place, first_result, results, n) if leave_first else None
        looked_at = _views_of_late_inputs(rest, place)
        look = self._function(looked_at, [], looked_at)
        wanted = [*([first_result] if left is None else left), *results]
        second = self._function(rest, [*border, *looked_at], wanted)
        # The axis along which clients lie; None: rows are clients.
        axes = [None if node.meta["val"].shape[0] == n else axis for node, axis in border.items()]
        kept_bytes = sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in border) // n
        first_early = is_early.index(True)

        def early(values: list[Tensor]) -> list[Tensor]:
            n = len(values[first_early])
            found = zip(first(*values), axes, strict=True)
            return [x if axis is None else x.unflatten(axis, (n, -1)).movedim(axis, 0) for x, axis in found]

        def views(values: list[Tensor]) -> list[Tensor]:
            return cast(list[Tensor], look(*values))

        def late(values: list[Tensor], kept: list[Tensor], views: list[Tensor]) -> list[Any]:
            given = zip(kept, axes, strict=True)
            return second(*values, *[x if a is None else x.movedim(0, a).flatten(a, a + 1) for x, a in given], *views)

        if left is None:
            return Parts(early, views, late, kept_bytes)
        third = self._function(list(graph.nodes), left, first_result)

        def after(values: list[Tensor], found: list[Tensor]) -> Tensor:
            return cast(Tensor, third(*values, *found))

        return Parts(early, views, late, kept_bytes, after, len(left))

    def _function(self, nodes: list[fx.Node], given: list[fx.Node], outputs: Any) -> Any:
        """Some nodes of the graph as a function of all its inputs, and of values that are given."""
        new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in [n for n in self.module.graph.nodes if n.op == "placeholder"] + given:
            copies[node] = new.placeholder(node.name)
        for node in nodes:
            if node.op in ("call_function", "get_attr") and node not in copies:
                copies[node] = new.node_copy(node, lambda n: copies[n])
        new.output(fx.node.map_arg(outputs, lambda n: copies[n]))
        new.eliminate_dead_code()
        if self.in_place:
            in_place.apply(new)
        if self.direct_calls:
            for node in new.nodes:
                node.target = DIRECT.get(node.target, node.target)
        new.lint()
        return fx.GraphModule(self.module, new).forward


def _views_of_late_inputs(nodes: list[fx.Node], place: dict[fx.Node, Place]) -> list[fx.Node]:
    """Views of what is trained or given, and of nothing else, that never copy."""
    found: list[fx.Node] = []
    for node in nodes:
        source = node.args[0] if node.args else None
        if node.target in SURE_VIEWS and isinstance(source, fx.Node) and len(node.all_input_nodes) == 1:
            if source in found or (source.op == "placeholder" and place[source] == "late"):
                found.append(node)
    return found


def _left_for_after(
    graph: fx.Graph, place: dict[fx.Node, Place], first: fx.Node, others: list[Any], n: int
) -> list[fx.Node] | None:
    """The late values that suffice, with early inputs, to compute the first result, and that other results need too.

    None if there are none, or if one of them has no row for each client.
    """
    for_others: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in others or any(user in for_others for user in node.users):
            for_others.add(node)
    left: dict[fx.Node, None] = {}
    to_do, seen = [first], set[fx.Node]()
    while to_do:
        node = to_do.pop()
        if node in seen:
            continue
        seen.add(node)
        if place[node] == "late" and node in for_others:
            value = node.meta.get("val")
            if node.op == "placeholder" or not isinstance(value, Tensor) or value.shape[:1] != (n,):
                return None
            left[node] = None
        elif node.op == "placeholder" and place[node] != "early":
            return None
        else:
            to_do += node.all_input_nodes
    return list(left) or None


def _cut(
    graph: fx.Graph, is_early: list[bool], stays: list[bool], n: int
) -> tuple[dict[fx.Node, Place], dict[fx.Node, int], set[fx.Node]]:
    """The place of every node; the border, which is what the late part is handed, with the axis of its clients; and
    the views of it that the late part takes itself."""
    unfit: set[fx.Node] = set()  # early values that cannot be handed over row by row
    while True:
        place = _places(graph, is_early, stays, unfit)
        met, views = _border(graph, place)
        border = {node: axis for node in met if (axis := _client_axis(node, n)) is not None}
        if len(border) == len(met):
            return place, border, views
        unfit |= set(met) - set(border)


def _places(graph: fx.Graph, is_early: list[bool], stays: list[bool], unfit: set[fx.Node]) -> dict[fx.Node, Place]:
    inputs = iter(zip(is_early, stays, strict=True))
    place: dict[fx.Node, Place] = {}
    for node in graph.nodes:
        sources = {place[x] for x in node.all_input_nodes}
        if node.op == "placeholder":
            early, stay = next(inputs)
            place[node] = "early" if early else "both" if stay else "late"
        elif _is_number(node):  # of clients, whichever input it is read from
            place[node] = "both"
        elif node in unfit or "late" in sources or _counts_clients(node):
            place[node] = "late"
        else:
            place[node] = "early" if "early" in sources else "both"
    return place


def _border(graph: fx.Graph, place: dict[fx.Node, Place]) -> tuple[list[fx.Node], set[fx.Node]]:
    """The early nodes that late ones need. In place of a view stands what it looks at; views are returned apart."""
    border: dict[fx.Node, None] = {}
    views: set[fx.Node] = set()

    def meet(node: fx.Node) -> None:
        if node.op == "placeholder" or place[node] != "early":
            return
        if node.target in VIEWS:
            views.add(node)
            meet(node.all_input_nodes[0])
        else:
            border[node] = None

    for node in graph.nodes:
        if place[node] == "late":
            for source in node.all_input_nodes:
                meet(source)
    return list(border), views


def _is_number(node: fx.Node) -> bool:
    return node.target in (aten.sym_size.int, operator.mul)


def _counts_clients(node: fx.Node) -> bool:
    """Whether it is something like 0, 1, 2, ... over the clients of the call: with more rows it would be longer."""
    sources = node.all_input_nodes
    return bool(sources) and all(map(_is_number, sources)) and node.target not in FILLS


def _client_axis(node: fx.Node, n: int) -> int | None:
    """The axis along which the n clients of a value lie, if there is exactly one."""
    value = node.meta.get("val")
    axes = [i for i, size in enumerate(value.shape) if size % n == 0] if isinstance(value, Tensor) else []
    return axes[0] if len(axes) == 1 else None


def _output(graph: fx.Graph) -> fx.Node:
    (out,) = [node for node in graph.nodes if node.op == "output"]
    return out
