"""Tables: how good the models are and what they cost, one row for each group of runs."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from plures.files import in_bytes
from plures.report import numbers
from plures.report.numbers import Stat, summarise, summarise_seeds
from plures.report.records import Group, metric_of_groups
from plures.runs.results import generic_of, harm_in_words

Form = Callable[[float], str]
Wanted = Callable[[Iterable[float]], float] | None  # max or min, where one end is best


class TableCell(NamedTuple):
    """A number in a table: what is read, what it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | None = None
    spread: str = ""
    best: bool = False


class Column(NamedTuple):
    head: str
    words: str  # what it means
    cells: list[TableCell]


class Asked(NamedTuple):
    """A column that is made from one number of summary.json."""

    head: str
    words: str
    of: Callable[[dict[str, Any]], Any]
    form: Form
    wanted: Wanted = None

    def make(self, groups: list[Group]) -> Column | None:
        stats = [summarise_seeds(group, self.of) for group in groups]
        metric, form, wanted = metric_of_groups(groups), self.form, self.wanted
        if form is in_metric:
            form = in_percent if metric.is_share else _in_digits
            wanted = wanted if metric.is_higher_better or wanted is None else min
        words = self.words.format(metric=metric.word, unit=", %" if metric.is_share else "")
        return make_column(self.head, words, stats, form, wanted)


def make_column(head: str, words: str, stats: list[Stat | None], form: Form, wanted: Wanted = None) -> Column | None:
    """One cell for each group; None when no run has such a number."""
    known = [one.mean for one in stats if one is not None]
    if not known:
        return None
    best = wanted(known) if wanted is not None and len(set(known)) > 1 else None
    cells = []
    for one in stats:
        if one is None:
            cells.append(TableCell("–"))
            continue
        spread = f"± {form(one.std)}" if one.n > 1 and one.std else ""
        cells.append(TableCell(form(one.mean), one.mean, spread, one.mean == best))
    return Column(head, words, cells)


def in_percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.2f}"


def in_metric(value: float) -> str:
    """Stands for the form of the metric that the runs go by."""
    return str(value)


def _in_digits(value: float) -> str:
    return f"{value:.4g}"


def _in_few(value: float) -> str:
    """A small count, or a mean of such."""
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def in_thousands(value: float) -> str:
    """A large number with a unit."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:g}"


def _in_seconds(value: float) -> str:
    return f"{value:,.1f} s"


def _in_megabytes(value: float) -> str:
    return f"{value:,.0f} MB"


# fmt: off
QUALITY = (
    Asked("personal", "{metric} of clients' own models on their own test rows{unit}, mean over clients",
          lambda s: s["personal"]["mean"], in_metric, max),
    Asked("worst 5 %", "mean of the 5 % of clients that are served worst{unit}",
          lambda s: s["personal"]["worst5"], in_metric, max),
    Asked("best 5 %", "mean of the 5 % that are served best{unit}", lambda s: s["personal"]["top5"], in_metric),
    Asked("spread", "standard deviation over clients", lambda s: s["personal"]["std"], in_metric, min),
    Asked("pooled", "{metric} of own models over all test rows{unit}",
          lambda s: s["personal"]["pooled"], in_metric, max),
    Asked("generic", "{metric} of the one model for all over all test rows{unit}",
          generic_of, in_metric, max),
    Asked("never drawn", "scored clients that never took part; they are served as new clients",
          lambda s: s["personal"]["never_trained"] or None, _in_few),
)
REWEIGHTED = Asked("reweighted", "own models on everybody's test rows, classes weighted as in the client's own, %",
                   lambda s: s["personal"]["reweighted"], in_percent, max)
COSTS = (
    Asked("down", "bytes to clients", lambda s: s["bytes"]["down"], in_bytes, min),
    Asked("up", "bytes from clients", lambda s: s["bytes"]["up"], in_bytes, min),
    Asked("FLOPs", "of clients' training", lambda s: s["flops"], in_thousands, min),
    Asked("own models", "FLOPs of making all personal models once, beside training",
          lambda s: s["personal_flops"] or None, in_thousands, min),
    Asked("training", "seconds", lambda s: s["seconds"]["train"], _in_seconds, min),
    Asked("evaluation", "seconds", lambda s: s["seconds"]["evaluate"], _in_seconds),
    Asked("in all", "seconds", lambda s: s["seconds"]["total"], _in_seconds),
    Asked("memory", "most that the process held", lambda s: s["peak_rss_mb"], _in_megabytes),
    Asked("refused", "updates that are not finite, or far too large", lambda s: s["refused_updates"], _in_few),
    Asked("target after", "rounds until personal models reached the target, where they did",
          lambda s: s["to_goal"]["cost"]["round"], _in_few, min),
    Asked("target for", "bytes until then", lambda s: s["to_goal"]["cost"]["bytes"], in_bytes, min),
)
# fmt: on


def tabulate_results(groups: list[Group]) -> list[Column]:
    """How good the models are."""
    against = {one.label: one for one in numbers.compare_with_local(groups)}
    harmed: list[Stat | None] = []
    for group in groups:
        points = against[group.label].points if group.label in against else []
        counts = [sum(point.is_harmed for point in points if point.seed == run.seed) for run in group.runs]
        harmed.append(summarise(counts) if points else None)
    columns = [
        *[one.make(groups) for one in QUALITY],
        make_column(
            "harmed",
            f"clients that lose {harm_in_words(metric_of_groups(groups))}, against training alone",
            harmed,
            _in_few,
            min,
        ),
        REWEIGHTED.make(groups),
    ]
    return [column for column in columns if column is not None]


def tabulate_costs(groups: list[Group]) -> list[Column]:
    """What the runs cost."""
    return [column for one in COSTS if (column := one.make(groups)) is not None]
