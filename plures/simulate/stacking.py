"""One client function over a group of clients: one after another, or vectorised over their stack."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from plures import tree
from plures.data.shard import Shard
from plures.methods.messages import Message, Same, one_of
from plures.tree import Tree

Style = Literal["vectorised", "one_by_one"]
ClientFunction = Callable[..., Tree]
N_TABLES = 2  # of a shard, x and y: all clients share them


def run_group(style: Style, fn: ClientFunction, message: Message, *stacked: Tree) -> Tree:
    """`fn(received, *rows)` for every client of a group; results are stacked."""
    with torch.no_grad():
        return (one_by_one if style == "one_by_one" else vectorised)(fn, message, *stacked)


def one_by_one(fn: ClientFunction, message: Message, *stacked: Tree) -> Tree:
    """One client after another."""
    n = next(len(part.size) for part in stacked if isinstance(part, Shard))
    return tree.stack([fn(one_of(message, i), *[_row(part, i) for part in stacked]) for i in range(n)])


def vectorised(fn: ClientFunction, message: Message, *stacked: Tree) -> Tree:
    """All clients at once."""
    leaves, spec = tree.flatten((message.tree, *stacked))
    dims: list[int | None] = [None if isinstance(message, Same) else 0] * len(tree.leaves(message.tree))
    for part in stacked:
        n = len(tree.leaves(part))
        dims += [*[None] * N_TABLES, *[0] * (n - N_TABLES)] if isinstance(part, Shard) else [0] * n
    found: list[tree.Spec] = []

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, form = tree.flatten(fn(*tree.unflatten(leaves, spec)))
        found.append(form)
        return tuple(out)

    # With tensors in a row vmap has less to look at than with trees.
    out = torch.vmap(flat, in_dims=tuple(dims))(*leaves)
    return tree.unflatten(out, found[0])


def as_stack(part: Tree) -> Tree:
    """One client's tree as a stack of one."""
    return tree.map(lambda x: x[None], part)


def _row(part: Tree, i: int) -> Tree:
    if isinstance(part, Shard):
        return Shard(*part[:N_TABLES], *[x[i] for x in part[N_TABLES:]])
    return tree.row(part, i)
