"""One self-contained page about runs: what was run, the table, and pictures of rounds and clients."""

import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from . import rows
from .checkpoint import write_text
from .errors import UsageError
from .memory import in_bytes
from .show import percent

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b", "#7f7f7f")


def write(folders: list[Path], to: Path) -> Path:
    """Read the runs and write the page."""
    runs = [_read(folder) for folder in folders]
    template = resources.files("plures").joinpath("templates/report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    environment.filters |= {"percent": percent, "in_bytes": in_bytes}
    first = runs[0]["summary"]
    page = environment.from_string(template).render(
        runs=runs, first=first, same_data=len({run["summary"]["data"] for run in runs}) == 1, figures=_figures(runs)
    )
    write_text(to, page)
    return to


def _read(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder} has no summary.json: is it a run folder, and has the run ended?") from None
    return {
        "name": summary["method"],
        "summary": summary,
        "rounds": rows.read_csv(folder / "rounds.csv"),
        "clients": rows.read_csv(folder / "clients.csv"),
    }


def _figures(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Pictures as SVG; none when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    drawn = [
        ("Accuracy of personal models, mean over clients, by round", _rounds(runs)),
        ("Accuracy of every client's personal model, worst to best", _clients(runs)),
    ]
    return [{"title": title, "svg": svg} for title, svg in drawn]


def _svg(draw: Any) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside right upper", frameon=False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _rounds(runs: list[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        for run, colour in zip(runs, COLOURS * len(runs), strict=False):
            seen = [row for row in run["rounds"] if row["personal_mean"]]
            accuracy = [100 * float(row["personal_mean"]) for row in seen]
            axes.plot([int(row["round"]) for row in seen], accuracy, color=colour, label=run["name"])
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy, %")

    return _svg(draw)


def _clients(runs: list[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        for run, colour in zip(runs, COLOURS * len(runs), strict=False):
            values = sorted(100 * float(row["personal_accuracy"]) for row in run["clients"] if row["personal_accuracy"])
            axes.plot(range(1, len(values) + 1), values, marker="o", ms=3, lw=1, color=colour, label=run["name"])
        axes.set_xlabel("clients, worst first")
        axes.set_ylabel("accuracy, %")

    return _svg(draw)
