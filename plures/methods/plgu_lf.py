"""PLGU-LF: a shared model that learns where personal models find it sharp, and personal layers that stay.

Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, 2023.

A client scores each layer by how far its personal model is from the received one. The D highest stay
personal; the others of the personal model are replaced by the received ones. Then in every step
    g = gradient of the personal model,   eps = rho * score * g / |g|  (one norm over the whole model),
    personal <- personal - lr g,       shared <- shared - lr (gradient of the shared model at shared + eps).

Differs from the paper: equation 5 is read with the exponent 1/p, for which it is SAM's solution, not
p - 1; scores have mean one, so that equal scores are SAM. All layers are perturbed, with the gradient of
the personal model (two passes a step); `perturb`, `eps_from` and `grad_at` give the other readings.
A normalisation layer has the score of the layer before it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit, with_gradient
from plures.methods.base import Averaged, setting, weights_setting
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.layerwise import Layerwise
from plures.methods.ingredients.sharpness import moved, perturbation, statistics_only
from plures.tree import Params


class PlguLfClient(NamedTuple):
    model: Params  # personal, never uploaded
    rounds: Tensor  # that it took part in


@dataclass(frozen=True)
class PlguLf(Layerwise, Averaged):
    """A shared model sharpened by layers, and a personal model that keeps its most personal layers."""

    personal: int = setting(5, "how many layers stay personal", least=0)
    perturb: str = setting(
        "all", "layers of the shared model that are perturbed: all, universal, personal", choices=("all", "uni", "per")
    )
    eps_from: str = setting(
        "theta", "whose gradient: the personal model's, or the shared one's", choices=("theta", "w")
    )
    grad_at: str = setting("w", "which model is perturbed to move the shared one", choices=("w", "theta"))
    weights: str = weights_setting("uniform")

    insides = "plures.report.insides.plgu_lf:pictures"

    def init_client(self, task, params):
        return PlguLfClient(params, torch.tensor(0))

    def scored_against(self, task, client, received):
        """For every tensor its layer's score, and whether its layer is personal."""
        each, layer_of = self.layer_scores(task, client.model, received, client.rounds)
        personal = layer_scores.most(each, self.personal)
        return layer_scores.by_tensor(each, layer_of), layer_scores.by_tensor(personal, layer_of)

    def train(self, task, received, client, shard):
        def objective(both, batch, scores):
            own, shared = both["own"], both["shared"]

            def loss(params):
                return task.loss(params, batch)

            gradients, own_loss = torch.func.grad_and_value(loss)(tree.detach(own))
            has_statistics = len(tree.trainable(shared)) < len(shared)
            still = torch.func.grad(loss)(tree.detach(shared)) if self.eps_from == "w" or has_statistics else {}
            eps = perturbation(gradients if self.eps_from == "theta" else still, self.rho, scores, self.q)
            if self.grad_at == "w":
                shared_loss = loss(moved(shared, eps))
            else:
                uphill, shared_loss = torch.func.grad_and_value(loss)(moved(tree.detach(own), eps))
                shared_loss = shared_loss + with_gradient(tree.trainable(shared), tree.trainable(uphill))
            return own_loss + with_gradient(own, gradients) + shared_loss + statistics_only(shared, still)

        scores, personal = self.scored_against(task, client, received)
        own = {name: torch.where(personal[name] > 0, x, received[name]) for name, x in client.model.items()}
        touched = {"all": lambda p: torch.ones_like(p), "uni": lambda p: 1 - p, "per": lambda p: p}[self.perturb]
        scores = {name: x * touched(personal[name]) for name, x in scores.items()}
        fitted = fit(objective, {"own": own, "shared": received}, shard, self.solver, given=(scores,))
        client = PlguLfClient(fitted.params["own"], client.rounds + 1)
        return client, fitted.params["shared"], {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "local"
