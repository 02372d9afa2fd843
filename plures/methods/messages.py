"""Messages from the server to a cohort: one for all, or one for each client."""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.tree import Tree


class Same(NamedTuple):
    """One message for the whole cohort."""

    tree: Tree


class Each(NamedTuple):
    """A message for each client, stacked along the first axis."""

    tree: Tree


Message = Same | Each


def one_of(message: Message, i: int) -> Tree:
    """What the i-th client of the cohort receives."""
    return tree.row(message.tree, i) if isinstance(message, Each) else message.tree


def some_of(message: Message, places: Tensor | list[int]) -> Message:
    """The messages to some clients of the cohort."""
    return Each(tree.rows(message.tree, torch.as_tensor(places))) if isinstance(message, Each) else message
