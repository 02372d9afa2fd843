"""Fed-RoD: FedAvg with a class-balanced loss, and each client adds the logits of a personal head.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, 2022.

Loss of a batch: balanced(generic logits) + cross-entropy(generic logits + personal head(features)), where features and
generic logits are constants in the second term. So body and generic head learn from the balanced loss alone, and the
personal head from plain cross-entropy alone. With `head=hyper` a shared hypernetwork makes the personal head from the
client's class proportions, so that a client that never trained has one too; the proportions are never sent.

The personal model has the server's body and generic head and the client's own personal head, as the paper says in words
(Appendix B.2); with `head=hyper` it is the head that the client's own copy of the hypernetwork made at the end of its
last training, which is what Algorithm 2 leaves at a client. `pm_base=generated` takes the head that the server's
hypernetwork makes, without any training at the client: this is what a new client is given.

Differs from the paper: the personal head starts at zero (the paper does not say), so that at first the personal model
is the generic one. With `pm_base=local` body and heads are those that the client had after its last training. With
`loss=meta-bsm` the loss on the public set is plain cross-entropy: with the learned loss itself, as printed, weights of
zero would be the best.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import tree
from plures.errors import UsageError
from plures.learn.fit import fit, recorded
from plures.learn.losses import cross_entropy
from plures.methods.base import NO_TERMS, Averaged, setting, with_penalties
from plures.methods.ingredients import meta_balance
from plures.methods.ingredients.balance import LOSSES
from plures.methods.ingredients.dense import draw_weights
from plures.methods.search import among, linear, log
from plures.tree import Params, Tree

HYPER = "hypernetwork/"  # prefix of the names of its tensors, which are sent along with the model


class FedRoDClient(NamedTuple):
    head: Params  # the personal head, never uploaded
    model: Params  # body and generic head as trained in the last round; empty with pm_base=server
    learned: Tree  # strength of the balancing and weights of rows, with loss=meta-bsm


def is_hyper(name):
    """Whether a tensor is part of the hypernetwork."""
    return name.startswith(HYPER)


def generate_head(hyper, counts):
    """The personal head that the hypernetwork makes for a client with these numbers of rows of each class."""
    shares = counts / counts.sum().clamp(min=1)
    hidden = torch.relu(hyper[HYPER + "hidden"] @ shares.to(hyper[HYPER + "hidden"].dtype))
    return (hyper[HYPER + "output"] @ hidden).reshape(len(shares), -1)


@dataclass(frozen=True)
class FedRoD(Averaged):
    """A shared model trained with a balanced loss, plus a personal head whose logits are added."""

    head: str = setting(
        "linear",
        "personal head: trained by the client, or made by a shared hypernetwork from its class proportions",
        choices=("linear", "hyper"),
    )
    loss: str = setting("bsm", "balanced loss for the shared model", choices=(*LOSSES, "meta-bsm"))
    gamma: float = setting(
        1.0, "strength of the balancing; 1 for bsm, to be tuned for ldam and cdt", least=0, search=linear(0, 2)
    )
    width: int = setting(
        16, "hidden units of the hypernetwork; the paper has 32 on CIFAR-10", least=1, search=log(8, 64).if_named()
    )
    meta_lr: float = setting(
        0.01, "meta-bsm: learning rate on the public set", least=0, search=log(0.001, 0.1).if_named()
    )
    learn_gamma: bool = setting(True, "meta-bsm: whether it learns the strength too, or only the weights of rows")
    pm_base: str = setting(
        "server",
        "body and generic head of the personal model: the server's, with the personal head that the client trained "
        "last; all as the client trained them (local); or all the server's, with a generated head (generated)",
        choices=("server", "local", "generated"),
        search=among("server", "local").if_named(),
    )

    refuses = {
        "brm": "its shared model is trained with a balanced loss already; choose it with loss=",
        "sam": "one loss trains its shared model and its personal head, and only the former could be sharpened",
    }
    trains = ("head",)
    insides = "plures.report.insides.fedrod:pictures"

    def __post_init__(self):
        super().__post_init__()
        if self.pm_base == "generated" and self.head == "linear":
            raise UsageError("FedRoD.pm_base=generated is for head=hyper; a linear head is trained, not generated")

    @property
    def public_rows(self):
        return 10 if self.loss == "meta-bsm" else 0

    @property
    def needs_classes(self):
        return "its loss is balanced by the numbers of rows of each class"

    def shared(self, task, params):
        return tree.drop(params, is_hyper)

    def init_server(self, task, params, federation):
        if self.head == "linear":
            return params
        n_classes, n_features = params[task.head + ".weight"].shape
        like = params[task.head + ".weight"]
        # Class proportions have a norm of at most one for any number of classes, so weights are drawn from [-1, 1).
        hidden = draw_weights(federation.key, (self.width, n_classes), 1, 0).to(like.dtype)
        return params | {HYPER + "hidden": hidden, HYPER + "output": like.new_zeros(n_classes * n_features, self.width)}

    def generic(self, task, server):
        return self.shared(task, server)

    def init_client(self, task, params):
        head = {"weight": torch.zeros_like(params[task.head + ".weight"])}
        learned = meta_balance.init_learned(self.gamma, head["weight"].dtype) if self.loss == "meta-bsm" else ()
        return FedRoDClient(head, params if self.pm_base == "local" else {}, learned)

    def train(self, task, received, client, shard, terms=NO_TERMS):
        def objective(trained, batch, penalties, lr):
            shared, personal_head = trained["shared"], trained["head"]
            features = task.training_features(shared, batch)
            generic = task.classify(shared, features)
            weight = personal_head["weight"] if self.head == "linear" else generate_head(personal_head, batch.counts)
            personal = generic.detach() + features.detach() @ weight.mT
            if self.loss == "meta-bsm":
                old = trained["recorded"]
                new = meta_balance.update_learned(task, shared, batch, old, lr, self.meta_lr, self.learn_gamma)
                balanced = meta_balance.weighted_loss(generic, batch, new) + recorded(old, new)
            else:
                balanced = LOSSES[self.loss](generic, batch, self.gamma)
            return with_penalties(balanced, shared, penalties) + cross_entropy(personal, batch)

        start = terms.start_from(received)
        head = client.head if self.head == "linear" else tree.keep(received, is_hyper)
        trained = {"shared": self.shared(task, start), "head": head, "recorded": client.learned}
        fitted = fit(objective, trained, shard, self.solver, given=(terms.penalties, self.solver.rate(shard.round)))
        shared, head = fitted.params["shared"], fitted.params["head"]
        upload = shared if self.head == "linear" else shared | head
        own = head if self.head == "linear" else {"weight": generate_head(head, shard.counts)}
        client = FedRoDClient(own, shared if self.pm_base == "local" else {}, fitted.params["recorded"])
        return client, upload, {"loss": fitted.loss, "steps": fitted.steps}

    def personalize(self, task, received, client, shard):
        if self.pm_base == "local":
            return self.with_head(task, client.model, client.head["weight"])
        weight = client.head["weight"]
        if self.pm_base == "generated":
            weight = generate_head(tree.keep(received, is_hyper), shard.counts)
        return self.with_head(task, self.shared(task, received), weight)

    def with_head(self, task, base, weight):
        """The model whose head is the sum of both heads; they read the same features."""
        name = task.head + ".weight"
        return base | {name: base[name] + weight}

    def adapt(self, task, received, shard, epochs):
        """The personal head starts from the class proportions with head=hyper, else at zero, and is then trained."""
        own = dataclasses.replace(self, solver=self.solver.for_epochs(epochs), head="linear", pm_base="local")
        model, client = self.shared(task, received), own.init_client(task, task.initial)
        if self.head == "hyper":
            client = client._replace(head={"weight": generate_head(tree.keep(received, is_hyper), shard.counts)})
        client, _, _ = own.train(task, model, client._replace(model=model), shard)
        return own.personalize(task, model, client, shard)

    @property
    def personal_model_name(self):
        return self.pm_base

    @property
    def is_served_whole(self):
        return self.pm_base == "generated"
