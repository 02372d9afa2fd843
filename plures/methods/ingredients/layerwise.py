"""What the methods of the PLGU paper share: settings of layer-wise sharpness, and what follows from them."""

from dataclasses import dataclass

from plures.methods.base import setting
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.sharpness import sharp, twice_sharp


@dataclass(frozen=True)
class Layerwise:
    """Gradients are taken uphill, the further in a layer the more personal it is."""

    rho: float = setting(0.05, "how far uphill the gradient of the shared model is taken", least=0)
    q: float = setting(2.0, "norm of the gradients; 2 as in SAM, 1 takes their signs", least=1)
    score: str = setting("mean", "distance of a layer: length by weights, or by their root", choices=("mean", "rms"))
    scale: str = setting("mean1", "scores of mean one, of sum one, or distances", choices=("mean1", "sum1", "raw"))
    score_norm_layers: bool = setting(False, "whether normalisation layers are scored as layers of their own")

    def layer_scores(self, task, own, reference, rounds):
        """[layer], and the layer of every tensor; uniform for a client that has not trained yet."""
        layer_of = layer_scores.scored_layers(task, reference, self.score_norm_layers)
        each = layer_scores.scores(task, own, reference, layer_of, self.score, self.scale, rounds > 0)
        return each, layer_of


@dataclass(frozen=True)
class LayerwiseSteps(Layerwise):
    """Training by sharp steps."""

    stages: str = setting("two", "a plain step before each sharp one, or the sharp one alone", choices=("one", "two"))

    def sharp_loss(self, loss, params, lr, scores):
        """A loss whose gradients make the sharp step, with or without a plain one before it."""
        if self.stages == "two":
            return twice_sharp(loss, params, lr, self.rho, scores, self.q)
        return sharp(loss, params, self.rho, scores, self.q)
