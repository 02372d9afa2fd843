"""Meta-BSM: a client learns the strength of its balanced softmax, and a weight for each row, from a public set.

Each step has three parts. A trial step moves the model with the current strength and weights. The gradient of the trial
model's plain cross-entropy on the public set updates strength and weights. The real step uses the updated ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.data.batches import Batch
from plures.learn.fit import descend, step_down
from plures.learn.losses import cross_entropy, masked_mean, row_losses
from plures.learn.task import Task
from plures.methods.ingredients.dense import draw_weights
from plures.tree import Params

WIDTH = 100  # of the hidden layer of the network that weights rows by their loss


class Learned(NamedTuple):
    gamma: Tensor  # strength of the balancing
    weigher: Params  # network: loss of a row -> its weight


def init_learned(gamma: float, dtype: torch.dtype) -> Learned:
    """The initial strength and network, the same for all clients. At first all rows have nearly equal weights."""
    key = torch.tensor(seeds.key_of("row weights"))
    weigher = {
        "hidden.weight": draw_weights(key, (WIDTH, 1), 1, 0),
        "hidden.bias": draw_weights(key, (WIDTH,), 1, 1),
        "output.weight": draw_weights(key, (1, WIDTH), WIDTH, 2),
        "output.bias": draw_weights(key, (1,), WIDTH, 3),
    }
    return tree.map(lambda x: x.to(dtype), Learned(torch.tensor(float(gamma)), weigher))


def row_weights(losses: Tensor, mask: Tensor, weigher: Params) -> Tensor:
    """A weight for each row from its loss, scaled to a mean of one over the batch."""
    hidden = torch.relu(losses.detach()[:, None] @ weigher["hidden.weight"].mT + weigher["hidden.bias"])
    raw = torch.sigmoid(hidden @ weigher["output.weight"].mT + weigher["output.bias"])[:, 0]
    return raw / masked_mean(raw, mask).clamp(min=1e-12)


def weighted_loss(logits: Tensor, batch: Batch, learned: Learned) -> Tensor:
    """Balanced softmax with the learned strength and a learned weight for each row."""
    present = batch.counts > 0
    prior = torch.where(present, learned.gamma * batch.counts.clamp(min=1).log(), -torch.inf)
    each = row_losses(logits + prior, batch.y)
    return masked_mean(row_weights(each, batch.mask, learned.weigher) * each, batch.mask)


def update_learned(
    task: Task, params: Params, batch: Batch, learned: Learned, lr: Tensor, meta_lr: float, learn_gamma: bool
) -> Learned:
    """Strength and network after one gradient step on the public loss of the model's trial step."""
    current = tree.detach(params)

    def trial_loss(learned: Learned) -> Tensor:
        def loss(params: Params) -> Tensor:
            return weighted_loss(task.training_logits(params, batch), batch, learned)

        return cross_entropy(task.training_logits(descend(loss, current, lr), task.public), task.public)

    gradients = torch.func.grad(trial_loss)(tree.detach(learned))
    if not learn_gamma:
        gradients = gradients._replace(gamma=torch.zeros_like(gradients.gamma))
    return tree.detach(step_down(learned, gradients, meta_lr))
