"""Sharpness-aware minimisation (SAM), layer by layer: gradients at perturbed weights.

The perturbation of a model with gradients g, for a radius rho and a score for each layer, is

    eps = rho * score * sign(g) * |g|^(q-1) / (sum |g|^q)^(1-1/q)

with one norm over the whole model; q = 2 and scores of one give SAM. BatchNorm statistics are never perturbed, and a
pass at perturbed weights never updates them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import with_gradient
from plures.tree import Params

Loss = Callable[[Params], Tensor]

TINY = 1e-12  # added to the norm, which may be zero


def perturbation(gradients: Params, rho: float, scores: Params | None = None, q: float = 2.0) -> Params:
    """The perturbation of every weight. `scores` holds a number for every tensor; without it all are one."""
    gradients = tree.trainable(gradients)
    total = torch.stack([x.abs().pow(q).sum() for x in gradients.values()]).sum()
    length = total.pow(1 - 1 / q) + TINY

    def perturb_one(name: str, x: Tensor) -> Tensor:
        eps = rho * (x if q == 2 else x.sign() * x.abs().pow(q - 1)) / length
        return eps if scores is None else scores[name] * eps

    return {name: perturb_one(name, x) for name, x in gradients.items()}


def perturb(params: Params, by: Params) -> Params:
    """The perturbed model, in which statistics are constants."""
    return {name: x + by[name].detach() if name in by else x.detach() for name, x in params.items()}


def statistics_term(params: Params, gradients: Params) -> Tensor:
    """Zero, with a gradient that updates the statistics as the unperturbed pass with these gradients would."""
    own = tree.keep(params, tree.is_statistic)
    return with_gradient(own, {name: gradients[name] for name in own}) if own else torch.zeros(())


def sam_loss(loss: Loss, params: Params, rho: float, scores: Params | None = None, q: float = 2.0) -> Tensor:
    """A loss with the gradients that `loss` has at the perturbed model: two passes."""
    gradients = torch.func.grad(loss)(tree.detach(params))
    return loss(perturb(params, perturbation(gradients, rho, scores, q))) + statistics_term(params, gradients)


def two_step_loss(loss: Loss, params: Params, lr: Tensor, rho: float, scores: Params, q: float = 2.0) -> Tensor:
    """A loss whose gradient step, at learning rate lr, is a plain step followed by a SAM step: three passes."""
    gradients = torch.func.grad(loss)(tree.detach(params))
    stepped = {name: x - lr * gradients[name] for name, x in tree.trainable(params).items()}
    statistics = tree.keep(params, tree.is_statistic)
    return sam_loss(loss, stepped | statistics, rho, scores, q) + with_gradient(
        tree.trainable(params), tree.trainable(gradients)
    )
