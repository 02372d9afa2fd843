"""Optimizers: SGD with momentum, Adam, AdamW and Yogi, for stacks of clients in training and for what a server learns.

A client's optimizer changes a stack of clients in place, many tensors in one call. A server's optimizer is a pure
function from parameters and state to new ones, because its state is part of what a checkpoint holds. The two round
differently: results of version 0.1 depend on it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plures import devices, tree
from plures.engine import Gradient
from plures.engine import private as torch_lists
from plures.learn.solver import Solver
from plures.tree import Tree

CLIENT_EPSILON = 1e-8
SERVER_EPSILON = 1e-5  # gradients far below it are rounding, such as those of a bias before BatchNorm: no step


class StackOptimizer:
    """The optimizer of a stack of clients: it changes their parameters in place, and is new for every fit."""

    def __init__(self, solver: Solver, params: list[Tensor]) -> None:
        self.solver, self.count = solver, 0
        n_kept = (1 if solver.momentum else 0) if solver.kind == "sgd" else 2
        self.kept = [[torch.zeros_like(x) for x in params] for _ in range(n_kept)]
        changed = solver.momentum or solver.weight_decay or solver.box or solver.clip
        self.only_adds = solver.kind == "sgd" and not changed

    def narrow(self, pick: Any) -> None:
        """Keep some rows of the stack only."""
        self.kept = [[x[pick] for x in group] for group in self.kept]

    def step(
        self,
        params: list[Tensor],
        gradients: Sequence[Gradient],
        is_statistic: list[bool],
        lr: float,
        paces: Sequence[float],
    ) -> None:
        """One step. A statistic moves by its gradient as it is; other tensors at `lr` times their pace."""
        self.count += 1
        moving: dict[float, list[int]] = {}  # pace -> places of tensors
        dense: dict[int, Tensor] = {}
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if not isinstance(gradient, Tensor):
                if self.only_adds:
                    gradient.add_to(params[i], -lr * paces[i])  # the gradient is not written and read again
                    continue
                gradient = gradient.dense()
            if is_statistic[i]:
                params[i].sub_(gradient)
            else:
                dense[i] = gradient
                moving.setdefault(paces[i], []).append(i)
        if self.solver.clip and dense:
            dense = _clip_each(dense, self.solver.clip)
        for pace, at in moving.items():
            self._move([params[i] for i in at], [dense[i] for i in at], at, lr * pace)

    def _move(self, params: list[Tensor], gradients: list[Tensor], at: list[int], lr: float) -> None:
        solver = self.solver
        if solver.weight_decay and solver.kind == "adamw":
            torch_lists.foreach_mul_(params, 1 - lr * solver.weight_decay)
        elif solver.weight_decay:
            gradients = list(torch_lists.foreach_add(gradients, params, alpha=solver.weight_decay))
        if solver.kind in ("adam", "adamw"):
            first, second = ([group[i] for i in at] for group in self.kept)
            torch_lists.foreach_lerp_(first, gradients, 0.1)
            torch_lists.foreach_mul_(second, 0.999)
            torch_lists.foreach_addcmul_(second, gradients, gradients, value=0.001)
            deviation = torch_lists.foreach_div(second, 1 - 0.999**self.count)
            torch_lists.foreach_sqrt_(deviation)
            torch_lists.foreach_add_(deviation, CLIENT_EPSILON)
            torch_lists.foreach_addcdiv_(params, first, deviation, value=-lr / (1 - 0.9**self.count))
        elif solver.momentum:
            buffers = [self.kept[0][i] for i in at]
            torch_lists.foreach_mul_(buffers, solver.momentum)
            torch_lists.foreach_add_(buffers, gradients)
            if solver.nesterov:
                buffers = list(torch_lists.foreach_add(gradients, buffers, alpha=solver.momentum))
            torch_lists.foreach_add_(params, buffers, alpha=-lr)
        else:
            torch_lists.foreach_add_(params, gradients, alpha=-lr)
        if solver.box is not None:
            torch_lists.foreach_clamp_min_(params, solver.box[0])
            torch_lists.foreach_clamp_max_(params, solver.box[1])


def _clip_each(gradients: dict[int, Tensor], longest: float) -> dict[int, Tensor]:
    """The gradients of every client of a stack, shortened to a norm if theirs, over all tensors, is larger."""
    squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
    factor = (longest / torch.stack(squares).sum(0).sqrt().clamp(min=1e-12)).clamp(max=1)
    return {i: x * factor.reshape(-1, *[1] * (x.dim() - 1)) for i, x in gradients.items()}


class OptimizerState(NamedTuple):
    """What a server's optimizer remembers from round to round."""

    first: Tree  # mean of gradients
    second: Tree  # mean of squared gradients; empty for SGD
    steps: Tensor


def init_optimizer(params: Tree, adam: bool = False) -> OptimizerState:
    """The state before the first step."""
    return OptimizerState(tree.zeros_like(params), tree.zeros_like(params) if adam else (), torch.tensor(0))


def sgd(
    params: Tree, gradients: Tree, state: OptimizerState, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> tuple[Tree, OptimizerState]:
    """One step of SGD with momentum."""
    first = tree.map(lambda m, g, p: momentum * m + g + weight_decay * p, state.first, gradients, params)
    return tree.axpy(-lr, first, params), state._replace(first=first, steps=state.steps + 1)


def adam(params: Tree, gradients: Tree, state: OptimizerState, lr: float) -> tuple[Tree, OptimizerState]:
    """One step of Adam."""
    steps = state.steps + 1
    first = tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradients)
    second = tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.second, gradients)
    count = devices.in_double(steps)
    of_first, of_second = 1 - 0.9**count, 1 - 0.999**count

    def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return (p - lr * (m / of_first) / ((v / of_second).sqrt() + SERVER_EPSILON)).to(p.dtype)

    return tree.map(moved, params, first, second), OptimizerState(first, second, steps)


def adam_rows(params: Tree, gradients: Tree, state: OptimizerState, lr: float) -> tuple[Tree, OptimizerState]:
    """One step of Adam for rows that have made different numbers of steps: the first axis of every tensor."""
    steps = state.steps + 1
    first = tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradients)
    second = tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.second, gradients)

    def corrected(moment: Tensor, decay: float) -> Tensor:
        share = (1 - decay ** devices.in_double(steps)).to(moment.device, moment.dtype)
        return moment / share.reshape(-1, *[1] * (moment.dim() - 1))

    def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - lr * corrected(m, 0.9) / (corrected(v, 0.999).sqrt() + SERVER_EPSILON)

    return tree.map(moved, params, first, second), OptimizerState(first, second, steps)


def adaptive(
    params: Tree, gradients: Tree, state: OptimizerState, lr: float, tau: float, yogi: bool
) -> tuple[Tree, OptimizerState]:
    """One step of Adam or Yogi as in FedOpt: no correction of the first steps, and `tau` beside the root."""

    def squares(v: Tensor, g: Tensor) -> Tensor:
        return v - 0.01 * g * g * (v - g * g).sign() if yogi else 0.99 * v + 0.01 * g * g

    first = tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, gradients)
    second = tree.map(squares, state.second, gradients)
    moved = tree.map(lambda p, m, v: p - lr * m / (v.sqrt() + tau), params, first, second)
    return moved, OptimizerState(first, second, state.steps + 1)


def clip(gradients: Tree, longest: float) -> Tree:
    """The gradients, shortened to a norm if theirs is larger."""
    norm = torch.stack([x.square().sum() for x in tree.leaves(gradients)]).sum().sqrt()
    return tree.scale((longest / norm.clamp(min=1e-12)).clamp(max=1), gradients)
