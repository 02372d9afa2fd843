"""Each paper's own picture for the page, drawn with plotly from what `states` found."""

from typing import Any

import numpy as np

from plures.report.interactive import Choice, Figure, bar_above, base_figure, cells, percents, scale, short
from plures.report.looks import (
    BAND,
    GRID,
    GROUND,
    INK,
    PAPER,
    SHADES,
    SIDES,
    SOFT,
    WARN,
    colour,
    dash,
    marker,
    see_through,
)
from plures.report.states import Alpha, Blends, Heads, Kept, Paths, Profile, Surface

MOST_CELLS = 300_000  # of all heat maps of one figure


def alpha_figures(key: str, found: Alpha) -> list[Figure]:
    layers = list(found.layers)
    n = found.layers[layers[0]].shape[1]
    room = max(2, MOST_CELLS // (len(layers) * n * n))
    kept = np.unique(np.linspace(0, len(found.rounds) - 1, min(room, len(found.rounds))).astype(int))
    views = {}
    for layer in layers:
        from_mean = 100 * (n * found.layers[layer] - 1)
        most = max(1e-3, float(np.abs(from_mean).max()))
        figure = base_figure(500, xaxis_title_text="whose layer it is", yaxis_title_text="who receives")
        figure.add_heatmap(
            colorscale=scale(SIDES),
            zmin=-most,
            zmax=most,
            xgap=1 if n <= 40 else 0,
            ygap=1 if n <= 40 else 0,
            colorbar={**bar_above("more or less than the plain mean, %"), "nticks": 5},
            hovertemplate="client %{y} takes %{customdata:.4f} from client %{x}<br>"
            "%{z:+.3g} % of the plain mean<extra></extra>",
        )
        figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain", scaleanchor="x")
        figure.update_xaxes(showgrid=False, constrain="domain")
        same = figure.to_plotly_json()
        for k in kept:
            found_cells = {"z": cells(from_mean[k]), "customdata": cells(found.layers[layer][k])}
            views[f"{layer}|{found.rounds[k]}"] = {**same, "data": [same["data"][0] | found_cells]}
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
    lines = base_figure(360, xaxis_title_text="round", yaxis_title_text="weight on oneself", showlegend=True)
    for look, layer in enumerate(layers):
        lines.add_scatter(
            x=found.rounds,
            y=short(found.own(layer)),
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
    bars = base_figure(360, xaxis_title_text="blend, from 0 (own) to 1 (received)", bargap=0.06)
    bars.update_layout(yaxis_title_text="share of weights, %", showlegend=len(found.layers) > 1, barmode="group")
    for look, (layer, share) in enumerate(found.layers.items()):
        bars.add_bar(
            x=short(middle),
            y=percents(share),
            name=layer,
            marker={"color": colour(look), "pattern": {"shape": ("", "/", ".", "x")[look % 4]}},
            hovertemplate=f"{layer}, about %{{x:.2f}}: %{{y:.1f}} % of weights<extra></extra>",
        )
    taken, left = sum(s[-1] for s in found.layers.values()), sum(s[0] for s in found.layers.values())
    n = len(found.layers)
    means = base_figure(360, xaxis_title_text="training rows of the client", yaxis_title_text="mean blend")
    means.add_scatter(
        x=found.sizes,
        y=short(found.means),
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
    figure = base_figure(
        480, xaxis_title_text="first principal direction", yaxis_title_text="second principal direction"
    )
    figure.update_layout(showlegend=True)
    figure.add_contour(
        x=short(found.x),
        y=short(found.y),
        z=cells(np.log10(found.loss)),
        customdata=found.loss.tolist(),
        colorscale=scale(GROUND),
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
            x=short(places[:, 0]),
            y=short(places[:, 1]),
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
    told = (
        "Without ALA every aggregation throws the client back; with it the client starts near where it wants to be. "
        if len(labels) > 1
        else ""
    )
    return Figure(
        f"path-{key}",
        f"The way of client {found.client}'s model",
        f"Filled marks are where local training starts, open ones where it ends. {told}The ground is the client's own "
        f"training loss (its scale is above it). The plane holds {100 * found.explained:.0f} % of all movement.",
        f"Paths of {' and '.join(labels)} for client {found.client} on its loss surface.",
        [],
        {"": figure.to_plotly_json()},
    )


def _log_ticks(loss: np.ndarray) -> dict[str, Any]:
    low, high = float(np.log10(loss.min())), float(np.log10(loss.max()))
    at = np.linspace(low, high, 4)
    return {"tickvals": short(at), "ticktext": [f"{10**x:.2g}" for x in at]}


def heads_figure(key: str, found: Heads) -> Figure:
    order = sorted(range(len(found.clients)), key=lambda k: found.personal[k] - found.server[k])
    names = [f"{found.clients[k]} ({found.sizes[k]})" for k in order]
    figure = base_figure(
        min(1000, max(320, 120 + 19 * len(order))), xaxis_title_text="accuracy on the client's test rows, %"
    )
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
    lines = base_figure(
        400, xaxis_title_text="distance along a random direction", yaxis_title_text="loss", showlegend=True
    )
    for look, (label, one) in enumerate(profiles):
        words = f"{label}: {one.words}"
        low, high = one.mean - one.std, one.mean + one.std
        lines.add_scatter(
            x=short([*one.distance, *one.distance[::-1]]),
            y=short([*high, *low[::-1]]),
            fill="toself",
            fillcolor=see_through(colour(look), BAND),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=words,
        )
        lines.add_scatter(
            x=short(one.distance),
            y=short(one.mean),
            name=words,
            legendgroup=words,
            mode="lines",
            line={"color": colour(look), "dash": dash(look), "width": 2.4},
            hovertemplate=f"{words}<br>at %{{x:.1f}}: %{{y:.3f}}<extra></extra>",
        )
    lines.update_layout(legend={"orientation": "v", "y": -0.2, "yanchor": "top", "x": 0})
    maps = {}
    for k, (_, surface) in enumerate(surfaces):
        figure = base_figure(480, xaxis_title_text="first random direction", yaxis_title_text="second random direction")
        figure.add_contour(
            x=short(surface.distance),
            y=short(surface.distance),
            z=cells(surface.loss),
            colorscale=scale(SHADES),
            ncontours=18,
            contours={"showlines": True},
            line={"color": GRID, "width": 0.6},
            colorbar=bar_above("loss"),
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
    figure = base_figure(120 + 44 * len(found.layers), xaxis_title_text="clients that keep the layer at home")
    figure.add_bar(
        x=found.n_kept,
        y=found.layers,
        orientation="h",
        customdata=short(found.scores),
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
