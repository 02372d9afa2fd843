"""The only loops over batches: `fit` trains a tree by the gradients of an objective, `measure` sums a function.

Both are written for one client and called in the middle of a client function. When that function is vmapped over
clients, they do not run to the end of the longest client: they are operations with a batching rule of their own,
which sorts clients by number of steps, so that those still training are always the first rows of every stacked
tensor. Nothing is padded but last batches.

An objective is `objective(params, batch, *given) -> scalar`. It may close over settings and the task, never over a
client's tensors: those are passed as `given`, so that they can be stacked.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import engine, tree
from plures.data.batches import LAST_BATCH, Batch, Batches, LastBatch, batches_per_epoch, plan_batches
from plures.data.shard import Shard
from plures.engine import Live, Signature
from plures.learn import flops
from plures.learn.optimizers import StackOptimizer
from plures.learn.solver import Plateau, Solver
from plures.tree import Tree

Objective = Callable[..., Tensor]

TEST_BATCH = 64  # rows of a batch of a test, for one of the stacked clients
MOST_PADDING = 4096  # rows of a batch that is padded to its whole width, however few rows there are
NARROW, TOGETHER = 16, 16  # rows of a batch, and batches of a stack, where batches of many clients go together
N_SHARD = len(Shard._fields)


class Fitted(NamedTuple):
    """What `fit` returns."""

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
) -> Fitted:
    """Train `params` on the rows of one client.

    objective: `objective(params, batch, *given)`, the loss of a batch; its gradient is the direction of a step.
    params: where training starts; any tree of tensors. Statistics of BatchNorm in it move by their gradient alone.
    shard: the client's rows. Their order in every epoch follows from its key.
    solver: optimizer, learning rate, size and number of batches, and when to stop.
    given: what the objective reads of this client besides the batch; it stays as it is.
    epochs: how many epochs this client trains, one number, instead of the solver's.
    """
    leaves, params_spec = tree.flatten(params)
    given_leaves, given_spec = tree.flatten(given)
    n_params, n_given = len(leaves), len(given_leaves)
    if epochs is not None:
        length, unit = epochs, "epochs"
    else:
        unit = "epochs" if solver.steps is None else "steps"
        length = shard.work if solver.varied else torch.tensor(solver.epochs if solver.steps is None else solver.steps)
    paces = _paces(params, solver)

    def train(tensors: list[Tensor], dims: list[int | None], n: int, is_single: bool) -> list[Tensor]:
        stack = _stack(tensors, dims, n, n_params, n_given)
        alone = is_single or (
            n == 1 and engine.is_faster_alone(engine.convolutions(tensors, dims[: n_params + n_given]))
        )
        signature = Signature(params_spec, n_params, given_spec, stack.given_dims, alone)
        sizes, smallest = stack.shard.size.cpu().numpy(), int(stack.shard.smallest.max())
        last_batch = LAST_BATCH[int(stack.shard.last_batch.max())]
        n_steps = stack.length
        if unit == "epochs":
            n_steps = n_steps * batches_per_epoch(sizes, solver.batch, smallest, last_batch)
        width = solver.batch
        if width > MOST_PADDING:  # wider than any rows: no wider than it need be
            width = _width(width, int(sizes.max(initial=1)))
        planned = _plan(stack, n_steps, width, smallest, solver.shuffle, last_batch)
        with torch.no_grad():
            training = _Training(objective, signature, solver, paces, planned)
            return planned.in_old_order(training.run(compiled=not is_single))

    out = engine.per_client(
        train, [*leaves, *given_leaves, *shard, length], (n_params + n_given, n_params + n_given + 1)
    )
    return Fitted(tree.unflatten(out[:-2], params_spec), out[-2], out[-1])


def measure(
    fn: Callable[..., Tree], params: Tree, shard: Shard, batch: int | None = None, given: tuple[Tree, ...] = ()
) -> Tree:
    """The sum of `fn(params, batch, *given)` over the rows of one client, in order.

    fn: gives a tree of tensors for a batch. Padded rows are in the batch too: it must leave out what `batch.mask` does.
    params, given: what it reads of this client besides the batch.
    batch: rows of a batch. Without it they are of any size: for a `fn` that is itself a sum over rows, none of which
        sees the others.
    """

    def on_batch(_: tuple[()], batch: Batch, params: Tree, *given: Tree) -> Tree:
        return fn(params, batch, *given)

    # All that is read counts as given: what all clients share is then not copied for each of them.
    _, nothing = tree.flatten(())
    leaves, spec = tree.flatten((params, *given))
    specs: list[tree.Spec] = []

    def add_up(tensors: list[Tensor], dims: list[int | None], n: int, is_single: bool) -> list[Tensor]:
        stack = _stack(tensors, dims, n, 0, len(leaves))
        alone = is_single or (n == 1 and engine.is_faster_alone(engine.convolutions(tensors, dims[: len(leaves)])))
        signature = Signature(nothing, 0, spec, stack.given_dims, alone)
        together = batch is None and not alone and all(d is None for d in stack.given_dims)
        sizes = stack.shard.size.cpu().numpy()
        largest = int(sizes.max(initial=1))
        width = NARROW if together else _width(batch or TEST_BATCH, largest)
        n_steps = stack.length * batches_per_epoch(sizes, width, 1, "keep")
        planned = _plan(stack, n_steps, width, 1, shuffle=False, last_batch="keep")
        with torch.no_grad():
            totals, found = _sum_over(on_batch, signature, planned, together)
        specs.append(found)
        return planned.in_old_order(totals)

    out = engine.per_client(add_up, [*leaves, *shard, torch.tensor(1)], (len(leaves), len(leaves) + 1))
    return tree.unflatten(out, specs[0])


# Plan


class _Stack(NamedTuple):
    """The tensors of a loop over a stack of clients."""

    params: list[Tensor]  # [client, ...]
    given: list[Tensor]
    given_dims: tuple[int | None, ...]  # 0 for what is stacked, None for what all clients share
    shard: Shard
    length: np.ndarray  # [client], epochs or steps


def _stack(tensors: list[Tensor], dims: list[int | None], n: int, n_params: int, n_given: int) -> _Stack:
    """Read the tensors of a loop, in a row: parameters, what is given, the shard, and a number of epochs or steps."""

    def stacked(i: int) -> Tensor:
        return tensors[i] if dims[i] == 0 else tensors[i].expand(n, *tensors[i].shape)

    first = n_params + n_given
    if dims[first] is not None or dims[first + 1] is not None:
        raise TypeError("a shard's x and y are tables that all clients share; they cannot be stacked")
    shard = Shard(tensors[first], tensors[first + 1], *[stacked(i) for i in range(first + 2, first + N_SHARD)])
    return _Stack(
        [stacked(i) for i in range(n_params)],
        tensors[n_params:first],
        tuple(dims[n_params:first]),
        shard,
        stacked(len(tensors) - 1).cpu().numpy(),
    )


class _Planned(NamedTuple):
    """A stack whose clients are sorted by number of steps, longest first, and their batches."""

    params: list[Tensor]  # in memory of their own: they are changed in place
    are_same: list[bool]  # whether all clients start from the same parameter
    given: list[Tensor]
    given_dims: tuple[int | None, ...]
    round: int
    batches: Batches
    order: Tensor | None  # place in the plan -> place in the stack; None if these are the same

    def in_old_order(self, out: list[Tensor]) -> list[Tensor]:
        """Results in the order of the stack."""
        return out if self.order is None else [x[self.order.argsort()] for x in out]

    def one_client(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and given tensors of the first client, still stacked."""
        given = [x[:1] if d == 0 else x for x, d in zip(self.given, self.given_dims, strict=True)]
        return [x[:1] for x in self.params], given


def _plan(
    stack: _Stack, n_steps: np.ndarray, batch: int, smallest: int, shuffle: bool, last_batch: LastBatch
) -> _Planned:
    """Plan the batches of all clients, and sort the clients as the plan does."""
    shard = stack.shard
    rows, sizes, keys = (x.cpu().numpy() for x in (shard.rows, shard.size, shard.key))
    device = shard.rows.device
    plan = plan_batches(rows, sizes, keys, n_steps, batch, smallest, shuffle, last_batch).on(device)
    order = torch.from_numpy(plan.sorted_clients).to(device)
    # As a rule it is: then large tensors need not be copied.
    is_sorted = bool((plan.sorted_clients == np.arange(len(plan.sorted_clients))).all())

    def sort(x: Tensor) -> Tensor:
        return x if is_sorted else x[order]

    params = [x.clone() if is_sorted else x[order] for x in stack.params]
    given = [sort(x) if d == 0 else x for x, d in zip(stack.given, stack.given_dims, strict=True)]
    batches = Batches(shard.x, shard.y, sort(shard.counts), plan)
    are_same = [x.stride(0) == 0 for x in stack.params]
    return _Planned(
        params, are_same, given, stack.given_dims, int(shard.round.max()), batches, None if is_sorted else order
    )


def _paces(params: Tree, solver: Solver) -> tuple[float, ...]:
    """The factor of the learning rate of every tensor."""
    by_name = dict(solver.pace)
    return tuple(by_name.get(name.partition("/")[0], 1.0) for name in tree.names(params))


# Step


class _Training:
    """The steps of a stack of clients, from the first to the last of the longest client."""

    def __init__(
        self, objective: Objective, signature: Signature, solver: Solver, paces: tuple[float, ...], planned: _Planned
    ) -> None:
        self.objective, self.signature, self.solver, self.paces = objective, signature, solver, paces
        self.planned, self.plan = planned, planned.batches.plan
        n = len(planned.batches.counts)
        self.whole = planned.params  # all clients; `params` are those still training
        self.place = np.arange(n)  # the clients still training, as places in the plan
        self.is_copy = False  # whether `params` is a copy of rows of `whole` and not a view of its first rows
        self.given, self.counts = planned.given, planned.batches.counts
        self.device = planned.batches.counts.device
        self.loss_sum = torch.zeros(n)

    def run(self, compiled: bool) -> list[Tensor]:
        """Trained parameters, mean losses and numbers of steps, in the order of the plan."""
        n, plan, batches = len(self.place), self.plan, self.planned.batches
        if not len(plan.live):
            return [*self.whole, torch.zeros(n), torch.zeros(n, dtype=torch.int64)]
        at: Any = slice(0, int(plan.live[0]))
        batch = batches.cut(at, batches.counts[at])
        params_of_one, given_of_one = self.planned.one_client()
        given = [x[at] if d == 0 else x for x, d in zip(self.given, self.signature.given_dims, strict=True)]
        example = [*[x[at] for x in self.whole], *batch, *given]
        step = engine.compile_step(self.objective, self.signature, example, not self.solver.shuffle, compiled)
        stopping = _Stopping(self.solver.stop, plan.n_steps, plan.steps_per_epoch) if self.solver.stop else None
        steps = step.over(batches, self.loss_sum if stopping is None else None)
        self.whole = step.arrange(self.whole)
        self.params: list[Any] = self.whole  # of the clients still training
        self.optimizer = StackOptimizer(self.solver, self.params)
        late = self._start_late(step) if stopping is None else {}
        is_statistic = tree.are_statistics(tree.unflatten(self.whole, self.signature.params_spec))
        lr = self.solver.rate_of(self.planned.round)
        n_done = 0
        for t, (start, n_live) in enumerate(zip(plan.start.tolist(), plan.live.tolist(), strict=False)):
            if stopping is not None:
                self._keep(np.flatnonzero(stopping.goes_on(t, self.place)))
            elif n_live < len(self.place):
                self._keep(np.arange(n_live))
            if len(self.place) == 0:
                break
            at = self._index(start + self.place) if self.is_copy else slice(start, start + len(self.place))
            losses, gradients = steps.take(t, Live(self.params, self.given, self.counts, self.place, at))
            self.optimizer.step(self.params, gradients, is_statistic, lr, self.paces)
            n_done += 1
            if losses is not None:  # else they are added up later, of many steps at once
                self._add_losses(losses)
            if stopping is not None and losses is not None:
                stopping.see(t, self.place, losses)
        steps.finish()
        engine.count(n_done, [step.why_eager] if step.why_eager else [], step.notes)
        taken = plan.n_steps if stopping is None else stopping.steps
        tensors = params_of_one, Batch(*[x[:1] for x in batch]), given_of_one
        _count_flops(self.objective, self.signature, batches.n_full(taken), *tensors, with_gradients=True)
        self._keep(np.zeros(0, np.int64))
        for i, weights in late.items():
            weights.settle(self.whole[i])
        n_steps = self._index(taken)
        return [*self.whole, self.loss_sum / n_steps.clamp(min=1), n_steps]

    def _start_late(self, step: engine.Step) -> dict[int, engine.Late]:
        """The parameters whose updates are added in the end, by their places."""
        if not self.optimizer.only_adds:
            return {}
        n_rows = len(self.plan.live) * self.plan.mask.shape[1]
        late = step.start_late(self.whole, self.planned.are_same, n_rows)
        self.params = [late.get(i, x) for i, x in enumerate(self.whole)]
        return late

    def _index(self, numbers: np.ndarray) -> Tensor:
        """Whole numbers where the tensors are."""
        return torch.from_numpy(numbers).to(self.device)

    def _add_losses(self, losses: Tensor) -> None:
        if self.is_copy:
            self.loss_sum[self._index(self.place)] += losses
        else:
            self.loss_sum[: len(self.place)].add_(losses)

    def _keep(self, kept: np.ndarray) -> None:
        """Go on with some rows of the stack only; what a copy holds is written back first."""
        if len(kept) == len(self.place):
            return
        if self.is_copy:
            for whole, part in zip(self.whole, self.params, strict=True):
                whole[self._index(self.place)] = part
        is_prefix = bool(np.array_equal(kept, np.arange(len(kept))))
        pick: Any = slice(len(kept)) if is_prefix else self._index(kept)
        self.is_copy = self.is_copy or not is_prefix
        self.params = [x[pick] for x in self.params]
        self.given = [x[pick] if d == 0 else x for x, d in zip(self.given, self.signature.given_dims, strict=True)]
        self.counts, self.place = self.counts[pick], self.place[kept]
        self.optimizer.narrow(pick)


# Stop


class _Stopping:
    """Which clients have reached a plateau."""

    def __init__(self, rule: Plateau, n_steps: np.ndarray, steps_per_epoch: np.ndarray) -> None:
        self.rule, self.planned, self.steps_per_epoch = rule, n_steps, steps_per_epoch
        self.steps = n_steps.copy()  # [client], how many each one takes in the end
        self.stopped = np.zeros(len(n_steps), bool)
        self.epochs: list[list[float]] = [[] for _ in n_steps]  # the loss of every epoch
        self.this_epoch: list[list[float]] = [[] for _ in n_steps]  # the losses of its batches so far

    def goes_on(self, t: int, place: np.ndarray) -> np.ndarray:
        """For each of these clients, whether it takes step t."""
        return (self.planned[place] > t) & ~self.stopped[place]

    def see(self, t: int, place: np.ndarray, losses: Tensor) -> None:
        """The losses of step t; at the end of an epoch they may end a client's training."""
        rule = self.rule
        for client, loss in zip(place.tolist(), losses.tolist(), strict=True):
            self.this_epoch[client].append(loss)
            if (t + 1) % self.steps_per_epoch[client]:
                continue
            seen, self.this_epoch[client] = self.this_epoch[client], []
            self.epochs[client].append(seen[-1] if rule.loss_of == "last_batch" else sum(seen) / len(seen))
            last = self.epochs[client][-rule.window :]
            if len(self.epochs[client]) > rule.window and float(np.std(last)) < rule.threshold:
                self.stopped[client] = True
                self.steps[client] = t + 1


# Measure


def _width(batch: int, largest: int) -> int:
    """Rows of a batch: a power of two, for each width is compiled; no wider than the largest client needs."""
    return min(batch, max(8, 1 << (largest - 1).bit_length()))


def _sum_over(
    fn: Callable[..., Tree], signature: Signature, planned: _Planned, together: bool
) -> tuple[list[Tensor], tree.Spec]:
    """Sums over the batches of every client, in the order of the plan, and the structure of what `fn` gives.

    `together`: batches of several clients, and several of one, form a stack, for all that is read is the same for all.
    """
    batches, plan, dims = planned.batches, planned.batches.plan, signature.given_dims
    if not len(plan.live):
        raise ValueError("nothing to measure: no client of the stack has a row")
    owner = torch.from_numpy(np.concatenate([np.arange(live) for live in plan.live])).to(batches.counts.device)
    starts = np.r_[0 : len(owner) : TOGETHER, len(owner)] if together else plan.start
    # For models without convolutions a trace costs more than it saves: tests are few and large.
    is_compiled = bool(engine.convolutions(planned.given, dims)) and not signature.alone
    call = engine.over_clients(fn, signature)
    values: engine.Values | None = None
    totals: list[Tensor] = []
    spec: tree.Spec = None
    for start, end in pairwise(starts.tolist()):
        at = slice(start, end)
        own = [x[: end - start] if d == 0 else x for x, d in zip(planned.given, dims, strict=True)]
        tensors = [*batches.cut(at, batches.counts[owner[at]]), *own]
        if values is None and is_compiled:
            values = engine.compile_values(fn, signature, tensors)
        parts, spec = tree.flatten(call(*tensors)) if values is None else (values.run(tensors), values.spec)
        if not totals:
            totals = [torch.zeros(len(batches.counts), *x.shape[1:], dtype=x.dtype) for x in parts]
        for total, x in zip(totals, parts, strict=True):
            total.index_add_(0, owner[at], x)
    one = batches.cut(slice(plan.start[0], plan.start[0] + 1), batches.counts[:1])
    n_batches = batches.n_full(plan.n_steps)
    _count_flops(fn, signature, n_batches, [], one, planned.one_client()[1], with_gradients=False)
    return totals, spec


def _count_flops(
    fn: Callable[..., Any],
    signature: Signature,
    n_batches: float,
    params: list[Tensor],
    batch: Batch,
    given: list[Tensor],
    with_gradients: bool,
) -> None:
    """Count batches of full size; the tensors are those of one client, still stacked."""
    alone = signature._replace(alone=True)

    def one_batch() -> None:
        if with_gradients:
            engine.eager_step(fn, alone)([*params, *batch, *given])
        else:
            engine.over_clients(fn, alone)(*params, *batch, *given)

    def name() -> Any:
        shapes = tuple(tuple(x.shape) for x in [*params, *batch, *given])
        return engine.name_of(fn), with_gradients, signature.params_spec, signature.given_spec, shapes

    flops.add_batches(name, n_batches, one_batch)


# Inside an objective


def descend(loss: Callable[[Tree], Tensor], params: Tree, lr: float | Tensor, steps: int = 1) -> Tree:
    """Some plain gradient steps on one batch, inside an objective; the result can be differentiated."""
    for _ in range(steps):
        params = step_down(params, torch.func.grad(loss)(params), lr)
    return params


def step_down(params: Tree, gradients: Tree, lr: float | Tensor) -> Tree:
    """One gradient step; statistics of BatchNorm are left as they are."""
    leaves, spec = tree.flatten(params)
    stay = tree.are_statistics(params)
    moved = [x if s else x - lr * g for x, g, s in zip(leaves, tree.leaves_like(params, gradients), stay, strict=True)]
    return tree.unflatten(moved, spec)


def with_gradient(value: Tree, gradients: Tree) -> Tensor:
    """Zero, whose gradient with respect to `value` is `gradients`."""
    pairs: Sequence[tuple[Tensor, Tensor]] = list(
        zip(tree.leaves(value), tree.leaves_like(value, gradients), strict=True)
    )
    return sum(((x - x.detach()) * g.detach()).sum() for x, g in pairs)  # type: ignore[return-value]


def recorded(old: Tree, new: Tree) -> Tensor:
    """Zero; with it in an objective, `old`, which stands under the name `recorded`, becomes `new` by the step."""
    return with_gradient(old, tree.sub(old, new))
