"""Printed: the page's figures for papers, drawn with matplotlib; the same runs give the same bytes.

There is one function for each figure that is about no method; pictures of methods draw themselves.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plures.errors import UsageError
from plures.report import numbers
from plures.report.gather import Material, note_failures
from plures.report.interactive import sides
from plures.report.looks import BAND, INK, SHADES, SOFT, WARN, colour
from plures.report.matplotlib_kit import add_legend, colour_map, line_style, new_figure, same_bytes, symbol_of
from plures.report.numbers import Against, Curve, Ranking
from plures.report.records import Group
from plures.report.splits import SplitTable
from plures.runs.folders import folder_name
from plures.studies.ranks import Ranks, place_methods

KINDS = ("svg", "pdf", "png")
MANY_RANKS = 15  # on the scale of a critical-difference diagram
Drawn = tuple[str, Any]  # a name for the file, and the figure


def write_files(material: Material, to: Path) -> list[Path]:
    """Write every figure as SVG, PDF and PNG; a picture that cannot be drawn becomes a note of the material."""
    out = []
    with same_bytes():
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {to}: {error.strerror}") from None
        for name, figure in _draw_figures(material.groups, material.splits):
            out += _save(figure, to, name)
        for inside in material.insides:
            label = inside.group.label
            for picture in inside.pictures:
                with note_failures(label, material.notes, picture):
                    if picture.draw_for_paper is not None:
                        name = f"{picture.file or picture.name}-{folder_name(label).replace(' ', '')}"
                        out += _save(picture.draw_for_paper(), to, name)
    return out


def _save(figure: Any, to: Path, name: str) -> list[Path]:
    """Write a figure in all kinds, without the date."""
    dateless: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}
    paths = [to / f"{name}.{kind}" for kind in KINDS]
    for path, kind in zip(paths, KINDS, strict=True):
        figure.savefig(path, format=kind, metadata=dateless[kind], dpi=200)
    return paths


def _draw_figures(groups: list[Group], splits: dict[str, SplitTable]) -> Iterator[Drawn]:
    for axis in numbers.AXES:
        for measure, words in numbers.MEASURES.items():
            found = numbers.make_curves(groups, axis, measure)
            if found:
                yield f"{measure.replace('_', '-')}-over-{axis}", draw_rounds(found, numbers.AXES[axis], words)
    if against := numbers.compare_with_local(groups):
        yield "against-local", draw_harmed(against)
    if rankings := numbers.rank_clients(groups):
        yield "clients", draw_ranking(rankings)
    if over := numbers.rank_methods(groups):
        yield "critical-difference", draw_ranks(over)
    for k, table in enumerate(splits.values()):
        yield f"split{'' if len(splits) == 1 else f'-{k}'}", draw_split(table)
    for key in ("new_clients", "personal_epochs"):
        if curves := numbers.make_epoch_curves(groups, key):
            yield key.replace("_", "-"), draw_epochs(curves)
    if curves := numbers.make_zeta_curves(groups):
        yield "zeta", draw_zeta(curves)


def _add_line(axes: Any, one: Curve) -> None:
    """A line in the look of its method, with a band where several seeds give one."""
    factor = one.metric.shown(1.0)
    x, mean, std = np.array(one.x), factor * np.array(one.mean), factor * np.array(one.std)
    axes.plot(x, mean, lw=1.4, label=one.label, **_marks(one.look, len(x)), **line_style(one.look))
    if std.any():
        axes.fill_between(x, mean - std, mean + std, color=colour(one.look), alpha=BAND, lw=0)


def _marks(look: int, n: int) -> dict[str, Any]:
    """The marks of a line with so many points, of which a dozen are marked."""
    return {"marker": symbol_of(look), "ms": 4, "markevery": max(1, n // 12)}


def draw_rounds(found: list[Curve], axis: str, measure: str) -> Any:
    figure, axes = new_figure()
    for one in found:
        _add_line(axes, one)
    axes.set(xlabel=axis, ylabel=found[0].metric.title, xlim=(0, None))
    axes.set_title(measure, fontsize=9)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure


def draw_harmed(found: list[Against]) -> Any:
    """One part for each method."""
    n = min(4, len(found))
    n_rows = -(-len(found) // n)
    figure, axes = new_figure(
        2.3 * n + 0.6, 2.4 * n_rows + 0.3, nrows=n_rows, ncols=n, squeeze=False, sharex=True, sharey=True
    )
    metric = found[0].metric
    low, high = sides([p for one in found for p in one.points])
    most = max(p.n_train for one in found for p in one.points)
    dots = None
    for one, place in zip(found, axes.ravel(), strict=False):
        place.axline((low, low), (high, high), color=SOFT, lw=0.8, ls="--")
        for is_harmed, symbol in ((False, "o"), (True, "X")):
            some = [p for p in one.points if p.is_harmed == is_harmed]
            dots = place.scatter(
                [metric.shown(p.local) for p in some],
                [metric.shown(p.own) for p in some],
                c=[p.n_train for p in some],
                marker=symbol,
                s=22,
                cmap=colour_map(SHADES),
                vmin=0,
                vmax=most,
                edgecolors=INK,
                linewidths=0.5,
            )
        place.set_title(f"{one.label}\n{one.harmed} of {len(one.points)} harmed", fontsize=8)
        place.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for place in axes.ravel()[len(found) :]:
        place.set_axis_off()
    unit = ", %" if metric.is_share else ""
    figure.supxlabel(f"alone (Local){unit}", fontsize=9)
    figure.supylabel(f"own model{unit}", fontsize=9)
    figure.colorbar(dots, ax=axes, shrink=0.7, label="training rows")
    return figure


def draw_ranking(found: list[Ranking]) -> Any:
    figure, axes = new_figure()
    for one in found:
        share = 100 * (np.arange(len(one.values)) + 1) / len(one.values)
        worst = np.array(one.worst)
        values = one.metric.shown(1.0) * np.array(one.values)
        axes.plot(share, values, lw=1.3, label=one.label, **_marks(one.look, len(share)), **line_style(one.look))
        axes.plot(share[worst], values[worst], "D", mfc="none", mec=WARN, ms=7, mew=1.2)
    axes.axvspan(0, 5, color=WARN, alpha=0.08, lw=0)
    axes.set(xlabel="clients, worst served first, %", ylabel=f"{found[0].metric.title}, own model", xlim=(0, 101))
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure


def draw_split(table: SplitTable) -> Any:
    share = table.counts / np.maximum(1, table.counts.sum(1, keepdims=True))
    figure, axes = new_figure(5.2, min(9, 1.2 + 0.16 * len(share)))
    shown = axes.imshow(share, aspect="auto", cmap=colour_map(SHADES), vmin=0, vmax=1, interpolation="nearest")
    every = -(-len(share) // 40)
    ticks = list(range(0, len(share), every))
    axes.set_yticks(ticks, [f"{table.names[k][:18]} ({int(table.counts[k].sum())})" for k in ticks], fontsize=6)
    axes.set(xlabel="class", ylabel="client (training rows)")
    figure.colorbar(shown, ax=axes, label="share of the client's rows")
    return figure


def draw_epochs(found: list[Curve]) -> Any:
    figure, axes = new_figure()
    for one in found:
        _add_line(axes, one)
        if one.generic is not None:
            axes.axhline(one.metric.shown(one.generic), color=colour(one.look), lw=0.8, ls=":")
    axes.set(xlabel="epochs on the client's own rows", ylabel=found[0].metric.title)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure


def draw_zeta(found: list[Curve]) -> Any:
    figure, axes = new_figure()
    for one in found:
        _add_line(axes, one)
    axes.set(xlabel="zeta", ylabel="accuracy of personal models, %", xlim=(-0.03, 1.03))
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure


def draw_ranks(found: Ranks) -> Any:
    """The critical-difference diagram."""
    k, placed, bars = len(found.methods), place_methods(found), found.alike()
    below, rows = 0.4 * (len(bars) + 1), max(one.row for one in placed) + 1
    figure, axes = new_figure(6.4, 1.0 + 0.25 * (rows + below))
    axes.plot([1, k], [0, 0], color=INK, lw=1)
    for rank in range(1, k + 1):
        axes.plot([rank, rank], [0, 0.2], color=INK, lw=1)
        if k <= MANY_RANKS or rank % 5 == 0 or rank == 1:  # else numbers touch each other
            axes.text(rank, 0.35, str(rank), ha="center", va="bottom", fontsize=8)
    length = min(found.critical, k - 1)
    axes.plot([1, 1 + length], [1.5, 1.5], color=INK, lw=1, marker="|", markersize=6)
    axes.text(1 + length / 2, 1.7, f"CD = {found.critical:.2f}", ha="center", va="bottom", fontsize=8)
    for level, (first, last) in enumerate(bars):
        y = -0.4 * (level + 0.8)
        axes.plot([found.mean[first] - 0.03, found.mean[last] + 0.03], [y, y], color=INK, lw=3, solid_capstyle="butt")
    for one in placed:
        y, end = -below - one.row - 0.4, 1 - 0.03 * (k - 1) if one.is_left else k + 0.03 * (k - 1)
        axes.plot([one.rank, one.rank, end], [0, y, y], color=INK, lw=0.8)
        side = "right" if one.is_left else "left"
        axes.text(end, y, f" {one.short} ", ha=side, va="center", fontsize=8)
    axes.set_ylim(-below - rows, 2.4)
    axes.axis("off")
    return figure
