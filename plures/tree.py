"""Trees: nested dicts and tuples of tensors, and the few operations that methods need on them.

A *model* is a flat dict from names to tensors. Names that end in `running_mean` or
`running_var` are *statistics* of BatchNorm: they travel and are averaged like weights, but no
gradient step, penalty or perturbation touches them, so `dot`, `sq_dist` and `trainable` leave
them out. In a larger tree, all that stands under the name `recorded` is treated as statistics are:
it moves by its gradient and by nothing else.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plures import devices

Tree: TypeAlias = Any  # nested dicts and tuples of tensors
Params: TypeAlias = dict[str, Tensor]
Part: TypeAlias = Callable[[str], bool]
Spec: TypeAlias = Any  # of a dict or tuple, (type, keys, specs of what is in it), else LEAF
LEAF = None


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running statistic of BatchNorm, or another record."""
    return name.endswith(("running_mean", "running_var")) or name.startswith("recorded/")


def flatten(tree: Tree) -> tuple[list[Tensor], Spec]:
    """The tensors, in order, and how they stand in the tree."""
    found: list[Tensor] = []
    return found, _flatten(tree, found)


def _flatten(tree: Tree, found: list[Tensor]) -> Spec:
    if isinstance(tree, dict):
        return dict, tuple(tree), tuple([_flatten(x, found) for x in tree.values()])
    if isinstance(tree, tuple | list):
        return type(tree), range(len(tree)), tuple([_flatten(x, found) for x in tree])
    found.append(tree)
    return LEAF


def unflatten(leaves: Iterable[Any], spec: Spec) -> Tree:
    rest = iter(leaves)
    try:
        made = _unflatten(rest, spec)
    except StopIteration:
        raise ValueError("fewer tensors than the tree has places") from None
    if next(rest, rest) is not rest:
        raise ValueError("more tensors than the tree has places")
    return made


def _unflatten(rest: Iterator[Any], spec: Spec) -> Tree:
    if spec is LEAF:
        return next(rest)
    kind, keys, specs = spec
    parts = [next(rest) if s is LEAF else _unflatten(rest, s) for s in specs]
    return dict(zip(keys, parts, strict=True)) if kind is dict else _like(kind, parts)


def _like(kind: type, parts: list[Any]) -> Tree:
    """A list, a tuple, or one with names."""
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def leaves(tree: Tree) -> list[Tensor]:
    found: list[Tensor] = []
    _flatten(tree, found)
    return found


def leaves_like(template: Tree, other: Tree) -> list[Tensor]:
    """The tensors of `other` in the order of the template, whatever the order of its dicts."""
    return leaves(map(lambda _, x: x, template, other))


def map(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`fn` on every tensor, with what is in the same place of the other trees."""
    if isinstance(tree, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != tree.keys():
                raise ValueError(f"trees differ: {list(tree)} here, {_said(other)} there")
        return {key: map(fn, x, *[other[key] for other in others]) for key, x in tree.items()}
    if isinstance(tree, tuple | list):
        for other in others:
            if type(other) is not type(tree) or len(other) != len(tree):
                raise ValueError(f"trees differ: {_said(tree)} here, {_said(other)} there")
        return _like(type(tree), [map(fn, *parts) for parts in zip(tree, *others, strict=True)])
    return fn(tree, *others)


def _said(tree: Tree) -> str:
    if isinstance(tree, dict):
        return str(list(tree))
    return f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, tuple | list) else type(tree).__name__


def names(tree: Tree) -> list[str]:
    """The path of every tensor, in the order of `leaves`: `model/conv1.weight`, `0/fc.bias`."""
    return ["/".join(path) for path in _paths(tree)]


def _paths(tree: Tree) -> Iterator[tuple[str, ...]]:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, tuple | list):
        parts = zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    else:
        yield ()
        return
    for key, part in parts:
        for path in _paths(part):
            yield str(key), *path


def by_path(prefix: str, tree: Tree) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, below a prefix."""
    return {f"{prefix}/{path}": x.contiguous() for path, x in zip(names(tree), leaves(tree), strict=True)}


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
    share = (devices.in_double(weights) / devices.in_double(weights.sum()))[None]

    def mean_of(x: Tensor) -> Tensor:
        return share.to(x.device, x.dtype).mm(x.reshape(len(x), x.shape[1:].numel())).view(x.shape[1:])

    return map(mean_of, stacked)


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
