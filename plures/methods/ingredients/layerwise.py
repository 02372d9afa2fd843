"""Layer-wise sharpness-aware minimisation, with its settings: shared by the methods of the PLGU paper."""

from dataclasses import dataclass

from plures.methods.base import setting
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.sharpness import sam_loss, two_step_loss
from plures.methods.search import among, log


@dataclass(frozen=True)
class Layerwise:
    """Gradients at perturbed weights: the more personal a layer, the larger its perturbation."""

    rho: float = setting(
        0.05,
        "length of the perturbation at which gradients of the shared model are computed",
        least=0,
        search=log(0.005, 0.5),
    )
    q: float = setting(
        2.0, "norm of the gradients; 2 as in SAM, 1 uses only their signs", least=1, search=among(1.0, 2.0).if_named()
    )
    score: str = setting(
        "mean",
        "distance of a layer: its norm divided by the number of weights, or by the root of that number",
        choices=("mean", "rms"),
    )
    scale: str = setting(
        "mean1", "scaling of the scores: to mean one, to sum one, or none", choices=("mean1", "sum1", "raw")
    )
    score_norm_layers: bool = setting(False, "whether normalisation layers have scores of their own")

    def layer_scores(self, task, own, reference, rounds):
        """Scores [layer], and the layer of every tensor. They are uniform for a client that has not trained yet."""
        layer_of = layer_scores.scored_layers(task, reference, self.score_norm_layers)
        each = layer_scores.scores(task, own, reference, layer_of, self.score, self.scale, rounds > 0)
        return each, layer_of


@dataclass(frozen=True)
class LayerwiseSteps(Layerwise):
    """Training by sharpness-aware steps."""

    stages: str = setting(
        "two",
        "two: a plain step before each sharpness-aware step; one: the sharpness-aware step alone",
        choices=("one", "two"),
    )

    def sharp_loss(self, loss, params, lr, scores):
        """A loss whose gradient step is sharpness-aware, with or without a plain step before it."""
        if self.stages == "two":
            return two_step_loss(loss, params, lr, self.rho, scores, self.q)
        return sam_loss(loss, params, self.rho, scores, self.q)
