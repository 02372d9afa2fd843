"""Page: words, tables and figures, put together in one file that needs nothing else."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from plures._version import __version__
from plures.errors import UsageError
from plures.files import write_text
from plures.report import interactive, looks, numbers
from plures.report.figure import Figure, make_figure
from plures.report.gather import Inside, Material, note_failures
from plures.report.numbers import summarise_seeds
from plures.report.plotly_kit import read_script
from plures.report.records import Group, find_common_options, metric_of_groups
from plures.report.tables import Column, tabulate_costs, tabulate_results
from plures.runs.results import generic_of

WITHOUT_PLOTS = "There are no figures, because plotly is not installed: pip install 'plures[plots]' brings them."


class Section(NamedTuple):
    id: str
    title: str
    words: list[str]
    columns: list[Column]
    figures: list[Figure]


class Page(NamedTuple):
    """What a page shows."""

    title: str
    what: list[str]  # sentences about what was run
    short: list[tuple[str, str, str]]  # numbers at its top: the number, what it is, whose
    notes: list[str]
    labels: list[str]  # of the rows of its tables, which are those of the legend
    sections: list[Section]
    made_from: list[str]  # folders


def write_page(material: Material, to: Path) -> Path:
    """The page about some runs."""
    script = read_script()
    notes = list(material.notes)
    sections = _make_sections(material, notes) if script else _make_tables(material.groups)
    page = Page(
        make_title(material.groups),
        tell_what_was_run(material.groups),
        tell_in_short(material.groups),
        notes,
        [group.label for group in material.groups],
        sections,
        ["/".join(run.folder.resolve().parts[-2:]) for run in material.runs],
    )
    return put_together(page, to)


def put_together(page: Page, to: Path) -> Path:
    """Write a page; without plotly it has no figures, and says so."""
    script = read_script()
    figures = [figure for section in page.sections for figure in section.figures]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(_read_template("report.html")).render(
        title=page.title,
        what=page.what,
        short=page.short,
        notes=[*page.notes, *([] if script else [WITHOUT_PLOTS])],
        groups=[(label, looks.swatch(look)) for look, label in enumerate(page.labels)],
        labels=page.labels,
        sections=page.sections,
        css=_read_template("report.css"),
        glue=_read_template("report.js") if script else "",
        plotly=script,
        views=_to_json({figure.id: figure.views for figure in figures}),
        dark=_to_json(looks.for_dark()),
        version=__version__,
        folders=page.made_from,
    )
    write_text(to, text)
    return to


def _read_template(name: str) -> str:
    return resources.files("plures.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _to_json(value: Any) -> str:
    """JSON that can stand inside a script element, whatever words are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# Words


_NUMBERS = "No One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve".split()


def make_title(groups: list[Group]) -> str:
    methods = list(dict.fromkeys(run.method for group in groups for run in group.runs))
    data = list(dict.fromkeys(Path(str(run.summary["data"])).stem for group in groups for run in group.runs))
    n = len(methods)
    who = methods[0] if n == 1 else f"{_NUMBERS[n] if n < len(_NUMBERS) else n} methods"
    return f"{who} on {data[0] if len(data) == 1 else f'{len(data)} data sets'}"


def tell_what_was_run(groups: list[Group]) -> list[str]:
    """The setting that all runs share, in sentences."""
    runs = [run for group in groups for run in group.runs]
    shared = find_common_options(runs)
    seeds = sorted({run.seed for run in runs})
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
    if shared.get("executor") == "one_by_one":
        how.append("run one client after another")
    elif shared.get("stack") is not None:
        how.append(f"run in stacks of at most {shared['stack']} clients")
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
            "The numbers are those of the honest ones."
        )
    return out


def tell_in_short(groups: list[Group]) -> list[tuple[str, str, str]]:
    """(number, what it is, whose): the best of the most asked columns, where methods met the same data."""
    runs = [run for group in groups for run in group.runs]
    if len(groups) < 2 or not {"data", "partition", "clients"} <= set(find_common_options(runs)):
        return []
    out, metric = [], metric_of_groups(groups)
    for words, of in (
        ("best mean of personal models", lambda s: s["personal"]["mean"]),
        ("best for the worst 5 % of clients", lambda s: s["personal"]["worst5"]),
        ("best model for all", generic_of),
    ):
        found = {group.label: value for group in groups if (value := summarise_seeds(group, of)) is not None}
        if found:
            best = max((value.mean for value in found.values()), key=lambda mean: metric.sign * mean)
            same = [label for label, value in found.items() if value.mean == best]
            text = f"{100 * best:.1f} %" if metric.is_share else metric.text(best)
            out.append((text, words, join_labels(same)))
    harmed = {one.label: one.harmed / len(one.points) for one in numbers.compare_with_local(groups)}
    if harmed:
        fewest = min(harmed.values())
        same = [label for label, share in harmed.items() if share == fewest]
        out.append((f"{100 * fewest:.0f} %", "of clients harmed, the fewest", join_labels(same)))
    return out


def join_labels(labels: list[str]) -> str:
    """a, b and c; of more than three, the first two and how many others."""
    if len(labels) > 3:
        labels = [*labels[:2], f"{len(labels) - 2} others"]
    *others, last = labels
    return f"{', '.join(others)} and {last}" if others else last


# Sections


def _make_sections(material: Material, notes: list[str]) -> list[Section]:
    """The tables and figures, in order; a picture that cannot be drawn becomes a note."""
    groups = material.groups
    results, costs = _make_tables(groups)
    rankings = numbers.rank_clients(groups)
    clients = [interactive.draw_harmed(numbers.compare_with_local(groups)), interactive.draw_ranking(rankings)]
    epochs = [
        interactive.draw_epochs(key.replace("_", "-"), *words, numbers.make_epoch_curves(groups, key))
        for key, words in EPOCHS.items()
    ]
    found = [
        results,
        _frame("ranks", "Over data sets", _draw_ranks(groups, notes)),
        _frame("time", "Over the rounds", [interactive.draw_rounds(groups)]),
        _frame("clients", "Client by client", clients),
        _frame("data", "The data", [interactive.draw_split(material.splits)]),
        costs,
        _frame("new", "Given a model, then on its own", epochs),
        *[_frame_inside(inside, notes) for inside in material.insides],
        _frame("labels", "Labels that differ", [interactive.draw_zeta(numbers.make_zeta_curves(groups))]),
    ]
    return [section for section in found if section is not None]


def _make_tables(groups: list[Group]) -> list[Section]:
    """The two sections that need no plotly: results and costs."""
    local = "" if numbers.compare_with_local(groups) else "Harmed clients are counted where Local is among the runs. "
    sort = " Press a heading to sort." if len(groups) > 1 else ""
    results = f"One row for each method. {local}The best of a column is in bold.{sort}"
    costs = "Bytes are those of tensors on the wire, over all rounds."
    costs += " FLOPs are those of training, and of the server's work."
    return [
        Section("results", "Results", [results], tabulate_results(groups), []),
        Section("cost", "What it cost", [costs], tabulate_costs(groups), []),
    ]


def _draw_ranks(groups: list[Group], notes: list[str]) -> list[Figure | None]:
    """The critical-difference diagram, where methods were run on several data sets."""
    try:
        found = numbers.rank_methods(groups)
    except UsageError as error:  # scipy is not installed
        notes.append(f"Ranks are not shown: {error}")
        return []
    return [] if found is None else [interactive.draw_ranks(found)]


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


def _frame(id: str, title: str, figures: Sequence[Figure | None], words: Sequence[str] = ()) -> Section | None:
    """A section of figures; None when there is none to show."""
    known = [figure for figure in figures if figure is not None]
    return Section(id, title, list(words), [], known) if known else None


def _frame_inside(inside: Inside, notes: list[str]) -> Section | None:
    """The section of a group's own pictures."""
    group, figures = inside.group, []
    for picture in inside.pictures:
        with note_failures(group.label, notes, picture):
            if picture.draw_for_page is not None:
                id, drawn = f"{picture.name}-{group.look}", picture.draw_for_page()
                figures.append(make_figure(id, picture.title, picture.words, picture.alt, picture.choices, drawn))
    words = [f"The models of seed {group.runs[0].seed}."] if len(group.runs) > 1 else []
    return _frame(f"inside-{group.look}", f"Inside {group.label}", figures, words)
