"""What every printed figure is drawn with. Matplotlib is an optional extra: it is imported in this file alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from plures.errors import UsageError
from plures.report.looks import PRINTED_DASHES, PRINTED_MARKERS, colour, dash, marker


@contextmanager
def same_bytes() -> Iterator[None]:
    """Figures that are drawn and saved in here are the same bytes each time, whatever the user's own style."""
    try:
        import matplotlib  # here: an optional extra, which only printed figures need
    except ImportError:
        raise UsageError(
            "figures are drawn with matplotlib, which is not installed: pip install 'plures[plots]' brings it"
        ) from None
    same: dict[Any, Any] = {"svg.hashsalt": "plures", "pdf.compression": 9, "svg.fonttype": "path"}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **same}):
        yield


def new_figure(width: float = 5.2, height: float = 3.4, **parts: Any) -> tuple[Any, Any]:
    """A figure of some inches, and its axes."""
    from matplotlib.figure import Figure  # here: an optional extra

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**parts)
    for one in np.atleast_1d(axes).ravel():
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=8)
    return figure, axes


def add_legend(figure: Any, axes: Any, columns: int = 3) -> None:
    """A legend below the figure, where there is more than one line."""
    handles, words = axes.get_legend_handles_labels()
    if len(words) > 1:
        figure.legend(handles, words, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def colour_map(shades: tuple[str, ...]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap  # here: an optional extra

    return LinearSegmentedColormap.from_list("plures", shades)


def line_style(look: int) -> dict[str, Any]:
    return {"color": colour(look), "ls": PRINTED_DASHES[dash(look)]}


def symbol_of(look: int) -> str:
    return PRINTED_MARKERS[marker(look)]
