"""One stacked step, of training or of a test, as a flat list of kernels.

A step of small clients costs little arithmetic: most of its time goes to vmap, autograd and Python.
So the step (a function vmapped over clients, and its slopes) is traced once into a graph of plain
kernels, which then runs for any number of clients. The number of clients is traced as a large prime;
wherever a multiple of it stands in the graph as a size, the number of clients of the call is put.
The graph is compared with the untraced step before it is used; if they differ, the step stays untraced.
"""

import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from . import cut, layout, lookup

PRIMES = (10007, 10009, 10037, 10039)

aten = torch.ops.aten

TRANSPOSES, PRODUCTS = (aten.transpose.int, aten.t.default), (aten.bmm.default, aten.mm.default)


class Product(NamedTuple):
    """A slope that is a product of matrices, not yet computed: it can be added to the weights as it is computed."""

    left: Tensor  # [client, i, k]
    right: Tensor  # [client, k, j]

    def dense(self) -> Tensor:
        return torch.bmm(self.left, self.right)

    def add_to(self, weights: Tensor, factor: float) -> None:
        weights.baddbmm_(self.left, self.right, alpha=factor)


class Scattered(NamedTuple):
    """A slope that is zero but in some rows: of an embedding, those that a batch looked up."""

    rows: Tensor  # [row, width]
    at: Tensor  # [place], where they belong, counted through the tables of all clients
    n_clients: int
    n_rows: int  # of a table
    which: Tensor | None = None  # [place], the row that belongs there; else one for each place

    def dense(self) -> Tensor:
        width = self.rows.shape[-1]
        whole = self.rows.new_zeros(self.n_clients, self.n_rows, width)
        self.add_to(whole, 1.0)
        return whole

    def add_to(self, weights: Tensor, factor: float) -> None:
        rows = factor * self.rows
        if self.which is not None:
            rows = rows.index_select(0, self.which)
        # The same as index_add_, which is much slower here.
        weights.view(-1, rows.shape[1]).scatter_add_(0, self.at.unsqueeze(1).expand_as(rows), rows)


Slope = Tensor | Product | Scattered | None
Losses = tuple[Tensor, list[Slope]]
Role = Literal["trained", "batch", "drawn", "given"]  # of a tensor of a step; "drawn" is what it draws by


class Step(NamedTuple):
    """Losses of a stack of clients and slopes, from the tensors of a step in a row.

    It may be cut in parts. `ahead`: what a batch gives before it meets any weight, which can be computed
    for many steps at once, each a row, and so can losses, after the steps. `again`: what it gives before
    it meets what is trained, which is the same when the batch comes again.
    """

    run: Callable[[list[Tensor]], Losses]
    traced: bool
    ahead: cut.Parts | None = None
    again: cut.Parts | None = None
    by_taps: Sequence[int] = ()  # kernels that are best in memory as `winograd.taps_first` puts them

    def __call__(self, tensors: list[Tensor]) -> Losses:
        return self.run(tensors)


class Values(NamedTuple):
    """What a function of a stack of clients gives, in a row, and the structure it has."""

    run: Callable[[list[Tensor]], list[Tensor]]
    spec: Any


def dense(slope: Slope) -> Tensor | None:
    return slope.dense() if isinstance(slope, (Product, Scattered)) else slope


_known: dict[Hashable, Step] = {}
_known_values: dict[Hashable, Values] = {}


def step_of(
    name: Hashable,
    eager: Callable[..., Tensor],
    n_params: int,
    tensors: list[Tensor],
    dims: Sequence[int | None],
    roles: Sequence[Role] = (),
    again: bool = False,
) -> Step:
    """A function of all tensors of a step that gives losses and the slopes of the first `n_params`.

    `eager(*tensors)` gives the losses of a stack of clients; `dims` says which tensors are stacked over a
    number of clients that may change from call to call; `name` is equal for steps that compute the same.
    With `roles`, one for each tensor, the step comes in two parts too, where it can be cut; `again` says
    whether batches come again.
    """
    key = (name, tuple(roles), again, _shapes(tensors, dims))
    if key not in _known:
        plain = untraced(eager, n_params)
        _known[key] = _traced(plain, tensors, dims, roles, again) or plain
    return _known[key]


def values_of(
    name: Hashable,
    eager: Callable[[list[Tensor]], tuple[list[Tensor], Any]],
    tensors: list[Tensor],
    dims: Sequence[int | None],
) -> Values:
    """The same without slopes: `eager` gives some values in a row, and their structure."""
    key = (name, _shapes(tensors, dims))
    if key not in _known_values:
        _, spec = eager(_few(tensors, dims, 2))

        def plain(values: list[Tensor]) -> list[Tensor]:
            return eager(values)[0]

        module, run = _module(plain, tensors, dims), plain
        if module is not None:
            whole = cut.whole(module)

            def traced(values: list[Tensor]) -> list[Tensor]:
                return list(whole(*values))

            if all(_same(plain, traced, _few(tensors, dims, n)) for n in (1, 2, 3)):
                run = traced
        _known_values[key] = Values(run, spec)
    return _known_values[key]


def _shapes(tensors: list[Tensor], dims: Sequence[int | None]) -> Hashable:
    return tuple((d, x.shape[1:] if d == 0 else x.shape, x.dtype) for x, d in zip(tensors, dims, strict=True))


def untraced(eager: Callable[..., Tensor], n_params: int) -> Step:
    def step(tensors: list[Tensor]) -> Losses:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors[:n_params]]
            losses = eager(*leaves, *tensors[n_params:])
            wanted = [x for x in leaves if x.requires_grad]
            slopes = iter(torch.autograd.grad(losses, wanted, torch.ones_like(losses), allow_unused=True))
        return losses.detach(), [next(slopes) if x.requires_grad else None for x in leaves]

    return Step(step, False)


def _traced(
    plain: Step, tensors: list[Tensor], dims: Sequence[int | None], roles: Sequence[Role], again: bool
) -> Step | None:
    def flat(values: list[Tensor]) -> list[Slope]:
        losses, slopes = plain(values)
        return [losses, *slopes]

    # How many clients there are is told by a tensor of the batch: both parts of a step have it.
    module = _module(flat, tensors, dims, roles.index("batch") if "batch" in roles else 0)
    if module is None:
        return None
    whole = cut.whole(module)

    def step(values: list[Tensor]) -> Losses:
        losses, *slopes = whole(*values)
        return losses, slopes

    if not all(_agree(plain.run, step, _few(tensors, dims, n)) for n in (1, 2, 3)):
        return None

    def in_two(first: set[Role], stays: set[Role], leave_losses: bool) -> cut.Parts | None:
        if not roles or 0 not in dims:
            return None
        is_first, stay = [r in first for r in roles], [r in stays for r in roles]
        try:
            found = cut.parts(module, is_first, stay, _prime(tensors), leave_losses)
        except Exception:  # what cannot be cut runs whole
            return None
        return found if found is not None and _agree_twice(step, found, _few(tensors, dims, 3), dims) else None

    ahead = in_two({"batch", "drawn"}, set(), True)
    again_too = in_two({"batch"}, {"given"}, False) if again else None
    return Step(step, True, ahead, again_too, layout.kernels_by_taps(module.graph))


def _module(
    plain: Callable[[list[Tensor]], list[Any]], tensors: list[Tensor], dims: Sequence[int | None], first: int = 0
) -> fx.GraphModule | None:
    """The kernels of a function of stacked clients; None if it cannot be traced.

    The first stacked tensor, from number `first` on, tells how many clients there are in a call.
    """
    prime = _prime(tensors)
    with FakeTensorMode(allow_non_fake_inputs=True):
        wide = [
            torch.empty((prime, *x.shape[1:]) if d == 0 else x.shape, dtype=x.dtype)
            for x, d in zip(tensors, dims, strict=True)
        ]

    def flat(*values: Tensor) -> list[Any]:
        return plain(list(values))

    try:
        if 0 in dims and _n_calls(plain, _few(tensors, dims, 2)) != _n_calls(plain, _few(tensors, dims, 3)):
            return None  # torch does some of it client by client: traced, it would be a loop of thousands
        module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*wide)
        _clean(module.graph)
        _join_products(module.graph)
        if 0 in dims:
            layout.channels_last(module.graph, prime)
            lookup.sum_rows(module.graph)
            _leave_parts(module.graph)
            _clean(module.graph)
            _free(module.graph, prime, list(dims).index(0, first))
        module.graph.lint()
        module.recompile()
    except Exception:  # what cannot be traced runs untraced: slower, the same numbers
        return None
    return module


def _prime(tensors: list[Tensor]) -> int:
    """One that divides no size of the tensors."""
    sizes = {size for x in tensors for size in x.shape}
    return next(p for p in PRIMES if not any(size % p == 0 for size in sizes if size))


def _agree_twice(
    step: Callable[[list[Tensor]], Losses], parts: cut.Parts, values: list[Tensor], dims: Sequence[int | None]
) -> bool:
    """Whether a step in two parts is the step, and what comes early does not depend on what it is computed beside."""

    def in_two(values: list[Tensor]) -> Losses:
        n = len(values[list(dims).index(0)])
        twice = [torch.cat([x, x]) if d == 0 else x for x, d in zip(values, dims, strict=True)]
        found = parts.late(values, [x[n:] for x in parts.early(twice)], parts.views(values))
        if parts.after is None:
            return found[0], found[1:]
        left, slopes = found[: parts.n_left], found[parts.n_left :]
        return parts.after(twice, [torch.cat([torch.zeros_like(x), x]) for x in left])[n:], slopes

    return _agree(step, in_two, values)


class Calls(TorchDispatchMode):
    """Counts the kernels that are called."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def _n_calls(plain: Callable[[list[Tensor]], Any], values: list[Tensor]) -> int:
    with Calls() as calls:
        plain(values)
    return calls.n


def _few(tensors: list[Tensor], dims: Sequence[int | None], n: int) -> list[Tensor]:
    """The tensors of n clients, made from the rows at hand and set apart a little."""

    def rows(x: Tensor) -> Tensor:
        picked = x.detach()[torch.arange(n) % len(x)].clone()
        if picked.is_floating_point():
            picked *= torch.linspace(0.9, 1.1, n).reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        return picked

    return [rows(x) if d == 0 else x.detach() for x, d in zip(tensors, dims, strict=True)]


def _agree(
    plain: Callable[[list[Tensor]], Losses], step: Callable[[list[Tensor]], Losses], values: list[Tensor]
) -> bool:
    """Whether two steps give the same losses and slopes."""

    def in_a_row(found: Losses) -> list[Tensor | None]:
        return [found[0], *map(dense, found[1])]

    return _same(lambda x: in_a_row(plain(x)), lambda x: in_a_row(step(x)), values)


def _same(one: Callable[..., Sequence[Any]], other: Callable[..., Sequence[Any]], values: list[Tensor]) -> bool:
    """Whether two functions give the same but for rounding."""
    try:
        found, again = one(values), other(values)
    except Exception:
        return False
    for a, b in zip(found, again, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _clean(graph: fx.Graph) -> None:
    """Drop what changes nothing: views to the same shape, detach, times one, a permutation that permutes nothing.

    Ones that are like something only need its shape; a view of an input that adds an axis of one says so.
    """

    def shape(node: Any) -> Any:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        return tuple(value.shape) if isinstance(value, Tensor) else None

    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        same = shape(node) is not None and shape(node) == shape(source)
        if node.target is aten.ones_like.default and same:
            with graph.inserting_before(node):
                ones = graph.call_function(
                    aten.full.default, (list(shape(node)), 1.0), {"dtype": node.meta["val"].dtype}
                )
            ones.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(ones)
            continue
        if node.target is aten.view.default and _is_sum_that_keeps_axes(source):
            x, axes, _ = cast(tuple[Any, ...], source.args)
            kept = [size for i, size in enumerate(shape(x)) if i not in axes]
            if shape(node) == tuple(kept) and all(axis >= 0 for axis in axes):
                with graph.inserting_before(node):
                    total = graph.call_function(aten.sum.dim_IntList, (x, axes))
                total.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(total)
                continue
        if node.target is aten.view.default and source.op == "placeholder":
            before = shape(source)
            axes = [i for i in range(1, len(before) + 1) if (*before[:i], 1, *before[i:]) == shape(node)]
            if axes:
                node.target, node.args = aten.unsqueeze.default, (source, axes[0])
                continue
        idle = (
            node.target in (aten.detach.default, aten.alias.default)
            or (same and node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default))
            or (node.target in (aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1)
            or (node.target is aten.permute.default and list(node.args[1]) == sorted(node.args[1]))
        )
        twice = (
            node.target is aten.transpose.int
            and source.target is aten.transpose.int
            and set(node.args[1:]) == set(source.args[1:])
        )
        if idle or twice:
            node.replace_all_uses_with(source.args[0] if twice else source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_sum_that_keeps_axes(node: fx.Node) -> bool:
    return node.target is aten.sum.dim_IntList and len(node.args) == 3 and node.args[2] is True


def _join_products(graph: fx.Graph) -> None:
    """Weights that are used many times, as in a recurrent net: a sum of products becomes one product.

    A1 B1 + A2 B2 + ... is [A1 A2 ...] [B1; B2; ...], and something plus a product is one kernel.
    """

    def is_one(node: Any, targets: tuple[Any, ...]) -> bool:
        return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1

    def turned(x: Any) -> Any:
        """The node with its last two axes exchanged."""
        if _is_turned(x):
            return x.args[0]
        return graph.call_function(aten.transpose.int, (x, -2, -1))

    def is_product(node: Any) -> bool:
        alone = is_one(node, TRANSPOSES) and _is_turned(node) and is_one(node.args[0], PRODUCTS)
        return alone or is_one(node, PRODUCTS)

    def factors(node: fx.Node) -> tuple[Any, Any]:
        """A and B of a term that is A B, or the transpose of a product."""
        if node.target in PRODUCTS:
            return node.args[0], node.args[1]
        left, right = node.args[0].args[:2]  # type: ignore[union-attr]
        return turned(right), turned(left)

    def terms(node: Any) -> list[Any]:
        """What is added up in a node."""
        if is_one(node, (aten.add.Tensor,)) and not node.kwargs:
            return [*terms(node.args[0]), *terms(node.args[1])]
        return [node]

    for node in reversed(list(graph.nodes)):
        if node.target is not aten.add.Tensor or node.kwargs or not node.users:
            continue
        added = [*terms(node.args[0]), *terms(node.args[1])]
        if len(added) > 2 and all(map(is_product, added)):
            with graph.inserting_before(node):
                pairs = [factors(term) for term in added]
                left = graph.call_function(aten.cat.default, ([turned(a) for a, _ in pairs], -2))
                right = graph.call_function(aten.cat.default, ([b for _, b in pairs], -2))
                target = aten.bmm.default if node.meta["val"].dim() == 3 else aten.mm.default
                joined = graph.call_function(target, (turned(left), right))
        elif any(map(is_product, node.args)) and node.meta["val"].dim() == 3:
            product = next(arg for arg in reversed(node.args) if is_product(arg))
            other = node.args[0] if product is node.args[1] else node.args[1]
            if not isinstance(other, fx.Node) or other.meta["val"].dim() != 3:
                continue
            with graph.inserting_before(node):
                joined = graph.call_function(aten.baddbmm.default, (other, *factors(product)))
        else:
            continue
        joined.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(joined)
        graph.erase_node(node)  # so that what it added up has no user left, and is not looked at again
    graph.eliminate_dead_code()


def _is_turned(node: Any) -> bool:
    """Whether a node is another one with its last two axes exchanged."""
    if not isinstance(node, fx.Node) or node.target not in TRANSPOSES:
        return False
    value = node.meta.get("val")
    if node.target is aten.t.default or value is None:  # what is made here has no value, and is turned
        return True
    n_axes = value.dim()
    return {axis % n_axes for axis in node.args[1:]} == {n_axes - 2, n_axes - 1}


def _leave_parts(graph: fx.Graph) -> None:
    """Give slopes that are products of matrices, or rows of an embedding, and nothing else, by their parts."""
    (out,) = [node for node in graph.nodes if node.op == "output"]
    losses, *slopes = out.args[0]

    def factors(slope: Any) -> Any:
        turned = _is_turned(slope)
        product: Any = slope.args[0] if turned else slope
        alone = isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1
        if not alone or len(slope.users) != 1:
            return slope
        left, right = product.args[:2]
        with graph.inserting_before(out):
            if turned:
                left, right = (graph.call_function(aten.transpose.int, (x, 1, 2)) for x in (right, left))
            return graph.call_function(Product, (left, right))

    def looked_up(slope: Any) -> Any:
        node = slope
        while isinstance(node, fx.Node) and len(node.users) == 1 and _same_order(node):
            node = node.args[0]
        backward = aten.embedding_dense_backward.default
        if not isinstance(node, fx.Node) or node.target is not backward or len(node.users) != 1:
            return slope
        rows, at, _, padding, by_frequency = cast(tuple[fx.Node, ...], node.args)
        if padding != -1 or by_frequency:
            return slope
        n_clients, n_rows, width = slope.meta["val"].shape
        with graph.inserting_before(out):
            if rows.target is lookup.spread:
                return graph.call_function(Scattered, (rows.args[0], at, n_clients, n_rows, rows.args[1]))
            flat_rows = graph.call_function(torch.reshape, (rows, [-1, width]))
            flat_at = graph.call_function(torch.reshape, (at, [-1]))
            return graph.call_function(Scattered, (flat_rows, flat_at, n_clients, n_rows))

    out.args = ([losses, *[looked_up(factors(slope)) for slope in slopes]],)
    graph.eliminate_dead_code()


def _same_order(node: fx.Node) -> bool:
    """Whether it gives the numbers of its input in their order: a view, or a permutation that permutes nothing."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == sorted(node.args[1])  # type: ignore[arg-type]
    return node.target in (aten.view.default, aten._unsafe_view.default)


def _free(graph: fx.Graph, prime: int, stacked: int) -> None:
    """Put the number of clients of the call, which input number `stacked` tells, where multiples of the prime stand."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        count = graph.call_function(aten.sym_size.int, (inputs[stacked], 0))
    products: dict[int, fx.Node] = {1: count}

    def freed(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or value == 0 or value % prime:
            return value
        times = value // prime
        if times not in products:
            with graph.inserting_after(count):
                products[times] = graph.call_function(operator.mul, (count, times))
        return products[times]

    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and node not in products.values():
            node.args = fx.node.map_aggregate(node.args, freed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, freed)


def name_of(value: Any) -> Hashable:
    """Something equal for two functions that compute the same: their code and what they close over."""
    if isinstance(value, Tensor):
        raise TypeError("an objective closes over a tensor; pass what belongs to a client as `given`")
    if isinstance(value, types.MethodType):
        return (name_of(value.__func__), name_of(value.__self__))
    if isinstance(value, types.FunctionType):
        cells = tuple(name_of(cell.cell_contents) for cell in value.__closure__ or ())
        return (value.__code__, cells, tuple(map(name_of, value.__defaults__ or ())))
    if isinstance(value, (tuple, list)):
        return tuple(map(name_of, value))
    if isinstance(value, dict):
        return tuple((key, name_of(item)) for key, item in value.items())
    return value if isinstance(value, Hashable) else ("object", id(value))
