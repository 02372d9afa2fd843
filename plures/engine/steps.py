"""The steps of one fit: what their batches give before they meet a weight is computed for many steps at once.

Three ways to run the same step: one after another; with a look ahead, where batches are new in every epoch; and
with a memory, where the same batches come again in every epoch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from plures.data.batches import Batches
from plures.engine.eager import LossesAndGradients
from plures.engine.gradients import Gradient
from plures.engine.late import Late, most_rows
from plures.engine.passes import winograd
from plures.engine.split import Parts
from plures.engine.trace import EagerStep

MEMORY_BYTES = 256 << 20  # that may be kept of batches that come again
AHEAD_BYTES = 2 << 20  # of batches to come: few enough steps that they stay in the cache


class Live(NamedTuple):
    """The clients of a stack that take a step: their weights, what they are given, and their places."""

    params: list[Any]  # tensors, or `Late`
    given: list[Tensor]
    counts: Tensor  # [client, class]
    place: np.ndarray  # [client], in the plan
    at: Any  # rows of the plan: a slice, or a tensor where some clients have stopped early


class Steps(Protocol):
    """The steps of one fit, taken in their order."""

    def take(self, t: int, live: Live) -> tuple[Tensor | None, list[Gradient]]:
        """Losses and gradients of step t. Losses may be left for later; then they are added up in the end."""

    def finish(self) -> None:
        """Add up the losses that were left for later."""


class Step(NamedTuple):
    """Losses and gradients of a stack of clients, compiled: called with the tensors of a step in a row."""

    run: EagerStep
    why_eager: str = ""  # empty if it is traced
    look_ahead: Parts | None = None
    repeat: Parts | None = None
    taps_first: Sequence[int] = ()
    late: Sequence[int] = ()  # parameters that may be `Late`
    notes: tuple[str, ...] = ()  # what could not be made faster, and why

    def __call__(self, tensors: list[Tensor]) -> LossesAndGradients:
        return self.run(tensors)

    def arrange(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters in the order in memory that this step is fastest with."""
        return [winograd.taps_first(x) if i in self.taps_first else x for i, x in enumerate(params)]

    def start_late(self, params: list[Tensor], are_same: Sequence[bool], n_rows: int) -> dict[int, Late]:
        """The parameters, by their places, whose updates are best added in the end.

        are_same: which of them all clients start from. n_rows: in all batches of a client that are to come.
        """
        return {
            i: Late(params[i][0].clone(), len(params[i]), n_rows)
            for i in self.late
            if are_same[i] and n_rows <= most_rows(*params[i].shape[1:])
        }

    def over(self, batches: Batches, loss_sum: Tensor | None) -> Steps:
        """The steps of a fit over these batches. Losses left for later are added to `loss_sum`; None: none are left."""
        plan = batches.plan
        if self.repeat is not None and len(plan.live) > plan.steps_per_epoch.max():
            return _Repeated(self.run, self.repeat, batches)
        if self.look_ahead is not None:
            return _LookAhead(self.look_ahead, batches, loss_sum)
        return _OneByOne(self.run, batches)


class _OneByOne:
    def __init__(self, run: EagerStep, batches: Batches) -> None:
        self.run, self.batches = run, batches

    def take(self, t: int, live: Live) -> LossesAndGradients:
        return self.run([*live.params, *self.batches.cut(live.at, live.counts), *live.given])

    def finish(self) -> None:
        pass


class _LookAhead:
    """Computes the early part of many steps at once, and hands it out step by step; losses are computed as many at a
    time, after their steps."""

    def __init__(self, parts: Parts, batches: Batches, loss_sum: Tensor | None) -> None:
        self.parts, self.batches, self.loss_sum = parts, batches, loss_sum
        self.left: list[list[Tensor]] = []  # of each step, what its losses are computed from
        self.seen: list[Tensor] | None = None  # the weights that the views look at
        self.end = 0  # the first step that is not computed yet
        plan = batches.plan
        of_tables = sum(table[:1].numel() * table.element_size() for table in (batches.x, batches.y))
        of_batch = plan.mask.shape[1] * (of_tables + plan.mask.element_size())
        self.row_bytes = of_batch + parts.kept_bytes  # of one client's step

    def take(self, t: int, live: Live) -> tuple[Tensor | None, list[Gradient]]:
        if t >= self.end:
            self.finish()
            self._compute(t, len(live.params), len(live.given))
        if len(live.params[0]) == self.batches.plan.live[t]:
            batch, kept = ([x[t - self.first] for x in each] for each in self.by_step)
        else:  # some of the planned clients have stopped
            at = live.at
            here = slice(at.start - self.base, at.stop - self.base) if isinstance(at, slice) else at - self.base
            batch, kept = ([x[here] for x in each] for each in self.whole)
        tensors = [*live.params, *batch, *live.given]
        if self.seen is not live.params:
            self.seen, self.views = live.params, self.parts.views(tensors)
        found, n = self.parts.late(tensors, kept, self.views), self.parts.n_after
        if self.parts.after is None:
            return found[0], found[1:]
        if self.loss_sum is None:
            return self.parts.after(tensors, found[:n]), found[n:]
        self.left.append(found[:n])
        return None, found[n:]

    def finish(self) -> None:
        if self.left and self.parts.after is not None and self.loss_sum is not None:
            rows = [torch.cat(each) for each in zip(*self.left, strict=True)]
            losses = self.parts.after(self.inputs, rows)
            self.loss_sum.index_add_(0, self.owner, losses.to(self.loss_sum.dtype))
        self.left = []

    def _compute(self, t: int, n_params: int, n_given: int) -> None:
        """The early part of step t and of as many after it as fit."""
        plan = self.batches.plan
        self.first, self.base = t, int(plan.start[t])
        self.end = int(np.searchsorted(plan.start, self.base + AHEAD_BYTES // self.row_bytes, side="right")) - 1
        self.end = max(self.end, t + 1)
        rows = slice(self.base, int(plan.start[self.end]))
        self.owner = torch.from_numpy(np.concatenate([np.arange(n) for n in plan.live[t : self.end]]))
        batch = self.batches.cut(rows, self.batches.counts[self.owner])
        nothing = torch.empty(0)  # in place of inputs that the early part does not read
        self.inputs = [*[nothing] * n_params, *batch, *[nothing] * n_given]
        kept = self.parts.early(self.inputs)
        live = plan.live[t : self.end].tolist()
        self.whole = batch, kept
        self.by_step = [x.split(live) for x in batch], [x.split(live) for x in kept]


class _Repeated:
    """Keeps the early part of every batch from its first epoch on, if that is not too much to keep."""

    def __init__(self, whole: EagerStep, parts: Parts, batches: Batches) -> None:
        self.whole, self.parts, self.batches = whole, parts, batches
        self.steps_per_epoch = batches.plan.steps_per_epoch
        self.start = np.concatenate([[0], np.cumsum(self.steps_per_epoch)])
        self.kept: list[Tensor] | None = None
        self.fits = True

    def take(self, t: int, live: Live) -> LossesAndGradients:
        tensors = [*live.params, *self.batches.cut(live.at, live.counts), *live.given]
        per_epoch = self.steps_per_epoch[live.place]
        at = torch.from_numpy(self.start[live.place] + t % per_epoch)
        if self.fits and (t < per_epoch).any():
            self._keep(at, self.parts.early(tensors))
        if not self.fits:
            return self.whole(tensors)
        now = [kept[at] for kept in self.kept or []]
        losses, *gradients = self.parts.late(tensors, now, self.parts.views(tensors))
        return losses, gradients

    def _keep(self, at: Tensor, new: list[Tensor]) -> None:
        if self.kept is None:
            n_rows = int(self.start[-1])
            self.fits = sum(x[0].numel() * x.element_size() for x in new) * n_rows <= MEMORY_BYTES
            self.kept = [x.new_empty(n_rows, *x.shape[1:]) for x in new] if self.fits else []
        for kept, x in zip(self.kept, new if self.fits else [], strict=True):
            kept[at] = x

    def finish(self) -> None:
        pass
