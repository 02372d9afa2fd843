"""Losses: how far the outputs of a model are from what is to be predicted, row by row."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from plures.data.batches import Batch
from plures.data.dataset import TaskKind


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy over the rows of the batch."""
    return masked_mean(row_losses(logits, batch.y), batch.mask)


def row_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every row; of a sequence, the mean over its positions."""
    each = -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return each if each.dim() == 1 else each.flatten(1).mean(1)


def label_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each label, which is there or not, in the mean over the labels of a row."""
    return (F.softplus(logits) - logits * y).mean(-1)


def square_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """An eighth of the squared error of every row.

    It is then curved as the cross-entropy of two classes is at most, so that learning rates which suit classes do not
    diverge on numbers.
    """
    return (outputs.squeeze(-1) - y).square() / 8


def count_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Poisson loss of every row, whose output is the logarithm of the expected count."""
    log_rate = outputs.squeeze(-1)
    return log_rate.exp() - y * log_rate


def masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    """The mean over the rows that the mask marks."""
    return (each * mask).sum() / mask.sum()


ROW_LOSSES: dict[TaskKind, Callable[[Tensor, Tensor], Tensor]] = {
    "classes": row_losses,
    "labels": label_losses,
    "number": square_losses,
    "count": count_losses,
}
