"""Tuning: the page about what a search for better settings has found."""

from collections.abc import Callable
from pathlib import Path

from plures.report.figure import Choice, Figure, make_figure
from plures.report.looks import INK, colour, dash, marker
from plures.report.page import Page, Section, put_together
from plures.report.plotly_kit import base_figure, read_script, to_percents, to_shown
from plures.report.tables import Column, TableCell, in_thousands
from plures.studies.tune import Objective, Tuning
from plures.studies.tuned import Tuned

MEASURES: dict[Objective, str] = {
    "personal": "of clients' own models, mean over clients",
    "worst5": "of the 5 % of clients that are served worst",
    "generic": "of the one model for all",
}


def write_tuning_page(wanted: Tuning, found: list[Tuned], to: Path) -> Path:
    """The table, what mattered, and how the best came to be."""
    figures = [draw_curves(found), draw_importance(found)] if read_script() else []
    sections = [
        Section("results", "Default and best", [_about_table(wanted)], tabulate(wanted, found), []),
        Section("search", "The search", [], [], [figure for figure in figures if figure is not None]),
    ]
    config = wanted.config
    seeds = ", ".join(map(str, wanted.seeds))
    what = [
        f"{wanted.trials} trials of each method on {config.data}, by the "
        f"{found[0].metric.word} {MEASURES[wanted.objective]}, on validation "
        f"rows of seed{'s' if len(wanted.seeds) > 1 else ''} {seeds}. Test rows were not read.",
        f"All trials play {wanted.rungs[0]} rounds, the better third of all so far goes on to "
        + ", and again a third to ".join(map(str, wanted.rungs[1:]))
        + " rounds. Trial 1 is the default, which is always played to the end.",
    ]
    if wanted.budget != "trials":
        unit = {"flops": "FLOPs", "seconds": "seconds of training"}[wanted.budget]
        what.append(f"Every method may spend as many {unit} as the trials of {found[0].method}.")
    title = f"Tuning of {found[0].method if len(found) == 1 else f'{len(found)} methods'} on {Path(config.data).stem}"
    sections = [section for section in sections if section.columns or section.figures]
    folder = "/".join(to.resolve().parent.parts[-2:])
    return put_together(Page(title, what, [], [], [one.method for one in found], sections, [folder]), to)


def _about_table(wanted: Tuning) -> str:
    return (
        "What is used in the end is the best, if it is above the default by more than one standard error of the "
        f"clients' differences; else the default. plures compare --tuned FOLDER --seeds {max(wanted.seeds) + 1} "
        "uses it."
    )


def tabulate(wanted: Tuning, found: list[Tuned]) -> list[Column]:
    """A row for each method."""

    def column(head: str, words: str, text: Callable[[Tuned], str], value: Callable[[Tuned], float | None]) -> Column:
        return Column(head, words, [TableCell(text(one), value(one)) for one in found])

    unit = {"trials": "trials", "flops": "FLOPs", "seconds": "seconds"}[wanted.budget]
    return [
        column("default", "score of trial 1", lambda t: t.text(_score(t, 0)), lambda t: _score(t, 0)),
        column("best", "score of the best trial", lambda t: t.text(_best(t)), _best),
        column("gain", "how much better the best is", lambda t: t.points(t.gain), lambda t: t.gain),
        column("error", "standard error of that", lambda t: t.points(t.error)[1:], lambda t: t.error),
        column("trials", "how many there were", lambda t: str(len(t.trials)), lambda t: len(t.trials)),
        column("to the end", "trials with all rounds", lambda t: str(len(t.whole)), lambda t: len(t.whole)),
        column("failed", "trials that could not be run", lambda t: str(n_failed(t)), lambda t: n_failed(t)),
        column("FLOPs", "of all trials", lambda t: in_thousands(flops_of(t)), flops_of),
        column("seconds", "of training in all trials", lambda t: f"{seconds_of(t):.1f}", seconds_of),
        column("unspent", f"{unit} of the budget", lambda t: unspent(t, unit), lambda t: t.budget - t.spent),
        column("used", "what is used in the end", lambda t: t.spec, lambda t: None),
    ]


def _score(one: Tuned, number: int) -> float:
    return one.trials[number].scores[one.rounds]


def _best(one: Tuned) -> float:
    return one.best.scores[one.rounds]


def n_failed(one: Tuned) -> int:
    return sum(bool(trial.failed) for trial in one.trials)


def flops_of(one: Tuned) -> float:
    return float(sum(trial.flops for trial in one.trials))


def seconds_of(one: Tuned) -> float:
    return float(sum(trial.seconds for trial in one.trials))


def unspent(one: Tuned, unit: str) -> str:
    """What is left of the budget, in words; a batch that was begun is finished, so it may be less than nothing."""
    left = one.budget - one.spent
    if unit == "trials":
        return f"{left:.0f}"
    return f"{100 * left / one.budget:.1f} %" if one.budget else "-"


def draw_curves(found: list[Tuned]) -> Figure:
    """The best score so far over the trials."""
    metric = found[0].metric
    figure = base_figure(400, xaxis_title_text="trials", yaxis_title_text=f"best so far, {metric.title}")
    for look, one in enumerate(found):
        x, y = zip(*one.curve(), strict=True)
        figure.add_scatter(
            x=list(x),
            y=to_shown(metric, [metric.sign * value for value in y]),
            name=one.method,
            legendgroup=one.method,
            mode="lines+markers",
            line={"color": colour(look), "dash": dash(look), "width": 2.2, "shape": "hv"},
            marker={"symbol": marker(look), "size": 6, "color": colour(look)},
            hovertemplate=f"<b>{one.method}</b><br>after %{{x}} trials: %{{y:.5~g}}{metric.unit}<extra></extra>",
        )
    ends = ", ".join(f"{one.method} {one.text(_best(one))}" for one in found)
    return make_figure(
        "best-so-far",
        "The best so far",
        "Each line is a method, from its default at trial 1 to the best that was found. Only trials with all rounds "
        "count.",
        f"Lines of the best score over trials; they end at {ends}.",
        [],
        figure,
    )


def draw_importance(found: list[Tuned]) -> Figure | None:
    """Which settings mattered."""
    known = [one for one in found if one.importance]
    if not known:
        return None
    views = {}
    most = max(len(one.importance) for one in known)
    for one in known:
        names = list(reversed(one.importance))
        figure = base_figure(90 + 34 * most, xaxis_title_text="share, %")
        shares = [one.importance[name] for name in names]
        figure.add_bar(
            x=to_percents(shares),
            y=names,
            orientation="h",
            marker={"color": colour(found.index(one))},
            text=[f"{100 * share:.0f} %" for share in shares],
            textposition="outside",
            textfont={"color": INK},
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.1f} %<extra></extra>",
        )
        figure.update_xaxes(range=[0, 108])
        figure.update_yaxes(type="category")
        views[one.method] = figure
    options = [(one.method, one.method) for one in known]
    first = next(iter(known[0].importance))
    return make_figure(
        "importance",
        "Which settings mattered",
        "How much of the differences between trials after the first rounds each setting explains (PED-ANOVA). With few "
        "trials this is rough.",
        f"Bars for each setting; of {known[0].method} the longest is {first}.",
        [Choice("method", "list", options)],
        views,
    )
