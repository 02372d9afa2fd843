"""Per-FedAvg: a shared start from which one step makes a good model for each client.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, 2020.

Every local step takes three parts D, D', D'' of a batch: v = w - alpha * gradient(w; D), d = gradient(v; D'), and
w <- w - lr * (d - alpha * H d), with H the curvature at w on D'': left out (`fo`), by a difference of
gradients (`hf`), or exactly (`exact`). The personal model is made by steps of size alpha from the mean.

Differs from the paper: the outer step size is lr. D, D' and D'' are thirds of a batch of three times the
size (halves for `fo`); a batch with fewer rows than parts repeats a row. By default the personal model
takes one epoch of steps, as the Fed-RoD paper strengthens it.
"""

import dataclasses
from dataclasses import dataclass

import torch

from plures import tree
from plures.learn.fit import fit, step_down, with_gradient
from plures.methods.base import NO_TERMS, Averaged, setting, weights_setting, with_penalties
from plures.methods.ingredients.sharpness import statistics_only


def adapted(task, params, shard, solver, lr, epochs):
    """A model after some epochs of plain steps of one size."""
    return fit(task.loss, params, shard, solver.plain(lr).for_epochs(epochs)).params


@dataclass(frozen=True)
class PerFedAvg(Averaged):
    """Local steps along gradients through one step of adaptation."""

    order: str = setting(
        "hf", "the curvature: none, by a difference of gradients, exact", choices=("fo", "hf", "exact")
    )
    alpha: float = setting(0.01, "size of the step of adaptation", least=0)
    delta: float = setting(1e-3, "hf: length of the difference", least=1e-12)
    pm_epochs: int = setting(1, "epochs of adaptation of the personal model", least=0)
    weights: str = weights_setting("uniform")

    def train(self, task, received, client, shard, terms=NO_TERMS):
        n_parts = 2 if self.order == "fo" else 3

        def objective(params, batch, penalties):
            w = tree.detach(params)
            parts = [batch.part(k, n_parts) for k in range(n_parts)]
            first = torch.func.grad(task.loss)(w, parts[0])
            d, value = torch.func.grad_and_value(task.loss)(step_down(w, first, self.alpha), parts[1])
            gradients = d if self.order == "fo" else step_down(d, self.bent(task, w, parts[2], d), self.alpha)
            moving = with_gradient(tree.trainable(params), tree.trainable(gradients)) + statistics_only(params, first)
            return value + moving + with_penalties(torch.zeros(()), params, penalties)

        solver = dataclasses.replace(self.solver, batch=n_parts * self.solver.batch)
        fitted = fit(objective, terms.start_from(received), shard, solver, given=(terms.penalties,))
        return client, fitted.params, {"loss": fitted.loss, "steps": fitted.steps}

    def bent(self, task, w, batch, d):
        """The curvature at w times d."""
        if self.order == "exact":
            return torch.func.grad(lambda p: tree.dot(d, torch.func.grad(task.loss)(p, batch)))(w)
        length = tree.dot(d, d).sqrt().clamp(min=1e-12)
        reach = self.delta / length
        ahead, behind = (torch.func.grad(task.loss)(step_down(w, d, sign * reach), batch) for sign in (-1, 1))
        return tree.map(lambda a, b: (a - b) / (2 * reach), ahead, behind)

    def personalize(self, task, received, client, shard):
        return adapted(task, received, shard, self.solver, self.alpha, self.pm_epochs)

    def adapt(self, task, received, shard, epochs):
        return adapted(task, received, shard, self.solver, self.alpha, epochs)

    @property
    def personal_model_name(self):
        return "global, adapted"
