"""Inside Fed-RoD: the generic and the personal head, on every client's test rows."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from plures import tree
from plures.methods.fedrod import FedRoD, FedRoDClient, generate_head, is_hyper
from plures.report.insides.base import Opened, Picture
from plures.report.insides.lookup import each_client, find_generic, find_layer, find_part, predict
from plures.report.looks import GRID, colour
from plures.report.matplotlib_kit import add_legend, new_figure
from plures.report.plotly_kit import base_figure, to_percents
from plures.runs.scene import Scene
from plures.runs.state import RunState
from plures.tree import Params


class Heads(NamedTuple):
    """Accuracy on every client's test rows."""

    clients: list[int]
    sizes: list[int]
    server: list[float]  # the server's model
    generic: list[float]  # the client's model with the generic head alone
    personal: list[float]  # with the personal head added

    def by_gain(self) -> list[int]:
        """Places of the clients, those that gain least by their personal heads first."""
        return sorted(range(len(self.clients)), key=lambda k: self.personal[k] - self.server[k])

    def names(self) -> list[str]:
        """Clients with their numbers of rows, in the order of their gains."""
        return [f"{self.clients[k]} ({self.sizes[k]})" for k in self.by_gain()]


def score_heads(state: RunState) -> Heads | None:
    """Every client's accuracy with and without its personal head."""
    method, whole = find_layer(state.scene.method, FedRoD), find_generic(state)
    if method is None or whole is None:
        return None
    scene, out = state.scene, Heads([], [], [], [], [])
    for client, received, kept in each_client(state, state.scored):
        own = find_part(kept, FedRoDClient)
        assert own is not None
        base = own.model if method.pm_base == "local" else method.shared(scene.task, received)
        counts = scene.population.shards([client], "train", "personalize", state.round).counts[0]
        is_generated = method.pm_base == "generated"
        weight = generate_head(tree.keep(received, is_hyper), counts) if is_generated else own.head["weight"]
        both = method.with_head(scene.task, base, weight)
        rows = scene.population.test[client]
        out.clients.append(client)
        out.sizes.append(len(scene.population.train[client]))
        out.server.append(_score(scene, whole, rows))
        out.generic.append(_score(scene, base, rows))
        out.personal.append(_score(scene, both, rows))
    return out


def _score(scene: Scene, params: Params, rows: np.ndarray) -> float:
    """The accuracy of a model on some rows."""
    return float((predict(scene, params, rows).argmax(-1) == scene.population.y[rows]).float().mean())


def pictures(opened: Opened) -> list[Picture]:
    """The two heads of every client."""
    found = score_heads(opened.simulation.state)
    if found is None:
        return []
    better = sum(p > g for p, g in zip(found.personal, found.server, strict=True))
    picture = Picture(
        "heads",
        "Two heads on one body",
        "For each client: the server's model with the generic head, the client's model with the generic head alone, "
        "and with its personal head added. The longer the grey line, the more the client gains.",
        f"The personal head beats the server's model for {better} of {len(found.clients)} clients.",
        draw_for_page=partial(draw_heads, found),
        draw_for_paper=partial(print_heads, found),
    )
    return [picture]


def draw_heads(found: Heads) -> Any:
    """One row for each client."""
    order, names = found.by_gain(), found.names()
    figure = base_figure(
        min(1000, max(320, 120 + 19 * len(order))), xaxis_title_text="accuracy on the client's test rows, %"
    )
    figure.update_layout(showlegend=True, yaxis_title_text="client (training rows)")
    for row, k in enumerate(order):
        ends = {"x0": 100 * found.server[k], "x1": 100 * found.personal[k], "y0": row, "y1": row}
        figure.add_shape(type="line", line={"color": GRID, "width": 4}, layer="below", **ends)
    series = [
        ("server's model, generic head", found.server, "circle", colour(0)),
        ("own model, generic head", found.generic, "diamond-open", colour(2)),
        ("own model, personal head added", found.personal, "square", colour(1)),
    ]
    for words, values, symbol, shade in series:
        figure.add_scatter(
            x=to_percents([values[k] for k in order]),
            y=list(range(len(order))),
            text=names,
            name=words,
            mode="markers",
            marker={"symbol": symbol, "size": 10, "color": shade, "line": {"color": shade, "width": 2}},
            hovertemplate=f"client %{{text}}<br>{words}: %{{x:.1f}} %<extra></extra>",
        )
    every = -(-len(order) // 40)
    figure.update_yaxes(tickvals=list(range(0, len(order), every)), ticktext=names[::every], showgrid=False)
    figure.update_layout(legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0})
    return figure


def print_heads(found: Heads) -> Any:
    """One row for each client."""
    order = found.by_gain()
    figure, axes = new_figure(5.2, min(9, 1.4 + 0.16 * len(order)))
    server, generic, personal = (100 * np.array(one)[order] for one in (found.server, found.generic, found.personal))
    height = np.arange(len(order))
    axes.hlines(height, server, personal, color="#cccccc", lw=2)
    for words, values, symbol, fill, edge in (
        ("server's model, generic head", server, "o", colour(0), colour(0)),
        ("own model, generic head", generic, "D", "none", colour(2)),
        ("own model, personal head added", personal, "s", colour(1), colour(1)),
    ):
        axes.plot(values, height, symbol, mfc=fill, mec=edge, ms=4.5, label=words)
    axes.set_yticks(height, found.names(), fontsize=6)
    axes.set(xlabel="accuracy on the client's test rows, %", ylabel="client (training rows)")
    add_legend(figure, axes, columns=1)
    return figure
