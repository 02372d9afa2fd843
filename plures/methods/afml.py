"""AFML: meta-learning of a head that adapts to each client, on an encoder whose weights are random.

Towards Generalizable Personalized Federated Learning with Adaptive Local Adaptation.

The server keeps a head c, and means and standard deviations of the encoder's weights. In each round it draws one
encoder for all clients. A client adapts the head by one gradient step on its support rows and uploads gradients, on its
query rows, of
    loss(adapted head) + alpha * (loss(head as sent, noisy features) + KL(features || N(0, I))).
These are the gradient of the whole sum with respect to the encoder, through the adaptation step, and that of the first
term with respect to c. The server turns encoder gradients into gradients of means and deviations, adds those of
beta * KL(weights || N(0, I)), and takes a step. So three terms trade off how good the model is before
adaptation, how well it adapts and how simple it is. The personal model is the mean encoder with a head that is
fine-tuned for `pers` epochs.

Differs from the paper, whose appendix with all numbers is missing: the server's optimizer, step sizes, alpha and beta
are ours, and the server's learning rate rises over the first rounds, in which Adam moves all weights by the same length
and large networks would leap. Biases and normalisation layers are not random. With `latent=vib` features are means, and
an extra layer gives their variances; with `latent=unit` all variances are one, without extra weights.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from plures import seeds, tree
from plures.learn import optimizers
from plures.learn.losses import masked_mean
from plures.learn.optimizers import OptimizerState
from plures.methods.base import Method, fit_head, setting
from plures.methods.ingredients.meta import meta_gradients, server_step, warm_up_setting
from plures.methods.messages import Same
from plures.methods.search import linear, log
from plures.tree import Params


class AfmlServer(NamedTuple):
    model: Params  # means of the encoder's weights, and all tensors that are not random
    spread: Params  # the standard deviation of a random tensor is softplus of this
    latent: Params  # layer from features to the log of their variances; empty with latent=unit
    optimizer: OptimizerState  # for all three
    key: Tensor
    round: Tensor


def inverse_softplus(value):
    """The x with softplus(x) = value."""
    return math.log(math.expm1(value))


def divergence(means, deviations):
    """KL(N(mean, deviation^2) || N(0, 1)), summed over all weights."""
    each = [(u**2 + s**2 - 1 - 2 * s.log()).sum() for u, s in zip(means, deviations, strict=True)]
    return torch.stack(each).sum() / 2


@dataclass(frozen=True)
class Afml(Method):
    """A random encoder for all clients, and a head that adapts to each client."""

    inner_lr: float = setting(0.3, "learning rate of the head's adaptation step", least=0, search=log(0.03, 3))
    alpha: float = setting(
        0.01,
        "weight of the loss before adaptation and of the KL divergence of the features",
        least=0,
        search=log(0.001, 0.1),
    )
    beta: float = setting(1e-6, "weight of the KL divergence of the encoder's weights", least=0, search=log(1e-7, 1e-5))
    sigma: float = setting(
        0.01,
        "initial standard deviation of the encoder's weights; with 0 they are not random",
        least=0,
        search=log(0.001, 0.1),
    )
    latent: str = setting("vib", "variance of the features: learned, or one", choices=("vib", "unit"))
    support: float = setting(
        0.8,
        "share of rows for the adaptation step; the outer loss uses the others",
        least=0,
        most=1,
        search=linear(0.5, 0.9),
    )
    first_order: bool = setting(False, "ignore second derivatives (first-order meta-gradients)")
    server_kind: str = setting("adam", "optimizer of the server", choices=("sgd", "adam"))
    server_lr: float = setting(0.006, "learning rate of the server", least=0, search=log(6e-4, 6e-2))
    warm_up: int = warm_up_setting()
    pers: int = setting(5, "epochs of fine-tuning of the personal head", least=0, search=linear(1, 10))

    trains = ("head", "body")

    def is_random(self, task, name):
        """Whether a tensor is random: weights of the encoder are; biases, normalisation layers and the head are not."""
        return self.sigma > 0 and task.initial[name].dim() > 1 and not (task.is_head(name) or task.is_norm(name))

    # Server

    def init_server(self, task, params, federation):
        random = tree.keep(params, lambda name: self.is_random(task, name))
        spread = tree.map(lambda x: torch.full_like(x, inverse_softplus(self.sigma)), random)
        latent = {}
        if self.latent == "vib":
            like = params[task.head + ".weight"]
            n_features = like.shape[1]
            latent = {"weight": like.new_zeros(n_features, n_features), "bias": like.new_full((n_features,), -5.0)}
        trained = self.trained_parts(params, spread, latent)
        optimizer = optimizers.init_optimizer(trained, adam=self.server_kind == "adam")
        return AfmlServer(params, spread, latent, optimizer, federation.key, torch.tensor(0))

    def trained_parts(self, model, spread, latent):
        """All that the optimizer of the server updates."""
        return {"model": tree.trainable(model), "spread": spread, "latent": latent}

    def draw_noise(self, server):
        """Standard normal numbers for this round, the same for all clients."""
        key = seeds.mix(server.key, server.round)
        return {name: seeds.normal(key, x.shape, k).to(x.dtype) for k, (name, x) in enumerate(server.spread.items())}

    def draw_model(self, server):
        """The model of this round, with random weights of the encoder."""
        noise = self.draw_noise(server)
        return server.model | {
            name: server.model[name] + softplus(server.spread[name]) * e for name, e in noise.items()
        }

    def send(self, task, server, ids):
        return Same({"model": self.draw_model(server), "latent": server.latent})

    def serve(self, task, server, ids):
        return Same({"model": server.model, "latent": server.latent})

    def newcomer(self, task, server):
        return {"model": server.model, "latent": server.latent}

    def server_gradients(self, server, gradients):
        """Gradients of means and deviations, from gradients at the drawn weights; the KL term is included."""
        noise = self.draw_noise(server)
        model, spread = dict(tree.trainable(gradients)), {}
        for name, e in noise.items():
            deviation = softplus(server.spread[name])
            model[name] = gradients[name] + self.beta * server.model[name]
            by_deviation = gradients[name] * e + self.beta * (deviation - 1 / deviation)
            spread[name] = by_deviation * torch.sigmoid(server.spread[name])
        return model, spread

    def merge(self, task, server, ids, uploads, sizes):
        mean = tree.mean(uploads, torch.ones_like(sizes))
        model, spread = self.server_gradients(server, mean["gradients"])
        gradients = {"model": model, "spread": spread, "latent": mean["latent_gradients"]}
        now = self.trained_parts(server.model, server.spread, server.latent)
        new, optimizer = server_step(
            self.server_kind, now, gradients, server.optimizer, self.server_lr, server.round, self.warm_up
        )
        statistics = {name: x - mean["gradients"][name] for name, x in server.model.items() if tree.is_statistic(name)}
        model = server.model | new["model"] | statistics
        return AfmlServer(model, new["spread"], new["latent"], optimizer, server.key, server.round + 1)

    def generic(self, task, server):
        return server.model

    # One client

    def train(self, task, received, client, shard):
        def inner(head, slow, batch):
            return task.loss_of(task.classify(head, task.training_features(slow["body"], batch)), batch)

        def outer(head, slow, batch):
            features = task.training_features(slow["body"], batch)
            adapted = task.loss_of(task.classify(head, features), batch)
            return adapted + self.alpha * self.trade_off(task, features, slow, batch) if self.alpha else adapted

        head, body = tree.keep(received["model"], task.is_head), tree.drop(received["model"], task.is_head)
        slow = {"body": body, "latent": received["latent"], "sent head": head}
        support, query = shard.split(self.support, "support")
        found = meta_gradients(inner, outer, head, slow, support, query, self.inner_lr, self.first_order)
        gradients = {name: (found.slow["body"] | found.fast)[name] for name in received["model"]}
        return client, {"gradients": gradients, "latent_gradients": found.slow["latent"]}, {"loss": found.loss}

    def trade_off(self, task, features, slow, batch):
        """The loss of the head as sent on noisy features, plus the KL divergence of the features from N(0, I)."""
        noise = seeds.normal(batch.key, features.shape, 3).to(features.dtype)
        if self.latent == "vib":
            log_variance = features @ slow["latent"]["weight"].mT + slow["latent"]["bias"]
        else:
            log_variance = torch.zeros_like(features)
        noisy = features + (log_variance / 2).exp() * noise
        before = task.loss_of(task.classify(slow["sent head"], noisy), batch)
        each = (features**2 + log_variance.exp() - 1 - log_variance) / 2
        return before + masked_mean(each.flatten(1).sum(1), batch.mask)

    def personalize(self, task, received, client, shard):
        return self.fine_tune_head(task, received["model"], shard, self.pers)

    def fine_tune_head(self, task, model, shard, epochs):
        """The model with its head trained on a fixed body."""
        head, body = tree.keep(model, task.is_head), tree.drop(model, task.is_head)
        return body | fit_head(task, head, body, shard, self.solver, epochs).params

    def adapt(self, task, received, shard, epochs):
        return self.fine_tune_head(task, received["model"], shard, epochs)

    @property
    def personal_model_name(self):
        return f"Pers.{self.pers}"
