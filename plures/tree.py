"""Trees: nested dicts and tuples of tensors, and the few operations that methods need on them.

A *model* is a flat dict from names to tensors. Names that end in `running_mean` or
`running_var` are *statistics* of BatchNorm: they travel and are averaged like weights, but no
gradient step, penalty or perturbation touches them, so `dot`, `sq_dist` and `trainable` leave
them out. In a larger tree, all that stands under the name `recorded` is treated as statistics are:
it moves by its slope and by nothing else.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree  # private in torch: this file alone knows

Tree: TypeAlias = Any  # nested dicts and tuples of tensors
Params: TypeAlias = dict[str, Tensor]
Part: TypeAlias = Callable[[str], bool]
Spec: TypeAlias = Any


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running statistic of BatchNorm, or another record."""
    return name.endswith(("running_mean", "running_var")) or name.startswith("recorded/")


def flatten(tree: Tree) -> tuple[list[Tensor], Spec]:
    return _pytree.tree_flatten(tree)


def unflatten(leaves: Iterable[Any], spec: Spec) -> Tree:
    return _pytree.tree_unflatten(list(leaves), spec)


def leaves(tree: Tree) -> list[Tensor]:
    return _pytree.tree_leaves(tree)


def leaves_like(template: Tree, other: Tree) -> list[Tensor]:
    """The tensors of `other` in the order of the template, whatever the order of its dicts."""
    return leaves(map(lambda _, x: x, template, other))


def map(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`fn` on every tensor, with the tensors in the same place of the other trees."""
    return _pytree.tree_map(fn, tree, *others)


def names(tree: Tree) -> list[str]:
    """The path of every tensor, in the order of `leaves`: `model/conv1.weight`, `0/fc.bias`."""
    paths, _ = _pytree.tree_flatten_with_path(tree)
    return ["/".join(_step(key) for key in path) for path, _ in paths]


def _step(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a tree holds dicts and tuples only, got {type(key).__name__}")


def are_statistics(tree: Tree) -> list[bool]:
    """For every tensor, in the order of `leaves`, whether it is a statistic."""
    return [is_statistic(name) for name in names(tree)]


# Arithmetic


def add(a: Tree, b: Tree) -> Tree:
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(torch.sub, a, b)


def scale(factor: float | Tensor, a: Tree) -> Tree:
    return map(lambda x: factor * x, a)


def axpy(factor: float | Tensor, a: Tree, b: Tree) -> Tree:
    """factor * a + b"""
    return map(lambda x, y: factor * x + y, a, b)


def lerp(start: Tree, end: Tree, weight: Tree) -> Tree:
    """start + weight * (end - start), exact at weights 0 and 1."""
    return map(torch.lerp, start, end, weight)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """`a` where the scalar condition holds, else `b`."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def zeros_like(a: Tree) -> Tree:
    return map(torch.zeros_like, a)


def detach(a: Tree) -> Tree:
    return map(Tensor.detach, a)


def dot(a: Params, b: Params) -> Tensor:
    """Inner product over the trainable tensors of two models."""
    return torch.stack([(a[name] * b[name]).sum() for name in a if not is_statistic(name)]).sum()


def sq_dist(a: Params, b: Params) -> Tensor:
    """Squared distance over the trainable tensors of two models."""
    return torch.stack([(a[name] - b[name]).square().sum() for name in a if not is_statistic(name)]).sum()


# Parts of a model


def keep(params: Params, part: Part) -> Params:
    """The tensors whose names are in the part."""
    return {name: value for name, value in params.items() if part(name)}


def drop(params: Params, part: Part) -> Params:
    """The tensors whose names are not in the part."""
    return {name: value for name, value in params.items() if not part(name)}


def trainable(params: Params) -> Params:
    return drop(params, is_statistic)


# The client axis (server side only)


def rows(tree: Tree, ids: Tensor) -> Tree:
    """The rows of the given clients."""
    return map(lambda x: x[ids], tree)


def row(tree: Tree, i: int) -> Tree:
    return map(lambda x: x[i], tree)


def put(tree: Tree, ids: Tensor, new: Tree) -> Tree:
    """A copy in which the given rows are replaced."""
    return map(lambda x, y: x.index_copy(0, ids, y), tree, new)


def stack(trees: list[Tree]) -> Tree:
    return map(lambda *xs: torch.stack(xs), *trees)


def repeat(tree: Tree, n: int) -> Tree:
    """n equal rows, in memory of their own."""
    return map(lambda x: x.expand(n, *x.shape).clone(), tree)


def mean(stacked: Tree, weights: Tensor) -> Tree:
    """The weighted mean over the first axis; weights need not sum to one."""
    share = weights.to(torch.float64) / weights.sum()
    return map(lambda x: torch.tensordot(share.to(x.dtype), x, 1), stacked)


def n_bytes(tree: Tree) -> int:
    """Size of a tree on the wire; whole numbers (which client, which layer) are not counted."""
    return sum(x.numel() * x.element_size() for x in leaves(tree) if x.is_floating_point())


def apart(new: Tree, old: Tree) -> Tree:
    """The same, with copies of what shares memory with another tree."""
    taken = {x.untyped_storage().data_ptr() for x in leaves(old)}
    return map(lambda x: x.clone() if x.untyped_storage().data_ptr() in taken else x, new)


def all_finite(stacked: Tree, n: int) -> Tensor:
    """For each of n rows, whether every number in it is finite."""
    fine = torch.ones(n, dtype=torch.bool)
    for x in leaves(stacked):
        if x.is_floating_point():
            each = x.reshape(n, -1)
            if not each.sum(1).isfinite().all():  # a sum is finite only if every number is; it may be too large itself
                fine &= each.isfinite().all(1)
    return fine
