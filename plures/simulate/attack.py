"""Attacks: what dishonest clients do, to see how well the honest ones are served all the same.

`labels` trains on random labels. `random` uploads noise of the spread of the true update. `replace`
multiplies its update by the number of clients in the round. The seed draws the attackers.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plures import seeds, tree
from plures.methods.messages import Each, Message
from plures.tree import Tree

Attack = Literal["none", "labels", "random", "replace"]


def draw_attackers(eligible: Sequence[int], share: float, seed: int) -> list[int]:
    """Which clients attack: a share of those that train, rounded, ascending."""
    n = int(share * len(eligible) + 0.5)
    chosen = seeds.generator(seed, "attackers").choice(len(eligible), n, replace=False)
    return sorted(eligible[int(i)] for i in chosen)


def poison_labels(y: Tensor, rows: Sequence[np.ndarray], n_classes: int, seed: int) -> Tensor:
    """The labels, with those of the attackers' training rows drawn at random."""
    new = y.clone()
    for k, own in enumerate(rows):
        rng = seeds.generator(seed, "poisoned labels", k)
        new[own] = torch.from_numpy(rng.integers(0, n_classes, (len(own), *y.shape[1:])))
    return new


def change_uploads(
    kind: Attack, message: Message, uploads: Tree, evil: Tensor, ids: Sequence[int], seed: int, round: int
) -> Tree:
    """The uploads of a cohort, with those of attackers (`evil` marks them) as they would send them.

    An update is what an upload changes of the tensor of the same name that was sent; where none of that name
    was sent, the upload itself is the update. Statistics of BatchNorm and whole numbers are left alone.
    """
    if kind in ("none", "labels") or not bool(evil.any()):
        return uploads
    sent = dict(zip(tree.names(message.tree), tree.leaves(message.tree), strict=True))
    names, leaves = tree.names(uploads), tree.leaves(uploads)
    _, spec = tree.flatten(uploads)

    def is_update(name: str, x: Tensor) -> bool:
        return x.is_floating_point() and not tree.is_statistic(name)

    def base(name: str, x: Tensor, i: int) -> Tensor:
        known = sent.get(name)
        if known is None:
            return torch.zeros_like(x[i])
        known = known[i] if isinstance(message, Each) else known
        return known if known.shape == x[i].shape else torch.zeros_like(x[i])

    out = [x.clone() for x in leaves]
    for i in evil.nonzero().flatten().tolist():
        at = [k for k, (name, x) in enumerate(zip(names, leaves, strict=True)) if is_update(name, x)]
        steps = {k: leaves[k][i] - base(names[k], leaves[k], i) for k in at}
        spread = torch.cat([x.flatten() for x in steps.values()]).std() if steps else 0.0
        key = torch.tensor(seeds.key_of(seed, "random update", round, ids[i]))
        for k, step in steps.items():
            wrong = len(ids) * step if kind == "replace" else spread * seeds.normal(key, step.shape, k).to(step.dtype)
            out[k][i] = base(names[k], leaves[k], i) + wrong
    return tree.unflatten(out, spec)
