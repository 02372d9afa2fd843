"""Inside PLGU-LF: how steep the loss is around shared and personal models, and which layers stay at home."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from plures import tree
from plures.methods.ingredients import layer_scores
from plures.methods.plgu_lf import PlguLf, PlguLfClient
from plures.report.figure import Choice
from plures.report.insides.base import Opened, Picture
from plures.report.insides.landscape import few_rows, make_direction, make_side, measure_loss, measure_plane
from plures.report.insides.lookup import each_client, find_generic, find_layer, find_part, spread_evenly
from plures.report.looks import BAND, GRID, SHADES, WARN, colour, dash, see_through
from plures.report.matplotlib_kit import add_legend, colour_map, line_style, new_figure
from plures.report.plotly_kit import SCALE, bar_above, base_figure, shorten, shorten_rows
from plures.runs import snapshots
from plures.runs.scene import Scene
from plures.runs.simulation import Simulation
from plures.runs.state import RunState
from plures.tree import Params

N_DIRECTIONS = 5  # random ones, of a profile
N_CLIENTS = 8  # whose personal models are in a profile


def pictures(opened: Opened) -> list[Picture]:
    """The valleys around models, with that of FedAvg's model if it is among the runs; and the layers that stay."""
    profiles, surfaces = measure_landscape(opened.simulation)
    named = [(opened.label, one) for one in profiles]
    if opened.fedavg is not None:
        named += [(opened.fedavg.label, one) for one in measure_landscape(opened.fedavg.simulation)[0][:1]]
    out = [show_profiles(named)] if named else []
    if surfaces:
        out.append(show_surfaces(opened.label, surfaces))
    kept = count_kept(opened.simulation.state)
    return out if kept is None else [*out, show_kept(kept)]


# Landscapes


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


def measure_landscape(simulation: Simulation) -> tuple[list[Profile], list[Surface]]:
    """Of the model for all on everybody's training rows, and of personal models on their clients' own."""
    state, scene = simulation.state, simulation.state.scene
    wanted = []
    generic = find_generic(state)
    if generic is not None:
        everybody = np.sort(np.concatenate(scene.population.train))
        wanted.append(("global, all rows", [(generic, everybody)]))
    some = [state.eligible[k] for k in spread_evenly(len(state.eligible), N_CLIENTS)]
    shown = sorted({*some, snapshots.shown_client(state)})
    own = [(simulation.personal_model(i), scene.population.train[i]) for i in shown]
    if all(set(model) == set(scene.task.initial) for model, _ in own):
        wanted.append((f"personal, own rows of {len(own)} clients", own))
    middle = shown.index(snapshots.shown_client(state))
    profiles = [Profile(words, *_measure_profile(scene, models)) for words, models in wanted]
    surfaces = []
    for words, models in wanted:
        one = models[middle if len(models) > 1 else 0]
        words = words if len(models) == 1 else f"personal, client {shown[middle]}"
        surfaces.append(Surface(words, *_measure_surface(scene, *one)))
    return profiles, surfaces


def _measure_profile(
    scene: Scene, models: list[tuple[Params, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distances, and the mean and standard deviation of the loss at each."""
    distance = np.linspace(-1, 1, 21)
    found = []
    for params, rows in models:
        some = few_rows(scene.task, rows, N_DIRECTIONS * len(distance) * len(models))
        for k in range(N_DIRECTIONS):
            step = make_direction(scene.task, params, k)
            found.append([measure_loss(scene, tree.axpy(float(t), step, params), some) for t in distance])
    return distance, np.mean(found, 0), np.std(found, 0)


def _measure_surface(scene: Scene, params: Params, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances, and the loss at each pair of them."""
    first, second = (make_direction(scene.task, params, k) for k in (0, 1))

    def model_at(a: float, b: float) -> Params:
        moved: Params = tree.axpy(a, first, tree.axpy(b, second, params))
        return moved

    side = make_side(-1, 1)
    return side, measure_plane(scene, rows, side, side, model_at)


def show_profiles(found: list[tuple[str, Profile]]) -> Picture:
    ends = "; ".join(
        f"{label}: {one.words} {one.mean[len(one.mean) // 2]:.2f} to {one.mean[-1]:.2f}" for label, one in found
    )
    return Picture(
        "profile",
        "How steep the valley is",
        "The loss while all weights move along a random direction, each filter by its own length. A flat line "
        "means a model that bears change, as the paper wants it for the shared model. Bands: over directions and "
        "clients.",
        f"Loss at the model and one length away. {ends}.",
        draw_for_page=partial(draw_profiles, found),
        draw_for_paper=partial(print_profiles, found),
        file="landscape",
    )


def draw_profiles(found: list[tuple[str, Profile]]) -> Any:
    """A line with a band for each model."""
    names = {"xaxis_title_text": "distance along a random direction", "yaxis_title_text": "loss"}
    figure = base_figure(400, showlegend=True, **names)
    for look, (label, one) in enumerate(found):
        words = f"{label}: {one.words}"
        low, high = one.mean - one.std, one.mean + one.std
        figure.add_scatter(
            x=shorten([*one.distance, *one.distance[::-1]]),
            y=shorten([*high, *low[::-1]]),
            fill="toself",
            fillcolor=see_through(colour(look), BAND),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=words,
        )
        figure.add_scatter(
            x=shorten(one.distance),
            y=shorten(one.mean),
            name=words,
            legendgroup=words,
            mode="lines",
            line={"color": colour(look), "dash": dash(look), "width": 2.4},
            hovertemplate=f"{words}<br>at %{{x:.1f}}: %{{y:.3f}}<extra></extra>",
        )
    figure.update_layout(legend={"orientation": "v", "y": -0.2, "yanchor": "top", "x": 0})
    return figure


def print_profiles(found: list[tuple[str, Profile]]) -> Any:
    """A line with a band for each model."""
    figure, axes = new_figure(5.2, 3.6)
    for look, (label, one) in enumerate(found):
        axes.plot(one.distance, one.mean, lw=1.4, label=f"{label}: {one.words}", **line_style(look))
        axes.fill_between(one.distance, one.mean - one.std, one.mean + one.std, color=colour(look), alpha=BAND, lw=0)
    axes.set(xlabel="distance along a random direction", ylabel="loss", ylim=(0, None))
    add_legend(figure, axes, columns=1)
    return figure


def show_surfaces(label: str, found: list[Surface]) -> Picture:
    return Picture(
        "surface",
        "The valley from above",
        "The same with two random directions; the cross is the model itself.",
        "Contours of the loss around a model.",
        draw_for_page=partial(draw_surfaces, found),
        choices=(Choice("model", "list", [(str(k), f"{label}: {one.words}") for k, one in enumerate(found)]),),
        draw_for_paper=partial(print_surfaces, found),
    )


def draw_surfaces(found: list[Surface]) -> dict[str, Any]:
    """A map for each model."""
    views = {}
    for k, one in enumerate(found):
        figure = base_figure(480, xaxis_title_text="first random direction", yaxis_title_text="second random direction")
        figure.add_contour(
            x=shorten(one.distance),
            y=shorten(one.distance),
            z=shorten_rows(one.loss),
            colorscale=SCALE,
            ncontours=18,
            contours={"showlines": True},
            line={"color": GRID, "width": 0.6},
            colorbar=bar_above("loss"),
            hovertemplate="loss %{z:.3f}<extra></extra>",
        )
        cross = {"symbol": "x", "size": 11, "color": WARN}
        words = "the model itself<extra></extra>"
        figure.add_scatter(x=[0], y=[0], mode="markers", marker=cross, hovertemplate=words)
        figure.update_yaxes(constrain="domain")
        views[str(k)] = figure
    return views


def print_surfaces(found: list[Surface]) -> Any:
    """A map for each model."""
    figure, axes = new_figure(3.6 * len(found), 3.1, ncols=len(found), squeeze=False)
    for place, one in zip(axes.ravel(), found, strict=True):
        ground = place.contourf(one.distance, one.distance, one.loss, levels=18, cmap=colour_map(SHADES))
        place.plot([0], [0], "X", color=WARN)
        place.set_title(one.words, fontsize=8)
        place.set(xlabel="first random direction", ylabel="second random direction", aspect="equal")
        figure.colorbar(ground, ax=place, label="loss")
    return figure


# Which layers stay at home


class Kept(NamedTuple):
    layers: list[str]
    n_kept: list[int]  # by how many clients each layer is kept
    scores: list[float]  # mean over clients
    n_clients: int


def count_kept(state: RunState) -> Kept | None:
    """Which layers each client would keep in its next round."""
    method = find_layer(state.scene.method, PlguLf)
    if method is None:
        return None
    names: list[str] = []
    kept, scores = [], []
    for _, received, client in each_client(state, state.eligible):
        own = find_part(client, PlguLfClient)
        assert own is not None
        each, layer_of = method.layer_scores(state.scene.task, own.model, received, own.rounds)
        names = list(dict.fromkeys(layer_of.values()))
        kept.append(layer_scores.mark_highest(each, method.personal).numpy())
        scores.append(each.numpy())
    n_kept = np.sum(kept, 0).astype(int).tolist()
    return Kept(names, n_kept, np.mean(scores, 0).tolist(), len(kept))


def show_kept(found: Kept) -> Picture:
    words = ", ".join(f"{layer} {n}" for layer, n in zip(found.layers, found.n_kept, strict=True))
    return Picture(
        "kept",
        "Which layers stay at home",
        f"Of {found.n_clients} clients, how many would keep each layer personal in the next round: those that differ "
        "most from the shared model. Layers are listed from the input to the head.",
        f"Clients that keep each layer: {words}.",
        draw_for_page=partial(draw_kept, found),
        draw_for_paper=partial(print_kept, found),
    )


def draw_kept(found: Kept) -> Any:
    """A bar for each layer."""
    figure = base_figure(120 + 44 * len(found.layers), xaxis_title_text="clients that keep the layer at home")
    figure.add_bar(
        x=found.n_kept,
        y=found.layers,
        orientation="h",
        customdata=shorten(found.scores),
        marker={"color": colour(0)},
        text=[f" {n} " for n in found.n_kept],
        textposition="auto",
        hovertemplate=f"%{{y}}: %{{x}} of {found.n_clients} clients<br>mean score %{{customdata:.3f}}<extra></extra>",
    )
    figure.update_xaxes(range=[0, found.n_clients * 1.04])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def print_kept(found: Kept) -> Any:
    """A bar for each layer."""
    figure, axes = new_figure(5.2, 1.0 + 0.32 * len(found.layers))
    axes.barh(found.layers, found.n_kept, color=colour(0))
    axes.invert_yaxis()
    axes.set(xlabel="clients that keep the layer at home", xlim=(0, found.n_clients))
    return figure
