"""Figure: one frame of the page, with what a reader can choose in it. Nothing is drawn here: plotly is not needed."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from plures.errors import UsageError

View = dict[str, Any]  # data and layout, as plotly.js takes them
HEIGHT = 400  # pixels of a view that does not say


class Choice(NamedTuple):
    """What a reader can choose in a figure."""

    name: str
    kind: str  # buttons, list or slider
    options: list[tuple[str, str]]  # (value, words)


class Figure(NamedTuple):
    """A figure has one view for each combination of the reader's choices."""

    id: str
    title: str
    words: str  # how to read it, for a newcomer
    alt: str  # what it shows, for readers who cannot see it
    choices: list[Choice]
    views: dict[str, View]  # by the chosen values, joined by |

    @property
    def height(self) -> int:
        return int(next(iter(self.views.values()))["layout"]["height"])


def make_figure(id: str, title: str, words: str, alt: str, choices: Sequence[Choice], drawn: Any) -> Figure:
    """A figure from what was drawn; raises if anything is missing in it, or cannot be shown.

    `drawn` is a plotly figure, or its JSON; with choices one for each combination, by the chosen values, joined by |.
    """
    if not choices:
        drawn = {"": drawn}
    wanted = ["|".join(values) for values in product(*[[value for value, _ in one.options] for one in choices])]
    missing = [key for key in wanted if key not in drawn]
    if missing or not wanted:
        raise UsageError(f"nothing was drawn for the choice {missing[0]!r}" if missing else "a choice has no options")
    views = {}
    for key in wanted:
        view = to_plain(drawn[key].to_plotly_json() if hasattr(drawn[key], "to_plotly_json") else drawn[key])
        views[key] = {"data": view["data"], "layout": {"height": HEIGHT} | view["layout"]}
    return Figure(id, title, words, alt, list(choices), views)


def to_plain(value: Any) -> Any:
    """The same of lists, dicts, words and numbers alone; numbers that are not finite are None, as JSON has none."""
    if isinstance(value, dict):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise UsageError(f"a view cannot show a {type(value).__name__}")
