"""Base: how a method shows what is inside its models.

A method, or an add-on, names a function in its attribute `insides`: `insides = "my_methods:pictures"`. A report calls
it with a run of the method, open at its last checkpoint:

    def pictures(opened: Opened) -> list[Picture]

It computes its numbers at once, while the run is open; what it gives draws them later, if plotly or matplotlib is
there. If anything fails, the report says so in a note and has no such picture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from plures.report.figure import Choice
from plures.runs.simulation import Simulation


class Picture(NamedTuple):
    """One picture of what is inside the models of a run: for the page, for papers, or for both."""

    name: str  # small letters, digits and hyphens; its id on the page and its files are named after it
    title: str
    words: str  # how to read it, for a newcomer
    alt: str  # what it shows, for readers who cannot see it
    draw_for_page: Callable[[], Any] | None = None  # gives a plotly figure, best begun by `plotly_kit.base_figure`
    choices: Sequence[Choice] = ()  # then it gives a dict of figures, each by the chosen values, joined by |
    draw_for_paper: Callable[[], Any] | None = None  # gives a matplotlib figure
    file: str = ""  # what its files are named after, if not after its name


@dataclass
class Opened:
    """A run of a report, open at its last checkpoint."""

    simulation: Simulation
    label: str  # of its group, in all tables and figures
    look: int  # of its group: place among colours, dashes and markers
    open_fedavg: Callable[[], "Opened | None"] = lambda: None

    @cached_property
    def fedavg(self) -> "Opened | None":
        """FedAvg on the same split and seed, if it is among the runs of the report; opened when first asked for."""
        return self.open_fedavg()
