"""Bounds: which updates of a cohort may be merged, so that one client cannot ruin the run of all.

An update must be finite, and not be far larger than those of the others. The bounds are wide: in a run of clients that
mean well nothing is refused, however unlike their data are.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from plures import devices, tree
from plures.methods.messages import Each, Message
from plures.tree import Tree

TIMES_MEDIAN = 100.0  # an update may be so many times as large as the median of its cohort
TIMES_SENT = 10.0  # and any update may be so many times as large as what the client was sent


def update_norms(message: Message, uploads: Tree) -> tuple[Tensor, Tensor]:
    """[client]: the distance of what each client uploads from what it was sent, and the size of what it was sent.

    What has no counterpart of its name and shape in the message counts as it is. Whole numbers do not count.
    """
    n = len(tree.leaves(uploads)[0])
    moved, size = (devices.in_double(torch.zeros(n)) for _ in range(2))
    for x, old in _pairs(message, uploads):
        for i in range(n):  # one at a time, so that no second copy of all uploads is made
            before = None if old is None else old[i] if isinstance(message, Each) else old
            moved[i] += _norm(x[i] if before is None else x[i] - before).square()
            size[i] += 0.0 if before is None else _norm(before).square()
    return moved.sqrt(), size.sqrt()


def _norm(x: Tensor) -> Tensor:
    if x.device.type in devices.WITHOUT_DOUBLE:
        return devices.in_double(torch.linalg.vector_norm(x))
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _pairs(message: Message, uploads: Tree) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Every tensor of numbers that is uploaded, stacked, and what was sent in its place."""
    sent = dict(zip(tree.names(message.tree), tree.leaves(message.tree), strict=True))
    for name, x in zip(tree.names(uploads), tree.leaves(uploads), strict=True):
        if x.is_floating_point():
            old = sent.get(name)
            fits = old is not None and old.shape == (x.shape if isinstance(message, Each) else x.shape[1:])
            yield x, old if fits else None


def _all_are_small(message: Message, uploads: Tree) -> bool:
    """Whether every upload is so small, beside what was sent, that it cannot be out of bounds. This is soon seen.

    If so, all of its numbers are finite, too.
    """
    n = len(tree.leaves(uploads)[0])
    size, sent = torch.zeros(n), torch.zeros(n)
    for x, old in _pairs(message, uploads):
        if old is None:
            return False
        size += torch.linalg.vector_norm(x.reshape(n, -1), dim=1).square()
        rows = n if isinstance(message, Each) else 1
        sent += torch.linalg.vector_norm(old.reshape(rows, -1), dim=1).square()
    return bool((size <= ((TIMES_SENT - 1) ** 2) * sent).all())


def reasons_to_refuse(
    message: Message, clients: Tree, uploads: Tree, n: int, times_median: float = TIMES_MEDIAN
) -> list[str]:
    """For each of n clients, why its update is refused; empty if it is not.

    message: what these clients were sent. clients, uploads: what they keep and upload, stacked.
    times_median: how many times the median of the cohort an update may be; with infinity, only finite numbers count.
    """
    has_uploads = bool(tree.leaves(uploads))
    is_small = has_uploads and _all_are_small(message, uploads)
    fine = tree.all_finite(clients, n)
    is_finite = (fine if is_small else fine & tree.all_finite(uploads, n)).tolist()
    found = ["" if fine else "it has numbers that are not finite" for fine in is_finite]
    if is_small or not has_uploads or times_median == math.inf or sum(is_finite) < 2:
        return found
    moved, sent = (x.tolist() for x in update_norms(message, uploads))
    # The lower median: of two clients, the smaller update.
    fine_ones = torch.tensor([x for x, fine in zip(moved, is_finite, strict=True) if fine])
    median = float(devices.in_double(fine_ones).median())
    if median == 0:
        return found
    for i in range(n):
        if is_finite[i] and moved[i] > times_median * median and moved[i] > TIMES_SENT * sent[i]:
            found[i] = f"its update is {moved[i] / median:.3g} times as large as the median of the round"
    return found


def cap_weights(sizes: Tensor, most_share: float) -> Tensor:
    """The weights of a cohort, its numbers of rows, lowered so that no client has more than this share of the sum.

    With a share below one over the number of clients, all are equal.
    """
    if most_share >= 1 or len(sizes) < 2:
        return sizes
    ordered = devices.in_double(sizes).sort().values
    for k in range(len(ordered)):  # the k largest get the same weight w, with w = share * (sum of the others + k w)
        if k * most_share >= 1:
            break
        others = float(ordered[: len(ordered) - k].sum())
        cap = most_share * others / (1 - k * most_share) if k else math.inf
        largest = float(ordered[len(ordered) - 1 - k]) if k < len(ordered) else 0.0
        total = others + (k * cap if k else 0.0)
        if largest <= most_share * total + 1e-9:
            return sizes if k == 0 else devices.in_double(sizes).clamp(max=cap)
    return torch.ones_like(sizes)
