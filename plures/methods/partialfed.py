"""PartialFed: FedAvg, but each client learns for every layer whether to load the shared layer or keep its own.

Sun et al., PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization, 2021.

A client has two logits for each layer: load or keep. The first rounds are FedAvg. In later rounds the client first
learns the logits, on rows that the model is not trained on, through a straight-through Gumbel-softmax choice between
the received layer and its own last one. Then it loads or keeps each layer by the larger logit, and trains on the other
rows.

Differs from the paper, for which there is no public code: a layer is a module; the choice is made once per round, not
for every batch. Any `strategy` but `adaptive` fixes which layers are kept, and trains on all rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.learn.fit import fit
from plures.methods.base import NO_TERMS, Averaged, Method, setting
from plures.methods.search import linear, log
from plures.tree import Params

STRATEGIES = ("adaptive", "global", "local", "head", "batch-norm")


class PartialFedClient(NamedTuple):
    model: Params  # as trained in the last round
    logits: Tensor  # [layer, 2]: of loading the received layer, and of keeping the client's own
    rounds: Tensor  # how many rounds the client took part in


@dataclass(frozen=True)
class PartialFed(Averaged):
    """Each client learns for every layer whether to load or to keep it."""

    strategy: str = setting(
        "adaptive", "which layers a client keeps: learned, none, all, the head, or BatchNorm layers", choices=STRATEGIES
    )
    warm_up: int = setting(
        5, "rounds that a client takes part in before it starts to choose", least=0, search=linear(0, 10)
    )
    model_rows: float = setting(
        0.8,
        "share of rows for training the model; the logits are learned on the others",
        least=0.1,
        most=0.99,
        search=linear(0.6, 0.95),
    )
    logits_lr: float = setting(0.1, "learning rate of the logits", least=0, search=log(0.01, 1))
    temperature: float = setting(1.0, "temperature of the Gumbel-softmax", least=1e-3, search=log(0.1, 10).if_named())

    def init_client(self, task, params):
        logits = torch.zeros(len(task.layers_in(params)), 2)
        return PartialFedClient(params, logits, torch.tensor(0))

    def kept_layers(self, task, client):
        """[layer]: 1 where the client keeps its own layer, else 0."""
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

    def load_layers(self, task, received, own, kept):
        """The received layers where kept is 0, the client's own where it is 1."""
        layers = list(task.layers)
        return {
            name: torch.lerp(x, own[name], kept[layers.index(task.layer_of(name))].to(x.dtype))
            for name, x in received.items()
        }

    def learn_logits(self, task, received, client, rows):
        """The logits after one epoch on these rows."""

        def objective(logits, batch, received, own):
            noise = -torch.log(-torch.log(seeds.uniform(batch.key, logits.shape).clamp(1e-6, 1 - 1e-6)))
            soft = ((logits + noise) / self.temperature).softmax(-1)[:, 1]
            hard = (soft > 0.5).to(soft.dtype)
            kept = hard + soft - soft.detach()  # the value of the hard choice, the gradient of the soft one
            model = self.load_layers(task, received, own, kept)
            # The gradient of a statistic is its update, which must not flow into the logits.
            statistics = tree.detach(tree.keep(model, tree.is_statistic))
            return task.loss(model | statistics, batch)

        ready = (client.rounds >= self.warm_up) & (rows.size > 0)
        epochs = torch.where(ready, 1, 0)
        solver = self.solver.plain(self.logits_lr)
        return fit(objective, client.logits, rows, solver, (received, client.model), epochs).params

    def train(self, task, received, client, shard, terms=NO_TERMS):
        start = terms.start_from(received)
        if self.strategy == "adaptive":
            for_model, for_choice = shard.fixed_split(self.model_rows, "choice of layers")
            alone = shard.size == 1  # a single row is used for the model, not for the choice
            for_choice = for_choice._replace(size=torch.where(alone, 0, for_choice.size))
            warming_up = client.rounds < self.warm_up
            for_model = for_model._replace(
                rows=torch.where(warming_up, shard.rows, for_model.rows),
                size=torch.where(warming_up, shard.size, for_model.size),
            )
            client = client._replace(logits=self.learn_logits(task, start, client, for_choice))
        else:
            for_model = shard
        start = self.load_layers(task, start, client.model, self.kept_layers(task, client))
        _, model, metrics = Method.train(self, task, received, (), for_model, terms._replace(start=start))
        return PartialFedClient(model, client.logits, client.rounds + 1), model, metrics

    def personalize(self, task, received, client, shard):
        return self.load_layers(task, received, client.model, self.kept_layers(task, client))

    @property
    def personal_model_name(self):
        return "chosen layers"
