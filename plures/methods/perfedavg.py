"""Per-FedAvg: FedAvg that trains the shared model to be good after one gradient step on a client's rows (MAML).

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, 2020.

Every local step uses three parts D, D', D'' of a batch: v = w - alpha * gradient(w; D), d = gradient(v; D'), and
w <- w - lr * (d - alpha * H d), where H is the Hessian at w on D''. The product H d is left out (`fo`), approximated by
a difference of gradients (`hf`), or exact (`exact`). The personal model is the mean after gradient steps with learning
rate alpha.

Differs from the paper: the outer learning rate is lr. D, D' and D'' are thirds of a batch of three times the size
(halves for `fo`), and rows are met three times (twice), so that there are about as many outer steps as other methods
take; a batch with fewer rows than parts repeats a row. By default the Hessian is ignored, and the personal model takes
one epoch of steps, as the Fed-RoD paper strengthens it.
"""

import dataclasses
from dataclasses import dataclass

import torch

from plures import tree
from plures.learn.fit import fit, step_down, with_gradient
from plures.methods.base import NO_TERMS, Averaged, setting, weights_setting, with_penalties
from plures.methods.ingredients.sharpness import statistics_term
from plures.methods.search import linear, log


def take_plain_steps(task, params, shard, solver, lr, epochs):
    """A model after some epochs of plain gradient steps with a constant learning rate."""
    return fit(task.loss, params, shard, solver.plain(lr).for_epochs(epochs)).params


@dataclass(frozen=True)
class PerFedAvg(Averaged):
    """Local steps along meta-gradients, through one adaptation step."""

    order: str = setting(
        "fo", "Hessian: ignored, by a difference of gradients, or exact", choices=("fo", "hf", "exact")
    )
    alpha: float = setting(0.01, "learning rate of the adaptation step", least=0, search=log(0.001, 0.1))
    delta: float = setting(
        1e-3,
        "hf: half the distance between the two points of the difference",
        least=1e-12,
        search=log(1e-5, 0.1).if_named(),
    )
    repeat: bool = setting(True, "meet rows as often as a step has parts, so that there are as many steps as batches")
    pm_epochs: int = setting(1, "epochs of adaptation for the personal model", least=0, search=linear(1, 5))
    weights: str = weights_setting("uniform")

    def train(self, task, received, client, shard, terms=NO_TERMS):
        n_parts = 2 if self.order == "fo" else 3

        def objective(params, batch, penalties):
            w = tree.detach(params)
            parts = [batch.part(k, n_parts) for k in range(n_parts)]
            first = torch.func.grad(task.loss)(w, parts[0])
            d, value = torch.func.grad_and_value(task.loss)(step_down(w, first, self.alpha), parts[1])
            gradients = (
                d if self.order == "fo" else step_down(d, self.hessian_product(task, w, parts[2], d), self.alpha)
            )
            step = with_gradient(tree.trainable(params), tree.trainable(gradients)) + statistics_term(params, first)
            return value + step + with_penalties(torch.zeros(()), params, penalties)

        solver = dataclasses.replace(self.solver, batch=n_parts * self.solver.batch)
        if self.repeat and solver.steps is None:
            solver = dataclasses.replace(solver, epochs=n_parts * solver.epochs)
            shard = shard._replace(work=n_parts * shard.work)
        fitted = fit(objective, terms.start_from(received), shard, solver, given=(terms.penalties,))
        return client, fitted.params, {"loss": fitted.loss, "steps": fitted.steps}

    def hessian_product(self, task, w, batch, d):
        """The Hessian at w times d."""
        if self.order == "exact":
            return torch.func.grad(lambda p: tree.dot(d, torch.func.grad(task.loss)(p, batch)))(w)
        length = tree.dot(d, d).sqrt().clamp(min=1e-12)
        scale = self.delta / length
        ahead, behind = (torch.func.grad(task.loss)(step_down(w, d, sign * scale), batch) for sign in (-1, 1))
        return tree.map(lambda a, b: (a - b) / (2 * scale), ahead, behind)

    def personalize(self, task, received, client, shard):
        return take_plain_steps(task, received, shard, self.solver, self.alpha, self.pm_epochs)

    def adapt(self, task, received, shard, epochs):
        return take_plain_steps(task, received, shard, self.solver, self.alpha, epochs)

    @property
    def personal_model_name(self):
        return "global, adapted"

    @property
    def is_served_whole(self):
        return True
