"""PLGU-LF: FedAvg with layer-wise SAM, plus a personal model per client that keeps its most personal layers.

Qu et al., How to Prevent the Poor Performance Clients for Personalized Federated Learning?, 2023.

A client scores each layer by the distance between its personal model and the received one. The personal model keeps the
D layers with the highest scores; its other layers are replaced by the received ones. Then in every step
    g = gradient of the personal model,   eps = rho * score * g / |g|  (one norm over the whole model),
    personal <- personal - lr g,       shared <- shared - lr (gradient of the shared model at shared + eps).

Differs from the paper: equation 5 is read with the exponent 1/p, for which it is SAM's solution, not p - 1. Scores have
a mean of one, so that equal scores are SAM. All layers are perturbed, along the gradient of the personal model (two
passes per step); `perturb`, `eps_from` and `grad_at` give the other readings. A normalisation layer has the score of
the layer before it. In its first round a client takes all layers as received: all scores are equal then, and the D
lowest layers would stay at their random start. The paper says |L_Uni| = 5 in section 6.1 and D = 5 in section 6.3,
which contradict each other; `personal` is D. Where a network has fewer than ten layers, half of them are personal: with
five of five the method would be local training.
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
from plures.methods.ingredients.sharpness import perturb, perturbation, statistics_term
from plures.methods.search import among
from plures.tree import Params

D = 5  # personal layers in the paper, whose network has 23


class PlguLfClient(NamedTuple):
    model: Params  # personal, never uploaded
    rounds: Tensor  # how many rounds the client took part in


@dataclass(frozen=True)
class PlguLf(Layerwise, Averaged):
    """A shared model trained with layer-wise SAM, and a personal model that keeps its most personal layers."""

    personal: int = setting(
        -1,
        "how many layers the personal model keeps; -1: five, at most half of them",
        least=-1,
        search=among(-1, 0, 1, 2, 5, 10).if_named(),
    )
    perturb: str = setting(
        "all",
        "which layers of the shared model are perturbed: all, the universal or the personal ones",
        choices=("all", "uni", "per"),
    )
    eps_from: str = setting(
        "theta", "perturb along the gradient of: theta, the personal model; w, the shared model", choices=("theta", "w")
    )
    grad_at: str = setting(
        "w",
        "where the gradient for the shared model is computed: at the perturbed w or at the perturbed theta",
        choices=("w", "theta"),
    )
    weights: str = weights_setting("uniform")

    insides = "plures.report.insides.plgu_lf:pictures"

    def init_client(self, task, params):
        return PlguLfClient(params, torch.tensor(0))

    def notes(self, task):
        n = len(set(layer_scores.scored_layers(task, task.initial, self.score_norm_layers).values()))
        if self.n_personal(n) < n:
            return ()
        return (f"all {n} layers of the model are personal (personal={self.personal}): clients train alone",)

    def n_personal(self, n_layers):
        """How many layers of a model with so many stay personal."""
        return min(D, n_layers // 2) if self.personal < 0 else self.personal

    def score_tensors(self, task, client, received):
        """For every tensor: the score of its layer, and 1 if the layer is personal, else 0."""
        each, layer_of = self.layer_scores(task, client.model, received, client.rounds)
        personal = layer_scores.mark_highest(each, self.n_personal(len(each)))
        return layer_scores.expand_to_tensors(each, layer_of), layer_scores.expand_to_tensors(personal, layer_of)

    def train(self, task, received, client, shard):
        def objective(both, batch, scores):
            own, shared = both["own"], both["shared"]

            def loss(params):
                return task.loss(params, batch)

            gradients, own_loss = torch.func.grad_and_value(loss)(tree.detach(own))
            has_statistics = len(tree.trainable(shared)) < len(shared)
            unperturbed = torch.func.grad(loss)(tree.detach(shared)) if self.eps_from == "w" or has_statistics else {}
            eps = perturbation(gradients if self.eps_from == "theta" else unperturbed, self.rho, scores, self.q)
            if self.grad_at == "w":
                shared_loss = loss(perturb(shared, eps))
            else:
                perturbed, shared_loss = torch.func.grad_and_value(loss)(perturb(tree.detach(own), eps))
                shared_loss = shared_loss + with_gradient(tree.trainable(shared), tree.trainable(perturbed))
            return own_loss + with_gradient(own, gradients) + shared_loss + statistics_term(shared, unperturbed)

        scores, personal = self.score_tensors(task, client, received)
        # A client that takes part for the first time has no layer of its own yet.
        keeps = {name: (p > 0) & (client.rounds > 0) for name, p in personal.items()}
        own = {name: torch.where(keeps[name], x, received[name]) for name, x in client.model.items()}
        factor = {"all": lambda p: torch.ones_like(p), "uni": lambda p: 1 - p, "per": lambda p: p}[self.perturb]
        scores = {name: x * factor(personal[name]) for name, x in scores.items()}
        fitted = fit(objective, {"own": own, "shared": received}, shard, self.solver, given=(scores,))
        client = PlguLfClient(fitted.params["own"], client.rounds + 1)
        return client, fitted.params["shared"], {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "local"
