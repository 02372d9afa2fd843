"""Inside pFedLA and HeurpFedLA: who listens to whom, layer by layer, over the rounds."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from plures.report.figure import Choice
from plures.report.insides.base import Opened, Picture
from plures.report.insides.lookup import spread_evenly
from plures.report.looks import SIDES, SOFT, colour, dash, marker
from plures.report.matplotlib_kit import add_legend, colour_map, line_style, new_figure, symbol_of
from plures.report.numbers import MOST_CLIENTS
from plures.report.plotly_kit import bar_above, base_figure, colour_scale, shorten, shorten_rows
from plures.runs import snapshots
from plures.runs.state import RunState

MOST_CELLS = 300_000  # of all heat maps of one figure


class Alpha(NamedTuple):
    """The weights between clients."""

    rounds: list[int]
    layers: dict[str, np.ndarray]  # [round, receiver, client]

    @property
    def n_clients(self) -> int:
        return int(next(iter(self.layers.values())).shape[1])

    def own(self, layer: str) -> np.ndarray:
        """[round]: how much a client takes from itself, mean over clients."""
        return self.layers[layer].diagonal(axis1=1, axis2=2).mean(1)

    def from_mean(self, layer: str) -> tuple[np.ndarray, float]:
        """[round, receiver, client]: how much more than the plain mean, in percent; and the most of it."""
        found = 100 * (self.n_clients * self.layers[layer] - 1)
        return found, max(1e-3, float(np.abs(found).max()))


def collect_alpha(state: RunState) -> Alpha | None:
    """The weights of every layer between clients, over the rounds that have snapshots, and at the end."""
    assert state.folder is not None
    with torch.no_grad():
        last = state.scene.method.snapshot(state.scene.task, state.server)
    seen = {at: snapshots.below(found, "method") for at, found in snapshots.read(state.folder).items()}
    seen[state.round] = last
    names = [name for name in last if name.startswith("alpha/")]
    if not names:
        return None
    rounds = [at for at in sorted(seen) if set(names) <= set(seen[at])]
    n = min(MOST_CLIENTS, len(last[names[0]]))
    layers = {
        name.removeprefix("alpha/"): np.stack([seen[at][name][:n, :n].numpy() for at in rounds]) for name in names
    }
    return Alpha(rounds, layers)


def pictures(opened: Opened) -> list[Picture]:
    """Maps of the weights between clients, and how much clients listen to themselves."""
    found = collect_alpha(opened.simulation.state)
    if found is None:
        return []
    layers = list(found.layers)
    room = max(2, MOST_CELLS // (len(layers) * found.n_clients**2))
    shown = spread_evenly(len(found.rounds), room)
    at_end = ", ".join(f"{layer} {found.own(layer)[-1]:.4f} at the end" for layer in layers)
    return [
        Picture(
            "alpha",
            "Who listens to whom, layer by layer",
            "Each row says of which clients a client's mixture is made. Where all cells are pale it is the plain mean; "
            "blue cells give more, orange ones less. A blue diagonal: clients go their own way. The slider moves over "
            "the rounds.",
            f"Heat maps of the weights between {found.n_clients} clients for the layers {', '.join(layers)}.",
            draw_for_page=partial(draw_maps, found, shown),
            choices=(
                Choice("layer", "buttons" if len(layers) <= 4 else "list", [(layer, layer) for layer in layers]),
                Choice("round", "slider", [(str(found.rounds[k]), str(found.rounds[k])) for k in shown]),
            ),
            draw_for_paper=partial(print_maps, found),
        ),
        Picture(
            "alpha-own",
            "How much a client listens to itself",
            "The diagonal of the maps above, mean over clients. A layer whose line rises becomes more personal.",
            f"Weight of a client on its own layer: {at_end}.",
            draw_for_page=partial(draw_own, found),
            draw_for_paper=partial(print_own, found),
        ),
    ]


def draw_maps(found: Alpha, shown: list[int]) -> dict[str, Any]:
    """A map for each layer and for each of the shown rounds."""
    views = {}
    gap = 1 if found.n_clients <= 40 else 0
    for layer in found.layers:
        from_mean, most = found.from_mean(layer)
        figure = base_figure(500, xaxis_title_text="whose layer it is", yaxis_title_text="who receives")
        figure.add_heatmap(
            colorscale=colour_scale(SIDES),
            zmin=-most,
            zmax=most,
            xgap=gap,
            ygap=gap,
            colorbar={**bar_above("more or less than the plain mean, %"), "nticks": 5},
            hovertemplate="client %{y} takes %{customdata:.4f} from client %{x}<br>"
            "%{z:+.3g} % of the plain mean<extra></extra>",
        )
        figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain", scaleanchor="x")
        figure.update_xaxes(showgrid=False, constrain="domain")
        same = figure.to_plotly_json()
        for k in shown:
            cells = {"z": shorten_rows(from_mean[k]), "customdata": shorten_rows(found.layers[layer][k])}
            views[f"{layer}|{found.rounds[k]}"] = {**same, "data": [same["data"][0] | cells]}
    return views


def draw_own(found: Alpha) -> Any:
    """A line for each layer."""
    figure = base_figure(360, xaxis_title_text="round", yaxis_title_text="weight on oneself", showlegend=True)
    for look, layer in enumerate(found.layers):
        figure.add_scatter(
            x=found.rounds,
            y=shorten(found.own(layer)),
            name=layer,
            mode="lines+markers",
            line={"color": colour(look), "dash": dash(look)},
            marker={"symbol": marker(look), "size": 7},
            hovertemplate=f"{layer}, round %{{x}}: %{{y:.4f}}<extra></extra>",
        )
    mean = 1 / found.n_clients
    figure.add_hline(y=mean, line={"color": SOFT, "dash": "dash", "width": 1})
    place = {"x": 1, "xref": "paper", "xanchor": "right", "y": mean, "yanchor": "top"}
    figure.add_annotation(text="plain mean", showarrow=False, font={"color": SOFT}, **place)
    return figure


def print_maps(found: Alpha) -> Any:
    """One row for each layer, from the first over the middle to the last round."""
    at = sorted({0, len(found.rounds) // 2, len(found.rounds) - 1})
    n = len(found.layers)
    figure, axes = new_figure(2.2 * len(at) + 0.6, 2.1 * n + 0.3, nrows=n, ncols=len(at), squeeze=False)
    for row, layer in zip(axes, found.layers, strict=True):
        from_mean, most = found.from_mean(layer)
        for place, k in zip(row, at, strict=True):
            shown = place.imshow(from_mean[k], cmap=colour_map(SIDES), vmin=-most, vmax=most, interpolation="nearest")
            place.set_title(f"{layer}, round {found.rounds[k]}", fontsize=8)
        figure.colorbar(shown, ax=row, shrink=0.8).set_label("from the mean, %", size=7)
    figure.supxlabel("whose layer it is", fontsize=9)
    figure.supylabel("who receives", fontsize=9)
    return figure


def print_own(found: Alpha) -> Any:
    figure, axes = new_figure(5.2, 2.8)
    for look, layer in enumerate(found.layers):
        axes.plot(found.rounds, found.own(layer), ms=4, lw=1.3, label=layer, marker=symbol_of(look), **line_style(look))
    axes.axhline(1 / found.n_clients, color=SOFT, ls="--", lw=0.8)
    axes.ticklabel_format(useOffset=False)
    axes.set(xlabel="round", ylabel="weight on oneself")
    add_legend(figure, axes)
    return figure
