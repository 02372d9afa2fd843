"""The numbers behind each paper's own picture: from a run's last state, and from the pictures that it kept."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import seeds, tree
from plures.data.shard import Shard
from plures.learn.task import Task, row_losses
from plures.methods.addons.ala import Ala, AlaClient
from plures.methods.fedrod import FedRoD, FedRoDClient
from plures.methods.ingredients import layer_scores
from plures.methods.messages import Each, Same
from plures.methods.plgu_lf import PlguLf, PlguLfClient
from plures.methods.spec import chain
from plures.runs import checkpoint, snapshots
from plures.runs.scene import Scene
from plures.runs.simulation import Simulation
from plures.simulate import executor
from plures.tree import Params, Tree

MOST_CLIENTS = 200  # in a picture that has a row or a place for each
FLOPS = 2e11  # that may be spent on one picture of a loss: some seconds
GRID = 17  # points along each side of a loss surface
N_DIRECTIONS = 5  # random ones, of a landscape


def worn(run: Simulation, kind: type) -> Any:
    """The method, or the part that it wears, of this kind; None if there is none."""
    return next((layer for layer in chain(run.scene.method) if isinstance(layer, kind)), None)


def find(state: Tree, kind: type) -> Any:
    """The part of a client's state that is of this kind, however deep; None if there is none."""
    if isinstance(state, kind):
        return state
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, tuple) else ()
    return next((found for one in inner if (found := find(one, kind)) is not None), None)


def each_client(run: Simulation, ids: list[int]) -> Iterator[tuple[int, Tree, Tree]]:
    """(client, what it is served now, its state), one after another."""
    method, task = run.scene.method, run.scene.task
    for client in ids[:MOST_CLIENTS]:
        only = torch.tensor([client])
        with torch.no_grad():
            message = method.serve(task, run.server, only)
        yield client, _first(message), tree.row(run.store.rows(only), 0)


def _first(message: Same | Each) -> Tree:
    return tree.row(message.tree, 0) if isinstance(message, Each) else message.tree


# The split


class SplitTable(NamedTuple):
    counts: np.ndarray  # [client, class] training rows
    names: list[str]
    n_clients: int  # of all; the table may show fewer


def split_table(scene: Scene) -> SplitTable:
    """Who has how many training rows of which class."""
    labels, n = scene.population.y.numpy(), scene.population.n_classes
    own = scene.split.train
    counts = np.array([np.bincount(labels[rows].ravel(), minlength=n) for rows in own[:MOST_CLIENTS]])
    names = [scene.names[k] if scene.names else str(k) for k in range(len(counts))]
    return SplitTable(counts, names, len(own))


# pFedLA: who listens to whom


class Alpha(NamedTuple):
    rounds: list[int]
    layers: dict[str, np.ndarray]  # [round, receiver, client]

    def own(self, layer: str) -> np.ndarray:
        """[round]: how much a client takes from itself, mean over clients."""
        return self.layers[layer].diagonal(axis1=1, axis2=2).mean(1)


def alpha(run: Simulation) -> Alpha | None:
    """The weights of every layer between clients, over the rounds that have pictures, and at the end."""
    assert run.folder is not None
    with torch.no_grad():
        last = run.scene.method.picture(run.scene.task, run.server)
    seen = {at: snapshots.part(found, "method") for at, found in snapshots.read(run.folder).items()} | {run.round: last}
    names = [name for name in last if name.startswith("alpha/")]
    if not names:
        return None
    rounds = [at for at in sorted(seen) if set(names) <= set(seen[at])]
    n = min(MOST_CLIENTS, len(last[names[0]]))
    layers = {
        name.removeprefix("alpha/"): np.stack([seen[at][name][:n, :n].numpy() for at in rounds]) for name in names
    }
    return Alpha(rounds, layers)


# ALA: how much of the received model a client takes


class Blends(NamedTuple):
    edges: np.ndarray  # of the bins
    layers: dict[str, np.ndarray]  # [bin]: share of all clients' weights of that layer
    clients: list[int]
    sizes: list[int]
    means: list[float]  # of each client over its weights


def blends(run: Simulation, n_bins: int = 20) -> Blends | None:
    """The learned blend of every client that has learned one."""
    if worn(run, Ala) is None:
        return None
    edges = np.linspace(0, 1, n_bins + 1)
    task, sizes = run.scene.task, run.scene.population.sizes()
    counts: dict[str, np.ndarray] = {}
    clients, means = [], []
    for client, _, state in each_client(run, run.eligible):
        own = find(state, AlaClient)
        if int(own.rounds) < 2 or not own.blend:  # in its first round a client has nothing to blend with
            continue
        for name, x in own.blend.items():
            found, _ = np.histogram(x.numpy(), edges)
            layer = task.layer_of(name)
            counts[layer] = counts.get(layer, np.zeros(n_bins)) + found
        clients.append(client)
        means.append(float(torch.cat([x.flatten() for x in own.blend.values()]).mean()))
    if not clients:
        return None
    layers = {layer: found / found.sum() for layer, found in counts.items()}
    return Blends(edges, layers, clients, [int(sizes[i]) for i in clients], means)


# The way of one client's model


class Way(NamedTuple):
    """Where one client's local training began and ended, round by round."""

    rounds: list[int]
    starts: list[Params]
    ends: list[Params]


def way(run: Simulation, most: int = 16) -> Way | None:
    """Replays the shown client's training from the pictures of a run, some rounds of it; None without pictures."""
    assert run.folder is not None
    found = snapshots.read(run.folder)
    rounds = [at for at in sorted(found) if at < run.round]
    rounds = [rounds[k] for k in np.unique(np.linspace(0, len(rounds) - 1, min(most, len(rounds))).astype(int))]
    out = Way([], [], [])
    for at in rounds:
        start, end = _replayed(run, at, found[at])
        if set(start) != set(run.scene.task.initial) or set(end) != set(start):
            return None  # what this method trains is not a whole model
        out.rounds.append(at)
        out.starts.append(start)
        out.ends.append(end)
    return out if len(rounds) > 1 else None


def _replayed(run: Simulation, at: int, picture: dict[str, Tensor]) -> tuple[Params, Params]:
    """The model that the shown client began the round with, and the one that it uploaded."""
    scene, client = run.scene, snapshots.shown_client(run)
    with torch.no_grad():
        template = _first(scene.method.send(scene.task, run.server, torch.tensor([client])))
    received = checkpoint.restore(template, snapshots.part(picture, "received"))
    state = checkpoint.restore(run.store.initial, snapshots.part(picture, "client"))
    shards = scene.population.shards([client], "train", "train", at)

    def train(received: Tree, state: Tree, shard: Shard) -> Tree:
        ala = worn(run, Ala)
        start = received
        if ala is not None:
            own = find(state, AlaClient)
            blend = ala.learn(scene.task, received, own, shard) if own.blend else {}
            start = ala.blended(received, own.model, blend)
        _, upload, _ = scene.method.train(scene.task, received, state, shard)
        return start, upload

    stacked = tree.map(lambda x: x[None], state)
    start, end = executor.run_group("one_by_one", train, Same(received), stacked, shards)
    return tree.row(start, 0), tree.row(end, 0)


class Paths(NamedTuple):
    """Ways of one client in the plane that holds most of them, on its loss."""

    client: int
    ways: list[np.ndarray]  # [point, 2]: start, end, start, end, ... of each way
    rounds: list[list[int]]
    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray  # [y, x]
    explained: float  # share of the variance that lies in the plane


def paths(run: Simulation, ways: list[Way]) -> Paths:
    """The plane is that of the first two principal components of all models of the ways."""
    task, client = run.scene.task, snapshots.shown_client(run)
    models = [[m for pair in zip(one.starts, one.ends, strict=True) for m in pair] for one in ways]
    flat = torch.stack([_flat(m) for one in models for m in one])
    centre = flat.mean(0)
    _, values, axes = torch.linalg.svd(flat - centre, full_matrices=False)
    places = ((flat - centre) @ axes[:2].T).numpy()
    x, y = (_around(places[:, k]) for k in (0, 1))
    rows = few_rows(task, run.scene.population.train[client], GRID * GRID)
    statistics = {name: value for name, value in models[-1][-1].items() if tree.is_statistic(name)}
    loss = np.empty((GRID, GRID))
    for i, b in enumerate(y):
        for j, a in enumerate(x):
            params = _shaped(task, centre + float(a) * axes[0] + float(b) * axes[1]) | statistics
            loss[i, j] = loss_of(run, params, rows)
    cuts = np.cumsum([len(one) for one in models])[:-1]
    share = float(values[:2].square().sum() / values.square().sum().clamp(min=1e-30))
    return Paths(client, np.split(places, cuts), [one.rounds for one in ways], x, y, loss, share)


def _around(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    room = 0.15 * max(high - low, 1e-6)
    return np.linspace(low - room, high + room, GRID)


def _flat(params: Params) -> Tensor:
    return torch.cat([x.flatten() for x in tree.trainable(params).values()])


def _shaped(task: Task, flat: Tensor) -> Params:
    out, at = {}, 0
    for name, x in tree.trainable(task.initial).items():
        out[name] = flat[at : at + x.numel()].reshape(x.shape)
        at += x.numel()
    return out


# Losses and landscapes


def few_rows(task: Task, rows: np.ndarray, n_passes: int) -> np.ndarray:
    """As many of the rows, spread evenly, as can be passed so often in reasonable time."""
    n = max(16, int(FLOPS / max(1, task.flops) / n_passes))
    return rows if len(rows) <= n else rows[np.linspace(0, len(rows) - 1, n).astype(int)]


def loss_of(run: Simulation, params: Params, rows: np.ndarray) -> float:
    """Mean loss of a model on some rows, in inference mode."""
    population, task = run.scene.population, run.scene.task
    with torch.no_grad():
        logits = task.logits(params, population.x[rows].to(task.example.dtype))
        return float(row_losses(logits, population.y[rows]).mean())


def direction(task: Task, params: Params, number: int) -> Params:
    """A random direction in which every filter is as long as the model's own; biases and norms stay."""
    out = {}
    for k, (name, x) in enumerate(params.items()):
        if x.dim() < 2 or tree.is_statistic(name) or task.is_norm(name):
            out[name] = torch.zeros_like(x)
            continue
        drawn = seeds.normal(torch.tensor(seeds.key_of("landscape", number)), x.shape, k).to(x.dtype)
        axes = tuple(range(1, x.dim()))
        own, its = (value.square().sum(axes, keepdim=True).sqrt() for value in (x, drawn))
        out[name] = drawn * own / its.clamp(min=1e-12)
    return out


class Profile(NamedTuple):
    """Loss along random directions."""

    words: str
    distance: np.ndarray
    mean: np.ndarray
    std: np.ndarray  # over directions, and over clients if there are several models


class Surface(NamedTuple):
    """Loss in the plane of two random directions."""

    words: str
    distance: np.ndarray
    loss: np.ndarray


def landscape(run: Simulation) -> tuple[list[Profile], list[Surface]]:
    """Of the model for all on everybody's training rows, and of personal models on their clients' own."""
    scene = run.scene
    wanted = []
    with torch.no_grad():
        generic = scene.method.generic(scene.task, run.server)
    if generic is not None:
        everybody = np.sort(np.concatenate(scene.population.train))
        wanted.append(("global, all rows", [(generic, everybody)]))
    shown = sorted({*_spread_evenly(run.eligible, 8), snapshots.shown_client(run)})
    own = [(run.personal_model(i), scene.population.train[i]) for i in shown]
    if all(set(model) == set(scene.task.initial) for model, _ in own):
        wanted.append((f"personal, own rows of {len(own)} clients", own))
    middle = shown.index(snapshots.shown_client(run))
    profiles = [Profile(words, *_profile(run, models)) for words, models in wanted]
    surfaces = []
    for words, models in wanted:
        one = models[middle if len(models) > 1 else 0]
        words = words if len(models) == 1 else f"personal, client {shown[middle]}"
        surfaces.append(Surface(words, *_surface(run, *one)))
    return profiles, surfaces


def _spread_evenly(ids: list[int], n: int) -> list[int]:
    return [ids[k] for k in np.unique(np.linspace(0, len(ids) - 1, min(n, len(ids))).astype(int))]


def _profile(run: Simulation, models: list[tuple[Params, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distance = np.linspace(-1, 1, 21)
    found = []
    for params, rows in models:
        some = few_rows(run.scene.task, rows, N_DIRECTIONS * len(distance) * len(models))
        for k in range(N_DIRECTIONS):
            step = direction(run.scene.task, params, k)
            found.append([loss_of(run, tree.axpy(float(t), step, params), some) for t in distance])
    return distance, np.mean(found, 0), np.std(found, 0)


def _surface(run: Simulation, params: Params, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance = np.linspace(-1, 1, GRID)
    some = few_rows(run.scene.task, rows, GRID * GRID)
    first, second = (direction(run.scene.task, params, k) for k in (0, 1))
    loss = np.empty((GRID, GRID))
    for i, b in enumerate(distance):
        row = tree.axpy(float(b), second, params)
        loss[i] = [loss_of(run, tree.axpy(float(a), first, row), some) for a in distance]
    return distance, loss


# PLGU-LF: which layers stay at home


class Kept(NamedTuple):
    layers: list[str]
    n_kept: list[int]  # by how many clients each layer is kept
    scores: list[float]  # mean over clients
    n_clients: int


def kept_layers(run: Simulation) -> Kept | None:
    """Which layers each client would keep in its next round."""
    method = worn(run, PlguLf)
    if method is None:
        return None
    names: list[str] = []
    kept, scores = [], []
    for _, received, state in each_client(run, run.eligible):
        own = find(state, PlguLfClient)
        each, layer_of = method.layer_scores(run.scene.task, own.model, received, own.rounds)
        names = list(dict.fromkeys(layer_of.values()))
        kept.append(layer_scores.most(each, method.personal).numpy())
        scores.append(each.numpy())
    n_kept = np.sum(kept, 0).astype(int).tolist()
    return Kept(names, n_kept, np.mean(scores, 0).tolist(), len(kept))


# Fed-RoD: two heads


class Heads(NamedTuple):
    """Accuracy on every client's test rows."""

    clients: list[int]
    sizes: list[int]
    server: list[float]  # the server's model
    generic: list[float]  # the client's model with the generic head alone
    personal: list[float]  # with the personal head added


def heads(run: Simulation) -> Heads | None:
    method = worn(run, FedRoD)
    if method is None:
        return None
    scene, out = run.scene, Heads([], [], [], [], [])
    with torch.no_grad():
        whole = scene.method.generic(scene.task, run.server)
    assert whole is not None
    for client, received, state in each_client(run, run.scored):
        own = find(state, FedRoDClient)
        base = own.model if method.pm_base == "local" else method.shared(scene.task, received)
        both = method.with_head(scene.task, base, own.head["weight"])
        rows = scene.population.test[client]
        out.clients.append(client)
        out.sizes.append(len(scene.population.train[client]))
        out.server.append(_accuracy(scene, whole, rows))
        out.generic.append(_accuracy(scene, base, rows))
        out.personal.append(_accuracy(scene, both, rows))
    return out


def _accuracy(scene: Scene, params: Params, rows: np.ndarray) -> float:
    with torch.no_grad():
        logits = scene.task.logits(params, scene.population.x[rows].to(scene.task.example.dtype))
    return float((logits.argmax(-1) == scene.population.y[rows]).float().mean())
