"""Meta-BSM: a client learns the strength of its balanced softmax, and a weight for each row, from a public set.

In each step the model takes a trial step with the present strength and weights; how well the trial
does on the public set, by plain cross-entropy, says how to move strength and weights; the real step
uses the moved ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.data.batches import Batch
from plures.learn.fit import descend, step_down
from plures.learn.task import Task, cross_entropy, masked_mean, row_losses
from plures.methods.ingredients.dense import drawn
from plures.tree import Params

WIDTH = 100  # of the hidden layer that weighs rows by their loss


class Learned(NamedTuple):
    gamma: Tensor  # strength of the balance
    weigher: Params  # loss of a row -> its weight


def initial(gamma: float, dtype: torch.dtype) -> Learned:
    """The same for all clients; rows begin with nearly equal weights."""
    key = torch.tensor(seeds.key_of("row weights"))
    weigher = {
        "hidden.weight": drawn(key, (WIDTH, 1), 1, 0),
        "hidden.bias": drawn(key, (WIDTH,), 1, 1),
        "output.weight": drawn(key, (1, WIDTH), WIDTH, 2),
        "output.bias": drawn(key, (1,), WIDTH, 3),
    }
    return tree.map(lambda x: x.to(dtype), Learned(torch.tensor(float(gamma)), weigher))


def row_weights(losses: Tensor, mask: Tensor, weigher: Params) -> Tensor:
    """A weight in (0, 1) for each row by its loss, divided so that their mean in the batch is one."""
    hidden = torch.relu(losses.detach()[:, None] @ weigher["hidden.weight"].mT + weigher["hidden.bias"])
    raw = torch.sigmoid(hidden @ weigher["output.weight"].mT + weigher["output.bias"])[:, 0]
    return raw / masked_mean(raw, mask).clamp(min=1e-12)


def weighed_loss(logits: Tensor, batch: Batch, learned: Learned) -> Tensor:
    """Balanced softmax of the learned strength, with a weight for each row."""
    present = batch.counts > 0
    prior = torch.where(present, learned.gamma * batch.counts.clamp(min=1).log(), -torch.inf)
    each = row_losses(logits + prior, batch.y)
    return masked_mean(row_weights(each, batch.mask, learned.weigher) * each, batch.mask)


def relearned(
    task: Task, params: Params, batch: Batch, learned: Learned, lr: Tensor, meta_lr: float, learn_gamma: bool
) -> Learned:
    """Strength and weights after one step down the public loss of the model's trial step."""
    still = tree.detach(params)

    def trial_loss(learned: Learned) -> Tensor:
        def loss(params: Params) -> Tensor:
            return weighed_loss(task.training_logits(params, batch), batch, learned)

        return cross_entropy(task.training_logits(descend(loss, still, lr), task.public), task.public)

    gradients = torch.func.grad(trial_loss)(tree.detach(learned))
    if not learn_gamma:
        gradients = gradients._replace(gamma=torch.zeros_like(gradients.gamma))
    return tree.detach(step_down(learned, gradients, meta_lr))
