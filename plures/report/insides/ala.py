"""Inside ALA: how much of the received model clients take, and the way of one client's model."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data.shard import Shard
from plures.errors import RunFailed
from plures.learn.task import Task
from plures.methods.addons.ala import Ala, AlaClient
from plures.methods.messages import Same, one_of
from plures.report.insides.base import Opened, Picture
from plures.report.insides.landscape import make_side, measure_plane
from plures.report.insides.lookup import each_client, find_layer, find_part, spread_evenly
from plures.report.looks import GROUND, INK, PAPER, colour, dash, marker
from plures.report.matplotlib_kit import add_legend, colour_map, line_style, new_figure, symbol_of
from plures.report.plotly_kit import bar_above, base_figure, colour_scale, shorten, shorten_rows, to_percents
from plures.runs import checkpoint, snapshots
from plures.runs.state import RunState
from plures.simulate.stacking import as_stack, run_group
from plures.tree import Params, Tree

N_BINS = 20  # of blends
MOST_ROUNDS = 16  # of a way


def pictures(opened: Opened) -> list[Picture]:
    """The learned blends, and the way of one client with FedAvg's beside it, if that is among the runs."""
    blends = collect_blends(opened.simulation.state)
    shown = [] if blends is None else show_blends(blends)
    return [*shown, *show_ways(opened)]


# Blends


class Blends(NamedTuple):
    edges: np.ndarray  # of the bins
    layers: dict[str, np.ndarray]  # [bin]: share of all clients' weights of that layer
    clients: list[int]
    sizes: list[int]
    means: list[float]  # of each client over its weights


def collect_blends(state: RunState) -> Blends | None:
    """The learned blend of every client that has learned one."""
    edges = np.linspace(0, 1, N_BINS + 1)
    counts: dict[str, np.ndarray] = {}
    clients, means = [], []
    for client, _, kept in each_client(state, state.eligible):
        own = find_part(kept, AlaClient)
        if own is None or int(own.rounds) < 2 or not own.blend:  # in its first round it has nothing to blend with
            continue
        for name, x in own.blend.items():
            found, _ = np.histogram(x.numpy(), edges)
            layer = state.scene.task.layer_of(name)
            counts[layer] = counts.get(layer, np.zeros(N_BINS)) + found
        clients.append(client)
        means.append(float(torch.cat([x.flatten() for x in own.blend.values()]).mean()))
    if not clients:
        return None
    layers = {layer: found / found.sum() for layer, found in counts.items()}
    return Blends(edges, layers, clients, [int(state.sizes[i]) for i in clients], means)


def show_blends(found: Blends) -> list[Picture]:
    taken, left = (100 * np.mean([share[k] for share in found.layers.values()]) for k in (-1, 0))
    return [
        Picture(
            "blend",
            "How much clients take of what they receive",
            "The learned blend of the upper layers, over all weights of all clients. Most weights are taken as "
            "received or kept as they are; those in between are truly mixed.",
            f"{taken:.0f} % of weights are taken as received, {left:.0f} % are kept.",
            draw_for_page=partial(draw_blends, found),
            draw_for_paper=partial(print_blends, found),
        ),
        Picture(
            "blend-clients",
            "Who takes more",
            "The mean blend of each client, beside its number of rows.",
            f"Mean blends of {len(found.means)} clients, from {min(found.means):.2f} to {max(found.means):.2f}.",
            draw_for_page=partial(draw_means, found),
        ),
    ]


def draw_blends(found: Blends) -> Any:
    """Bars for each layer."""
    middle = (found.edges[:-1] + found.edges[1:]) / 2
    figure = base_figure(360, xaxis_title_text="blend, from 0 (own) to 1 (received)", bargap=0.06)
    figure.update_layout(yaxis_title_text="share of weights, %", showlegend=len(found.layers) > 1, barmode="group")
    for look, (layer, share) in enumerate(found.layers.items()):
        figure.add_bar(
            x=shorten(middle),
            y=to_percents(share),
            name=layer,
            marker={"color": colour(look), "pattern": {"shape": ("", "/", ".", "x")[look % 4]}},
            hovertemplate=f"{layer}, about %{{x:.2f}}: %{{y:.1f}} % of weights<extra></extra>",
        )
    return figure


def draw_means(found: Blends) -> Any:
    """A dot for each client."""
    figure = base_figure(360, xaxis_title_text="training rows of the client", yaxis_title_text="mean blend")
    figure.add_scatter(
        x=found.sizes,
        y=shorten(found.means),
        customdata=found.clients,
        mode="markers",
        marker={"size": 10, "color": colour(0), "line": {"color": INK, "width": 1}},
        hovertemplate="client %{customdata}, %{x} rows: %{y:.3f}<extra></extra>",
    )
    figure.update_yaxes(range=[-0.02, 1.04])
    return figure


def print_blends(found: Blends) -> Any:
    """Bars for each layer, and a dot for each client."""
    figure, (bars, dots) = new_figure(7, 2.8, ncols=2)
    width = (found.edges[1] - found.edges[0]) / len(found.layers)
    for look, (layer, share) in enumerate(found.layers.items()):
        style = {"color": colour(look), "hatch": ("", "//", "..", "xx")[look % 4]}
        bars.bar(found.edges[:-1] + look * width, 100 * share, width, align="edge", label=layer, **style)
    bars.set(xlabel="blend, from 0 (own) to 1 (received)", ylabel="share of weights, %")
    dots.plot(found.sizes, found.means, "o", color=colour(0), ms=4)
    dots.set(xlabel="training rows of the client", ylabel="mean blend", ylim=(-0.02, 1.04))
    add_legend(figure, bars)
    return figure


# The way of one client's model


class Way(NamedTuple):
    """Where one client's local training started and ended, round by round."""

    rounds: list[int]
    starts: list[Params]
    ends: list[Params]


def replay_way(state: RunState) -> Way | None:
    """The shown client's training again, from the snapshots of a run, some rounds of it; None without snapshots."""
    assert state.folder is not None
    found = snapshots.read(state.folder)
    rounds = [at for at in sorted(found) if at < state.round]
    rounds = [rounds[k] for k in spread_evenly(len(rounds), MOST_ROUNDS)]
    way = Way([], [], [])
    for at in rounds:
        try:
            start, end = _replay_round(state, at, found[at])
        except RunFailed:
            return None  # its snapshots are from another version
        if set(start) != set(state.scene.task.initial) or set(end) != set(start):
            return None  # what this method trains is not a whole model
        way.rounds.append(at)
        way.starts.append(start)
        way.ends.append(end)
    return way if len(rounds) > 1 else None


def _replay_round(state: RunState, at: int, snapshot: dict[str, Tensor]) -> tuple[Params, Params]:
    """The model that the shown client started the round with, and the one that it uploaded."""
    scene, client = state.scene, snapshots.shown_client(state)
    with torch.no_grad():
        template = one_of(scene.method.send(scene.task, state.server, torch.tensor([client])), 0)
    received = checkpoint.restore(template, snapshots.below(snapshot, "received"))
    kept = checkpoint.restore(state.store.initial, snapshots.below(snapshot, "client"))
    shards = scene.population.shards([client], "train", "train", at)
    ala = find_layer(scene.method, Ala)

    def train(received: Tree, kept: Tree, shard: Shard) -> Tree:
        start = received
        own = find_part(kept, AlaClient)
        if ala is not None and own is not None:
            blend = ala.learn_blend(scene.task, received, own, shard) if own.blend else {}
            start = ala.blend_models(received, own.model, blend)
        _, upload, _ = scene.method.train(scene.task, received, kept, shard)
        return start, upload

    start, end = run_group("one_by_one", train, Same(received), as_stack(kept), shards)
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


def project_ways(state: RunState, ways: list[Way]) -> Paths:
    """The plane is that of the first two principal components of all models of the ways."""
    scene, client = state.scene, snapshots.shown_client(state)
    models = [[m for pair in zip(one.starts, one.ends, strict=True) for m in pair] for one in ways]
    flat = torch.stack([flatten_weights(m) for one in models for m in one])
    centre = flat.mean(0)
    _, values, axes = torch.linalg.svd(flat - centre, full_matrices=False)
    places = ((flat - centre) @ axes[:2].T).numpy()
    statistics = {name: value for name, value in models[-1][-1].items() if tree.is_statistic(name)}

    def model_at(a: float, b: float) -> Params:
        return _shape_weights(scene.task, centre + a * axes[0] + b * axes[1]) | statistics

    x, y = (_make_side_around(places[:, k]) for k in (0, 1))
    loss = measure_plane(scene, scene.population.train[client], x, y, model_at)
    cuts = np.cumsum([len(one) for one in models])[:-1]
    share = float(values[:2].square().sum() / values.square().sum().clamp(min=1e-30))
    return Paths(client, np.split(places, cuts), [one.rounds for one in ways], x, y, loss, share)


def _make_side_around(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    room = 0.15 * max(high - low, 1e-6)
    return make_side(low - room, high + room)


def flatten_weights(params: Params) -> Tensor:
    """The weights of a model in one row."""
    return torch.cat([x.flatten() for x in tree.trainable(params).values()])


def _shape_weights(task: Task, flat: Tensor) -> Params:
    """The weights of a model from one row of them."""
    out, at = {}, 0
    for name, x in tree.trainable(task.initial).items():
        out[name] = flat[at : at + x.numel()].reshape(x.shape)
        at += x.numel()
    return out


def show_ways(opened: Opened) -> list[Picture]:
    """The way of the shown client under ALA, and under FedAvg where it is among the runs."""
    own = replay_way(opened.simulation.state)
    if own is None:
        return []
    ways, of = [own], [opened]
    without = None if opened.fedavg is None else replay_way(opened.fedavg.simulation.state)
    if opened.fedavg is not None and without is not None:
        ways.append(without)
        of.append(opened.fedavg)
    found = project_ways(opened.simulation.state, ways)
    labels, looks = [one.label for one in of], [one.look for one in of]
    told = (
        "Without ALA every aggregation throws the client back; with it the client starts near where it wants to be. "
        if len(ways) > 1
        else ""
    )
    picture = Picture(
        "path",
        f"The way of client {found.client}'s model",
        f"Filled marks are where local training starts, open ones where it ends. {told}The ground is the client's own "
        f"training loss (its scale is above it). The plane holds {100 * found.explained:.0f} % of all movement.",
        f"Paths of {' and '.join(labels)} for client {found.client} on its loss surface.",
        draw_for_page=partial(draw_paths, found, labels, looks),
        draw_for_paper=partial(print_paths, found, labels, looks),
    )
    return [picture]


def draw_paths(found: Paths, labels: list[str], looks: list[int]) -> Any:
    """A line for each way, on the client's loss."""
    names = {"xaxis_title_text": "first principal direction", "yaxis_title_text": "second principal direction"}
    figure = base_figure(480, showlegend=True, **names)
    figure.add_contour(
        x=shorten(found.x),
        y=shorten(found.y),
        z=shorten_rows(np.log10(found.loss)),
        customdata=found.loss.tolist(),
        colorscale=colour_scale(GROUND),
        contours={"showlines": False},
        ncontours=24,
        colorbar={**bar_above("loss of the client"), **_log_ticks(found.loss)},
        hovertemplate="loss %{customdata:.3f}<extra></extra>",
        name="loss",
        showlegend=False,
    )
    for places, rounds, label, look in zip(found.ways, found.rounds, labels, looks, strict=True):
        when = [f"round {at + 1}, {what}" for at in rounds for what in ("start", "after training")]
        figure.add_scatter(
            x=shorten(places[:, 0]),
            y=shorten(places[:, 1]),
            text=when,
            name=label,
            mode="lines+markers",
            line={"color": colour(look), "dash": dash(look), "width": 2.4},
            marker={
                "symbol": [marker(look), f"{marker(look)}-open"] * len(rounds),
                "size": 9,
                "color": colour(look),
                "line": {"width": 2, "color": colour(look)},
            },
            hovertemplate=f"<b>{label}</b><br>%{{text}}<extra></extra>",
        )
    x, y = (float(found.ways[0][0, k]) for k in (0, 1))
    arrow = {"arrowcolor": INK, "bgcolor": PAPER, "ax": 14, "ay": 34}
    figure.add_annotation(text="common start", x=x, y=y, xanchor="left", **arrow)
    return figure


def _log_ticks(loss: np.ndarray) -> dict[str, Any]:
    low, high = float(np.log10(loss.min())), float(np.log10(loss.max()))
    at = np.linspace(low, high, 4)
    return {"tickvals": shorten(at), "ticktext": [f"{10**x:.2g}" for x in at]}


def print_paths(found: Paths, labels: list[str], looks: list[int]) -> Any:
    figure, axes = new_figure(5.2, 4)
    ground = axes.contourf(found.x, found.y, np.log10(found.loss), levels=20, cmap=colour_map(GROUND))
    for places, label, look in zip(found.ways, labels, looks, strict=True):
        symbol = symbol_of(look)
        axes.plot(places[:, 0], places[:, 1], lw=1.2, label=label, marker=symbol, ms=0, **line_style(look))
        axes.plot(places[::2, 0], places[::2, 1], symbol, ms=4.5, color=colour(look))
        axes.plot(places[1::2, 0], places[1::2, 1], symbol, ms=4.5, mfc="none", color=colour(look))
    axes.set(xlabel="first principal direction", ylabel="second principal direction")
    axes.set_title(f"client {found.client}", fontsize=9)
    figure.colorbar(ground, ax=axes, label="log10 of the client's loss")
    add_legend(figure, axes)
    return figure
