"""ALA (adaptive local aggregation): local training starts from a learned blend of the client's and the received model.

    start = own + blend * (received - own)    in the upper p layers, with a number in [0, 1] for every weight
    start = received                          in the lower layers

The blend is learned by gradient steps on the loss of `start`, on s percent of the client's rows. The first time it is
trained until the loss settles, in every later round for one epoch; with `freeze` it then stays as it is. In its first
round a client has no model of its own yet and takes the received one as it is. So do all clients in the first
`from_round` rounds of a run.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit
from plures.learn.solver import Plateau
from plures.methods.addons.base import Addon
from plures.methods.base import NO_TERMS, setting
from plures.methods.search import linear, log
from plures.tree import Params, Tree


class AlaClient(NamedTuple):
    host: Tree
    model: Params  # the shared part of the model as this client trained it in its last round
    blend: (
        Params  # in [0, 1], for every weight of the upper layers: 0 keeps the client's value, 1 takes the received one
    )
    rounds: Tensor  # how many rounds the client took part in; those before ALA is active count as one


@dataclass(frozen=True)
class Ala(Addon):
    """Local training starts from own + blend * (received - own) in the upper layers, with a learned blend."""

    eta: float = setting(1.0, "learning rate of the blend", least=0, search=log(0.1, 10))
    s: float = setting(
        80.0, "percent of the client's rows that the blend is learned on", least=0, most=100, search=linear(5, 100)
    )
    p: int = setting(
        1,
        "how many upper layers (or blocks) are blended; lower layers are taken as received",
        least=0,
        search=linear(1, 3),
    )
    threshold: float = setting(
        0.01,
        "first stage: stop when the standard deviation of the last 10 losses is below this",
        least=0,
        search=log(0.001, 0.1).if_named(),
    )
    cap: int = setting(100, "first stage: largest number of epochs", least=1, search=log(10, 1000).if_named())
    loss_stat: str = setting(
        "last_batch", "first stage: which loss of an epoch is compared", choices=("last_batch", "epoch_mean")
    )
    ala_pm: str = setting(
        "init",
        "the personal model: made from the blend, or the model that the client last trained",
        choices=("init", "trained"),
    )
    from_round: int = setting(
        0,
        "rounds before ALA becomes active; until then the received model is taken as it is",
        least=0,
        search=linear(0, 10).if_named(),
    )
    freeze: bool = setting(False, "learn the blend the first time only, and use it unchanged in all later rounds")

    insides = "plures.report.insides.ala:pictures"

    @property
    def refuses(self):
        return {**self.host.refuses, "c": "the blend says where training starts", "ala": "it has ALA already"}

    def upper_weights(self, task, received):
        """The names of the trainable tensors in the upper layers of the received model."""
        names = list(tree.trainable(received))
        blocks = task.blocks_in(names)
        chosen = blocks[max(0, len(blocks) - self.p) :]
        return [name for name in names if task.block_of(name) in chosen]

    def is_inactive(self, shard):
        """Whether ALA is not active yet in this round: the blend is 1 everywhere and is not learned."""
        return shard.round < self.from_round

    def init_client(self, task, params):
        shared = self.host.shared(task, params)
        blend = {name: torch.ones_like(shared[name]) for name in self.upper_weights(task, shared)}
        return AlaClient(self.host.init_client(task, params), shared, blend, torch.tensor(0))

    def blend_models(self, received, own, blend):
        """The received model with the upper layers blended: own + blend * (received - own)."""
        new = {name: torch.lerp(own[name], received[name], weight) for name, weight in blend.items()}
        return received | new

    def learn_blend(self, task, received, client, shard):
        """The blend after this round: trained until the loss settles the first time, for one epoch or none later."""

        def objective(blend, batch, received, own, host):
            start = self.blend_models(received, own, blend)
            return task.loss(self.host.local_model(task, start, host), batch)

        # In its first round a client has no model to blend with.
        takes_received = (client.rounds == 0) | self.is_inactive(shard)
        later = 0 if self.freeze else 1
        epochs = torch.where(takes_received, 0, torch.where(client.rounds == 1, self.cap, later))
        # The same batches in every epoch: the losses of last batches are comparable only on the same rows.
        stop = Plateau(threshold=self.threshold, loss_of=self.loss_stat)
        solver = dataclasses.replace(self.solver.plain(self.eta), box=(0.0, 1.0), shuffle=False, stop=stop)
        some = shard.take(self.s / 100, "ala")
        given = (received, client.model, client.host)
        return fit(objective, client.blend, some, solver, given, epochs).params

    def train(self, task, received, client, shard, terms=NO_TERMS):
        blend = self.learn_blend(task, received, client, shard) if client.blend else {}
        start = self.blend_models(received, client.model, blend)
        host, upload, metrics = self.host.train(task, received, client.host, shard, terms._replace(start=start))
        rounds = torch.where(self.is_inactive(shard), 1, client.rounds + 1)
        return AlaClient(host, self.shared(task, upload), blend, rounds), upload, metrics

    def personalize(self, task, received, client, shard):
        if self.ala_pm == "trained":
            return self.host.personalize(task, client.model, client.host, shard)
        blend = self.learn_blend(task, received, client, shard) if client.blend else {}
        start = self.blend_models(received, client.model, blend)
        return self.host.personalize(task, start, client.host, shard)

    def adapt(self, task, received, shard, epochs):
        """One round from the received model, then the blend of the trained model with the received one."""
        if not epochs:
            return self.host.adapt(task, received, shard, 0)
        client = self.init_client(task, task.initial)
        first = self.with_solver(self.solver.for_epochs(epochs))
        client, _, _ = first.train(task, received, client, shard)
        personal = self.personalize(task, received, client, shard)
        if not self.from_round:
            return personal
        return tree.where(self.is_inactive(shard), self.host.adapt(task, received, shard, epochs), personal)

    @property
    def personal_model_name(self):
        return self.ala_pm if self.host.personal_model_name == "global" else self.host.personal_model_name

    @property
    def is_served_whole(self):
        return False
