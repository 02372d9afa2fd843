"""Addon: a method that wraps a host method. This base class changes nothing."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from plures import tree
from plures.errors import UsageError
from plures.methods.base import NO_TERMS, Method


@dataclass(frozen=True)
class Addon(Method):
    """Passes every call on to its host. Subclasses override what they change."""

    host: Method = Method()

    changes_training: ClassVar[bool] = (
        True  # True: it changes how the shared model is trained, so the host must train one
    )

    def __post_init__(self):
        super().__post_init__()
        addon, name = type(self).__name__.lower(), self.host.title
        if addon in self.host.refuses:
            raise UsageError(f"{name} cannot take the add-on {addon}: {self.host.refuses[addon]}")
        if self.changes_training and not self.host.takes_terms:
            raise UsageError(
                f"{name} cannot take the add-on {addon}: it trains no shared model whose start or loss could be changed"
            )

    @property
    def title(self):
        return self.host.title

    @property
    def takes_terms(self):
        return self.host.takes_terms

    @property
    def refuses(self):
        return self.host.refuses

    @property
    def public_rows(self):
        return self.host.public_rows

    @property
    def trains_on_public(self):
        return self.host.trains_on_public

    @property
    def needs_classes(self):
        return self.host.needs_classes or super().needs_classes

    def with_solver(self, solver):
        return dataclasses.replace(self, solver=solver, host=self.host.with_solver(solver))

    @property
    def depends_on_rounds(self):
        return self.host.depends_on_rounds

    @property
    def sampling(self):
        return self.host.sampling

    def with_schedule(self, schedule):
        return dataclasses.replace(self, schedule=schedule, host=self.host.with_schedule(schedule))

    def shared(self, task, params):
        return self.host.shared(task, params)

    def shared_weights(self, task, received):
        """The weights of the shared model, without statistics: what an add-on can correct."""
        return tree.trainable(self.host.shared(task, received))

    def init_server(self, task, params, federation):
        return self.host.init_server(task, params, federation)

    def send(self, task, server, ids):
        return self.host.send(task, server, ids)

    def serve(self, task, server, ids):
        return self.host.serve(task, server, ids)

    def merge(self, task, server, ids, uploads, sizes):
        return self.host.merge(task, server, ids, uploads, sizes)

    def generic(self, task, server):
        return self.host.generic(task, server)

    def newcomer(self, task, server):
        return self.host.newcomer(task, server)

    def notes(self, task):
        return self.host.notes(task)

    def refuse_frozen(self, task):
        self.host.refuse_frozen(task)

    def snapshot(self, task, server):
        return self.host.snapshot(task, server)

    def init_client(self, task, params):
        return self.host.init_client(task, params)

    def train(self, task, received, client, shard, terms=NO_TERMS):
        if terms is NO_TERMS:  # a host that trains no shared model does not accept `terms`
            return self.host.train(task, received, client, shard)
        return self.host.train(task, received, client, shard, terms)

    def local_model(self, task, received, client):
        return self.host.local_model(task, received, client)

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, received, client, shard)

    def predict(self, task, personal, x):
        return self.host.predict(task, personal, x)

    def adapt(self, task, received, shard, epochs):
        return self.host.adapt(task, received, shard, epochs)

    @property
    def personal_model_name(self):
        return self.host.personal_model_name

    @property
    def is_served_whole(self):
        return self.host.is_served_whole

    def trim(self, task, message):
        return self.host.trim(task, message)

    def traffic(self, task, message, upload):
        return self.host.traffic(task, message, upload)
