"""Figures for the page, drawn with plotly. A figure has one view for each of the reader's choices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from . import numbers
from .looks import BAND, GRID, GROUND, INK, PAPER, SHADES, SIDES, SOFT, WARN, colour, dash, marker, see_through
from .numbers import Against, Level, Spread
from .runs import Group
from .states import Alpha, Blends, Heads, Kept, Paths, Profile, SplitTable, Surface


def _scale(shades: Sequence[str]) -> list[list[Any]]:
    return [[k / (len(shades) - 1), shade] for k, shade in enumerate(shades)]


SCALE = _scale(SHADES)
MOST_CELLS = 300_000  # of all heat maps of one figure


View = dict[str, Any]  # data and layout, as plotly.js takes them


class Choice(NamedTuple):
    """What a reader can choose of a figure."""

    name: str
    kind: str  # buttons, list or slider
    options: list[tuple[str, str]]  # (value, words)


class Figure(NamedTuple):
    id: str
    title: str
    words: str  # what is seen, for a newcomer
    alt: str  # for who cannot see it
    choices: list[Choice]
    views: dict[str, View]  # by the chosen values, joined by |

    @property
    def height(self) -> int:
        return int(next(iter(self.views.values()))["layout"]["height"])


def _base(height: int = 400, **layout: Any) -> go.Figure:
    """An empty figure in the style of the page."""
    figure = go.Figure()
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zerolinecolor": GRID,
        "zeroline": False,
        "automargin": True,
        "ticks": "",
        "title": {"standoff": 12, "font": {"color": SOFT, "size": 13}},
        "tickfont": {"color": SOFT},
    }
    figure.update_layout(
        template="none",
        height=height,
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
        hovermode="closest",
        hoverlabel={"bgcolor": PAPER, "bordercolor": GRID, "font": {"color": INK}},
        showlegend=False,
        legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0, "font": {"color": INK}},
        xaxis=axis,
        yaxis=axis,
    )
    figure.update_layout(**layout)
    return figure


def percents(values: Sequence[float] | np.ndarray) -> list[float]:
    return [round(100 * float(value), 3) for value in values]


def _short(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(f"{float(value):.5g}") for value in values]


def _cells(table: np.ndarray) -> list[list[float]]:
    return [_short(row) for row in table]


def _line(figure: go.Figure, label: str, look: int, x: list[float], mean: list[float], std: list[float]) -> None:
    """A line in the look of its method, with a band where several seeds give one."""
    if any(std):
        edge = [m + s for m, s in zip(mean, std, strict=True)] + [
            m - s for m, s in zip(reversed(mean), reversed(std), strict=True)
        ]
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=percents(edge),
            fill="toself",
            fillcolor=see_through(colour(look), BAND),
            line={"width": 0},
            hoverinfo="skip",
            legendgroup=label,
            mode="lines",
            showlegend=False,
            meta="band",
        )
    plus = "" if not any(std) else " ± %{customdata:.2f}"
    figure.add_scatter(
        x=x,
        y=percents(mean),
        customdata=percents(std),
        name=label,
        legendgroup=label,
        mode="lines+markers" if len(x) <= 40 else "lines",
        line={"color": colour(look), "dash": dash(look), "width": 2.2},
        marker={"symbol": marker(look), "size": 7, "color": colour(look)},
        hovertemplate=f"<b>{label}</b><br>%{{x:.4~s}}: %{{y:.2f}} %{plus}<extra></extra>",
    )


def rounds_figure(groups: list[Group]) -> Figure | None:
    views = {}
    axes = [axis for axis in numbers.AXES if numbers.curves(groups, axis, "personal_mean")]
    measures = [m for m in numbers.MEASURES if any(numbers.curves(groups, "rounds", m))]
    if not axes or not measures:
        return None
    for measure in measures:
        for axis in axes:
            figure = _base(430, yaxis_title_text="accuracy, %", xaxis_title_text=numbers.AXES[axis])
            for one in numbers.curves(groups, axis, measure):
                _line(figure, one.label, one.look, _short(one.x), one.mean, one.std)
            figure.update_xaxes(rangemode="tozero", tickformat="~s")
            views[f"{measure}|{axis}"] = figure.to_plotly_json()
    last = {one.label: one.mean[-1] for one in numbers.curves(groups, "rounds", measures[0])}
    best = max(last, key=lambda label: last[label])
    several = any(len(group.runs) > 1 for group in groups)
    return Figure(
        "rounds",
        "Accuracy over time",
        "Each line is a method. Higher is better, and further left is cheaper. Change what “cheap” means: rounds, "
        "bytes that travelled, or seconds that clients trained."
        + (" A band is one standard deviation over seeds." if several else ""),
        f"Lines of accuracy for {len(last)} runs; at the end the highest is {best} with {100 * last[best]:.2f} %.",
        [
            Choice("accuracy of", "list", [(m, numbers.MEASURES[m]) for m in measures]),
            Choice("against", "buttons", [(axis, axis if axis != "flops" else "FLOPs") for axis in axes]),
        ],
        views,
    )


def against_figure(found: list[Against]) -> Figure | None:
    if not found:
        return None
    views = {}
    for k, one in enumerate(found):
        low = min(min(p.own, p.local) for p in one.points)
        side = [max(-2.0, 100 * low - 6), 103.0]
        figure = _base(470, xaxis_title_text="alone (Local), %", yaxis_title_text="own model, %")
        figure.update_layout(xaxis_range=side, yaxis_range=side)
        figure.add_scatter(
            x=[side[0], side[1], side[1]],
            y=[side[0], side[1], side[0]],
            fill="toself",
            fillcolor=see_through(WARN, 0.08),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
        )
        line = {"color": SOFT, "dash": "dash", "width": 1.5}
        figure.add_scatter(x=side, y=side, mode="lines", line=line, hoverinfo="skip")
        sizes = [p.n_train for p in one.points]
        figure.add_scatter(
            x=percents([p.local for p in one.points]),
            y=percents([p.own for p in one.points]),
            mode="markers",
            customdata=[[p.client, p.n_train, p.seed, 100 * (p.own - p.local)] for p in one.points],
            marker={
                "size": 11,
                "symbol": ["x" if p.own < p.local - 1e-12 else "circle" for p in one.points],
                "color": sizes,
                "colorscale": SCALE,
                "cmin": 0,
                "cmax": max(sizes),
                "line": {"color": INK, "width": 1},
                "opacity": 0.9,
                "colorbar": {
                    "title": {"text": "rows", "font": {"color": SOFT}},
                    "tickfont": {"color": SOFT},
                    "thickness": 12,
                    "outlinewidth": 0,
                },
            },
            hovertemplate="client %{customdata[0]}, seed %{customdata[2]}<br>%{customdata[1]} rows<br>"
            "alone %{x:.1f} %, here %{y:.1f} %<br>%{customdata[3]:+.1f} points<extra></extra>",
        )
        figure.add_annotation(
            text=f"<b>{one.harmed} of {len(one.points)}</b> do worse than alone",
            xref="paper",
            yref="paper",
            x=0,
            y=1.01,
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            font={"color": WARN, "size": 14},
        )
        figure.update_layout(margin_t=36)
        views[str(k)] = figure.to_plotly_json()
    words = "; ".join(f"{one.label} {one.harmed} of {len(one.points)}" for one in found)
    return Figure(
        "harmed",
        "Who gains, and who would be better off alone",
        "Each mark is a client. Above the dashed line its own model beats what it would have got by training alone; "
        "below it, marked by a cross, joining did harm. The scale beside it tells how many rows a client trains on.",
        f"Clients by accuracy alone and under a method. Harmed clients: {words}.",
        [Choice("method", "list", [(str(k), one.label) for k, one in enumerate(found)])],
        views,
    )


def spread_figure(found: list[Spread]) -> Figure | None:
    if not found:
        return None
    points = _base(90 + 46 * len(found), xaxis_title_text="accuracy of a client's own model, %")
    names = [one.label for one in found]
    points.update_yaxes(
        tickmode="array", tickvals=list(range(len(found))), ticktext=names, autorange="reversed", showgrid=False
    )
    ordered = _base(430, xaxis_title_text="clients, worst served first, %", yaxis_title_text="accuracy, %")
    for row, one in enumerate(found):
        height = _beside(one.values)
        for worst in (False, True):
            kept = [k for k, is_worst in enumerate(one.worst) if is_worst == worst]
            points.add_scatter(
                x=percents([one.values[k] for k in kept]),
                y=[row + height[k] for k in kept],
                customdata=[one.clients[k] for k in kept],
                mode="markers",
                legendgroup=one.label,
                marker={
                    "symbol": "diamond-open" if worst else "circle",
                    "size": 13 if worst else 8,
                    "color": WARN if worst else colour(one.look),
                    "opacity": 1 if worst else 0.6,
                    "line": {"width": 2.4 if worst else 0, "color": WARN if worst else colour(one.look)},
                },
                hovertemplate=f"<b>{one.label}</b><br>client %{{customdata}}: %{{x:.1f}} %"
                + ("<br>among the worst 5 %" if worst else "")
                + "<extra></extra>",
            )
        points.add_scatter(
            x=[100 * one.mean, 100 * one.mean],
            y=[row - 0.36, row + 0.36],
            mode="lines",
            legendgroup=one.label,
            line={"color": INK, "width": 2.6},
            hovertemplate=f"<b>{one.label}</b><br>mean {100 * one.mean:.2f} %<extra></extra>",
        )
        n = len(one.values)
        ordered.add_scatter(
            x=[round(100 * (k + 1) / n, 3) for k in range(n)],
            y=percents(one.values),
            customdata=one.clients,
            mode="lines+markers" if n <= 60 else "lines",
            legendgroup=one.label,
            line={"color": colour(one.look), "dash": dash(one.look), "width": 2},
            marker={"symbol": marker(one.look), "size": 6, "color": colour(one.look)},
            hovertemplate=f"<b>{one.label}</b><br>client %{{customdata}}: %{{y:.1f}} %<extra></extra>",
        )
    ordered.add_vrect(x0=0, x1=5, fillcolor=see_through(WARN, 0.08), line_width=0)
    ordered.add_annotation(
        text="worst 5 %", x=5, xanchor="left", y=1, yref="paper", yanchor="top", showarrow=False, font={"color": WARN}
    )
    words = "; ".join(f"{one.label} mean {100 * one.mean:.1f}, worst {100 * one.worst_mean:.1f}" for one in found)
    return Figure(
        "spread",
        "From the worst to the best served client",
        "A good mean can hide clients that are served badly. Each dot is a client, the bar is the mean, and open "
        "diamonds are the worst 5 % of clients, the number that the table gives.",
        f"Accuracies of all clients under each method, in percent: {words}.",
        [Choice("as", "buttons", [("points", "points"), ("ordered", "ordered lines")])],
        {"points": points.to_plotly_json(), "ordered": ordered.to_plotly_json()},
    )


def _beside(values: list[float]) -> list[float]:
    """Heights that keep equal values apart; the same for the same values."""
    out: list[float] = []
    seen: dict[float, int] = {}
    for value in values:
        place = round(value, 2)
        k = seen[place] = seen.get(place, -1) + 1
        out.append((1 if k % 2 else -1) * ((k + 1) // 2) * 0.09)
    largest = max(map(abs, out))
    return [0.32 * height / largest if largest > 0.32 else height for height in out]


def split_figure(tables: dict[str, SplitTable]) -> Figure | None:
    if not tables:
        return None
    views = {}
    for label, table in tables.items():
        share = table.counts / np.maximum(1, table.counts.sum(1, keepdims=True))
        figure = _base(
            min(760, max(300, 110 + 17 * len(table.counts))),
            xaxis_title_text="class",
            yaxis_title_text="client (training rows)",
        )
        figure.add_heatmap(
            z=_cells(share),
            customdata=table.counts.tolist(),
            y=list(range(len(share))),
            colorscale=SCALE,
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            colorbar={**_bar("share of the client's rows"), "tickformat": ".0%"},
            hovertemplate="client %{y}, class %{x}<br>%{customdata} rows, %{z:.0%} of its own<extra></extra>",
        )
        every = -(-len(share) // 40)
        ticks = list(range(0, len(share), every))
        words = [f"{table.names[k][:18]} ({int(table.counts[k].sum())})" for k in ticks]
        figure.update_yaxes(tickvals=ticks, ticktext=words, autorange="reversed", showgrid=False)
        figure.update_xaxes(showgrid=False, dtick=1 if share.shape[1] <= 20 else None, title_standoff=22)
        views[label] = figure.to_plotly_json()
    first = next(iter(tables.values()))
    own = [int((row > 0).sum()) for row in first.counts]
    few = (
        ""
        if len(first.counts) == first.n_clients
        else f" The first {len(first.counts)} of {first.n_clients} clients are shown."
    )
    return Figure(
        "split",
        "Who has which classes",
        "A row is a client, a column a class; the stronger a cell, the more of the client's rows are of that class. "
        "The more a row is one strong cell, the less one model can serve everybody." + few,
        f"{first.n_clients} clients have between {min(own)} and {max(own)} of {first.counts.shape[1]} classes.",
        [Choice("split", "list", [(label, label) for label in tables])] if len(tables) > 1 else [],
        views if len(tables) > 1 else {"": next(iter(views.values()))},
    )


def _bar(title: str) -> dict[str, Any]:
    """A colour bar above a heat map, where it takes no width from it."""
    return {
        "title": {"text": title, "side": "top", "font": {"color": SOFT, "size": 12}},
        "orientation": "h",
        "y": 1.02,
        "yanchor": "bottom",
        "thickness": 10,
        "len": 0.8,
        "x": 0,
        "xanchor": "left",
        "tickfont": {"color": SOFT, "size": 11},
        "outlinewidth": 0,
    }


def new_clients_figure(found: list[Level]) -> Figure | None:
    if not found:
        return None
    figure = _base(400, xaxis_title_text="epochs on the new client's rows", yaxis_title_text="accuracy, %")
    for one in found:
        _line(figure, one.label, one.look, one.x, one.mean, one.std)
        if one.generic is not None:
            figure.add_scatter(
                x=[one.x[0], one.x[-1]],
                y=percents([one.generic] * 2),
                mode="lines",
                legendgroup=one.label,
                line={"color": colour(one.look), "dash": "dot", "width": 1.2},
                opacity=0.7,
                hovertemplate=f"<b>{one.label}</b><br>its one model for all: %{{y:.2f}} %<extra></extra>",
            )
    figure.update_xaxes(dtick=1 if len(found[0].x) < 15 else None)
    words = "; ".join(f"{one.label} {100 * one.mean[0]:.1f} then {100 * one.mean[-1]:.1f} %" for one in found)
    return Figure(
        "new-clients",
        "Clients that come later",
        "Some clients were held out of training. The lines begin with what such a client is given at once, and go on "
        "while it trains on its own rows. Thin dotted lines: the one model for all.",
        f"Accuracy of new clients before and after their epochs: {words}.",
        [],
        {"": figure.to_plotly_json()},
    )


def zeta_figure(found: list[Level]) -> Figure | None:
    if not found:
        return None
    figure = _base(420, xaxis_title_text="zeta: share of clients that name classes alike", showlegend=True)
    figure.update_layout(yaxis_title_text="accuracy of personal models, %")
    for one in found:
        _line(figure, one.label, one.look, one.x, one.mean, one.std)
    figure.update_traces(legendgroup="", selector={"type": "scatter"})
    figure.update_xaxes(range=[-0.03, 1.03])
    words = "; ".join(f"{one.label} from {100 * one.mean[0]:.1f} to {100 * one.mean[-1]:.1f} %" for one in found)
    return Figure(
        "zeta",
        "When clients name the same thing differently",
        "zeta is the share of clients that call classes by the same names; the others have names of their own. "
        "One model for all must fail at the left, where most clients disagree; models that adapt to each client "
        "need not.",
        f"Accuracy over zeta: {words}.",
        [],
        {"": figure.to_plotly_json()},
    )


# Each paper's own picture


def alpha_figures(key: str, found: Alpha) -> list[Figure]:
    layers = list(found.layers)
    n = found.layers[layers[0]].shape[1]
    room = max(2, MOST_CELLS // (len(layers) * n * n))
    kept = np.unique(np.linspace(0, len(found.rounds) - 1, min(room, len(found.rounds))).astype(int))
    views = {}
    for layer in layers:
        from_mean = 100 * (n * found.layers[layer] - 1)
        most = max(1e-3, float(np.abs(from_mean).max()))
        figure = _base(500, xaxis_title_text="whose layer it is", yaxis_title_text="who receives")
        figure.add_heatmap(
            colorscale=_scale(SIDES),
            zmin=-most,
            zmax=most,
            xgap=1 if n <= 40 else 0,
            ygap=1 if n <= 40 else 0,
            colorbar={**_bar("more or less than the plain mean, %"), "nticks": 5},
            hovertemplate="client %{y} takes %{customdata:.4f} from client %{x}<br>"
            "%{z:+.3g} % of the plain mean<extra></extra>",
        )
        figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain", scaleanchor="x")
        figure.update_xaxes(showgrid=False, constrain="domain")
        same = figure.to_plotly_json()
        for k in kept:
            cells = {"z": _cells(from_mean[k]), "customdata": _cells(found.layers[layer][k])}
            views[f"{layer}|{found.rounds[k]}"] = {**same, "data": [same["data"][0] | cells]}
    maps = Figure(
        f"alpha-{key}",
        "Who listens to whom, layer by layer",
        "Each row says of which clients a client's mixture is made. Where all cells are pale it is the plain mean; "
        "blue cells give more, orange ones less. A blue diagonal: clients go their own way. The slider moves over the "
        "rounds.",
        f"Heat maps of the weights between {n} clients for the layers {', '.join(layers)}.",
        [
            Choice("layer", "buttons" if len(layers) <= 4 else "list", [(layer, layer) for layer in layers]),
            Choice("round", "slider", [(str(found.rounds[k]), str(found.rounds[k])) for k in kept]),
        ],
        views,
    )
    lines = _base(360, xaxis_title_text="round", yaxis_title_text="weight on oneself", showlegend=True)
    for look, layer in enumerate(layers):
        lines.add_scatter(
            x=found.rounds,
            y=_short(found.own(layer)),
            name=layer,
            mode="lines+markers",
            line={"color": colour(look), "dash": dash(look)},
            marker={"symbol": marker(look), "size": 7},
            hovertemplate=f"{layer}, round %{{x}}: %{{y:.4f}}<extra></extra>",
        )
    mean = 1 / n
    lines.add_hline(y=mean, line={"color": SOFT, "dash": "dash", "width": 1})
    lines.add_annotation(
        text="plain mean",
        x=1,
        xref="paper",
        xanchor="right",
        y=mean,
        yanchor="top",
        showarrow=False,
        font={"color": SOFT},
    )
    own = Figure(
        f"alpha-own-{key}",
        "How much a client listens to itself",
        "The diagonal of the maps above, mean over clients. A layer whose line rises becomes more personal.",
        "Weight of a client on its own layer: "
        + ", ".join(f"{x} {found.own(x)[-1]:.4f} at the end" for x in layers)
        + ".",
        [],
        {"": lines.to_plotly_json()},
    )
    return [maps, own]


def blend_figures(key: str, found: Blends) -> list[Figure]:
    middle = (found.edges[:-1] + found.edges[1:]) / 2
    bars = _base(360, xaxis_title_text="blend, from 0 (own) to 1 (received)", bargap=0.06)
    bars.update_layout(yaxis_title_text="share of weights, %", showlegend=len(found.layers) > 1, barmode="group")
    for look, (layer, share) in enumerate(found.layers.items()):
        bars.add_bar(
            x=_short(middle),
            y=percents(share),
            name=layer,
            marker={"color": colour(look), "pattern": {"shape": ("", "/", ".", "x")[look % 4]}},
            hovertemplate=f"{layer}, about %{{x:.2f}}: %{{y:.1f}} % of weights<extra></extra>",
        )
    taken, left = sum(s[-1] for s in found.layers.values()), sum(s[0] for s in found.layers.values())
    n = len(found.layers)
    means = _base(360, xaxis_title_text="training rows of the client", yaxis_title_text="mean blend")
    means.add_scatter(
        x=found.sizes,
        y=_short(found.means),
        customdata=found.clients,
        mode="markers",
        marker={"size": 10, "color": colour(0), "line": {"color": INK, "width": 1}},
        hovertemplate="client %{customdata}, %{x} rows: %{y:.3f}<extra></extra>",
    )
    means.update_yaxes(range=[-0.02, 1.04])
    return [
        Figure(
            f"blend-{key}",
            "How much clients take of what they receive",
            "The learned blend of the upper layers, over all weights of all clients. Most weights are taken as "
            "received or kept as they are; those in between are truly mixed.",
            f"{100 * taken / n:.0f} % of weights are taken as received, {100 * left / n:.0f} % are kept.",
            [],
            {"": bars.to_plotly_json()},
        ),
        Figure(
            f"blend-clients-{key}",
            "Who takes more",
            "The mean blend of each client, beside its number of rows.",
            f"Mean blends of {len(found.means)} clients, from {min(found.means):.2f} to {max(found.means):.2f}.",
            [],
            {"": means.to_plotly_json()},
        ),
    ]


def path_figure(key: str, found: Paths, labels: list[str], looks: list[int]) -> Figure:
    figure = _base(480, xaxis_title_text="first principal direction", yaxis_title_text="second principal direction")
    figure.update_layout(showlegend=True)
    figure.add_contour(
        x=_short(found.x),
        y=_short(found.y),
        z=_cells(np.log10(found.loss)),
        customdata=found.loss.tolist(),
        colorscale=_scale(GROUND),
        contours={"showlines": False},
        ncontours=24,
        colorbar={**_bar("loss of the client"), **_log_ticks(found.loss)},
        hovertemplate="loss %{customdata:.3f}<extra></extra>",
        name="loss",
        showlegend=False,
    )
    for places, rounds, label, look in zip(found.ways, found.rounds, labels, looks, strict=True):
        when = [f"round {at + 1}, {what}" for at in rounds for what in ("start", "after training")]
        figure.add_scatter(
            x=_short(places[:, 0]),
            y=_short(places[:, 1]),
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
    figure.add_annotation(
        text="common start",
        x=float(found.ways[0][0, 0]),
        y=float(found.ways[0][0, 1]),
        xanchor="left",
        arrowcolor=INK,
        bgcolor=PAPER,
        ax=14,
        ay=34,
    )
    return Figure(
        f"path-{key}",
        f"The way of client {found.client}'s model",
        "Filled marks are where local training starts, open ones where it ends. Without ALA every aggregation throws "
        "the client back; with it the client starts near where it wants to be. The ground is the client's own training "
        f"loss (its scale is above it). The plane holds {100 * found.explained:.0f} % of all movement.",
        f"Paths of {' and '.join(labels)} for client {found.client} on its loss surface.",
        [],
        {"": figure.to_plotly_json()},
    )


def _log_ticks(loss: np.ndarray) -> dict[str, Any]:
    low, high = float(np.log10(loss.min())), float(np.log10(loss.max()))
    at = np.linspace(low, high, 4)
    return {"tickvals": _short(at), "ticktext": [f"{10**x:.2g}" for x in at]}


def heads_figure(key: str, found: Heads) -> Figure:
    order = sorted(range(len(found.clients)), key=lambda k: found.personal[k] - found.server[k])
    names = [f"{found.clients[k]} ({found.sizes[k]})" for k in order]
    figure = _base(max(320, 120 + 19 * len(order)), xaxis_title_text="accuracy on the client's test rows, %")
    figure.update_layout(showlegend=True, yaxis_title_text="client (training rows)")
    for row, k in enumerate(order):
        figure.add_shape(
            type="line",
            x0=100 * found.server[k],
            x1=100 * found.personal[k],
            y0=row,
            y1=row,
            line={"color": GRID, "width": 4},
            layer="below",
        )
    series = [
        ("server's model, generic head", found.server, "circle", colour(0)),
        ("own model, generic head", found.generic, "diamond-open", colour(2)),
        ("own model, personal head added", found.personal, "square", colour(1)),
    ]
    for words, values, symbol, shade in series:
        figure.add_scatter(
            x=percents([values[k] for k in order]),
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
    better = sum(p > g for p, g in zip(found.personal, found.server, strict=True))
    return Figure(
        f"heads-{key}",
        "Two heads on one body",
        "For each client: the server's model with the generic head, the client's model with the generic head alone, "
        "and with its personal head added. The longer the grey line, the more the client gains.",
        f"The personal head beats the server's model for {better} of {len(order)} clients.",
        [],
        {"": figure.to_plotly_json()},
    )


def landscape_figures(
    key: str, profiles: list[tuple[str, Profile]], surfaces: list[tuple[str, Surface]]
) -> list[Figure]:
    lines = _base(400, xaxis_title_text="distance along a random direction", yaxis_title_text="loss", showlegend=True)
    for look, (label, one) in enumerate(profiles):
        words = f"{label}: {one.words}"
        low, high = one.mean - one.std, one.mean + one.std
        lines.add_scatter(
            x=_short([*one.distance, *one.distance[::-1]]),
            y=_short([*high, *low[::-1]]),
            fill="toself",
            fillcolor=see_through(colour(look), BAND),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=words,
        )
        lines.add_scatter(
            x=_short(one.distance),
            y=_short(one.mean),
            name=words,
            legendgroup=words,
            mode="lines",
            line={"color": colour(look), "dash": dash(look), "width": 2.4},
            hovertemplate=f"{words}<br>at %{{x:.1f}}: %{{y:.3f}}<extra></extra>",
        )
    lines.update_layout(legend={"orientation": "v", "y": -0.2, "yanchor": "top", "x": 0})
    maps = {}
    for k, (_, surface) in enumerate(surfaces):
        figure = _base(480, xaxis_title_text="first random direction", yaxis_title_text="second random direction")
        figure.add_contour(
            x=_short(surface.distance),
            y=_short(surface.distance),
            z=_cells(surface.loss),
            colorscale=SCALE,
            ncontours=18,
            contours={"showlines": True},
            line={"color": GRID, "width": 0.6},
            colorbar=_bar("loss"),
            hovertemplate="loss %{z:.3f}<extra></extra>",
        )
        figure.add_scatter(
            x=[0],
            y=[0],
            mode="markers",
            marker={"symbol": "x", "size": 11, "color": WARN},
            hovertemplate="the model itself<extra></extra>",
        )
        figure.update_yaxes(constrain="domain")
        maps[str(k)] = figure.to_plotly_json()
    ends = "; ".join(
        f"{label}: {one.words} {one.mean[len(one.mean) // 2]:.2f} to {one.mean[-1]:.2f}" for label, one in profiles
    )
    out = [
        Figure(
            f"profile-{key}",
            "How steep the valley is",
            "The loss while all weights move along a random direction, each filter by its own length. A flat line "
            "means a model that bears change, as the paper wants it for the shared model. Bands: over directions and "
            "clients.",
            f"Loss at the model and one length away. {ends}.",
            [],
            {"": lines.to_plotly_json()},
        )
    ]
    if maps:
        options = [(str(k), f"{label}: {surface.words}") for k, (label, surface) in enumerate(surfaces)]
        out.append(
            Figure(
                f"surface-{key}",
                "The valley from above",
                "The same with two random directions; the cross is the model itself.",
                "Contours of the loss around a model.",
                [Choice("model", "list", options)],
                maps,
            )
        )
    return out


def kept_figure(key: str, found: Kept) -> Figure:
    figure = _base(120 + 44 * len(found.layers), xaxis_title_text="clients that keep the layer at home")
    figure.add_bar(
        x=found.n_kept,
        y=found.layers,
        orientation="h",
        customdata=_short(found.scores),
        marker={"color": colour(0)},
        text=[f" {n} " for n in found.n_kept],
        textposition="auto",
        hovertemplate=f"%{{y}}: %{{x}} of {found.n_clients} clients<br>mean score %{{customdata:.3f}}<extra></extra>",
    )
    figure.update_xaxes(range=[0, found.n_clients * 1.04])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    words = ", ".join(f"{layer} {n}" for layer, n in zip(found.layers, found.n_kept, strict=True))
    return Figure(
        f"kept-{key}",
        "Which layers stay at home",
        f"Of {found.n_clients} clients, how many would keep each layer personal in the next round: those that differ "
        "most from the shared model. Layers are listed from the input to the head.",
        f"Clients that keep each layer: {words}.",
        [],
        {"": figure.to_plotly_json()},
    )
