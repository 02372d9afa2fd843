"""Losses that make a client with few rows of a class learn as if it had as many as of the others.

Each is a function of logits and a batch, which carries how many training rows of each class the
client has. They are for training only: predictions use the plain logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plures.data.batches import Batch
from plures.learn.task import cross_entropy, masked_mean, row_losses

BalancedLoss = Callable[[Tensor, Batch, float], Tensor]


def _own_count(batch: Batch) -> Tensor:
    """For each row, how many training rows the client has of its class; one for padding."""
    return batch.counts[batch.y].clamp(min=1)


def plain(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Cross-entropy."""
    return cross_entropy(logits, batch)


def reweighted(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Inverse re-weighting: rows of a class share one weight, with mean one over the client's rows."""
    each = row_losses(logits, batch.y)
    n_present = (batch.counts > 0).sum()
    return masked_mean(each * batch.counts.sum() / (n_present * _own_count(batch)), batch.mask)


def margin(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """LDAM: the logit of the true class is lowered by gamma * N_y^(-1/4)."""
    lower = gamma * _own_count(batch).to(logits.dtype) ** -0.25
    true = torch.nn.functional.one_hot(batch.y, logits.shape[-1])
    return cross_entropy(logits - true * lower.unsqueeze(-1), batch)


def temperature(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """CDT: every logit is multiplied by (N_c / N_max)^gamma."""
    share = batch.counts / batch.counts.max().clamp(min=1)
    factor = share**gamma if gamma > 0 else torch.ones_like(share)
    return cross_entropy(logits * factor, batch)


def softmax_prior(logits: Tensor, batch: Batch, gamma: float) -> Tensor:
    """Balanced softmax: gamma * log N_c is added; a class with no rows drops out of the denominator."""
    if gamma == 0:
        return cross_entropy(logits, batch)
    present = batch.counts > 0
    prior = torch.where(present, gamma * batch.counts.clamp(min=1).log(), -torch.inf)
    return cross_entropy(logits + prior, batch)


LOSSES: dict[str, BalancedLoss] = {
    "ce": plain,
    "ir": reweighted,
    "ldam": margin,
    "cdt": temperature,
    "bsm": softmax_prior,
}
