"""pFedLA: every client receives its own layer-wise weighted mean of all models, with weights from a hypernetwork.

Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, 2022.

For each client, the server keeps its last model and a small hypernetwork. The hypernetwork outputs a weight for every
(layer, client); the weights of each layer sum to one. A client trains its mixture as in FedAvg. The server
backpropagates the change through the mixture: mixer <- mixer + step along J^T (after - before), where J is the Jacobian
of the mixture with respect to the hypernetwork, at the models that the mixture was made from.

Differs from the paper, which names neither the map to weights that sum to one, nor how the hypernetworks start, nor
their optimizer and its rate. Here the map is softmax and the last layer starts at zero, so that the first mixture is
the plain mean (`alpha_map=relu_norm` is what public code does). The change of each layer is divided by its length and
by how far the clients' layers are apart, so that a step depends neither on the size of a layer nor on the clients'
learning rate, and the optimizer is Adam: with plain steps at the rate of public code (`mixer_optimizer=sgd,unit=false,
mixer_lr=0.005`) the weights stay equal, and the method is FedAvg. A layer is a module with its weight and bias.
BatchNorm statistics stay with the client. The sign of the update is that of the paper's derivation, for which a step
lowers the loss.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plures import seeds, tree
from plures.learn import optimizers
from plures.learn.optimizers import OptimizerState
from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Collected, Method, setting
from plures.methods.messages import Each
from plures.methods.search import linear, log
from plures.tree import Params

DEPTH = 3  # number of fully connected layers between embedding and output
EXACT = "donot_use_mm_for_euclid_dist"  # by differences: products would make equal models look apart
SAME = 1e-10  # squared distance, over squared length, below which models are equal up to rounding


class PFedLAServer(NamedTuple):
    models: Params  # [client, ...], each client's last model
    mixers: Params  # [client, ...], each client's embedding and hypernetwork
    first: Params  # [client, ...], Adam's mean of gradients; empty with mixer_optimizer=sgd
    second: Params  # [client, ...], its mean of squares
    steps: Tensor  # [client], how many it has made for each
    seen: Tensor  # [client], 1 if it has uploaded a model, else 0


@dataclass(frozen=True)
class PFedLA(Collected):
    """The server mixes all models for each client and learns the weights from how the mixtures change in training."""

    width: int = setting(
        100, "size of the embedding and the hidden layers of a hypernetwork", least=1, search=log(30, 300).if_named()
    )
    mixer_lr: float = setting(7e-4, "learning rate of the hypernetworks", least=0, search=log(7e-5, 7e-3))
    mixer_optimizer: str = setting("adam", "optimizer of the hypernetworks", choices=("adam", "sgd"))
    unit: bool = setting(True, "divide the change of each layer by its length and by how far clients' layers are apart")
    alpha_map: str = setting("softmax", "map to weights that sum to one", choices=("softmax", "relu_norm"))
    self_bias: float = setting(
        0.0, "softmax: initial bias of the logit of a client's own model", search=linear(-2, 2).if_named()
    )
    layer_mean: bool = setting(False, "divide the change of each layer by its number of weights")

    refuses = {addon: "its server keeps a model for each client and none for all" for addon in ("scaffold", "feddyn")}
    insides = "plures.report.insides.pfedla:pictures"

    def init_server(self, task, params, federation):
        n, n_layers = federation.n_clients, len(task.layers_in(params))

        def draw(stream, *shape):
            return seeds.uniform(federation.key, (n, *shape), stream)

        bound = 1 / math.sqrt(self.width)
        mixers = {"embedding": seeds.normal(federation.key, (n, self.width), 1000)}
        for k in range(DEPTH):
            mixers[f"hidden{k}.weight"] = (2 * draw(2 * k, self.width, self.width) - 1) * bound
            mixers[f"hidden{k}.bias"] = (2 * draw(2 * k + 1, self.width) - 1) * bound
        if self.alpha_map == "softmax":
            mixers["output.weight"] = torch.zeros(n, n_layers, n, self.width)
            mixers["output.bias"] = self.self_bias * torch.eye(n).unsqueeze(1).repeat(1, n_layers, 1)
        else:
            mixers["output.weight"] = draw(100, n_layers, n, self.width)
            mixers["output.bias"] = draw(101, n_layers, n)
        moments = tree.zeros_like(mixers) if self.mixer_optimizer == "adam" else {}
        return PFedLAServer(tree.repeat(params, n), mixers, moments, dict(moments), torch.zeros(n), torch.zeros(n))

    def weights(self, mixers: Params, ids: Tensor) -> Tensor:
        """How much of each client's layer each receiver gets: [receiver, layer, client]."""
        hidden = mixers["embedding"]
        for k in range(DEPTH):
            hidden = torch.relu(_linear(mixers[f"hidden{k}.weight"], hidden) + mixers[f"hidden{k}.bias"])
        logits = torch.einsum("rlcw,rw->rlc", mixers["output.weight"], hidden) + mixers["output.bias"]
        if self.alpha_map == "softmax":
            return logits.softmax(-1)
        positive = torch.relu(logits)
        total = positive.sum(-1, keepdim=True)
        alone = torch.nn.functional.one_hot(ids, logits.shape[-1]).to(logits.dtype).unsqueeze(1)
        return torch.where(total > 0, positive / total.clamp(min=1e-12), alone)

    def mix(self, task, models, weights):
        """The mixture for each receiver, layer by layer."""
        layers = task.layers_in(models)

        def mix_one(name, x):
            shares = weights[:, layers.index(task.layer_of(name))].to(x.dtype)
            return (shares @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])

        return {name: mix_one(name, x) for name, x in models.items()}

    def send(self, task, server, ids):
        return Each(self.mix(task, server.models, self.weights(tree.rows(server.mixers, ids), ids)))

    def merge(self, task, server, ids, uploads, sizes):
        with torch.enable_grad():
            mixers = tree.map(lambda x: x.requires_grad_(), tree.rows(server.mixers, ids))
            sent = self.mix(task, server.models, self.weights(mixers, ids))
            change = {name: uploads[name] - sent[name].detach() for name in sent}
            if self.layer_mean:
                change = {name: x / self._layer_size(task, uploads, name) for name, x in change.items()}
            if self.unit:
                change = self.scale_to_unit(task, server.models, tree.detach(sent), change)
            gradients = torch.autograd.grad(list(sent.values()), list(mixers.values()), [change[name] for name in sent])
        upwards, mixers = dict(zip(mixers, gradients, strict=True)), tree.detach(mixers)
        models = tree.put(server.models, ids, uploads)
        if self.mixer_optimizer == "sgd":
            mixers = tree.axpy(self.mixer_lr, upwards, mixers)
            seen = server.seen.index_fill(0, ids, 1.0)
            return server._replace(models=models, mixers=tree.put(server.mixers, ids, mixers), seen=seen)
        state = OptimizerState(tree.rows(server.first, ids), tree.rows(server.second, ids), server.steps[ids])
        mixers, state = optimizers.adam_rows(mixers, tree.scale(-1, upwards), state, self.mixer_lr)
        return PFedLAServer(
            models,
            tree.put(server.mixers, ids, mixers),
            tree.put(server.first, ids, state.first),
            tree.put(server.second, ids, state.second),
            server.steps.index_copy(0, ids, state.steps),
            server.seen.index_fill(0, ids, 1.0),
        )

    def scale_to_unit(self, task, models, sent, change):
        """The change of each receiver's layers over its length and over how far all clients' layers are from it."""
        lengths: dict[str, Tensor] = {}
        spreads: dict[str, Tensor] = {}
        sizes: dict[str, Tensor] = {}
        for name, x in change.items():
            layer = task.layer_of(name)
            lengths[layer] = lengths.get(layer, 0) + x.flatten(1).square().sum(1)
            far = torch.cdist(sent[name].flatten(1), models[name].flatten(1), compute_mode=EXACT)
            spreads[layer] = spreads.get(layer, 0) + far.square().mean(1)
            sizes[layer] = sizes.get(layer, 0) + sent[name].flatten(1).square().sum(1)
        # Where all clients have the same layer there is nothing to choose, and no step is taken.
        factors = {
            layer: torch.where(
                spreads[layer] > SAME * sizes[layer] + 1e-30,
                (lengths[layer] * spreads[layer]).clamp(min=1e-30).rsqrt(),
                0.0,
            )
            for layer in lengths
        }
        return {
            name: x * factors[task.layer_of(name)].to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))
            for name, x in change.items()
        }

    def _layer_size(self, task, stacked, name):
        layer = task.layer_of(name)
        return sum(x[0].numel() for other, x in stacked.items() if task.layer_of(other) == layer)

    def snapshot(self, task, server):
        """The weights of the mixture for each layer: [receiver, client]."""
        each = self.weights(server.mixers, torch.arange(len(server.mixers["embedding"])))
        return {f"alpha/{layer}": each[:, k] for k, layer in enumerate(task.layers_in(server.models))}

    @property
    def personal_model_name(self):
        return "received mixture"


def _linear(weight, x):
    return torch.einsum("rij,rj->ri", weight, x)


def pfedla() -> Method:
    """pFedLA with private BatchNorm statistics."""
    return KeepLocal(host=PFedLA(), private="statistics")
