"""The only loops over examples: `fit` moves a tree down the slope of an objective, `measure` sums a function.

Both are written for one client and called in the middle of a client function. When that function
is vmapped over clients, they do not step to the end of the longest client: they are operations
with a batching rule of their own, which sorts clients by number of steps, so that the live ones
are always the first rows of every stacked tensor. Nothing is padded but last batches.

An objective is `objective(params, batch, *given) -> scalar`. It may close over settings and the
task, never over a client's tensors: those are passed as `given`, so that they can be stacked.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch  # private in torch: how vmap is told of an operation
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

from . import cut, flops, layout, trace, tree, winograd
from .shard import Plan, Shard, batches_an_epoch, plan
from .task import Batch
from .tree import Tree

Objective = Callable[..., Tensor]

MEMORY_BYTES = 256 << 20  # what may be kept of batches that come again
TEST_BATCH = 64  # rows of a batch of a test, of one of stacked clients
NARROW, TOGETHER = 16, 16  # rows where batches of many clients go together, with little padding, and how many do
AHEAD_BYTES = 2 << 20  # of batches to come: few steps, that stay near at hand


@dataclass(frozen=True)
class Solver:
    """How a tree is moved down a slope, and for how long. State is fresh at every `fit`."""

    kind: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 1.0  # of the learning rate, a round
    batch: int = 10
    epochs: int = 1
    steps: int | None = None  # instead of epochs
    box: tuple[float, float] | None = None  # values are clipped into it after every step

    def for_epochs(self, epochs: int) -> "Solver":
        return dataclasses.replace(self, epochs=epochs, steps=None)

    def for_steps(self, steps: int) -> "Solver":
        return dataclasses.replace(self, steps=steps)

    def plain(self, lr: float) -> "Solver":
        """Gradient steps of one size and nothing else, for the same number of epochs or steps."""
        return dataclasses.replace(self, kind="sgd", lr=lr, momentum=0.0, weight_decay=0.0, decay=1.0)

    def rate(self, round: Tensor) -> Tensor:
        """The learning rate of a round."""
        return self.lr * self.decay**round


@dataclass(frozen=True)
class Plateau:
    """A client stops after an epoch when its last losses hardly differ."""

    window: int = 10  # epochs looked at; at least one more must have passed
    threshold: float = 0.01  # standard deviation below which it stops
    loss_of: Literal["last_batch", "epoch_mean"] = "last_batch"


class Fitted(NamedTuple):
    params: Tree
    loss: Tensor  # mean over the steps
    steps: Tensor  # how many were taken


def fit(
    objective: Objective,
    params: Tree,
    shard: Shard,
    solver: Solver,
    given: tuple[Tree, ...] = (),
    epochs: Tensor | None = None,
    stop: Plateau | None = None,
    pace: dict[str, float] | None = None,
    shuffle: bool = True,
) -> Fitted:
    """Train `params` on the shard. `epochs`, one number a client, replaces the solver's.

    `pace` multiplies the learning rate of what stands under a name of the tree. Without `shuffle`
    every epoch meets the rows in the order of the shard, in the same batches.
    """
    leaves, params_spec = tree.flatten(params)
    given_leaves, given_spec = tree.flatten(given)
    if epochs is not None:
        length, unit = epochs, "epochs"
    elif solver.steps is not None:
        length, unit = torch.tensor(solver.steps), "steps"
    else:
        length, unit = torch.tensor(solver.epochs), "epochs"
    places = [name.partition("/")[0] for name in tree.names(params)]
    paces = tuple((pace or {}).get(place, 1.0) for place in places)
    sizes = len(leaves), len(given_leaves)
    job = _Job(_fit, objective, solver, unit, stop, params_spec, given_spec, *sizes, _Found(), shuffle, paces)
    out = _loop(job, [*leaves, *given_leaves, *shard, length])
    return Fitted(tree.unflatten(out[:-2], params_spec), out[-2], out[-1])


def measure(
    fn: Callable[..., Tree], params: Tree, shard: Shard, batch: int | None = None, given: tuple[Tree, ...] = ()
) -> Tree:
    """The sum of `fn(params, batch, *given)` over the shard, in batches of `batch` rows, in order.

    Without `batch` they are of any size: for a `fn` that is itself a sum over rows, of which none sees the others.
    """

    def on_batch(_: tuple[()], batch: Batch, params: Tree, *given: Tree) -> Tree:
        return fn(params, batch, *given)

    # All that is read is given: what all clients share is then not copied for each of them.
    _, nothing = tree.flatten(())
    leaves, spec = tree.flatten((params, *given))
    found = _Found()
    solver = Solver(batch=batch or TEST_BATCH)
    job = _Job(_measure, on_batch, solver, "epochs", None, nothing, spec, 0, len(leaves), found, False)
    job = job._replace(any_batches=batch is None)
    out = _loop(job, [*leaves, *shard, torch.tensor(1)])
    return tree.unflatten(out, found.spec)


def descend(loss: Callable[[Tree], Tensor], params: Tree, lr: float | Tensor, steps: int = 1) -> Tree:
    """Some plain gradient steps on one batch, inside an objective; what comes out can be differentiated."""
    for _ in range(steps):
        params = step_down(params, torch.func.grad(loss)(params), lr)
    return params


def step_down(params: Tree, slopes: Tree, lr: float | Tensor) -> Tree:
    """One gradient step; statistics of BatchNorm are left as they are."""
    leaves, spec = tree.flatten(params)
    stay = tree.are_statistics(params)
    moved = [x if s else x - lr * g for x, g, s in zip(leaves, tree.leaves_like(params, slopes), stay, strict=True)]
    return tree.unflatten(moved, spec)


def sloped(value: Tree, slopes: Tree) -> Tensor:
    """Zero, whose gradient with respect to `value` is `slopes`."""
    pairs = zip(tree.leaves(value), tree.leaves_like(value, slopes), strict=True)
    return sum(((x - x.detach()) * g.detach()).sum() for x, g in pairs)  # type: ignore[return-value]


def recorded(old: Tree, new: Tree) -> Tensor:
    """Zero; with it in an objective, `old`, which stands under `recorded`, becomes `new` by the step."""
    return sloped(old, tree.sub(old, new))


class _Found:
    """The structure of what `fn` of a `measure` returns, known when it has been called."""

    spec: Any = None


class _Job(NamedTuple):
    run: Callable[..., list[Tensor]]
    fn: Callable[..., Any]
    solver: Solver
    unit: str
    stop: Plateau | None
    params_spec: Any
    given_spec: Any
    n_params: int
    n_given: int
    found: _Found
    shuffle: bool  # whether each epoch has an order of its own
    paces: tuple[float, ...] = ()  # factors of the learning rate, one for each tensor
    alone: bool = False  # one client: no vmap
    traced: bool = True
    any_batches: bool = False  # whether results are the same for all of them


def _loop(job: _Job, tensors: list[Tensor]) -> list[Tensor]:
    """One operation over one client; under vmap, over many.

    As a `torch.autograd.Function` it would be the same, and slower.
    """
    if functorch.peek_interpreter_stack() is None:
        dims: list[int | None] = [0 if i not in _tables(job) else None for i in range(len(tensors))]
        stacked = [x.unsqueeze(0) if dim == 0 else x for x, dim in zip(tensors, dims, strict=True)]
        plain = job._replace(alone=True, traced=False)
        return [x.squeeze(0) for x in _stacked_loop(plain, stacked, dims, 1)]
    vmap = retrieve_current_functorch_interpreter()
    if not isinstance(vmap, VmapInterpreter):
        raise TypeError("fit and measure are operations of a client: no slope is taken through them")
    level, n = vmap.level(), vmap.batch_size()
    is_stacked = [functorch.maybe_get_level(x) == level for x in tensors]
    dims = [0 if it_is else None for it_is in is_stacked]
    stacked = [_unwrapped(x) if it_is else x for x, it_is in zip(tensors, is_stacked, strict=True)]
    with vmap.lower():
        # Kernels for narrow convolutions of a single client are faster than those for a stack of one.
        weights = stacked[: job.n_params + job.n_given]
        alone = n == 1 and any(len(x) % layout.WIDE for x in _convolutions(weights, dims))
        out = _stacked_loop(job._replace(alone=alone), stacked, dims, n)
    return [functorch._add_batch_dim(x, 0, level) for x in out]


def _unwrapped(x: Tensor) -> Tensor:
    """The stack of clients behind what vmap shows as one of them."""
    return functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)


def _convolutions(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """One client's kernels, [out, in, height, width]."""
    one = [x[0] if d == 0 else x for x, d in zip(tensors, dims, strict=False)]
    return [x for x in one if x.dim() == 4]


def _tables(job: _Job) -> tuple[int, int]:
    """Where x and y are among the tensors: all clients of a stack share them."""
    return job.n_params + job.n_given, job.n_params + job.n_given + 1


def _stacked_loop(job: _Job, tensors: list[Tensor], dims: list[int | None], n: int) -> list[Tensor]:
    """Stack what is not stacked, plan the batches, run, and put the rows back in their old order."""

    def stacked(i: int) -> Tensor:
        return tensors[i] if dims[i] == 0 else tensors[i].expand(n, *tensors[i].shape)

    first_given, first_shard = job.n_params, job.n_params + job.n_given
    x_at, y_at = _tables(job)
    if dims[x_at] is not None or dims[y_at] is not None:
        raise TypeError("a shard's x and y are tables that all clients share; they cannot be stacked")
    shard = Shard(*[tensors[i] if i in (x_at, y_at) else stacked(i) for i in range(first_shard, first_shard + 8)])
    length = stacked(len(tensors) - 1).numpy()
    sizes, size, smallest = shard.size.numpy(), job.solver.batch, int(shard.smallest.max())
    if job.run is _measure:
        size, smallest = _test_width(job, dims[first_given:first_shard], int(sizes.max(initial=1))), 1
    n_steps = length * batches_an_epoch(sizes, size, smallest) if job.unit == "epochs" else length
    batches = plan(shard.rows.numpy(), sizes, shard.key.numpy(), n_steps, size, smallest, job.shuffle)
    order = torch.from_numpy(batches.sorted_clients)
    is_sorted = bool((order == torch.arange(n)).all())  # as a rule: then large tensors need not be copied

    def in_order(x: Tensor) -> Tensor:
        return x if is_sorted else x[order]

    params = [in_order(stacked(i)) for i in range(job.n_params)]
    if is_sorted:
        params = [x.clone() for x in params]  # fresh memory: updated in place
    given = [in_order(tensors[i]) if dims[i] == 0 else tensors[i] for i in range(first_given, first_shard)]
    call = _caller(job, dims[first_given:first_shard])
    with torch.no_grad():
        out = job.run(job, call, params, given, dims[first_given:first_shard], shard, in_order(shard.counts), batches)
    return out if is_sorted else [x[order.argsort()] for x in out]


def _caller(job: _Job, given_dims: Sequence[int | None]) -> Callable[..., Any]:
    """`fn` over the first rows of stacked tensors: called as it is for one client, vmapped for many."""

    def one(params: list[Tensor], batch: Batch, given: list[Tensor]) -> Any:
        return job.fn(tree.unflatten(params, job.params_spec), batch, *tree.unflatten(given, job.given_spec))

    if job.alone:

        def alone(params: list[Tensor], batch: Batch, given: list[Tensor]) -> Any:
            own = [x[0] if d == 0 else x for x, d in zip(given, given_dims, strict=True)]
            out = one([x[0] for x in params], Batch(*[x[0] for x in batch]), own)
            return tree.map(lambda x: x.unsqueeze(0), out)

        return alone
    return torch.vmap(one, in_dims=(0, 0, list(given_dims)))


def _fit(
    job: _Job,
    call: Callable[..., Tensor],
    full: list[Tensor],
    given: list[Tensor],
    given_dims: Sequence[int | None],
    shard: Shard,
    counts: Tensor,
    batches: Plan,
) -> list[Tensor]:
    solver, stop = job.solver, job.stop
    n = len(counts)
    is_statistic = tree.are_statistics(tree.unflatten(full, job.params_spec))
    lr = solver.lr * solver.decay ** int(shard.round.max())
    loss_sum, steps = torch.zeros(n), batches.n_steps.copy()
    history: list[list[float]] = [[] for _ in range(n)]  # of epochs, for `stop`
    this_epoch: list[list[float]] = [[] for _ in range(n)]

    if not len(batches.live):
        return [*full, torch.zeros(n), torch.zeros(n, dtype=torch.int64)]
    at: Any = slice(0, int(batches.live[0]))
    batch = _batch(shard, batches, at, counts[at])
    first = [x[:1] for x in full], Batch(*[x[:1] for x in batch]), _first(given, given_dims)
    of_first = [x[at] if d == 0 else x for x, d in zip(given, given_dims, strict=True)]
    step = _step(job, call, [*[x[at] for x in full], *batch, *of_first], given_dims)
    memory: _Memory | None = None
    ahead: _Ahead | None = None
    if step.again is not None and len(batches.live) > batches.steps_an_epoch.max():
        memory = _Memory(step, step.again, batches.steps_an_epoch)
    elif step.ahead is not None:
        ahead = _Ahead(step.ahead, shard, batches, counts, loss_sum if stop is None else None)
    full = [winograd.taps_first(x) if i in step.by_taps else x for i, x in enumerate(full)]
    place = np.arange(n)  # the clients now in the stack, as places in the plan
    gathered = False  # whether `now` is a copy of rows of `full` and not a view of its first rows
    now, own, own_counts = full, given, counts
    state = _SolverState(solver, now)
    stopped = np.zeros(n, bool)

    def narrow(kept: np.ndarray) -> None:
        """Go on with some rows of the stack only."""
        nonlocal place, gathered, now, own, own_counts
        if gathered:
            for whole, part in zip(full, now, strict=True):
                whole[torch.from_numpy(place)] = part
        prefix = bool(np.array_equal(kept, np.arange(len(kept))))
        pick: Any = slice(len(kept)) if prefix else torch.from_numpy(kept)
        gathered = gathered or not prefix
        now = [x[pick] for x in now]
        own = [x[pick] if d == 0 else x for x, d in zip(own, given_dims, strict=True)]
        own_counts, place = own_counts[pick], place[kept]
        state.narrow(pick)

    for t, (start, n_live) in enumerate(zip(batches.start.tolist(), batches.live.tolist(), strict=False)):
        if stop is not None:
            narrow_to = np.flatnonzero((batches.n_steps[place] > t) & ~stopped[place])
            if len(narrow_to) < len(place):
                narrow(narrow_to)
        elif n_live < len(place):
            narrow(np.arange(n_live))
        if len(place) == 0:
            break
        at = torch.from_numpy(start + place) if gathered else slice(start, start + len(place))
        if ahead is not None:
            losses, slopes = ahead.step(t, at, now, own)
        else:
            tensors = [*now, *_batch(shard, batches, at, own_counts), *own]
            losses, slopes = step(tensors) if memory is None else memory.step(t, place, tensors)
        state.step(now, slopes, is_statistic, lr, job.paces)
        if losses is None:
            continue  # they are added up later, of many steps at once
        if gathered:
            loss_sum[torch.from_numpy(place)] += losses
        else:
            loss_sum[: len(place)].add_(losses)
        if stop is not None:
            for client, loss in zip(place.tolist(), losses.tolist(), strict=True):
                this_epoch[client].append(loss)
                if (t + 1) % batches.steps_an_epoch[client] == 0:
                    losses_seen = this_epoch[client]
                    mean = sum(losses_seen) / len(losses_seen)
                    history[client].append(losses_seen[-1] if stop.loss_of == "last_batch" else mean)
                    this_epoch[client] = []
                    last = history[client][-stop.window :]
                    stopped[client] = len(history[client]) > stop.window and float(np.std(last)) < stop.threshold
                    if stopped[client]:
                        steps[client] = t + 1
    if ahead is not None:
        ahead.add_losses()
    _count(job, given_dims, _share_of_batches(batches, steps), *first)
    narrow(np.zeros(0, np.int64))
    taken = torch.from_numpy(steps)
    return [*full, loss_sum / taken.clamp(min=1), taken]


def _batch(shard: Shard, batches: Plan, at: Any, counts: Tensor) -> Batch:
    rows = batches.rows[at]
    x, y = (table.index_select(0, rows.reshape(-1)).unflatten(0, rows.shape) for table in (shard.x, shard.y))
    return Batch(x, y, batches.mask[at], counts, batches.keys[at])


def _step(
    job: _Job, call: Callable[..., Tensor], tensors: list[Tensor], given_dims: Sequence[int | None]
) -> trace.Step:
    """Losses and slopes of a stack of clients, from the tensors of a step in a row."""
    n = job.n_params
    fields = len(Batch._fields)

    def eager(*values: Tensor) -> Tensor:
        return call(list(values[:n]), Batch(*values[n : n + fields]), list(values[n + fields :]))

    if not job.traced:
        return trace.untraced(eager, n)
    roles: list[trace.Role] = ["trained"] * n
    roles += ["drawn" if field == "key" else "batch" for field in Batch._fields]
    roles += ["given"] * len(given_dims)
    dims = _dims(job, given_dims)
    return trace.step_of(_name(job, given_dims), eager, n, tensors, dims, roles, again=not job.shuffle)


def _name(job: _Job, given_dims: Sequence[int | None]) -> Any:
    return trace.name_of(job.fn), job.params_spec, job.given_spec, tuple(given_dims)


def _dims(job: _Job, given_dims: Sequence[int | None]) -> list[int | None]:
    """Which tensors of a step are stacked."""
    n, fields = job.n_params, len(Batch._fields)
    return [None] * (n + fields + len(given_dims)) if job.alone else [*[0] * (n + fields), *given_dims]


class _Ahead:
    """Steps of which what their batches give before they meet a weight has been computed, for many steps at once.

    Losses, where they can be left for later, are added to `loss_sum`, of as many steps at a time; without it, none are.
    """

    def __init__(
        self, parts: cut.Parts, shard: Shard, batches: Plan, counts: Tensor, loss_sum: Tensor | None = None
    ) -> None:
        self.parts, self.shard, self.batches, self.counts = parts, shard, batches, counts
        self.loss_sum = loss_sum
        self.left: list[list[Tensor]] = []  # of each step, what its losses come from
        self.seen: list[Tensor] | None = None  # the weights that the views are of
        self.end = 0  # of the steps that are computed
        of_tables = sum(table[:1].numel() * table.element_size() for table in (shard.x, shard.y))
        of_batch = batches.mask.shape[1] * (of_tables + batches.mask.element_size())
        self.row_bytes = of_batch + parts.kept_bytes  # of a client's step

    def step(self, t: int, at: Any, now: list[Tensor], own: list[Tensor]) -> tuple[Tensor | None, list[trace.Slope]]:
        """Step t of the clients at these rows of the plan, with their weights and what they are given."""
        if t >= self.end:
            self.add_losses()
            self._compute(t, len(now), len(own))
        if len(now[0]) == self.batches.live[t]:
            batch, kept = ([x[t - self.first] for x in each] for each in self.by_step)
        else:  # not all of those that were planned
            here = slice(at.start - self.base, at.stop - self.base) if isinstance(at, slice) else at - self.base
            batch, kept = ([x[here] for x in each] for each in self.whole)
        tensors = [*now, *batch, *own]
        if self.seen is not now:
            self.seen, self.views = now, self.parts.views(tensors)
        found, n = self.parts.late(tensors, kept, self.views), self.parts.n_left
        if self.parts.after is None:
            return found[0], found[1:]
        if self.loss_sum is None:
            return self.parts.after(tensors, found[:n]), found[n:]
        self.left.append(found[:n])
        return None, found[n:]

    def add_losses(self) -> None:
        """Those of all steps that were computed ahead, and taken."""
        if self.left and self.parts.after is not None and self.loss_sum is not None:
            rows = [torch.cat(each) for each in zip(*self.left, strict=True)]
            self.loss_sum.index_add_(0, self.owner, self.parts.after(self.read, rows).to(self.loss_sum.dtype))
        self.left = []

    def _compute(self, t: int, n_params: int, n_given: int) -> None:
        """Step t and as many after it as may be kept."""
        batches = self.batches
        self.first, self.base = t, int(batches.start[t])
        self.end = int(np.searchsorted(batches.start, self.base + AHEAD_BYTES // self.row_bytes, side="right")) - 1
        self.end = max(self.end, t + 1)
        rows = slice(self.base, int(batches.start[self.end]))
        self.owner = torch.from_numpy(np.concatenate([np.arange(n) for n in batches.live[t : self.end]]))
        batch = _batch(self.shard, batches, rows, self.counts[self.owner])
        nothing = torch.empty(0)  # in place of what is not read
        self.read = [*[nothing] * n_params, *batch, *[nothing] * n_given]
        kept = self.parts.early(self.read)
        live = batches.live[t : self.end].tolist()
        self.whole = batch, kept
        self.by_step = [x.split(live) for x in batch], [x.split(live) for x in kept]


class _Memory:
    """Steps over batches that come again in every epoch: what they give before they meet what is trained is kept."""

    def __init__(self, whole: trace.Step, parts: cut.Parts, steps_an_epoch: np.ndarray) -> None:
        self.whole, self.parts, self.steps_an_epoch = whole, parts, steps_an_epoch
        self.start = np.concatenate([[0], np.cumsum(steps_an_epoch)])
        self.kept: list[Tensor] | None = None
        self.fits = True

    def step(self, t: int, place: np.ndarray, tensors: list[Tensor]) -> trace.Losses:
        """Step t of the clients at these places of the plan."""
        an_epoch = self.steps_an_epoch[place]
        at = torch.from_numpy(self.start[place] + t % an_epoch)
        if self.fits and (t < an_epoch).any():
            new = self.parts.early(tensors)
            if self.kept is None:
                n_bytes = sum(x[0].numel() * x.element_size() for x in new) * int(self.start[-1])
                self.fits = n_bytes <= MEMORY_BYTES
                self.kept = [x.new_empty(int(self.start[-1]), *x.shape[1:]) for x in new] if self.fits else []
            for kept, x in zip(self.kept, new if self.fits else [], strict=True):
                kept[at] = x
        if not self.fits:
            return self.whole(tensors)
        now = [kept[at] for kept in self.kept or []]
        losses, *slopes = self.parts.late(tensors, now, self.parts.views(tensors))
        return losses, slopes


def _first(given: list[Tensor], given_dims: Sequence[int | None]) -> list[Tensor]:
    return [x[:1] if d == 0 else x for x, d in zip(given, given_dims, strict=True)]


def _share_of_batches(batches: Plan, steps: np.ndarray) -> float:
    """How many batches of full size were done, when each client took so many steps."""
    rows = batches.mask.sum(1).numpy()
    t = np.repeat(np.arange(len(batches.live)), batches.live)
    client = np.arange(len(rows)) - np.repeat(batches.start[:-1], batches.live)
    return float(rows[t < steps[client]].sum()) / batches.mask.shape[1]


def _count(
    job: _Job, given_dims: Sequence[int | None], n: float, params: list[Tensor], batch: Batch, given: list[Tensor]
) -> None:
    """Tell how many batches of full size were done; the tensors are those of one client."""
    call = _caller(job._replace(alone=True), given_dims)

    def one_batch() -> None:
        if job.run is _fit:
            trace.untraced(lambda *params: call(list(params), batch, given), len(params))(params)
        else:
            call(params, batch, given)

    def name() -> Any:
        shapes = tuple(tuple(x.shape) for x in [*params, *batch, *given])
        return trace.name_of(job.fn), job.run is _fit, job.params_spec, job.given_spec, shapes

    flops.add(name, n, one_batch)


class _SolverState:
    """Momentum and the like, for the rows of the stack; new for every fit."""

    def __init__(self, solver: Solver, params: list[Tensor]) -> None:
        self.solver, self.count = solver, 0
        n_kept = {"sgd": 1 if solver.momentum else 0, "adam": 2}[solver.kind]
        self.kept = [[torch.zeros_like(x) for x in params] for _ in range(n_kept)]
        self.adds_up = solver.kind == "sgd" and not (solver.momentum or solver.weight_decay or solver.box)

    def narrow(self, pick: Any) -> None:
        self.kept = [[x[pick] for x in group] for group in self.kept]

    def step(
        self,
        leaves: list[Tensor],
        slopes: Sequence[trace.Slope],
        is_statistic: list[bool],
        lr: float,
        paces: tuple[float, ...],
    ) -> None:
        self.count += 1
        moving: dict[float, list[int]] = {}  # pace -> places of tensors
        grads: dict[int, Tensor] = {}
        for i, slope in enumerate(slopes):
            if slope is None:
                continue
            if not isinstance(slope, Tensor):
                if self.adds_up:
                    slope.add_to(leaves[i], -lr * paces[i])  # no slope is written and read again
                    continue
                slope = slope.dense()
            if is_statistic[i]:
                leaves[i].sub_(slope)  # the slope of a statistic is the step it has to take
            else:
                grads[i] = slope
                moving.setdefault(paces[i], []).append(i)
        for pace, at in moving.items():
            self._move([leaves[i] for i in at], [grads[i] for i in at], at, lr * pace)

    def _move(self, params: list[Tensor], grads: list[Tensor], at: list[int], lr: float) -> None:
        solver = self.solver
        if solver.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=solver.weight_decay))
        if solver.kind == "adam":
            first, second = ([group[i] for i in at] for group in self.kept)
            torch._foreach_lerp_(first, grads, 0.1)
            torch._foreach_mul_(second, 0.999)
            torch._foreach_addcmul_(second, grads, grads, value=0.001)
            spread = torch._foreach_div(second, 1 - 0.999**self.count)
            torch._foreach_sqrt_(spread)
            torch._foreach_add_(spread, 1e-8)
            torch._foreach_addcdiv_(params, first, spread, value=-lr / (1 - 0.9**self.count))
        elif solver.momentum:
            speed = [self.kept[0][i] for i in at]
            torch._foreach_mul_(speed, solver.momentum)
            torch._foreach_add_(speed, grads)
            torch._foreach_add_(params, speed, alpha=-lr)
        else:
            torch._foreach_add_(params, grads, alpha=-lr)
        if solver.box is not None:
            torch._foreach_clamp_min_(params, solver.box[0])
            torch._foreach_clamp_max_(params, solver.box[1])


def _test_width(job: _Job, given_dims: Sequence[int | None], largest: int) -> int:
    """Rows of a batch: of few widths, for each is traced."""
    if _go_together(job, given_dims):
        return NARROW
    return min(job.solver.batch, max(8, 1 << (largest - 1).bit_length()))  # no wider than the largest client needs


def _go_together(job: _Job, given_dims: Sequence[int | None]) -> bool:
    """Whether batches of several clients, and several of one, are a stack: all that is read is the same for all."""
    return job.any_batches and not job.alone and all(d is None for d in given_dims)


def _measure(
    job: _Job,
    call: Callable[..., Tree],
    params: list[Tensor],
    given: list[Tensor],
    given_dims: Sequence[int | None],
    shard: Shard,
    counts: Tensor,
    batches: Plan,
) -> list[Tensor]:
    totals: list[Tensor] = []
    n = len(counts)
    values: trace.Values | None = None
    fields = len(Batch._fields)
    # For other models a trace costs more than it saves: tests are few and large.
    has_convolutions = bool(_convolutions(given, given_dims))

    def eager(tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        return tree.flatten(call([], Batch(*tensors[:fields]), tensors[fields:]))  # all that is read is given

    if not len(batches.live):
        raise ValueError("nothing to measure: no client of the stack has a row")
    with torch.no_grad():
        owner = torch.from_numpy(np.concatenate([np.arange(live) for live in batches.live]))
        starts = batches.start
        if _go_together(job, given_dims):
            starts = np.r_[0 : len(owner) : TOGETHER, len(owner)]
        for start, end in pairwise(starts.tolist()):
            at = slice(start, end)
            own = [x[: end - start] if d == 0 else x for x, d in zip(given, given_dims, strict=True)]
            tensors = [*_batch(shard, batches, at, counts[owner[at]]), *own]
            if values is None and has_convolutions and not job.alone:
                values = trace.values_of(_name(job, given_dims), eager, tensors, _dims(job, given_dims))
            parts, job.found.spec = eager(tensors) if values is None else (values.run(tensors), values.spec)
            if not totals:
                totals = [torch.zeros(n, *x.shape[1:], dtype=x.dtype) for x in parts]
            for total, x in zip(totals, parts, strict=True):
                total.index_add_(0, owner[at], x)
        one = _batch(shard, batches, slice(batches.start[0], batches.start[0] + 1), counts[:1])
        n_batches = _share_of_batches(batches, batches.n_steps)
        _count(job, given_dims, n_batches, [x[:1] for x in params], one, _first(given, given_dims))
    return totals
