"""Fed-RoD: one shared model trained with a balanced loss, and a personal head added to its logits.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, 2022.

Loss of a batch: balanced(generic logits) + cross-entropy(generic logits + personal head(features)),
where the second term sees features and generic logits as constants: body and generic head learn
from the balanced loss alone, the personal head from plain cross-entropy alone.

Differs from the paper: the personal head starts at zero (the paper does not say), so that at first
the personal model is the generic one. As in the paper's tables, the personal model has the body
and generic head that the client trained in its last round; `pm_base=server` takes the server's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..balance import LOSSES
from ..fit import fit
from ..method import BARE, Method, average, pulled, setting, weights_setting
from ..task import cross_entropy
from ..tree import Params


class FedRoDClient(NamedTuple):
    head: Params  # the personal head, never uploaded
    model: Params  # body and generic head as trained in the last round; empty with pm_base=server


@dataclass(frozen=True)
class FedRoD(Method):
    """A balanced shared model, plus a personal head added to its logits."""

    loss: str = setting("bsm", "balanced loss of the shared model", choices=tuple(LOSSES))
    gamma: float = setting(1.0, "strength of the balance; 1 for bsm, to be tuned for ldam and cdt", least=0)
    pm_base: str = setting(
        "local",
        "body and generic head of the personal model: last trained, or the server's",
        choices=("local", "server"),
    )
    weights: str = weights_setting()

    def merge(self, task, server, ids, uploads, sizes):
        return average(uploads, sizes, self.weights)

    def init_client(self, task, params):
        head = {"weight": torch.zeros_like(params[task.head + ".weight"])}
        return FedRoDClient(head, params if self.pm_base == "local" else {})

    def train(self, task, received, client, shard, worn=BARE):
        balanced = LOSSES[self.loss]

        def objective(both, batch, pulls):
            shared, head = both
            features = task.training_features(shared, batch)
            generic = task.classify(shared, features)
            personal = generic.detach() + features.detach() @ head["weight"].mT
            shared_loss = pulled(balanced(generic, batch, self.gamma), shared, pulls)
            return shared_loss + cross_entropy(personal, batch)

        both = (worn.begin(received), client.head)
        fitted = fit(objective, both, shard, self.solver, given=(worn.pulls,))
        shared, head = fitted.params
        return FedRoDClient(head, shared if self.pm_base == "local" else {}), shared, {"loss": fitted.loss}

    def personalize(self, task, received, client, shard):
        """Both heads read the same features, so their sum is one head."""
        base = client.model if self.pm_base == "local" else received
        name = task.head + ".weight"
        return base | {name: base[name] + client.head["weight"]}

    @property
    def scored(self):
        return self.pm_base
