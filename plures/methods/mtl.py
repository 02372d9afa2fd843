"""MTL: every client trains its own model, and a regulariser pulls all models towards their mean.

Smith et al., Federated Multi-Task Learning, 2017, in the form that the Fed-RoD paper compares with.

Local loss: F_i(w_i) + c * (|w_i|^2 + sum_j |w_j - mean|^2). The gradient of the sum over j is 2 (w_i - mean), so
the server only has to send the mean. c is `strength`; with 0, a power of ten below one over the number of weights, as
in Fed-RoD's comparison, which is local training to the eye.

Differs from the paper: the task relationship matrix is fixed to the projection that removes the mean, where public code
has an all-ones matrix in place of the identity. A client that does not take part in a round enters the mean with its
last known model.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.learn.fit import fit, with_gradient
from plures.methods.base import Collected, setting
from plures.methods.messages import Same
from plures.methods.search import log
from plures.tree import Params


class MtlServer(NamedTuple):
    models: Params  # [client, ...], each client's last model
    seen: Tensor  # [client], 1 if it has uploaded a model, else 0


class MtlClient(NamedTuple):
    model: Params


@dataclass(frozen=True)
class Mtl(Collected):
    """Personal models that are pulled towards their mean."""

    strength: float = setting(
        3e-3,
        "weight of both regularisation terms; 0 chooses a power of ten by the number of weights",
        least=0,
        search=log(3e-4, 3e-2),
    )
    coupled: bool = setting(True, "whether to use the regularisation terms; without them this is local training")

    def init_server(self, task, params, federation):
        return MtlServer(tree.repeat(params, federation.n_clients), torch.zeros(federation.n_clients))

    def send(self, task, server, ids):
        return Same(tree.map(lambda x: x.mean(0), server.models))

    def init_client(self, task, params):
        return MtlClient(params)

    def weight(self, params):
        """c = 10^-f with f = floor(log10 d + 1) + 1 for d weights."""
        if not self.coupled or self.strength:
            return self.strength if self.coupled else 0.0
        n_weights = sum(x.numel() for x in tree.trainable(params).values())
        return 10.0 ** -(math.floor(math.log10(n_weights) + 1) + 1)

    def train(self, task, received, client, shard):
        n, c = self.schedule.n_clients, self.weight(received)

        def objective(params, batch, mean, start):
            own = tree.trainable(params)
            # The mean changes with the client's own model, which is one n-th of it.
            gradient = {
                name: 2 * c * (2 * x - mean[name] - (x - start[name]) / n) for name, x in tree.detach(own).items()
            }
            return task.loss(params, batch) + with_gradient(own, gradient)

        fitted = fit(objective, client.model, shard, self.solver, given=(received, client.model))
        return MtlClient(fitted.params), fitted.params, {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        return client.model

    @property
    def personal_model_name(self):
        return "local"
