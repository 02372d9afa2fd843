"""Interactive: the figures of the page that are about no method, drawn with plotly."""

from typing import Any

import numpy as np

from plures.learn.metrics import Metric
from plures.report import numbers
from plures.report.figure import Choice, Figure, make_figure
from plures.report.looks import BAND, INK, SOFT, WARN, colour, dash, marker, see_through
from plures.report.numbers import Against, Curve, Point, Ranking
from plures.report.plotly_kit import SCALE, bar_above, base_figure, shorten, shorten_rows, to_shown
from plures.report.records import Group, metric_of_groups
from plures.report.splits import SplitTable
from plures.runs.results import harm_in_words
from plures.studies.ranks import FEW, Ranks, place_methods


def _capital(word: str) -> str:
    return word[0].upper() + word[1:]


def _unit(metric: Metric) -> str:
    return ", %" if metric.is_share else ""


def sides(points: list[Point]) -> list[float]:
    """The ends of both axes of a square figure that holds all points."""
    metric = points[0].metric
    values = [metric.shown(value) for p in points for value in (p.own, p.local)]
    if metric.is_share:
        return [max(-2.0, min(values) - 6), 103.0]
    room = 0.05 * (max(values) - min(values)) or 1.0
    return [min(values) - room, max(values) + room]


def _add_line(figure: Any, curve: Curve) -> None:
    """A line in the look of its method, with a band where several seeds give one."""
    label, look, x, mean, std = curve[:5]
    if any(std):
        edge = [m + s for m, s in zip(mean, std, strict=True)] + [
            m - s for m, s in zip(reversed(mean), reversed(std), strict=True)
        ]
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=to_shown(curve.metric, edge),
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
        y=to_shown(curve.metric, mean),
        customdata=to_shown(curve.metric, std),
        name=label,
        legendgroup=label,
        mode="lines+markers" if len(x) <= 40 else "lines",
        line={"color": colour(look), "dash": dash(look), "width": 2.2},
        marker={"symbol": marker(look), "size": 7, "color": colour(look)},
        hovertemplate=f"<b>{label}</b><br>%{{x:.4~s}}: %{{y:.2f}}{curve.metric.unit}{plus}<extra></extra>",
    )


def draw_rounds(groups: list[Group]) -> Figure | None:
    """What the runs go by over rounds, or over what was spent."""
    views, metric = {}, metric_of_groups(groups)
    axes = [axis for axis in numbers.AXES if numbers.make_curves(groups, axis, "personal_mean")]
    measures = [m for m in numbers.MEASURES if any(numbers.make_curves(groups, "rounds", m))]
    if not axes or not measures:
        return None
    for measure in measures:
        for axis in axes:
            figure = base_figure(430, yaxis_title_text=metric.title, xaxis_title_text=numbers.AXES[axis])
            for one in numbers.make_curves(groups, axis, measure):
                _add_line(figure, one._replace(x=shorten(one.x)))
            figure.update_xaxes(rangemode="tozero", tickformat="~s")
            if axis == "rounds" and max(len(run.rounds) for group in groups for run in group.runs) < 10:
                figure.update_xaxes(dtick=1)  # there is no half round
            views[f"{measure}|{axis}"] = figure
    last = {one.label: one.mean[-1] for one in numbers.make_curves(groups, "rounds", measures[0])}
    best = max(last, key=lambda label: metric.sign * last[label])
    several = any(len(group.runs) > 1 for group in groups)
    return make_figure(
        "rounds",
        f"{_capital(metric.word)} over time",
        f"Each line is a method. {'Higher' if metric.is_higher_better else 'Lower'} is better, and further left is "
        "cheaper. Change what “cheap” means: rounds, "
        "bytes that travelled, or seconds and FLOPs of training."
        + (" A band is one standard deviation over seeds." if several else ""),
        f"Lines of {metric.word} for {len(last)} runs; at the end the best is {best} with {metric.text(last[best])}.",
        [
            Choice(f"{metric.word} of", "list", [(m, numbers.MEASURES[m]) for m in measures]),
            Choice("against", "buttons", [(axis, axis if axis != "flops" else "FLOPs") for axis in axes]),
        ],
        views,
    )


def draw_harmed(found: list[Against]) -> Figure | None:
    """Every client under a method, beside what it would have alone."""
    if not found:
        return None
    views = {}
    for k, one in enumerate(found):
        metric = one.metric
        side = sides(one.points)
        figure = base_figure(
            470, xaxis_title_text=f"alone (Local){_unit(metric)}", yaxis_title_text=f"own model{_unit(metric)}"
        )
        figure.update_layout(xaxis_range=side, yaxis_range=side)
        figure.add_scatter(
            x=[side[0], side[1], side[1] if metric.is_higher_better else side[0]],
            y=[side[0], side[1], side[0] if metric.is_higher_better else side[1]],
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
            x=to_shown(metric, [p.local for p in one.points]),
            y=to_shown(metric, [p.own for p in one.points]),
            mode="markers",
            customdata=[[p.client, p.n_train, p.seed, metric.shown(p.own - p.local)] for p in one.points],
            marker={
                "size": 11,
                "symbol": ["x" if p.is_harmed else "circle" for p in one.points],
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
            f"alone %{{x:.4~g}}{metric.unit}, here %{{y:.4~g}}{metric.unit}<br>%{{customdata[3]:+.4~g}}"
            f"{' points' if metric.is_share else ''}<extra></extra>",
        )
        figure.add_annotation(
            text=f"<b>{one.harmed} of {len(one.points)}</b> are harmed",
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
        views[str(k)] = figure
    better = found[0].metric.is_higher_better
    words = "; ".join(f"{one.label} {one.harmed} of {len(one.points)}" for one in found)
    return make_figure(
        "harmed",
        "Who gains, and who would be better off alone",
        f"Each mark is a client. {'Above' if better else 'Below'} the dashed line its own model beats what it would "
        f"have got by training alone; {'below' if better else 'above'} it, it does not. A cross marks a client that is "
        f"harmed: it loses {harm_in_words(found[0].metric)}. The scale beside it tells how many rows a client trains "
        "on.",
        f"Clients by {found[0].metric.word} alone and under a method. Harmed clients: {words}.",
        [Choice("method", "list", [(str(k), one.label) for k, one in enumerate(found)])],
        views,
    )


def draw_ranking(found: list[Ranking]) -> Figure | None:
    """All clients, as points or as ordered lines."""
    if not found:
        return None
    metric = found[0].metric
    points = base_figure(90 + 46 * len(found), xaxis_title_text=f"{metric.word} of a client's own model{_unit(metric)}")
    names = [one.label for one in found]
    points.update_yaxes(
        tickmode="array", tickvals=list(range(len(found))), ticktext=names, autorange="reversed", showgrid=False
    )
    ordered = base_figure(430, xaxis_title_text="clients, worst served first, %", yaxis_title_text=metric.title)
    for row, one in enumerate(found):
        height = _keep_apart(one.values)
        for worst in (False, True):
            kept = [k for k, is_worst in enumerate(one.worst) if is_worst == worst]
            points.add_scatter(
                x=to_shown(metric, [one.values[k] for k in kept]),
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
                hovertemplate=f"<b>{one.label}</b><br>client %{{customdata}}: %{{x:.4~g}}{metric.unit}"
                + ("<br>among the worst 5 %" if worst else "")
                + "<extra></extra>",
            )
        points.add_scatter(
            x=[metric.shown(one.mean), metric.shown(one.mean)],
            y=[row - 0.36, row + 0.36],
            mode="lines",
            legendgroup=one.label,
            line={"color": INK, "width": 2.6},
            hovertemplate=f"<b>{one.label}</b><br>mean {metric.text(one.mean)}<extra></extra>",
        )
        n = len(one.values)
        ordered.add_scatter(
            x=[round(100 * (k + 1) / n, 3) for k in range(n)],
            y=to_shown(metric, one.values),
            customdata=one.clients,
            mode="lines+markers" if n <= 60 else "lines",
            legendgroup=one.label,
            line={"color": colour(one.look), "dash": dash(one.look), "width": 2},
            marker={"symbol": marker(one.look), "size": 6, "color": colour(one.look)},
            hovertemplate=f"<b>{one.label}</b><br>client %{{customdata}}: %{{y:.4~g}}{metric.unit}<extra></extra>",
        )
    ordered.add_vrect(x0=0, x1=5, fillcolor=see_through(WARN, 0.08), line_width=0)
    ordered.add_annotation(
        text="worst 5 %", x=5, xanchor="left", y=1, yref="paper", yanchor="top", showarrow=False, font={"color": WARN}
    )
    words = "; ".join(f"{one.label} mean {metric.text(one.mean)}, worst {metric.text(one.worst_mean)}" for one in found)
    return make_figure(
        "spread",
        "From the worst to the best served client",
        "A good mean can hide clients that are served badly. Each dot is a client, the bar is the mean, and open "
        "diamonds are the worst 5 % of clients, the number that the table gives.",
        f"{_capital(metric.word)} of all clients under each method: {words}.",
        [Choice("as", "buttons", [("points", "points"), ("ordered", "ordered lines")])],
        {"points": points, "ordered": ordered},
    )


def _keep_apart(values: list[float]) -> list[float]:
    """Heights that keep equal values apart; the same for the same values."""
    out: list[float] = []
    seen: dict[float, int] = {}
    for value in values:
        place = float(f"{value:.2g}")
        k = seen[place] = seen.get(place, -1) + 1
        out.append((1 if k % 2 else -1) * ((k + 1) // 2) * 0.09)
    largest = max(map(abs, out))
    return [0.32 * height / largest if largest > 0.32 else height for height in out]


def draw_split(tables: dict[str, SplitTable]) -> Figure | None:
    """A map of clients and classes for each split."""
    if not tables:
        return None
    views = {}
    for label, table in tables.items():
        share = table.counts / np.maximum(1, table.counts.sum(1, keepdims=True))
        figure = base_figure(
            min(760, max(300, 110 + 17 * len(table.counts))),
            xaxis_title_text="class",
            yaxis_title_text="client (training rows)",
        )
        figure.add_heatmap(
            z=shorten_rows(share),
            customdata=table.counts.tolist(),
            y=list(range(len(share))),
            colorscale=SCALE,
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            colorbar={**bar_above("share of the client's rows"), "tickformat": ".0%"},
            hovertemplate="client %{y}, class %{x}<br>%{customdata} rows, %{z:.0%} of its own<extra></extra>",
        )
        every = -(-len(share) // 40)
        ticks = list(range(0, len(share), every))
        words = [f"{table.names[k][:18]} ({int(table.counts[k].sum())})" for k in ticks]
        figure.update_yaxes(tickvals=ticks, ticktext=words, autorange="reversed", showgrid=False)
        figure.update_xaxes(showgrid=False, dtick=1 if share.shape[1] <= 20 else None, title_standoff=22)
        views[label] = figure
    first = next(iter(tables.values()))
    own = [int((row > 0).sum()) for row in first.counts]
    few = (
        ""
        if len(first.counts) == first.n_clients
        else f" The first {len(first.counts)} of {first.n_clients} clients are shown."
    )
    return make_figure(
        "split",
        "Who has which classes",
        "A row is a client, a column a class; the stronger a cell, the more of the client's rows are of that class. "
        "The more a row is one strong cell, the less one model can serve everybody." + few,
        f"{first.n_clients} clients have between {min(own)} and {max(own)} of {first.counts.shape[1]} classes.",
        [Choice("split", "list", [(label, label) for label in tables])] if len(tables) > 1 else [],
        views if len(tables) > 1 else next(iter(views.values())),
    )


def draw_ranks(found: Ranks) -> Figure:
    """The critical-difference diagram: mean ranks on an axis, bars over methods that do not differ."""
    k, placed, bars = len(found.methods), place_methods(found), found.alike()
    rows = max(one.row for one in placed) + 1
    gap, step = 0.45, 1.0  # between bars, and between names
    below = gap * (len(bars) + 1)
    height = 130 + 30 * (rows + round(below))
    figure = base_figure(height, hovermode=False)

    def line(x: list[float], y: list[float], width: float = 1.3) -> None:
        figure.add_scatter(x=x, y=y, mode="lines", line={"color": INK, "width": width}, hoverinfo="skip")

    def words(x: float, y: float, text: str, where: str, size: int = 13) -> None:
        font = {"color": INK, "size": size}
        figure.add_annotation(x=x, y=y, text=text, showarrow=False, xanchor=where, yanchor="middle", font=font)

    line([1, k], [0, 0])
    for rank in range(1, k + 1):
        line([rank, rank], [0, 0.22])
        words(rank, 0.55, str(rank), "center")
    length = min(found.critical, k - 1)
    line([1, 1 + length], [1.25, 1.25])
    for end in (1, 1 + length):
        line([end, end], [1.13, 1.37])
    beyond = " (longer than the axis)" if found.critical > k - 1 else ""
    words(1 + length / 2, 1.65, f"critical difference {found.critical:.2f}{beyond}", "center")
    for level, (first, last) in enumerate(bars):
        y = -gap * (level + 0.8)
        line([found.mean[first] - 0.03, found.mean[last] + 0.03], [y, y], width=5)
    side = 0.03 * (k - 1)
    for one in placed:
        y, end = -below - step * (one.row + 0.4), 1 - side if one.is_left else k + side
        line([one.rank, one.rank, end], [0, y, y])
        words(end, y, f" {one.short} ", "right" if one.is_left else "left")
    room = 14 + 7 * max(len(one.short) for one in placed)  # pixels for the names, however wide the page is
    figure.update_layout(margin={"l": room, "r": room})
    figure.update_xaxes(visible=False, range=[1 - side, k + side], fixedrange=True)
    figure.update_yaxes(visible=False, range=[-below - step * rows, 2.0], fixedrange=True)
    p = "" if found.p is None else f" Friedman's test says p = {found.p:.2g}."
    few = f" {len(found.blocks)} data sets are few for these tests." if len(found.blocks) < FEW else ""
    return make_figure(
        "critical-difference",
        "Mean ranks",
        f"Each method stands at its mean rank over {', '.join(found.blocks)}; 1 is the best. A thick bar joins methods "
        f"whose ranks are closer than the critical difference (Nemenyi, 5 %).{p}{few}",
        "Mean ranks: " + ", ".join(f"{one.method} {one.rank:.2f}" for one in placed) + ".",
        [],
        figure,
    )


def draw_epochs(id: str, title: str, words: str, found: list[Curve]) -> Figure | None:
    """Accuracy while clients adapt a model that they were given."""
    if not found:
        return None
    metric = found[0].metric
    figure = base_figure(400, xaxis_title_text="epochs on the client's own rows", yaxis_title_text=metric.title)
    for one in found:
        _add_line(figure, one)
        if one.generic is not None:
            figure.add_scatter(
                x=[one.x[0], one.x[-1]],
                y=to_shown(metric, [one.generic] * 2),
                mode="lines",
                legendgroup=one.label,
                line={"color": colour(one.look), "dash": "dot", "width": 1.2},
                opacity=0.7,
                hovertemplate=f"<b>{one.label}</b><br>its one model for all: %{{y:.2f}}{metric.unit}<extra></extra>",
            )
    figure.update_xaxes(dtick=1 if len(found[0].x) < 15 else None)
    told = "; ".join(f"{one.label} {metric.text(one.mean[0])} then {metric.text(one.mean[-1])}" for one in found)
    alt = f"{_capital(metric.word)} before and after the epochs: {told}."
    return make_figure(id, title, words + " Thin dotted lines: the one model for all.", alt, [], figure)


def draw_zeta(found: list[Curve]) -> Figure | None:
    """Accuracy over the share of clients that name classes alike."""
    if not found:
        return None
    figure = base_figure(420, xaxis_title_text="zeta: share of clients that name classes alike", showlegend=True)
    figure.update_layout(yaxis_title_text="accuracy of personal models, %")
    for one in found:
        _add_line(figure, one)
    figure.update_traces(legendgroup="", selector={"type": "scatter"})
    figure.update_xaxes(range=[-0.03, 1.03])
    words = "; ".join(f"{one.label} from {100 * one.mean[0]:.1f} to {100 * one.mean[-1]:.1f} %" for one in found)
    return make_figure(
        "zeta",
        "When clients name the same thing differently",
        "zeta is the share of clients that call classes by the same names; the others have names of their own. "
        "One model for all must fail at the left, where most clients disagree; models that adapt to each client "
        "need not.",
        f"Accuracy over zeta: {words}.",
        [],
        figure,
    )
