"""ALA: a client starts from a learned blend, weight by weight, of its own model and the received one."""

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
from plures.tree import Params, Tree


class AlaClient(NamedTuple):
    host: Tree
    model: Params  # the shared model as this client left it after its last round
    blend: Params  # in [0, 1]: how far each upper weight moves from its own value to the received one
    rounds: Tensor  # how many it took part in


@dataclass(frozen=True)
class Ala(Addon):
    """Local training starts from own + blend * (received - own) in the upper layers."""

    eta: float = setting(1.0, "step size of the blend", least=0)
    s: float = setting(80.0, "percent of the client's rows that the blend is learned on", least=0, most=100)
    p: int = setting(1, "how many upper layers (or blocks) are blended; the lower ones are taken as received", least=0)
    threshold: float = setting(0.01, "first stage: stop when the loss of the last 10 epochs spreads less", least=0)
    cap: int = setting(100, "first stage: stop after so many epochs in any case", least=1)
    loss_stat: str = setting(
        "last_batch", "first stage: the loss of an epoch that is looked at", choices=("last_batch", "epoch_mean")
    )
    ala_pm: str = setting(
        "init",
        "the personal model is made from the blend, or is the client's trained model",
        choices=("init", "trained"),
    )

    insides = "plures.report.insides.ala:pictures"

    @property
    def refuses(self):
        return {**self.host.refuses, "c": "the blend says where training starts", "ala": "it has it already"}

    def upper(self, task, received):
        """The trainable names of the upper layers among what is received."""
        names = list(tree.trainable(received))
        blocks = task.blocks_in(names)
        chosen = blocks[max(0, len(blocks) - self.p) :]
        return [name for name in names if task.block_of(name) in chosen]

    def init_client(self, task, params):
        shared = self.host.shared(task, params)
        blend = {name: torch.ones_like(shared[name]) for name in self.upper(task, shared)}
        return AlaClient(self.host.init_client(task, params), shared, blend, torch.tensor(0))

    def blended(self, received, own, blend):
        new = {name: torch.lerp(own[name], received[name], weight) for name, weight in blend.items()}
        return received | new

    def learn(self, task, received, client, shard):
        """The blend after this round's learning: until it settles the first time, then one epoch."""

        def objective(blend, batch, received, own, host):
            start = self.blended(received, own, blend)
            return task.loss(self.host.local_model(task, start, host), batch)

        first_time = torch.where(client.rounds == 1, self.cap, 1)
        epochs = torch.where(client.rounds == 0, 0, first_time)  # at first there is no old model to blend with
        # The same batches in every epoch: losses of last batches can settle only if they are of the same rows.
        stop = Plateau(threshold=self.threshold, loss_of=self.loss_stat)
        solver = dataclasses.replace(self.solver.plain(self.eta), box=(0.0, 1.0), shuffle=False, stop=stop)
        some = shard.take(self.s / 100, "ala")
        given = (received, client.model, client.host)
        return fit(objective, client.blend, some, solver, given, epochs).params

    def train(self, task, received, client, shard, terms=NO_TERMS):
        blend = self.learn(task, received, client, shard) if client.blend else {}
        start = self.blended(received, client.model, blend)
        host, upload, metrics = self.host.train(task, received, client.host, shard, terms._replace(start=start))
        return AlaClient(host, self.shared(task, upload), blend, client.rounds + 1), upload, metrics

    def personalize(self, task, received, client, shard):
        if self.ala_pm == "trained":
            return self.host.personalize(task, client.model, client.host, shard)
        blend = self.learn(task, received, client, shard) if client.blend else {}
        start = self.blended(received, client.model, blend)
        return self.host.personalize(task, start, client.host, shard)

    def adapt(self, task, received, shard, epochs):
        """A first round from the received model, and then the blend of what came out with the received one."""
        if not epochs:
            return self.host.adapt(task, received, shard, 0)
        client = self.init_client(task, task.initial)
        first = self.with_solver(self.solver.for_epochs(epochs))
        client, _, _ = first.train(task, received, client, shard)
        return self.personalize(task, received, client, shard)

    @property
    def personal_model_name(self):
        return self.ala_pm if self.host.personal_model_name == "global" else self.host.personal_model_name
