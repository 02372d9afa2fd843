"""KeepLocal: a part of the model stays with each client and is never sent.

Around FedAvg this is FedPer (private head), LG-FedAvg (private body) or FedBN (private BatchNorm layers).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from plures import tree
from plures.errors import UsageError
from plures.learn.fit import fit
from plures.learn.frozen import matches
from plures.learn.task import Task
from plures.methods.addons.base import Addon
from plures.methods.addons.brm import Brm
from plures.methods.addons.c import C
from plures.methods.addons.fedopt import FedOpt
from plures.methods.addons.ft import Ft
from plures.methods.addons.prox import Prox
from plures.methods.addons.public import Public
from plures.methods.addons.sam import Sam
from plures.methods.base import NO_TERMS, setting
from plures.methods.search import among
from plures.tree import Params, Tree

PRIVATE: dict[str, Callable[[Task, str], bool]] = {
    "head": lambda task, name: task.is_head(name),
    "body": lambda task, name: not task.is_head(name),
    "batch-norm": lambda task, name: task.is_batch_norm(name),
    "statistics": lambda task, name: tree.is_statistic(name),
    "nothing": lambda task, name: False,
}


ESTIMATION_STEPS = 50  # with BatchNorm's momentum of 0.1, half a percent of the start is left then


class KeptClient(NamedTuple):
    host: Tree
    kept: Params  # never uploaded


@dataclass(frozen=True)
class KeepLocal(Addon):
    """The host trains the whole model, but its private part is neither sent nor averaged."""

    private: str = setting(
        "head",
        "what stays with the client: head, body, batch-norm, statistics, nothing, a name of layers or tensors with * "
        "for anything, or several joined by /",
        search=among("head", "body", "batch-norm", "nothing").if_named(),
    )

    def __post_init__(self):
        super().__post_init__()
        for part in self.private.split("/"):
            if part not in PRIVATE and not set(part) & set("*.?"):
                words = f"a part that can stay is one of {', '.join(PRIVATE)}, or a pattern like *.lora_B"
                raise UsageError(f"private={self.private}: {words}")

    def is_private(self, task):
        """A function of a tensor's name: whether that tensor stays with the client."""
        parts = self.private.split("/")
        return lambda name: any(PRIVATE[part](task, name) if part in PRIVATE else matches(part, name) for part in parts)

    def notes(self, task):
        # Statistics stay where there are some; a model without BatchNorm lacks nothing.
        if self.private == "statistics" or any(map(self.is_private(task), task.initial)):
            return self.host.notes(task)
        return (f"the model has no part that is private={self.private}: this is {self.host.title}",)

    def refuse_frozen(self, task):
        private = self.is_private(task)
        if any(map(private, tree.trainable(task.frozen))) and not any(map(private, task.initial)):
            raise UsageError(
                f"what would stay with each client (private={self.private}) is frozen, so that all have the same; let "
                "it train, or choose another method, e.g. fedavg"
            )
        self.host.refuse_frozen(task)

    def shared(self, task, params):
        return tree.drop(self.host.shared(task, params), self.is_private(task))

    def init_server(self, task, params, federation):
        return self.host.init_server(task, tree.drop(params, self.is_private(task)), federation)

    def generic(self, task, server):
        shared = self.host.generic(task, server)
        return shared if shared is not None and len(shared) == len(task.initial) else None

    def init_client(self, task, params):
        return KeptClient(self.host.init_client(task, params), tree.keep(params, self.is_private(task)))

    def local_model(self, task, received, client):
        whole = self.host.local_model(task, received, client.host) | client.kept
        return {name: whole[name] for name in task.initial}

    def train(self, task, received, client, shard, terms=NO_TERMS):
        start = self.local_model(task, terms.start_from(received), client)
        host, model, metrics = self.host.train(task, received, client.host, shard, terms._replace(start=start))
        private = self.is_private(task)
        return KeptClient(host, tree.keep(model, private)), tree.drop(model, private), metrics

    def adapt(self, task, received, shard, epochs):
        """As the host does. Private statistics of BatchNorm, which a new client has not got, are estimated first."""
        missing = any(tree.is_statistic(name) and self.is_private(task)(name) for name in task.initial)
        shared = tree.keep(received, task.initial.__contains__) if isinstance(received, dict) else {}
        if not epochs or not missing or not shared:
            return self.host.adapt(task, received, shard, epochs)
        model = task.initial | shared
        still = self.host.solver.plain(0.0).for_steps(ESTIMATION_STEPS)  # weights stay; statistics move by each batch
        statistics = tree.keep(fit(task.loss, model, shard, still).params, tree.is_statistic)
        return self.host.adapt(task, received | statistics, shard, epochs)

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, self.local_model(task, received, client), client.host, shard)

    @property
    def personal_model_name(self):
        return (
            f"server's model, own {self.private}"
            if self.host.personal_model_name == "global"
            else self.host.personal_model_name
        )

    @property
    def is_served_whole(self):
        return False


@dataclass(frozen=True)
class Keep(KeepLocal):
    """What stays with the client, as a user asks for it: around methods that train one shared model and average it."""

    def __post_init__(self):
        super().__post_init__()
        host = self.host
        while isinstance(host, (Prox, Sam, Ft, C, Brm, FedOpt, Public)):
            host = host.host
        if type(host).__name__ != "FedAvg":
            raise UsageError(
                f"{self.title} cannot take the add-on keep: there are parts of the model that it keeps or corrects "
                "itself; keep is for FedAvg, FedProx and FedSAM, perhaps with ft, c, brm, fedopt or public"
            )
