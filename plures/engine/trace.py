"""Trace: a stacked step as a flat list of kernels.

A step of small clients costs little arithmetic: most of its time goes to vmap, autograd and Python. So the step (a
function vmapped over clients, and its gradients) is traced once into a graph of plain kernels, which then runs for
any number of clients. The number of clients is traced as a large prime; wherever a multiple of it stands in the
graph as a size, the number of clients of the call is put. A traced step is compared with the eager one before it is
used; if they differ, or the step cannot be traced, the eager one is used, and the reason is told.
"""

import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from plures.engine import private
from plures.engine.choice import Engine
from plures.engine.eager import LossesAndGradients
from plures.engine.gradients import dense
from plures.engine.late import Late
from plures.engine.passes import apply_all, late_updates, winograd
from plures.engine.record import record
from plures.engine.split import Parts, Splitter

PRIMES = (10007, 10009, 10037, 10039)

aten = torch.ops.aten

Role = Literal["trained", "batch", "drawn", "given"]  # of a tensor of a step; "drawn" is the key that it draws by
EagerStep = Callable[[list[Tensor]], LossesAndGradients]


class NotTraced(Exception):
    """Why a step stays eager, in words."""


class OtherNumbers(NotTraced):
    """Its trace does not give the numbers of the eager step."""


class Traced(NamedTuple):
    """A traced step, whole and in parts."""

    run: EagerStep
    look_ahead: Parts | None  # early is what batches give before they meet a weight: many steps at once
    repeat: Parts | None  # early is what batches give before they meet what is trained: once for a batch
    taps_first: Sequence[int]  # kernels that the step reads fastest as `winograd.taps_first` lays them
    late: Sequence[int]  # weights that may be `Late`
    notes: tuple[str, ...] = ()  # what could not be made faster, and why


def trace_step(
    eager: EagerStep,
    tensors: list[Tensor],
    dims: Sequence[int | None],
    roles: Sequence[Role],
    repeats: bool,
    engine: Engine,
) -> Traced:
    """A step of stacked clients as kernels; raises NotTraced.

    `dims` says which tensors are stacked over a number of clients that may change from call to call, `roles` what
    each of them is, and `repeats` whether batches come again. The tensors are an example.
    """

    def flat(values: list[Tensor]) -> list[Any]:
        losses, gradients = eager(values)
        return [losses, *gradients]

    is_exact = tensors[0].dtype == torch.float64
    if is_exact:  # there are no kernels to win then: the numbers of a client that runs alone are worth more
        engine = engine.without("client-by-client")

    def compiled(like: list[Tensor]) -> tuple[fx.GraphModule, Splitter, EagerStep]:
        # The number of clients is read off a tensor of the batch: both parts of a split step have it.
        module = _graph(flat, like, dims, engine, True, roles.index("batch") if "batch" in roles else 0)
        splitter = _splitter(module, engine)
        whole = splitter.whole()

        def step(values: list[Tensor]) -> LossesAndGradients:
            losses, *gradients = whole(*values)
            return losses, gradients

        return module, splitter, step

    def require_same(step: EagerStep, like: list[Tensor]) -> None:
        for n in (1, 2, 3):
            _require_same(_in_a_row(eager), _in_a_row(step), few_clients(like, dims, n))

    module, splitter, step = compiled(tensors)
    _with_second_look(lambda: require_same(step, tensors), lambda like: require_same(compiled(like)[2], like), tensors)

    notes: list[str] = []

    def split(early: set[Role], stays: set[Role], leave_losses: bool) -> Parts | None:
        if not roles or 0 not in dims:
            return None
        is_early, stay = [r in early for r in roles], [r in stays for r in roles]
        try:
            found = splitter.parts(is_early, stay, _prime(tensors), leave_losses)
            if found is not None:
                _require_same_parts(step, found, few_clients(tensors, dims, 3), dims, is_early)
        except Exception as error:  # what cannot be split runs whole: the same kernels, called step by step
            notes.append(f"a step cannot be computed in parts ({type(error).__name__}: {str(error)[:120]})")
            return None
        return found

    look_ahead = split({"batch", "drawn"}, set(), True) if engine.has("look-ahead") else None
    repeat = split({"batch"}, {"given"}, False) if repeats and engine.has("repeats") else None
    taps_first = winograd.kernels_with_taps_first(module.graph)
    late = late_updates.found_in(module.graph)
    if late:
        _require_same_late(step, few_clients(tensors, dims, 3), late)
    return Traced(step, look_ahead, repeat, taps_first, late, tuple(notes))


def trace_values(
    eager: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor], dims: Sequence[int | None], engine: Engine
) -> Callable[[list[Tensor]], list[Tensor]]:
    """The same for a function that gives some values and no gradients; raises NotTraced."""

    def compiled(like: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        whole = _splitter(_graph(eager, like, dims, engine, False), engine).whole()

        def run(values: list[Tensor]) -> list[Tensor]:
            return list(whole(*values))

        return run

    def require_same(run: Callable[[list[Tensor]], list[Tensor]], like: list[Tensor]) -> None:
        for n in (1, 2, 3):
            _require_same(eager, run, few_clients(like, dims, n))

    run = compiled(tensors)
    _with_second_look(lambda: require_same(run, tensors), lambda like: require_same(compiled(like), like), tensors)
    return run


def _with_second_look(
    require_same: Callable[[], None], require_same_in: Callable[[list[Tensor]], None], tensors: list[Tensor]
) -> None:
    """Compare; what differs in single precision is compared in double precision, and what differs there raises.

    In a deep net the rounding of a sum may move a value across the bend of a ReLU, and with it whole gradients. In
    double precision none is so near: the same passes, on the same function, must then give the same numbers.
    """
    try:
        require_same()
    except OtherNumbers:
        if all(x.dtype == torch.float64 for x in tensors if x.is_floating_point()):
            raise
        require_same_in([x.double() if x.is_floating_point() else x for x in tensors])


def _splitter(module: fx.GraphModule, engine: Engine) -> Splitter:
    return Splitter(module, engine.has("direct-calls"), engine.has("in-place"))


def _graph(
    eager: Callable[[list[Tensor]], list[Any]],
    tensors: list[Tensor],
    dims: Sequence[int | None],
    engine: Engine,
    has_gradients: bool,
    first: int = 0,
) -> fx.GraphModule:
    """The kernels of a function of stacked clients.

    The first stacked tensor, from place `first` on, tells how many clients there are in a call.
    """
    if not private.can_trace:
        raise NotTraced(private.why_not_traced())
    prime = _prime(tensors)
    shapes = [((prime, *x.shape[1:]) if d == 0 else x.shape, x.dtype) for x, d in zip(tensors, dims, strict=True)]

    def flat(*values: Tensor) -> list[Any]:
        return eager(list(values))

    try:
        if 0 in dims and _n_kernels(eager, few_clients(tensors, dims, 2)) != _n_kernels(
            eager, few_clients(tensors, dims, 3)
        ):
            raise NotTraced("torch runs a kernel of it client by client, so that its trace would be a loop")
        module = record(flat, shapes)
        apply_all(module.graph, prime, engine, 0 in dims, has_gradients)
        if 0 in dims:
            _put_number_of_clients(module.graph, prime, list(dims).index(0, first))
        module.graph.lint()
        module.recompile()
    except NotTraced:
        raise
    except Exception as error:  # torch may raise anything while it traces; the eager step gives the same numbers
        words = (str(error).strip().splitlines() or [""])[0]
        raise NotTraced(f"it cannot be traced ({type(error).__name__}: {words[:160]})") from error
    return module


def _prime(tensors: list[Tensor]) -> int:
    """One that divides no size of the tensors."""
    sizes = {size for x in tensors for size in x.shape}
    return next(p for p in PRIMES if not any(size % p == 0 for size in sizes if size))


def _put_number_of_clients(graph: fx.Graph, prime: int, stacked: int) -> None:
    """Where multiples of the prime stand, put the number of clients of the call, which input `stacked` has."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        count = graph.call_function(aten.sym_size.int, (inputs[stacked], 0))
    products: dict[int, fx.Node] = {1: count}

    def replaced(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or value == 0 or value % prime:
            return value
        times = value // prime
        if times not in products:
            with graph.inserting_after(count):
                products[times] = graph.call_function(operator.mul, (count, times))
        return products[times]

    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and node not in products.values():
            node.args = fx.node.map_aggregate(node.args, replaced)
            node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)


def _n_kernels(eager: Callable[[list[Tensor]], Any], values: list[Tensor]) -> int:
    with private.KernelCount() as kernels:
        eager(values)
    return kernels.n


def few_clients(tensors: list[Tensor], dims: Sequence[int | None], n: int) -> list[Tensor]:
    """The tensors of n clients, made from the rows at hand and scaled a little differently for each."""

    def rows(x: Tensor) -> Tensor:
        picked = x.detach()[torch.arange(n) % len(x)].clone()
        if picked.is_floating_point():
            picked *= torch.linspace(0.9, 1.1, n).reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        return picked

    return [rows(x) if d == 0 else x.detach() for x, d in zip(tensors, dims, strict=True)]


# Comparisons with the eager step


def _in_a_row(step: EagerStep) -> Callable[[list[Tensor]], list[Tensor | None]]:
    def run(values: list[Tensor]) -> list[Tensor | None]:
        losses, gradients = step(values)
        return [losses, *map(dense, gradients)]

    return run


def _require_same(one: Callable[..., Sequence[Any]], other: Callable[..., Sequence[Any]], values: list[Tensor]) -> None:
    """Raises NotTraced if two functions do not give the same but for rounding."""
    try:
        expected, found = one(values), other(values)
        same = all(_are_close(a, b) for a, b in zip(expected, found, strict=True))
    except Exception as error:  # a graph that fails here would fail in training
        raise NotTraced(f"its trace fails ({type(error).__name__})") from error
    if not same:
        raise OtherNumbers("its trace gives other numbers")


def _are_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is None and b is None
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def _require_same_parts(
    step: EagerStep, parts: Parts, values: list[Tensor], dims: Sequence[int | None], is_early: Sequence[bool]
) -> None:
    """Raises NotTraced if a step in parts is not the step, or depends on what it is computed beside.

    Early parts get what they get in training: the rows of more than one step, and nothing in place of late inputs.
    """

    def in_parts(values: list[Tensor]) -> LossesAndGradients:
        n = len(values[list(dims).index(0)])
        twice = [torch.cat([x, x]) if d == 0 else x for x, d in zip(values, dims, strict=True)]
        if parts.after is not None:
            twice = [x if early else torch.empty(0) for x, early in zip(twice, is_early, strict=True)]
        found = parts.late(values, [x[n:] for x in parts.early(twice)], parts.views(values))
        if parts.after is None:
            return found[0], found[1:]
        left, gradients = found[: parts.n_after], found[parts.n_after :]
        return parts.after(twice, [torch.cat([torch.zeros_like(x), x]) for x in left])[n:], gradients

    _require_same(_in_a_row(step), _in_a_row(in_parts), values)


def _require_same_late(step: EagerStep, values: list[Tensor], late: Sequence[int]) -> None:
    """Raises NotTraced if a step depends on whether updates have been added to weights or are kept beside them."""
    with_late: list[Any] = list(values)
    for i in late:
        n = len(values[i])
        with_late[i] = Late(values[i][0], n, 2)
        with_late[i].keep(values[i][:, :, :1], values[i][:, :1], 0.1)
        values = [*values[:i], values[i][:1].repeat(n, 1, 1), *values[i + 1 :]]
        with_late[i].settle(values[i])
    _require_same(lambda _: _in_a_row(step)(values), lambda _: _in_a_row(step)(with_late), values)


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
