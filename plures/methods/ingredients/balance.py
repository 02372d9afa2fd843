"""Class-balanced losses: a client with few rows of a class trains as if it had equally many rows of every class.

Each loss is a function of logits and a batch. The batch holds how many training rows of each class the client has.
They are for training only: predictions use the plain logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plures.data.batches import Batch
from plures.learn.losses import cross_entropy, masked_mean, row_losses

BalancedLoss = Callable[[Tensor, Batch, float], Tensor]


def _own_count(batch: Batch) -> Tensor:
    """For each row of the batch: how many training rows of its class the client has; at least one, for padding."""
    return batch.counts[batch.y].clamp(min=1)


def plain_loss(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Plain cross-entropy."""
    return cross_entropy(logits, batch)


def reweighted_loss(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Inverse re-weighting: a row weighs 1 / (rows of its class), scaled to a mean of one over the client's rows."""
    each = row_losses(logits, batch.y)
    n_present = (batch.counts > 0).sum()
    return masked_mean(each * batch.counts.sum() / (n_present * _own_count(batch)), batch.mask)


def margin_loss(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """LDAM: the logit of the true class is lowered by gamma * N_y^(-1/4)."""
    lower = gamma * _own_count(batch).to(logits.dtype) ** -0.25
    true = torch.nn.functional.one_hot(batch.y, logits.shape[-1])
    return cross_entropy(logits - true * lower.unsqueeze(-1), batch)


def temperature_loss(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """CDT: every logit is multiplied by (N_c / N_max)^gamma."""
    share = batch.counts / batch.counts.max().clamp(min=1)
    factor = share**gamma if gamma > 0 else torch.ones_like(share)
    return cross_entropy(logits * factor, batch)


def balanced_softmax_loss(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Balanced softmax: gamma * log N_c is added to the logit; a class without rows drops out of the denominator."""
    if gamma == 0:
        return cross_entropy(logits, batch)
    present = batch.counts > 0
    prior = torch.where(present, gamma * batch.counts.clamp(min=1).log(), -torch.inf)
    return cross_entropy(logits + prior, batch)


LOSSES: dict[str, BalancedLoss] = {
    "ce": plain_loss,
    "ir": reweighted_loss,
    "ldam": margin_loss,
    "cdt": temperature_loss,
    "bsm": balanced_softmax_loss,
}
