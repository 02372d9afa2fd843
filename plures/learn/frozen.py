"""Frozen tensors: which tensors of a model train, and which are constants of its task.

A tensor is frozen if the model says so (`requires_grad=False`), or by patterns. Statistics of BatchNorm go with the
weights of their layer: where none of these trains, the layer computes as in inference, and its statistics stay.
"""

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from plures import tree
from plures.errors import UsageError, unknown
from plures.tree import Params

MOST_LAYERS = 12  # that are told in a sentence


class Chosen(NamedTuple):
    """Patterns by which a user says what trains: `freeze` and all else does, or `train` and nothing else does.

    A pattern is `head`, `body`, or a name of a tensor or of a module around it, in which * stands for anything.
    Several are joined by commas.
    """

    freeze: str = ""
    train: str = ""
    adapter: str = ""  # beside which all but the head is frozen: see `adapters`


ALL_TRAIN = Chosen()  # but for those that the model itself freezes


def frozen_names(module: nn.Module, names: Iterable[str], head: str, chosen: Chosen = ALL_TRAIN) -> set[str]:
    """The frozen ones among the named tensors of a module. Raises if none of them is left to train."""
    names = list(names)
    if chosen.freeze and chosen.train:
        raise UsageError("freeze and train are two ways to say which weights train; give one of them")
    if chosen.train and chosen.adapter:
        raise UsageError("an adapter says which weights train: it and the head; leave train out")
    if chosen.train:
        frozen = set(names) - _named("train", chosen.train, names, head)
    else:
        frozen = {name for name, x in module.named_parameters() if not x.requires_grad}
        if chosen.freeze:
            frozen |= _named("freeze", chosen.freeze, names, head)
    weights = {name for name in names if not tree.is_statistic(name)}
    for name in set(names) - weights:
        layer = name.rpartition(".")[0]
        own = {weight for weight in weights if weight.rpartition(".")[0] == layer}
        if own and own <= frozen:
            frozen.add(name)
        elif chosen.train and own - frozen:  # by name or not, they are part of a layer that trains
            frozen.discard(name)
    if weights <= frozen:
        raise UsageError(
            "all weights of the model are frozen, and nothing is left to train; let some train, e.g. with --train head"
        )
    return frozen


def _named(option: str, patterns: str, names: list[str], head: str) -> set[str]:
    """The tensors that patterns name. A pattern that names none is a mistake."""
    found: set[str] = set()
    for pattern in filter(None, (each.strip() for each in patterns.split(","))):
        if pattern in ("head", "body"):
            new = {name for name in names if name.startswith(head + ".") == (pattern == "head")}
        else:
            new = {name for name in names if matches(pattern, name)}
        if not new:
            layers = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
            raise unknown(f"layer or weight to {option}", pattern, ("head", "body", *layers))
        found |= new
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a tensor, or a module that it is in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def in_words(trained: Params, frozen: Params) -> str:
    """How many weights train, and which; empty if all do."""
    if not frozen:
        return ""
    own, fixed = tree.trainable(trained), tree.trainable(frozen)
    n_own, n_fixed = (sum(x.numel() for x in part.values()) for part in (own, fixed))
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in own))
    more = f" and {len(layers) - MOST_LAYERS} more" if len(layers) > MOST_LAYERS else ""
    return f"{n_own:,} of {n_own + n_fixed:,} weights train: {', '.join(layers[:MOST_LAYERS])}{more}"


def fingerprint(params: Params) -> str:
    """SHA-256 of tensors by name; empty if there are none."""
    if not params:
        return ""
    total = hashlib.sha256()
    for name, x in sorted(params.items()):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        total.update(x.contiguous().cpu().numpy().tobytes())
    return total.hexdigest()
