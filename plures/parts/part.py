"""Part: a method around a host. As it stands here it changes nothing."""

import inspect
from dataclasses import dataclass

from ..errors import UsageError
from ..method import BARE, Method


@dataclass(frozen=True)
class Part(Method):
    """Hands every call on to its host; a part overrides what it changes."""

    host: Method = Method()

    def __post_init__(self):
        super().__post_init__()
        if "worn" not in inspect.signature(self.host.train).parameters:
            name = type(self.host).__name__
            raise UsageError(
                f"{name} cannot wear {type(self).__name__.lower()}: it trains no shared model "
                "whose start or loss a part could change"
            )

    @property
    def turns(self):
        return self.host.turns

    def shared(self, task, params):
        return self.host.shared(task, params)

    def init_server(self, task, params, federation):
        return self.host.init_server(task, params, federation)

    def send(self, task, server, ids):
        return self.host.send(task, server, ids)

    def merge(self, task, server, ids, uploads, sizes):
        return self.host.merge(task, server, ids, uploads, sizes)

    def generic(self, task, server):
        return self.host.generic(task, server)

    def init_client(self, task, params):
        return self.host.init_client(task, params)

    def train(self, task, received, client, shard, worn=BARE):
        return self.host.train(task, received, client, shard, worn)

    def local_model(self, task, received, client):
        return self.host.local_model(task, received, client)

    def personalize(self, task, received, client, shard):
        return self.host.personalize(task, received, client, shard)

    def predict(self, task, personal, x):
        return self.host.predict(task, personal, x)

    @property
    def scored(self):
        return self.host.scored
