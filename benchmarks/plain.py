"""What one writes first: an nn.Module, torch.optim.SGD and a DataLoader, one client after another.

The same clients do the same steps as in Plures, for four methods. Models and state of clients are kept from round
to round where the method keeps them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import torch
from package import Scene, model_maker
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Federation:
    """All clients, and the one model."""

    def __init__(self, scene: Scene) -> None:
        config, population = scene.config, scene.population
        self.config, self.population = config, population
        n_tokens = int(population.x.max()) + 1 if not population.x.is_floating_point() else 0
        shape = tuple(population.x.shape[1:])
        self.model: nn.Module = model_maker(str(config.model), shape, population.n_classes, n_tokens)()
        if config.adapter is not None:
            add_lora(self.model, config.adapter)
        self.clients = [i for i, rows in enumerate(population.train) if len(rows)]
        self.kept: dict[int, nn.Module] = {}  # what clients keep
        self.blends: dict[int, list[Tensor]] = {}  # FedALA's weights
        self.n_steps = 0

    def batches(self, client: int, share: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.population.train[client]
        if share < 1:
            rows = rows[torch.randperm(len(rows))[: max(1, int(share * len(rows)))].numpy()]
        data = TensorDataset(self.population.x[rows], self.population.y[rows])
        yield from DataLoader(data, batch_size=self.config.batch, shuffle=True)

    def trained(self, model: nn.Module, client: int, loss_of: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
        solver = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=self.config.lr)
        for _ in range(self.config.epochs):
            for x, y in self.batches(client):
                solver.zero_grad()
                loss_of(x, y).backward()
                solver.step()
                self.n_steps += 1
        return model

    def merge(self, found: list[nn.Module]) -> None:
        sizes = torch.tensor([float(len(self.population.train[i])) for i in self.clients])
        with torch.no_grad():
            for whole, *each in zip(self.model.parameters(), *(one.parameters() for one in found), strict=True):
                if not whole.requires_grad:
                    continue
                whole.copy_(sum(share * x for share, x in zip(sizes / sizes.sum(), each, strict=True)))


def add_lora(model: nn.Module, adapter: str) -> None:
    """LoRA from `peft` in the linear layers of this name; besides, only the head is trained."""
    import peft

    settings = dict(item.split("=") for item in adapter.removeprefix("lora:").split(","))
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    chosen = [name for name in names if fnmatch(name, settings["layers"])]
    rank = int(settings["rank"])
    model.requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=chosen), model)
    for part in (module for name, module in model.named_modules() if name == "head"):
        part.requires_grad_(True)


def fedavg(all: Federation) -> None:
    found = []
    for client in all.clients:
        model = copy.deepcopy(all.model)
        found.append(all.trained(model, client, lambda x, y, model=model: cross_entropy(model(x), y)))
    all.merge(found)


def ditto(all: Federation, lam: float = 0.1) -> None:
    found = []
    for client in all.clients:
        model = copy.deepcopy(all.model)
        found.append(all.trained(model, client, lambda x, y, model=model: cross_entropy(model(x), y)))
        own = all.kept.setdefault(client, copy.deepcopy(all.model))

        def loss(x: Tensor, y: Tensor, own: nn.Module = own) -> Tensor:
            pairs = zip(own.parameters(), all.model.parameters(), strict=True)
            return cross_entropy(own(x), y) + lam / 2 * sum(((a - b.detach()) ** 2).sum() for a, b in pairs)

        all.trained(own, client, loss)
    all.merge(found)


class TwoHeads(nn.Module):
    """A body with its head, and a second head of the client's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        name, head = list(model.named_children())[-1]
        assert isinstance(head, nn.Linear)
        self.body, self.head = model, head
        setattr(self.body, name, nn.Identity())
        self.own = nn.Linear(head.in_features, head.out_features, bias=False)
        nn.init.zeros_(self.own.weight)


def fedrod(all: Federation) -> None:
    found = []
    for client in all.clients:
        kept = all.kept.get(client)
        model = TwoHeads(copy.deepcopy(all.model))
        if isinstance(kept, TwoHeads):
            model.own = kept.own
        labels = all.population.y[all.population.train[client]]
        logs = torch.log(torch.bincount(labels, minlength=all.population.n_classes).float() + 1e-12)

        def loss(x: Tensor, y: Tensor, model: TwoHeads = model, logs: Tensor = logs) -> Tensor:
            features = model.body(x)
            generic = model.head(features)
            personal = generic.detach() + model.own(features.detach())
            return cross_entropy(generic + logs, y) + cross_entropy(personal, y)

        all.trained(model, client, loss)
        all.kept[client] = model
        whole = copy.deepcopy(model.body)
        name = [name for name, _ in all.model.named_children()][-1]
        setattr(whole, name, model.head)
        found.append(whole)
    all.merge(found)


def fedala(all: Federation, share: float = 0.8, layers: int = 1, cap: int = 10, step: float = 1.0) -> None:
    """The blend of the last layer is learned on a share of the rows, at first until it settles."""
    found = []
    for client in all.clients:
        own = all.kept.get(client)
        model = copy.deepcopy(all.model)
        if own is not None:
            n_last = 2 * layers
            mine, theirs = list(own.parameters())[-n_last:], list(all.model.parameters())[-n_last:]
            is_new = client not in all.blends
            blend = all.blends.setdefault(client, [torch.ones_like(x) for x in mine])
            last = list(model.parameters())[-n_last:]
            losses: list[float] = []
            for _ in range(cap if is_new else 1):
                for x, y in all.batches(client, share):
                    with torch.no_grad():
                        for x_last, a, b, w in zip(last, mine, theirs, blend, strict=True):
                            x_last.copy_(a + (b - a) * w)
                    loss = cross_entropy(model(x), y)
                    for w, gradient, a, b in zip(blend, torch.autograd.grad(loss, last), mine, theirs, strict=True):
                        w.sub_(step * gradient * (b - a).detach()).clamp_(0, 1)
                losses.append(float(loss.detach()))
                if is_new and len(losses) > 10 and math.sqrt(float(torch.tensor(losses[-10:]).var())) < 0.1:
                    break
            with torch.no_grad():
                for x_last, a, b, w in zip(last, mine, theirs, blend, strict=True):
                    x_last.copy_(a + (b - a) * w)
        all.trained(model, client, lambda x, y, model=model: cross_entropy(model(x), y))
        all.kept[client] = model
        found.append(model)
    all.merge(found)


@torch.no_grad()
def evaluated(all: Federation) -> list[float]:
    """The accuracy of the one model on every client's test rows."""
    found = []
    for client in all.clients:
        rows = all.population.test[client]
        x, y = all.population.x[rows], all.population.y[rows]
        right = [(all.model(some).argmax(1) == of).sum() for some, of in zip(x.split(256), y.split(256), strict=True)]
        found.append(float(sum(right)) / max(1, len(rows)))
    return found


ROUNDS: dict[str, Callable[[Federation], None]] = {
    "fedavg": fedavg,
    "ditto": ditto,
    "fedrod": fedrod,
    "fedala": fedala,
}
