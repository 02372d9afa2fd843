"""FedPHP: FedAvg, plus a moving average of each client's models, whose features regularise local training.

Li et al., FedPHP: Federated Personalization with Inherited Private Models, 2021.

Local loss: (1 - lam) * F(v) + lam * R, starting at the received model, where R is the discrepancy MMD(features of v,
features of p), or with `inherit=kd` the divergence of the predictions of v from those of p (distillation); then
p <- mu p + (1 - mu) v with mu = min(mu_max, mu_max * c / expected rounds), where c counts the rounds that the client
took part in. v is uploaded; p is the personal model.

Differs from the paper: lam is 0.05, which the authors' code lists for both. The widths of the MMD kernels (multiples of
the mean squared distance between the features of a batch) are ours, since the paper does not give its own, and so is
the temperature of the distillation, 2 for both models; the authors' code divides the teacher's logits alone, by 4.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit
from plures.learn.losses import masked_mean
from plures.methods.base import NO_TERMS, Averaged, setting, with_penalties
from plures.methods.search import linear, log
from plures.tree import Params

WIDTHS = (0.5, 1.0, 2.0)  # of the MMD kernels, in mean squared distances
TEMPERATURE = 2.0  # of the distillation


class FedPHPClient(NamedTuple):
    model: Params  # p, the moving average, never uploaded
    rounds: Tensor  # how many rounds the client took part in


def mmd(a, b, mask):
    """Squared maximum mean discrepancy (MMD) between two sets of features of a batch; 0 for equal sets."""
    rows = torch.cat([a.flatten(1), b.flatten(1)])
    squares = (rows[:, None] - rows[None, :]).square().sum(-1)
    n = mask.sum()
    weight = torch.cat([mask, -mask]) / n
    width = (squares.detach() * weight.abs()[:, None] * weight.abs()[None, :]).sum() / 4 + 1e-12
    kernel = torch.stack([torch.exp(-squares / (width * factor)) for factor in WIDTHS]).mean(0)
    return (kernel * weight[:, None] * weight[None, :]).sum()


def distillation(logits, teacher, mask):
    """KL divergence of a model's softened predictions from those of its teacher, times the squared temperature."""
    own, theirs = ((x / TEMPERATURE).log_softmax(-1) for x in (logits, teacher.detach()))
    each = (theirs.exp() * (theirs - own)).sum(-1)
    return TEMPERATURE**2 * masked_mean(each.flatten(1).mean(1) if each.dim() > 1 else each, mask)


@dataclass(frozen=True)
class FedPHP(Averaged):
    """Keeps a moving average of the client's models, and trains new models to have features close to its own."""

    lam: float = setting(
        0.05, "weight of the discrepancy between the two models in the loss", least=0, most=1, search=log(0.005, 0.5)
    )
    inherit: str = setting("mmd", "what is compared: features (MMD), or predictions (KD)", choices=("mmd", "kd"))
    mu_max: float = setting(
        0.9, "largest weight of past models in the moving average", least=0, most=1, search=linear(0.5, 0.99)
    )

    depends_on_rounds = True

    @property
    def needs_classes(self):
        return "inherit=kd compares probabilities of classes" if self.inherit == "kd" else ""

    def init_client(self, task, params):
        return FedPHPClient(params, torch.tensor(0))

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def objective(params, batch, past, penalties):
            if self.lam == 0:
                return with_penalties(task.loss(params, batch), params, penalties)
            if self.inherit == "mmd":
                discrepancy = mmd(task.features(params, batch.x), task.features(past, batch.x).detach(), batch.mask)
            else:
                discrepancy = distillation(task.logits(params, batch.x), task.logits(past, batch.x), batch.mask)
            return with_penalties((1 - self.lam) * task.loss(params, batch) + self.lam * discrepancy, params, penalties)

        fitted = fit(objective, terms.start_from(received), shard, self.solver, given=(client.model, terms.penalties))
        mu = (self.mu_max * client.rounds / self.schedule.rounds_per_client).clamp(max=self.mu_max)
        model = tree.map(lambda v, p: torch.lerp(v, p, mu.to(v.dtype)), fitted.params, client.model)
        return FedPHPClient(model, client.rounds + 1), fitted.params, {"loss": fitted.loss, "steps": fitted.steps}

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "moving average"
