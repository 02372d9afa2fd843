"""pFedHN: a hypernetwork on the server generates each client's model from an embedding of that client.

Shamsian et al., Personalized Federated Learning using Hypernetworks, 2021.

The server sends theta = H(v_i), and the client trains it and uploads the result. The server backpropagates the change
through H: the gradient of (H, v_i) is J^T (theta - trained). H is an MLP with one linear output layer for each tensor.

Differs from the paper: with several clients in a round, the gradients of H are added up for one step, where the authors
take one client, and a step, after the other (`cohort=mean` averages them); each embedding is updated by its own client
alone. BatchNorm statistics stay with the client. `private=head/statistics` keeps the head
with the client too (pFedHN-PC).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from plures import seeds, tree
from plures.learn import optimizers
from plures.learn.fit import fit
from plures.learn.optimizers import OptimizerState
from plures.methods.addons.keep import KeepLocal
from plures.methods.base import Method, setting
from plures.methods.ingredients.dense import draw_weights
from plures.methods.messages import Each
from plures.methods.search import among, linear, log
from plures.tree import Params


class PFedHNServer(NamedTuple):
    embeddings: torch.Tensor  # [client, size]
    net: Params  # the hypernetwork
    embedding_momentum: torch.Tensor  # [client, size]
    net_optimizer: OptimizerState


@dataclass(frozen=True)
class PFedHN(Method):
    """The server learns to generate models; clients train what they receive."""

    embedding: int = setting(
        0,
        "size of an embedding; 0 chooses a quarter of the number of clients, plus one",
        least=0,
        search=among(0, 5, 10, 20).if_named(),
    )
    width: int = setting(100, "width of the hypernetwork's hidden layers", least=1, search=log(50, 200).if_named())
    depth: int = setting(3, "number of hidden layers after the first", least=0, search=linear(1, 4).if_named())
    hyper_lr: float = setting(
        1e-2, "learning rate of the hypernetwork and the embeddings", least=0, search=log(0.001, 0.1)
    )
    hyper_momentum: float = setting(0.9, "momentum for both", least=0, most=0.999, search=linear(0.5, 0.99))
    hyper_decay: float = setting(1e-3, "weight decay for both", least=0, search=log(1e-4, 1e-2))
    cohort: str = setting("sum", "gradients of the clients of a round: added up, or averaged", choices=("sum", "mean"))
    clip: float = setting(50.0, "gradients of both are clipped to this norm", least=0, search=log(5, 500).if_named())

    refuses = {
        addon: "its server generates each client's model and keeps no model for all" for addon in ("scaffold", "feddyn")
    }

    def init_server(self, task, params, federation):
        size = self.embedding or 1 + federation.n_clients // 4
        key = federation.key
        net = {}
        n_in = size
        for k in range(self.depth + 1):
            net[f"hidden{k}.weight"] = draw_weights(key, (self.width, n_in), n_in, 2 * k)
            net[f"hidden{k}.bias"] = draw_weights(key, (self.width,), n_in, 2 * k + 1)
            n_in = self.width
        for k, (name, x) in enumerate(params.items()):
            net[f"output.{name}.weight"] = draw_weights(key, (x.numel(), self.width), self.width, 1000 + 2 * k).to(
                x.dtype
            )
            net[f"output.{name}.bias"] = draw_weights(key, (x.numel(),), self.width, 1001 + 2 * k).to(x.dtype)
        embeddings = seeds.normal(key, (federation.n_clients, size), 999)
        return PFedHNServer(embeddings, net, torch.zeros_like(embeddings), optimizers.init_optimizer(net))

    def generate(self, task, net, embeddings):
        """The models for embeddings [..., size]; every tensor has the same leading axes."""
        hidden = embeddings @ net["hidden0.weight"].mT + net["hidden0.bias"]
        for k in range(1, self.depth + 1):
            hidden = torch.relu(hidden) @ net[f"hidden{k}.weight"].mT + net[f"hidden{k}.bias"]

        def output(name):
            weight, bias = net[f"output.{name}.weight"], net[f"output.{name}.bias"]
            flat = hidden.to(weight.dtype) @ weight.mT + bias
            return flat.reshape(*embeddings.shape[:-1], *task.initial[name].shape)

        return {name: output(name) for name in task.initial if f"output.{name}.weight" in net}

    def send(self, task, server, ids):
        return Each(self.generate(task, server.net, server.embeddings[ids]))

    def merge(self, task, server, ids, uploads, sizes):
        with torch.enable_grad():
            net = tree.map(lambda x: x.detach().requires_grad_(), server.net)
            embeddings = server.embeddings[ids].detach().requires_grad_()
            sent = self.generate(task, net, embeddings)
            change = [x.detach() - uploads[name] for name, x in sent.items()]
            gradients = torch.autograd.grad(list(sent.values()), [embeddings, *net.values()], change)
        n = len(ids) if self.cohort == "mean" else 1
        own, rest = gradients[0], dict(zip(net, [g / n for g in gradients[1:]], strict=True))
        own = torch.stack([optimizers.clip(x, self.clip) for x in own])
        rest = optimizers.clip(rest, self.clip)
        before, momentum = server.embeddings[ids], server.embedding_momentum[ids]
        momentum = self.hyper_momentum * momentum + own + self.hyper_decay * before
        new_net, net_optimizer = optimizers.sgd(
            server.net, rest, server.net_optimizer, self.hyper_lr, self.hyper_momentum, self.hyper_decay
        )
        return PFedHNServer(
            server.embeddings.index_copy(0, ids, before - self.hyper_lr * momentum),
            new_net,
            server.embedding_momentum.index_copy(0, ids, momentum),
            net_optimizer,
        )

    def generic(self, task, server):
        return None

    def newcomer(self, task, server):
        return {"net": server.net, "embedding": server.embeddings.mean(0)}

    def adapt(self, task, received, shard, epochs):
        """Trains an embedding, starting at the mean of all, and the tensors that the hypernetwork does not generate."""

        def loss(trained, batch, net):
            return task.loss(trained["rest"] | self.generate(task, net, trained["embedding"]), batch)

        generated = self.generate(task, received["net"], received["embedding"])
        rest = {name: x for name, x in task.initial.items() if name not in generated}
        trained = {"embedding": received["embedding"], "rest": rest}
        found = fit(loss, trained, shard, self.solver.for_epochs(epochs), given=(received["net"],)).params
        return found["rest"] | self.generate(task, received["net"], found["embedding"])

    @property
    def personal_model_name(self):
        return "generated"


def pfedhn() -> Method:
    """pFedHN with private BatchNorm statistics."""
    return KeepLocal(host=PFedHN(), private="statistics")
