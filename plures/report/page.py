"""The page: words, tables and figures, put together in one file that needs nothing else."""

import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from plures._version import __version__
from plures.files import in_bytes, write_text
from plures.report import looks, numbers
from plures.report.gather import Inside, Material
from plures.report.numbers import Stat, over_seeds
from plures.report.runs import Group, common

WITHOUT_PLOTS = "There are no figures, because plotly is not installed: pip install 'plures[plots]' brings them."


class Cell(NamedTuple):
    """A number in a table: what is read, what it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | None = None
    spread: str = ""
    best: bool = False


class Column(NamedTuple):
    head: str
    words: str  # what it means
    cells: list[Cell]


class Section(NamedTuple):
    id: str
    title: str
    words: list[str]
    columns: list[Column]
    figures: list[Any]


def write_page(material: Material, to: Path) -> Path:
    try:
        import plotly.offline

        from plures.report import interactive, interactive_inside
    except ImportError:
        script, drawn, inside = "", None, None
    else:
        script, drawn, inside = plotly.offline.get_plotlyjs(), interactive, interactive_inside
    sections = [section for section in _sections(material, drawn, inside) if section is not None]
    figures = [figure for section in sections for figure in section.figures]
    template = _file("report.html")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(
        title=title(material.groups),
        what=what_was_run(material.groups),
        short=in_short(material.groups),
        notes=[*material.notes, *([] if drawn else [WITHOUT_PLOTS])],
        groups=[(group, looks.swatch(group.look)) for group in material.groups],
        labels=[group.label for group in material.groups],
        sections=sections,
        css=_file("report.css"),
        glue=_file("report.js") if drawn else "",
        plotly=script,
        views=_json({figure.id: figure.views for figure in figures}),
        dark=_json(looks.for_dark()),
        version=__version__,
        folders=["/".join(run.folder.resolve().parts[-2:]) for run in material.runs],
    )
    write_text(to, page)
    return to


def _file(name: str) -> str:
    return resources.files("plures.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can stand inside a script element, whatever words are in it."""
    text = json.dumps(value, separators=(",", ":"), default=_plain)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    return value.tolist()


# Words


_NUMBERS = "No One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve".split()


def title(groups: list[Group]) -> str:
    methods = list(dict.fromkeys(run.method for group in groups for run in group.runs))
    data = list(dict.fromkeys(Path(str(run.summary["data"])).stem for group in groups for run in group.runs))
    n = len(methods)
    who = methods[0] if n == 1 else f"{_NUMBERS[n] if n < len(_NUMBERS) else n} methods"
    return f"{who} on {data[0] if len(data) == 1 else f'{len(data)} data sets'}"


def what_was_run(groups: list[Group]) -> list[str]:
    """The setting that all runs share, in sentences."""
    runs = [run for group in groups for run in group.runs]
    shared = common(runs)
    seeds = sorted({run.summary["seed"] for run in runs})
    have = f"{shared['clients']} clients" if "clients" in shared else "The clients"
    data = f" have the rows of {Path(str(shared['data'])).stem}" if "data" in shared else " have rows"
    dealt = {"natural": ", as the data names them"}.get(
        str(shared.get("partition")), f", dealt by {shared['partition']}" if "partition" in shared else ""
    )
    out = [f"{have}{data}{dealt}. Every client is tested on rows of its own that nobody trained on."]
    how = []
    if "model" in shared:
        how.append(f"the model is {shared['model']}")
    if "rounds" in shared:
        how.append(f"there are {shared['rounds']} rounds")
    if "participation" in shared:
        share = float(shared["participation"])
        how.append("all clients take part in each" if share == 1 else f"{100 * share:g} % of clients take part in each")
    if shared.get("steps") is not None:
        how.append(f"with {shared['steps']} batches of {shared.get('batch')} rows")
    elif "epochs" in shared and "batch" in shared:
        n = shared["epochs"]
        how.append(f"with {n} epoch{'' if n == 1 else 's'} of batches of {shared['batch']} rows")
    if "lr" in shared:
        how.append(f"at learning rate {shared['lr']:g}")
    text = ", ".join(how)
    over = f"Seed {seeds[0]}."
    if len(seeds) > 1:
        over = f"Seeds {', '.join(map(str, seeds))}; ± is one standard deviation over them."
    out.append(f"{text[0].upper()}{text[1:]}. {over}" if text else over)
    attack = next((run.summary["attack"] for run in runs if run.summary.get("attack")), None)
    if attack:
        kinds = {"labels": "train on random labels", "random": "upload noise", "replace": "enlarge their updates"}
        out.append(
            f"{len(attack['attackers'])} clients attack: they {kinds.get(attack['kind'], attack['kind'])}. "
            "Accuracies are those of the honest ones."
        )
    return out


def in_short(groups: list[Group]) -> list[tuple[str, str, str]]:
    """(number, what it is, whose): the best of the most asked columns, where methods met the same data."""
    runs = [run for group in groups for run in group.runs]
    if len(groups) < 2 or not {"data", "partition", "clients"} <= set(common(runs)):
        return []
    out = []
    for words, of in (
        ("best mean of personal models", lambda s: s["personal"]["mean"]),
        ("best for the worst 5 % of clients", lambda s: s["personal"]["worst5"]),
        ("best model for all", lambda s: s["generic"]["accuracy"]),
    ):
        found = {group.label: value for group in groups if (value := over_seeds(group, of)) is not None}
        if found:
            best = max(value.mean for value in found.values())
            same = [label for label, value in found.items() if value.mean == best]
            out.append((f"{100 * best:.1f} %", words, in_a_row(same)))
    harmed = {one.label: one.harmed / len(one.points) for one in numbers.against_local(groups)}
    if harmed:
        fewest = min(harmed.values())
        same = [label for label, share in harmed.items() if share == fewest]
        out.append((f"{100 * fewest:.0f} %", "of clients harmed, the fewest", in_a_row(same)))
    return out


def in_a_row(labels: list[str]) -> str:
    """a, b and c; of more than three, the first two and how many others."""
    if len(labels) > 3:
        labels = [*labels[:2], f"{len(labels) - 2} others"]
    *others, last = labels
    return f"{', '.join(others)} and {last}" if others else last


# Tables


def _column(head: str, words: str, stats: list[Stat | None], form: Any, wanted: Any = None) -> Column | None:
    """None when no run has such a number. `wanted` is max or min where one end is best."""
    known = [one.mean for one in stats if one is not None]
    if not known:
        return None
    best = wanted(known) if wanted is not None and len(set(known)) > 1 else None
    cells = []
    for one in stats:
        if one is None:
            cells.append(Cell("–"))
            continue
        spread = f"± {form(one.std)}" if one.n > 1 and one.std else ""
        cells.append(Cell(form(one.mean), one.mean, spread, one.mean == best))
    return Column(head, words, cells)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _few(value: float) -> str:
    """A small count, or a mean of such."""
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def results(groups: list[Group]) -> list[Column]:
    """One row a group."""

    def over(of: Any) -> list[Stat | None]:
        return [over_seeds(group, of) for group in groups]

    found = {one.label: one for one in numbers.against_local(groups)}
    harmed: list[Stat | None] = []
    for group in groups:
        one = found.get(group.label)
        harmed.append(None if one is None else numbers.stat([_harmed(one, run.summary["seed"]) for run in group.runs]))
    columns = [
        _column("personal", "accuracy of clients' own models on their own test rows, %, mean over clients",
                over(lambda s: s["personal"]["mean"]), _percent, max),
        _column("worst 5 %", "mean of the 5 % of clients that are served worst, %",
                over(lambda s: s["personal"]["worst5"]), _percent, max),
        _column("best 5 %", "mean of the 5 % that are served best, %", over(lambda s: s["personal"]["top5"]), _percent),
        _column("spread", "standard deviation over clients, points",
                over(lambda s: s["personal"]["std"]), _percent, min),
        _column("pooled", "accuracy of own models over all test rows, %",
                over(lambda s: s["personal"]["pooled"]), _percent, max),
        _column("generic", "accuracy of the one model for all over all test rows, %",
                over(lambda s: s["generic"]["accuracy"]), _percent, max),
        _column("harmed", "clients that do worse than with training alone", harmed, _few, min),
        _column("reweighted", "own models on everybody's test rows, classes weighted as in the client's own, %",
                over(lambda s: s["personal"]["reweighted"]), _percent, max),
    ]  # fmt: skip
    return [column for column in columns if column is not None]


def _harmed(one: numbers.Against, seed: int) -> int:
    return sum(p.own < p.local - 1e-12 for p in one.points if p.seed == seed)


def ledger(groups: list[Group]) -> list[Column]:
    def over(of: Any) -> list[Stat | None]:
        return [over_seeds(group, of) for group in groups]

    columns = [
        _column("down", "bytes to clients", over(lambda s: s["bytes"]["down"]), in_bytes, min),
        _column("up", "bytes from clients", over(lambda s: s["bytes"]["up"]), in_bytes, min),
        _column("FLOPs", "of clients' training", over(lambda s: s["flops"]), _count, min),
        _column("training", "seconds", over(lambda s: s["seconds"]["train"]), _seconds, min),
        _column("evaluation", "seconds", over(lambda s: s["seconds"]["evaluate"]), _seconds),
        _column("in all", "seconds", over(lambda s: s["seconds"]["total"]), _seconds),
        _column("memory", "most that the process held", over(lambda s: s["peak_rss_mb"]), lambda v: f"{v:,.0f} MB"),
        _column("refused", "updates with numbers that are not finite",
                over(lambda s: s["refused_updates"]), _few),
        _column("target after", "rounds until personal models reached the target, where they did",
                over(lambda s: s["to_target"]["cost"]["round"]), _few, min),
        _column("target for", "bytes until then", over(lambda s: s["to_target"]["cost"]["bytes"]), in_bytes, min),
    ]  # fmt: skip
    return [column for column in columns if column is not None]


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:g}"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"


# Sections


def _sections(material: Material, drawn: Any, drawn_inside: Any) -> list[Section | None]:
    groups = material.groups
    local = "Harmed clients are counted where Local is among the runs. " if not numbers.against_local(groups) else ""
    return [
        Section(
            "results",
            "Results",
            [
                f"One row for each method. {local}The best of a column is in bold."
                + (" Press a heading to sort." if len(groups) > 1 else "")
            ],
            results(groups),
            [],
        ),
        _drawn("time", "Over the rounds", [drawn and drawn.rounds_figure(groups)]),
        _drawn(
            "clients",
            "Client by client",
            [
                drawn and drawn.against_figure(numbers.against_local(groups)),
                drawn and drawn.spread_figure(numbers.spreads(groups)),
            ],
        ),
        _drawn("data", "The data", [drawn and drawn.split_figure(material.splits)]),
        Section(
            "cost",
            "What it cost",
            [
                "Bytes are those of tensors on the wire, over all rounds. FLOPs are those of training, and of the "
                "server's work."
            ],
            ledger(groups),
            [],
        ),
        _drawn("new", "Given a model, then on its own", [_epochs(drawn, groups, key) for key in EPOCHS]),
        *[_inside(inside, drawn_inside) for inside in material.insides],
        _drawn("labels", "Labels that differ", [drawn and drawn.zeta_figure(numbers.over_zeta(groups))]),
    ]


EPOCHS = {
    "new_clients": (
        "Clients that come later",
        "Some clients were held out of training. The lines begin with what such a client is given at once, and go on "
        "while it trains on its own rows.",
    ),
    "personal_epochs": (
        "How fast a model becomes personal",
        "Every client of the training is given a model made from the server's state alone, and trains it on its own "
        "rows.",
    ),
}


def _epochs(drawn: Any, groups: list[Group], key: str) -> Any:
    return drawn and drawn.epochs_figure(key.replace("_", "-"), *EPOCHS[key], numbers.over_epochs(groups, key))


def _drawn(id: str, title: str, figures: list[Any], words: list[str] | None = None) -> Section | None:
    """A section of figures; None when there is none to show."""
    known = [figure for figure in figures if figure is not None]
    return Section(id, title, words or [], [], known) if known else None


def _inside(inside: Inside, drawn: Any) -> Section | None:
    if drawn is None:
        return None
    key = str(inside.group.look)
    figures: list[Any] = []
    if inside.alpha is not None:
        figures += drawn.alpha_figures(key, inside.alpha)
    if inside.blends is not None:
        figures += drawn.blend_figures(key, inside.blends)
    if inside.paths is not None:
        names, places = [group.label for group in inside.path_of], [group.look for group in inside.path_of]
        figures.append(drawn.path_figure(key, inside.paths, names, places))
    if inside.heads is not None:
        figures.append(drawn.heads_figure(key, inside.heads))
    if inside.profiles:
        figures += drawn.landscape_figures(key, list(inside.profiles), list(inside.surfaces))
    if inside.kept is not None:
        figures.append(drawn.kept_figure(key, inside.kept))
    several = len(inside.group.runs) > 1
    words = [f"The models of seed {inside.group.runs[0].summary['seed']}."] if several else []
    return _drawn(f"inside-{key}", f"Inside {inside.group.label}", figures, words)
