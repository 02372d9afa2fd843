"""The lower part of a model: frozen layers that rows meet before any weight that trains. It can be run once for a row.

It is found from the order in which a model calls its layers. The model is cut at the first layer that trains, or at a
layer around it: what that layer is given is all that the rest of the model needs of the frozen ones. In the copy that
trains, frozen layers below the cut are replaced by stubs that give not-a-number, so that a value of theirs which is
used after all cannot go unseen; a cut is taken only if both ways compute the same.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plures.learn.stock import PlainFunctions, without_fast_path

LEAST_SAVED = 20  # FLOPs of the lower part for each number that is kept; else it is quicker to run it again


class _Reached(Exception):
    """The cut was reached, with these arguments."""

    def __init__(self, arguments: "_Arguments") -> None:
        super().__init__()
        self.arguments = arguments


class _Arguments(NamedTuple):
    """What a layer is called with."""

    by_place: tuple[Any, ...]
    by_name: dict[str, Any]

    def get(self, key: int | str) -> Any:
        return self.by_place[key] if isinstance(key, int) else self.by_name[key]

    def keys(self) -> list[int | str]:
        """Of those that are tensors."""
        named = [name for name, value in self.by_name.items() if isinstance(value, Tensor)]
        return [k for k, value in enumerate(self.by_place) if isinstance(value, Tensor)] + named


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(_Arguments(args, kwargs))


def _without_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (), {}


class Given:
    """What the upper part starts from in a call: values of the lower part, handed in where the model is cut."""

    def __init__(self, keys: tuple[int | str, ...], n_met: int) -> None:
        self.keys, self.n_met = keys, n_met
        self.values: list[Tensor] = []
        self.n_rows = 0
        self.is_entered = True
        self.functions: PlainFunctions | None = None

    def begin(self, values: list[Tensor], n_rows: int, functions: PlainFunctions | None) -> None:
        """Before a call."""
        self.values, self.n_rows, self.functions, self.is_entered = values, n_rows, functions, False

    def end(self) -> None:
        """After it: nothing of a batch is kept."""
        self.values, self.functions, self.is_entered = [], None, True

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand the values to the layer at the cut, when it is called for the first time."""
        if self.is_entered:
            return None
        self.is_entered = True
        if self.functions is not None:  # dropout above draws the numbers that it draws behind the whole lower part
            self.functions.n_met = self.n_met
        by_place, by_name = list(args), dict(kwargs)
        for key, value in zip(self.keys, self.values, strict=True):
            if isinstance(key, int):
                by_place[key] = value
            else:
                by_name[key] = value
        return tuple(by_place), by_name


class Stub(nn.Module):
    """Stands for a layer below the cut: not-a-number in the shape of its output."""

    def __init__(self, output: Any, given: Given) -> None:
        super().__init__()
        self.output, self.given = output, given
        self.register_forward_pre_hook(_without_arguments, with_kwargs=True)

    def forward(self) -> Any:
        """In place of the layer's output."""
        return _filled(self.output, self.given.n_rows)


class _Shape(NamedTuple):
    """Of a tensor that a layer gives; whether it has a row for each row of the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_rows: bool


class _Unknown(Exception):
    """A layer gives something that is no tensor."""


def _shapes_of(two: Any, three: Any) -> Any:
    """The shapes of what a layer gave for two rows, and for three."""
    if isinstance(two, Tensor):
        return _Shape(tuple(two.shape), two.dtype, two.dim() > 0 and (two.shape[0], three.shape[0]) == (2, 3))
    if two is None or isinstance(two, (bool, int, float)):
        return two
    if type(two) in (tuple, list) and len(two) == len(three):
        return type(two)(_shapes_of(a, b) for a, b in zip(two, three, strict=True))
    raise _Unknown


def _filled(shapes: Any, n_rows: int) -> Any:
    if isinstance(shapes, _Shape):
        value = math.nan if shapes.dtype.is_floating_point else 0
        size = (n_rows, *shapes.shape[1:]) if shapes.has_rows else shapes.shape
        return torch.full((), value, dtype=shapes.dtype).expand(size)
    return type(shapes)(_filled(one, n_rows) for one in shapes) if isinstance(shapes, (tuple, list)) else shapes


class Upper(NamedTuple):
    """How the rest of the model starts from kept values: the same modules, with stubs below the cut."""

    given: Given
    stubs: dict[str, Any]  # path of a layer below the cut -> shapes of its output
    path: str  # of the layer at the cut

    def of(self, module: nn.Module) -> nn.Module:
        """A copy of the body that starts at the cut; weights are shared."""
        module = _copy(module)
        for path, output in self.stubs.items():
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, Stub(output, self.given))
        module.get_submodule(self.path).register_forward_pre_hook(self.given.enter, with_kwargs=True)
        return module

    def is_below(self, name: str) -> bool:
        """Whether a tensor belongs to a layer below the cut."""
        return any(name.startswith(path + ".") for path in self.stubs)


class Lower:
    """The lower part of a model, in inference mode: from rows to what the rest of the model starts from.

    What it gives is one row of numbers for each row: values at the cut, and behind them the row itself, if the rest of
    the model looks at it, too (as at tokens, for what is padding).
    """

    def __init__(self, module: nn.Module, upper: Upper | None, keeps_row: bool) -> None:
        self.module, self.upper, self.keeps_row = module, upper, keeps_row
        self.shapes: list[tuple[int, ...]] = []  # of the values at the cut
        self.row_shape: tuple[int, ...] = ()
        self.row_dtype = torch.float32
        self.flops = 0

    def measure(self, row: Tensor) -> None:
        """Learn the shapes of its values from a row, and what it costs."""
        with FlopCounterMode(display=False) as counter:
            values, _ = self.values(row.unsqueeze(0))
        self.flops = counter.get_total_flops()
        self.shapes = [tuple(value.shape[1:]) for value in values]
        self.row_shape, self.row_dtype = tuple(row.shape), row.dtype

    @property
    def description(self) -> str:
        """What it computes, in words that are the same for the same layers."""
        cut = "the head" if self.upper is None else f"{self.upper.path} {self.upper.given.keys}"
        return f"{self.module!r} up to {cut}, {self.shapes} {self.keeps_row}"

    @property
    def pays(self) -> bool:
        """Whether keeping its values saves enough."""
        return self.flops >= LEAST_SAVED * sum(map(math.prod, self.shapes))

    @torch.no_grad()
    def values(self, x: Tensor) -> tuple[list[Tensor], int]:
        """The values at the cut, and how many functions were met on the way (see `PlainFunctions`)."""
        with PlainFunctions(torch.tensor(0)) as functions, without_fast_path():
            if self.upper is None:
                return [self.module(x)], 0
            try:
                self.module(x)
            except _Reached as reached:
                return [reached.arguments.get(key) for key in self.upper.given.keys], functions.n_met
        raise RuntimeError("the model did not come to the layer at which it is cut")

    def run(self, x: Tensor) -> Tensor:
        """[row, ...]: what is kept of rows."""
        values, _ = self.values(x)
        if self.upper is None:
            return values[0]
        parts = [value.flatten(1) for value in values]
        return torch.cat([*parts, *([x.flatten(1).to(parts[0].dtype)] if self.keeps_row else [])], 1)

    def unpack(self, kept: Tensor) -> tuple[list[Tensor], Tensor]:
        """The values at the cut, and the rows; not-a-number, where nothing looks at them."""
        sizes = [math.prod(shape) for shape in self.shapes]
        rest = [kept.shape[1] - sum(sizes)] if self.keeps_row else []
        parts = list(kept.split([*sizes, *rest], 1))
        values = [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=False)]
        if self.keeps_row:
            return values, parts[-1].reshape(-1, *self.row_shape).to(self.row_dtype)
        return values, _filled(_Shape((0, *self.row_shape), self.row_dtype, True), len(kept))


# What a model may raise that looks at its layers in ways that stubs cannot serve: then it is not cut there.
CANNOT_CUT = (_Unknown, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class _Call(NamedTuple):
    path: str
    parent: int  # number of the call that it is in; -1 for that of the whole
    output: Any


def _record(module: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> list[_Call]:
    """All calls of layers, in the order in which they begin."""
    calls: list[_Call] = []
    inside: list[int] = []

    def begin(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            calls.append(_Call(path, inside[-1] if inside else -1, None))
            inside.append(len(calls) - 1)

        return hook

    def end(_module: nn.Module, _args: Any, output: Any) -> None:
        number = inside.pop()
        calls[number] = calls[number]._replace(output=output)

    hooks = []
    for path, layer in module.named_modules():
        hooks += [layer.register_forward_pre_hook(begin(path)), layer.register_forward_hook(end)]
    try:
        call(x)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def lower_parts(
    module: nn.Module, trained: list[str], frozen: list[str], call: Callable[[Tensor], Any], row: Tensor
) -> Iterator[Lower]:
    """Lower parts that may do, the largest first.

    module: the body in inference mode; `call` runs it with all its weights.
    trained, frozen: names of its tensors that train, and of those that do not.
    """
    if not trained:
        whole = Lower(_copy(module), None, False)
        whole.measure(row)
        yield whole
        return
    with torch.no_grad():
        two, three = (_record(module, call, torch.stack([row] * n)) for n in (2, 3))
    if [each.path for each in two] != [each.path for each in three]:
        return
    for number in reversed(_way_to_training(two, trained)):
        try:
            found = _cut(module, two, three, number, frozen, row)
        except CANNOT_CUT:
            continue
        if found is not None:
            yield found


def _way_to_training(calls: list[_Call], trained: list[str]) -> list[int]:
    """The calls around the first layer that trains, the outermost first; that of the whole is not among them."""
    way, at = [], 0
    while not any(name.rpartition(".")[0] == calls[at].path for name in trained):
        inside = [k for k, each in enumerate(calls) if each.parent == at]
        found = [k for k in inside if any(name.startswith(calls[k].path + ".") for name in trained)]
        if not found:
            break
        at = found[0]
        way.append(at)
    return way


def _cut(
    module: nn.Module, two: list[_Call], three: list[_Call], number: int, frozen: list[str], row: Tensor
) -> Lower | None:
    """The lower part if the model is cut at a call; None if there is nothing to gain there."""
    path, around = two[number].path, {number}
    at = number
    while at >= 0:
        around.add(at)
        at = two[at].parent
    later = {each.path for each in two[number:]}
    before = [k for k in range(number) if k not in around and two[k].parent in around and two[k].path not in later]
    stubs = {two[k].path: _shapes_of(two[k].output, three[k].output) for k in before}
    if not any(name.startswith(each + ".") for each in stubs for name in frozen):
        return None
    # Run with the stubs, the values that come from below the cut are not numbers.
    given = Given((), 0)
    given.n_rows = 2
    below = _copy(module)
    for each, output in stubs.items():
        parent, _, name = each.rpartition(".")
        setattr(below.get_submodule(parent), name, Stub(output, given))
    below.get_submodule(path).register_forward_pre_hook(_stop, with_kwargs=True)
    arguments = _arguments(below, torch.stack([row, row]))
    keys = [k for k in arguments.keys() if arguments.get(k).is_floating_point() and arguments.get(k).isnan().any()]
    if not keys or len({arguments.get(key).dtype for key in keys}) > 1:
        return None
    if any(len(arguments.get(key)) != 2 for key in keys):
        return None
    whole = _copy(module)
    whole.get_submodule(path).register_forward_pre_hook(_stop, with_kwargs=True)
    found = Lower(whole, Upper(Given(tuple(keys), 0), stubs, path), True)
    _, n_met = found.values(torch.stack([row, row]))
    found.upper = Upper(Given(tuple(keys), n_met), stubs, path)
    found.measure(row)
    return found


def _arguments(module: nn.Module, x: Tensor) -> _Arguments:
    try:
        with torch.no_grad(), PlainFunctions(torch.tensor(0)), without_fast_path():
            module(x)
    except _Reached as reached:
        return reached.arguments
    raise _Unknown


def _copy(module: nn.Module) -> nn.Module:
    """A copy whose tensors are those of the original."""
    tensors = [*module.parameters(), *module.buffers()]
    shared: dict[int, Any] = {id(x): x for x in tensors}
    for each in module.modules():  # tensors in places of parameters that are none, and what a call leaves in a layer
        places = (each._parameters, each._buffers, vars(each))
        shared |= {id(x): x for place in places for x in place.values() if isinstance(x, Tensor)}
    return copy.deepcopy(module, shared)
