"""The page's figures for papers, drawn with matplotlib: one function a figure, the same bytes for the same runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plures.errors import UsageError
from plures.report import numbers
from plures.report.gather import Inside, Material
from plures.report.looks import (
    BAND,
    GROUND,
    INK,
    PRINTED_DASHES,
    PRINTED_MARKERS,
    SHADES,
    SIDES,
    SOFT,
    WARN,
    colour,
    dash,
    marker,
)
from plures.report.numbers import Against, Curve, Level, Spread
from plures.report.runs import Group
from plures.report.states import Alpha, Blends, Heads, Kept, Paths, Profile, SplitTable, Surface
from plures.runs.folders import folder_name

KINDS = ("svg", "pdf", "png")
Drawn = tuple[str, Any]  # a name for the file, and the figure


def write_files(material: Material, to: Path) -> list[Path]:
    """Write every figure as SVG, PDF and PNG."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "figures are drawn with matplotlib, which is not installed: pip install 'plures[plots]' brings it"
        ) from None
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {to}: {error.strerror}") from None
    out = []
    same: dict[Any, Any] = {"svg.hashsalt": "plures", "pdf.compression": 9, "svg.fonttype": "path"}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **same}):
        for name, figure in _figures(material.groups, material.splits, material.insides):
            for kind in KINDS:
                path = to / f"{name}.{kind}"
                dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
                figure.savefig(path, format=kind, metadata=dateless, dpi=200)
                out.append(path)
    return out


def _figures(groups: list[Group], splits: dict[str, SplitTable], insides: list[Inside]) -> Iterator[Drawn]:
    for axis in numbers.AXES:
        for measure, words in numbers.MEASURES.items():
            found = numbers.curves(groups, axis, measure)
            if found:
                yield f"{measure.replace('_', '-')}-over-{axis}", rounds(found, numbers.AXES[axis], words)
    if against := numbers.against_local(groups):
        yield "against-local", harmed(against)
    if spreads := numbers.spreads(groups):
        yield "clients", clients(spreads)
    for k, table in enumerate(splits.values()):
        yield f"split{'' if len(splits) == 1 else f'-{k}'}", split(table)
    for key in ("new_clients", "personal_epochs"):
        if levels := numbers.over_epochs(groups, key):
            yield key.replace("_", "-"), epochs(levels)
    if levels := numbers.over_zeta(groups):
        yield "zeta", zeta(levels)
    for inside in insides:
        name = folder_name(inside.group.label).replace(" ", "")
        if inside.alpha is not None:
            yield f"alpha-{name}", alpha(inside.alpha)
            yield f"alpha-own-{name}", alpha_own(inside.alpha)
        if inside.blends is not None:
            yield f"blend-{name}", blend(inside.blends)
        if inside.paths is not None:
            yield f"path-{name}", path(inside.paths, list(inside.path_of))
        if inside.heads is not None:
            yield f"heads-{name}", heads(inside.heads)
        if inside.profiles:
            yield f"landscape-{name}", landscape([one for one in inside.profiles])
        if inside.surfaces:
            yield f"surface-{name}", surfaces([one for one in inside.surfaces])
        if inside.kept is not None:
            yield f"kept-{name}", kept(inside.kept)


def _new(width: float = 5.2, height: float = 3.4, **parts: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**parts)
    for one in np.atleast_1d(axes).ravel():
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=8)
    return figure, axes


def _legend(figure: Any, axes: Any, columns: int = 3) -> None:
    handles, words = axes.get_legend_handles_labels()
    if len(words) > 1:
        figure.legend(handles, words, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _scale(shades: tuple[str, ...]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("plures", shades)


def _line(axes: Any, one: Curve | Level) -> None:
    x, mean, std = np.array(one.x), 100 * np.array(one.mean), 100 * np.array(one.std)
    look = {"color": colour(one.look), "linestyle": PRINTED_DASHES[dash(one.look)]}
    every = max(1, len(x) // 12)
    axes.plot(x, mean, **look, lw=1.4, marker=PRINTED_MARKERS[marker(one.look)], ms=4, markevery=every, label=one.label)
    if std.any():
        axes.fill_between(x, mean - std, mean + std, color=colour(one.look), alpha=BAND, lw=0)


def rounds(found: list[Curve], axis: str, measure: str) -> Any:
    figure, axes = _new()
    for one in found:
        _line(axes, one)
    axes.set(xlabel=axis, ylabel="accuracy, %", xlim=(0, None))
    axes.set_title(measure, fontsize=9)
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def harmed(found: list[Against]) -> Any:
    n = min(4, len(found))
    n_rows = -(-len(found) // n)
    figure, axes = _new(
        2.3 * n + 0.6, 2.4 * n_rows + 0.3, nrows=n_rows, ncols=n, squeeze=False, sharex=True, sharey=True
    )
    low = 100 * min(min(p.own, p.local) for one in found for p in one.points) - 4
    most = max(p.n_train for one in found for p in one.points)
    dots = None
    for one, place in zip(found, axes.ravel(), strict=False):
        place.axline((100, 100), gradient=1, color=SOFT, lw=0.8, ls="--")
        for is_harmed, symbol in ((False, "o"), (True, "X")):
            some = [p for p in one.points if (p.own < p.local - 1e-12) == is_harmed]
            dots = place.scatter(
                [100 * p.local for p in some],
                [100 * p.own for p in some],
                c=[p.n_train for p in some],
                marker=symbol,
                s=22,
                cmap=_scale(SHADES),
                vmin=0,
                vmax=most,
                edgecolors=INK,
                linewidths=0.5,
            )
        place.set_title(f"{one.label}\n{one.harmed} of {len(one.points)} harmed", fontsize=8)
        place.set(xlim=(low, 103), ylim=(low, 103), aspect="equal")
    for place in axes.ravel()[len(found) :]:
        place.set_axis_off()
    figure.supxlabel("alone (Local), %", fontsize=9)
    figure.supylabel("own model, %", fontsize=9)
    figure.colorbar(dots, ax=axes, shrink=0.7, label="training rows")
    return figure


def clients(found: list[Spread]) -> Any:
    figure, axes = _new()
    for one in found:
        share = 100 * (np.arange(len(one.values)) + 1) / len(one.values)
        worst = np.array(one.worst)
        values = 100 * np.array(one.values)
        look = {"color": colour(one.look), "ls": PRINTED_DASHES[dash(one.look)]}
        every = max(1, len(share) // 12)
        axes.plot(
            share,
            values,
            lw=1.3,
            marker=PRINTED_MARKERS[marker(one.look)],
            ms=4,
            markevery=every,
            label=one.label,
            **look,
        )
        axes.plot(share[worst], values[worst], "D", mfc="none", mec=WARN, ms=7, mew=1.2)
    axes.axvspan(0, 5, color=WARN, alpha=0.08, lw=0)
    axes.set(xlabel="clients, worst served first, %", ylabel="accuracy of own model, %", xlim=(0, 101))
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def split(table: SplitTable) -> Any:
    share = table.counts / np.maximum(1, table.counts.sum(1, keepdims=True))
    figure, axes = _new(5.2, min(9, 1.2 + 0.16 * len(share)))
    shown = axes.imshow(share, aspect="auto", cmap=_scale(SHADES), vmin=0, vmax=1, interpolation="nearest")
    every = -(-len(share) // 40)
    ticks = list(range(0, len(share), every))
    axes.set_yticks(ticks, [f"{table.names[k][:18]} ({int(table.counts[k].sum())})" for k in ticks], fontsize=6)
    axes.set(xlabel="class", ylabel="client (training rows)")
    figure.colorbar(shown, ax=axes, label="share of the client's rows")
    return figure


def epochs(found: list[Level]) -> Any:
    figure, axes = _new()
    for one in found:
        _line(axes, one)
        if one.generic is not None:
            axes.axhline(100 * one.generic, color=colour(one.look), lw=0.8, ls=":")
    axes.set(xlabel="epochs on the client's own rows", ylabel="accuracy, %")
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def zeta(found: list[Level]) -> Any:
    figure, axes = _new()
    for one in found:
        _line(axes, one)
    axes.set(xlabel="zeta", ylabel="accuracy of personal models, %", xlim=(-0.03, 1.03))
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def alpha(found: Alpha) -> Any:
    """A row a layer, from the first over the middle to the last round."""
    at = sorted({0, len(found.rounds) // 2, len(found.rounds) - 1})
    layers = list(found.layers)
    figure, axes = _new(2.2 * len(at) + 0.6, 2.1 * len(layers) + 0.3, nrows=len(layers), ncols=len(at), squeeze=False)
    for row, layer in zip(axes, layers, strict=True):
        n = found.layers[layer].shape[1]
        from_mean = 100 * (n * found.layers[layer] - 1)
        most = max(1e-3, float(np.abs(from_mean).max()))
        for place, k in zip(row, at, strict=True):
            shown = place.imshow(from_mean[k], cmap=_scale(SIDES), vmin=-most, vmax=most, interpolation="nearest")
            place.set_title(f"{layer}, round {found.rounds[k]}", fontsize=8)
        figure.colorbar(shown, ax=row, shrink=0.8).set_label("from the mean, %", size=7)
    figure.supxlabel("whose layer it is", fontsize=9)
    figure.supylabel("who receives", fontsize=9)
    return figure


def alpha_own(found: Alpha) -> Any:
    figure, axes = _new(5.2, 2.8)
    for look, layer in enumerate(found.layers):
        style = {"color": colour(look), "ls": PRINTED_DASHES[dash(look)], "marker": PRINTED_MARKERS[marker(look)]}
        axes.plot(found.rounds, found.own(layer), ms=4, lw=1.3, label=layer, **style)
    axes.axhline(1 / found.layers[layer].shape[1], color=SOFT, ls="--", lw=0.8)
    axes.ticklabel_format(useOffset=False)
    axes.set(xlabel="round", ylabel="weight on oneself")
    _legend(figure, axes)
    return figure


def blend(found: Blends) -> Any:
    figure, (bars, dots) = _new(7, 2.8, ncols=2)
    width = (found.edges[1] - found.edges[0]) / len(found.layers)
    for look, (layer, share) in enumerate(found.layers.items()):
        hatch = ("", "//", "..", "xx")[look % 4]
        bars.bar(
            found.edges[:-1] + look * width,
            100 * share,
            width,
            align="edge",
            color=colour(look),
            hatch=hatch,
            label=layer,
        )
    bars.set(xlabel="blend, from 0 (own) to 1 (received)", ylabel="share of weights, %")
    dots.plot(found.sizes, found.means, "o", color=colour(0), ms=4)
    dots.set(xlabel="training rows of the client", ylabel="mean blend", ylim=(-0.02, 1.04))
    _legend(figure, bars)
    return figure


def path(found: Paths, of: list[Group]) -> Any:
    figure, axes = _new(5.2, 4)
    ground = axes.contourf(found.x, found.y, np.log10(found.loss), levels=20, cmap=_scale(GROUND))
    for places, group in zip(found.ways, of, strict=True):
        style = {"color": colour(group.look), "ls": PRINTED_DASHES[dash(group.look)]}
        symbol = PRINTED_MARKERS[marker(group.look)]
        axes.plot(places[:, 0], places[:, 1], lw=1.2, label=group.label, marker=symbol, ms=0, **style)
        axes.plot(places[::2, 0], places[::2, 1], symbol, ms=4.5, color=colour(group.look))
        axes.plot(places[1::2, 0], places[1::2, 1], symbol, ms=4.5, mfc="none", color=colour(group.look))
    axes.set(xlabel="first principal direction", ylabel="second principal direction")
    axes.set_title(f"client {found.client}", fontsize=9)
    figure.colorbar(ground, ax=axes, label="log10 of the client's loss")
    _legend(figure, axes)
    return figure


def heads(found: Heads) -> Any:
    order = sorted(range(len(found.clients)), key=lambda k: found.personal[k] - found.server[k])
    figure, axes = _new(5.2, min(9, 1.4 + 0.16 * len(order)))
    series = [
        ("server's model, generic head", found.server, "o", colour(0), colour(0)),
        ("own model, generic head", found.generic, "D", "none", colour(2)),
        ("own model, personal head added", found.personal, "s", colour(1), colour(1)),
    ]
    height = np.arange(len(order))
    axes.hlines(
        height, 100 * np.array(found.server)[order], 100 * np.array(found.personal)[order], color="#cccccc", lw=2
    )
    for words, values, symbol, fill, edge in series:
        axes.plot(100 * np.array(values)[order], height, symbol, mfc=fill, mec=edge, ms=4.5, label=words)
    axes.set_yticks(height, [f"{found.clients[k]} ({found.sizes[k]})" for k in order], fontsize=6)
    axes.set(xlabel="accuracy on the client's test rows, %", ylabel="client (training rows)")
    _legend(figure, axes, columns=1)
    return figure


def landscape(found: list[tuple[str, Profile]]) -> Any:
    figure, axes = _new(5.2, 3.6)
    for look, (label, one) in enumerate(found):
        style = {"color": colour(look), "ls": PRINTED_DASHES[dash(look)]}
        axes.plot(one.distance, one.mean, lw=1.4, label=f"{label}: {one.words}", **style)
        axes.fill_between(one.distance, one.mean - one.std, one.mean + one.std, color=colour(look), alpha=BAND, lw=0)
    axes.set(xlabel="distance along a random direction", ylabel="loss", ylim=(0, None))
    _legend(figure, axes, columns=1)
    return figure


def surfaces(found: list[tuple[str, Surface]]) -> Any:
    figure, axes = _new(3.6 * len(found), 3.1, ncols=len(found), squeeze=False)
    for place, (_, one) in zip(axes.ravel(), found, strict=True):
        ground = place.contourf(one.distance, one.distance, one.loss, levels=18, cmap=_scale(SHADES))
        place.plot([0], [0], "X", color=WARN)
        place.set_title(one.words, fontsize=8)
        place.set(xlabel="first random direction", ylabel="second random direction", aspect="equal")
        figure.colorbar(ground, ax=place, label="loss")
    return figure


def kept(found: Kept) -> Any:
    figure, axes = _new(5.2, 1.0 + 0.32 * len(found.layers))
    axes.barh(found.layers, found.n_kept, color=colour(0))
    axes.invert_yaxis()
    axes.set(xlabel="clients that keep the layer at home", xlim=(0, found.n_clients))
    return figure
