"""PartialFed: each client decides, layer by layer, whether to load the shared model or keep its own.

Sun et al., PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization, 2021.

For each layer a client has two logits. After some rounds as FedAvg, a round first learns the logits on a part
of the rows that the model is not trained on, through a straight-through Gumbel-softmax choice between the
received layer and its own last one; then it loads each layer by the larger logit and trains on the other rows.

Differs from the paper, for which there is no public code: a layer is a module; the choice is made once a round
and not anew for every batch. `strategy` other than `adaptive` fixes what stays own, and trains on all rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, Method, setting
from plures.tree import Params

STRATEGIES = ("adaptive", "global", "local", "head", "batch-norm")


class PartialFedClient(NamedTuple):
    model: Params  # as trained in the last round
    logits: Tensor  # [layer, 2]: take the received layer, keep the own one
    rounds: Tensor  # that it took part in


@dataclass(frozen=True)
class PartialFed(Averaged):
    """Every layer is loaded or kept, by a choice that the client learns."""

    strategy: str = setting("adaptive", "learned, or what stays own: nothing, all, head, BatchNorm", choices=STRATEGIES)
    warm_up: int = setting(5, "rounds of a client before it chooses", least=0)
    model_rows: float = setting(
        0.8, "share of rows that the model is trained on; the others teach the choice", least=0.1, most=0.99
    )
    logits_lr: float = setting(0.1, "learning rate of the logits", least=0)
    temperature: float = setting(1.0, "of the Gumbel-softmax", least=1e-3)

    def init_client(self, task, params):
        logits = torch.zeros(len(task.layers_in(params)), 2)
        return PartialFedClient(params, logits, torch.tensor(0))

    def keeps(self, task, client):
        """[layer]: 1 where the own layer is kept."""
        layers = list(task.layers)
        if self.strategy == "adaptive":
            chosen = (client.logits[:, 1] > client.logits[:, 0]).to(torch.float32)
            return torch.where(client.rounds >= self.warm_up, chosen, torch.zeros_like(chosen))
        own = {
            "global": lambda name: False,
            "local": lambda name: True,
            "head": task.is_head,
            "batch-norm": task.is_batch_norm,
        }[self.strategy]
        return torch.tensor([1.0 if own(task.layers[layer][0]) else 0.0 for layer in layers])

    def loaded(self, task, received, own, keeps):
        """Each layer received where keeps is 0, own where it is 1."""
        layers = list(task.layers)
        return {
            name: torch.lerp(x, own[name], keeps[layers.index(task.layer_of(name))].to(x.dtype))
            for name, x in received.items()
        }

    def learned(self, task, received, client, rows):
        """The logits after an epoch on these rows."""

        def objective(logits, batch, received, own):
            noise = -torch.log(-torch.log(seeds.uniform(batch.key, logits.shape).clamp(1e-6, 1 - 1e-6)))
            soft = ((logits + noise) / self.temperature).softmax(-1)[:, 1]
            hard = (soft > 0.5).to(soft.dtype)
            keeps = hard + soft - soft.detach()  # the value of the hard choice, the gradient of the soft one
            model = self.loaded(task, received, own, keeps)
            still = tree.detach(
                tree.keep(model, tree.is_statistic)
            )  # the gradient of a statistic is no gradient of the choice
            return task.loss(model | still, batch)

        ready = (client.rounds >= self.warm_up) & (rows.size > 0)
        epochs = torch.where(ready, 1, 0)
        solver = self.solver.plain(self.logits_lr)
        return fit(objective, client.logits, rows, solver, (received, client.model), epochs).params

    def train(self, task, received, client, shard, terms=NO_TERMS):
        start = terms.start_from(received)
        if self.strategy == "adaptive":
            for_model, for_choice = shard.lasting_split(self.model_rows, "choice of layers")
            alone = shard.size == 1  # a single row trains the model, and no choice
            for_choice = for_choice._replace(size=torch.where(alone, 0, for_choice.size))
            waiting = client.rounds < self.warm_up
            for_model = for_model._replace(
                rows=torch.where(waiting, shard.rows, for_model.rows),
                size=torch.where(waiting, shard.size, for_model.size),
            )
            client = client._replace(logits=self.learned(task, start, client, for_choice))
        else:
            for_model = shard
        start = self.loaded(task, start, client.model, self.keeps(task, client))
        _, model, metrics = Method.train(self, task, received, (), for_model, terms._replace(start=start))
        return PartialFedClient(model, client.logits, client.rounds + 1), model, metrics

    def personalize(self, task, received, client, shard):
        return self.loaded(task, received, client.model, self.keeps(task, client))

    @property
    def personal_model_name(self):
        return "chosen layers"
