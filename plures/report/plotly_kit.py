"""What every figure of the page is drawn with. Plotly is an optional extra: it is imported in this file alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from plures.learn.metrics import Metric
from plures.report.looks import GRID, INK, PAPER, SHADES, SOFT


def read_script() -> str:
    """The text of plotly.js; empty if plotly is not installed."""
    try:
        import plotly.offline  # here: an optional extra, and without it the page has its words and tables
    except ImportError:
        return ""
    return str(plotly.offline.get_plotlyjs())


def base_figure(height: int = 400, **layout: Any) -> Any:
    """An empty plotly figure in the style of the page."""
    import plotly.graph_objects as go  # here: an optional extra, and the page is made without it too

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
        margin={"l": 8, "r": 12, "t": 30, "b": 8},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": SOFT, "activecolor": INK},
        hovermode="closest",
        hoverlabel={"bgcolor": PAPER, "bordercolor": GRID, "font": {"color": INK}},
        showlegend=False,
        legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0, "font": {"color": INK}},
        xaxis=axis,
        yaxis=axis,
    )
    figure.update_layout(**layout)
    return figure


def colour_scale(shades: Sequence[str]) -> list[list[Any]]:
    """Colours at equal distances, as plotly takes them."""
    return [[k / (len(shades) - 1), shade] for k, shade in enumerate(shades)]


SCALE = colour_scale(SHADES)


def to_percents(values: Sequence[float] | np.ndarray) -> list[float]:
    return [round(100 * float(value), 3) for value in values]


def to_shown(metric: Metric, values: Sequence[float] | np.ndarray) -> list[float]:
    """Numbers of a metric as they are shown, with as many digits as can be seen."""
    return to_percents(values) if metric.is_share else shorten(values)


def shorten(values: Sequence[float] | np.ndarray) -> list[float]:
    """Numbers with as many digits as can be seen: they make the page smaller."""
    return [float(f"{float(value):.5g}") for value in values]


def shorten_rows(table: np.ndarray) -> list[list[float]]:
    return [shorten(row) for row in table]


def bar_above(title: str) -> dict[str, Any]:
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
