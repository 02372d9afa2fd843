"""What users see in the terminal during runs and after them: progress and tables."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from plures.files import in_bytes, telling_disk_failures
from plures.learn.metrics import ACCURACY, Metric
from plures.runs.callbacks import Callback
from plures.runs.loop import Result
from plures.runs.results import Round, generic_of, harm_in_words, metric_of
from plures.runs.state import RunState
from plures.studies import reproduce
from plures.studies.preset import Preset, Scale
from plures.studies.ranks import Ranks
from plures.studies.tables import BASELINES, Line, footnotes, text_of

SECONDS_BETWEEN_LINES = 1.0  # where there is no terminal to draw a bar on


class ProgressReport(Callback):
    """A bar on a terminal, plain lines elsewhere; both end up in the log."""

    def __init__(self, console: Console, name: str, log: Path | None, quiet: bool) -> None:
        self.console, self.name, self.log, self.quiet = console, name, log, quiet
        self.last_line, self.n_bytes, self.first = 0.0, 0, 0
        self.bar: Progress | None = None

    def note(self, line: str) -> None:
        if self.log is not None:
            with telling_disk_failures(self.log.parent), open(self.log, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def say(self, line: str) -> None:
        self.note(line)
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def started(self, state: RunState) -> None:
        self.first = state.round
        self.n_bytes = sum(row.bytes_down + row.bytes_up for row in state.rows)
        config = state.scene.config
        odd = len(state.scene.population.train) - len(state.eligible)
        self.say(
            f"{config.method}: {config.clients} clients of {config.data} ({config.split or config.partition}), "
            f"{config.model}, {config.rounds} rounds, seed {config.seed}"
            + (f"; {odd} clients have no rows and sit out" if odd else "")
            + (f"; resumed after round {state.round}" if state.round else "")
        )
        if self.console.is_terminal and not self.quiet:
            self.bar = Progress(
                TextColumn(f"{self.name:14}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=config.rounds, completed=state.round, numbers="")

    def played(self, state: RunState, row: Round) -> None:
        self.n_bytes += row.bytes_down + row.bytes_up
        numbers = f"loss {row.loss:.4f}"
        if row.personal_mean is not None:
            numbers += f"  personal {state.scene.metric.text(row.personal_mean)}"
        numbers += f"  {in_bytes(self.n_bytes)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=row.round, numbers=numbers)
        left = self.seconds_left(state, row)
        line = f"round {row.round}/{state.scene.config.rounds}  {numbers}  {left:.0f} s left"
        now = time.perf_counter()
        if self.bar is None and (
            now - self.last_line > SECONDS_BETWEEN_LINES or row.round == state.scene.config.rounds
        ):
            self.last_line = now
            self.say(line)
        else:
            self.note(line)

    def seconds_left(self, state: RunState, row: Round) -> float:
        """By the median of the last rounds: the first one compiles, and one that is scored takes longer."""
        recent = [one.train_seconds + one.evaluate_seconds for one in state.rows[self.first :][-10:]]
        return float(np.median(recent)) * (state.scene.config.rounds - row.round) if recent else 0.0

    def ended(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class GrowingTable:
    """A comparison while it runs: on a terminal a table that grows, elsewhere a line for each run that is done."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.found: list[list[str]] = []
        self.running: list[str] | None = None
        self.live: Live | None = None

    def __enter__(self) -> "GrowingTable":
        if self.console.is_terminal and not self.quiet:
            self.live = Live(self.table(), console=self.console, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, line: str) -> None:
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def table(self) -> Table:
        table = _table()
        for cells in [*self.found, *([self.running] if self.running else [])]:
            table.add_row(*cells)
        return table

    def progress(self, name: str, state: RunState, row: Round | None) -> None:
        if self.live is None:
            return
        at = f"{state.round}/{state.scene.config.rounds}"
        score = "..." if row is None or row.personal_mean is None else state.scene.metric.text(row.personal_mean)
        self.running = [name, score, "", "", "", "", "", at]
        self.live.update(self.table())

    def done(self, method: str, seed: int, result: Result) -> None:
        name, self.running = f"{method} ({seed})", None
        self.found.append(result_cells(name, result.summary))
        if self.live is not None:
            self.live.update(self.table())
        elif not self.quiet:
            self.console.print(result_line(name, result.summary), markup=False, highlight=False, soft_wrap=True)

    def callback(self, method: str, seed: int, folder: Path | None) -> Callback:
        return _Row(self, f"{method} ({seed})", folder)


class _Row(ProgressReport):
    """The current run as the last row of a growing table; all lines go to the run's log."""

    def __init__(self, table: GrowingTable, name: str, folder: Path | None) -> None:
        super().__init__(table.console, name, folder / "log.txt" if folder else None, quiet=True)
        self.table = table

    def started(self, state: RunState) -> None:
        super().started(state)
        self.table.progress(self.name, state, state.rows[-1] if state.rows else None)

    def played(self, state: RunState, row: Round) -> None:
        super().played(state, row)
        self.table.progress(self.name, state, row)


def comparison_table(found: list[Line]) -> Table:
    """One row for each method, over its seeds."""
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    heads = ["method", *found[0].spreads, "harmed", "traffic", "FLOPs", "seconds", "p", "p, Holm"]
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for line in found:
        table.add_row(
            line.method,
            *[text_of(spread, line.metric) for spread in line.spreads.values()],
            "-" if not line.harmed else f"{np.mean(line.harmed):.4g}",
            in_bytes(line.n_bytes),
            f"{line.flops:.1e}",
            f"{line.seconds:.1f}",
            "" if line.p is None else f"{line.p:.2g}",
            "" if line.p_holm is None else f"{line.p_holm:.2g}",
        )
    table.caption = (
        f"{measured_in(found[0].metric)}; harmed: clients that lose {harm_in_words(found[0].metric)}, against training "
        f"alone; p: how likely such a difference to {found[0].method} would be by chance (signs of the clients' "
        "differences flipped), and corrected for the number of methods (Holm)"
    ) + "".join(f"; {note}" for note in footnotes(found))
    return table


def ranks_table(found: Ranks) -> Table:
    """Accuracies on each data set with the method's place, and mean ranks, the best first."""
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "mean rank", *found.blocks):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for i, method in enumerate(found.methods):
        cells = [f"{found.text(k, i)} ({found.ranks[k, i]:g})" for k in range(len(found.blocks))]
        table.add_row(method, f"{found.mean[i]:.2f}", *cells)
    words = dict.fromkeys(measured_in(metric) for metric in found.metrics)
    table.caption = f"of personal models: {' or '.join(words)}, and the place of the method on that data set"
    return table


def measured_in(metric: Metric) -> str:
    """What the numbers of a table are."""
    if metric is ACCURACY:
        return "accuracies in %"
    better = "" if metric.is_higher_better else ", lower is better"
    return f"{metric.word}{' in %' if metric.is_share else ''}{better}"


def verdict(methods: list[str], better: list[str]) -> str:
    """Which methods serve clients better than training alone and than one model for all; empty if not compared."""
    if not set(BASELINES) <= set(methods) or len(methods) == len(BASELINES):
        return ""
    names = ", ".join(better) or "no method"
    return f"better for the clients than both training alone and FedAvg (p < 0.05, Holm): {names}"


def reproduction_table(title: str, cells: list[reproduce.Cell], scale: str) -> Table:
    """Theirs and ours, a row for each method and column of the paper; a smoke test is not to be compared."""
    table = Table(title=title, box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "number", "published", "ours", "gap", "verdict"):
        table.add_column(head, justify="left" if head in ("method", "number", "verdict") else "right", no_wrap=True)
    for cell in cells:
        theirs = "-" if cell.published is None else f"{cell.published:.2f}"
        theirs += f" ± {cell.published_std:.2f}" if cell.published_std is not None else ""
        ours = "-" if not cell.ours.n else f"{cell.ours.mean:.2f}"
        ours += f" ± {cell.ours.std:.2f}" if cell.ours.n > 1 else ""
        compared = cell.published is not None and cell.ours.n and scale != "smoke"
        gap = f"{cell.ours.mean - (cell.published or 0):+.2f}" if compared else ""
        table.add_row(cell.method, cell.column, theirs, ours, gap, cell.verdict if compared else "")
    return table


def reproduction_words(preset: Preset, cells: list[reproduce.Cell], scale: Scale) -> list[str]:
    """What the table says, and what it cannot say."""
    if scale == "smoke":
        return ["a smoke test proves that it runs; its numbers are those of other data and are not to be compared"]
    out = []
    for order in reproduce.orders(preset, cells):
        if order.pairs:
            broken = f"; not: {', '.join(order.broken)}" if order.broken else ""
            out.append(f"{order.column}: the published order holds for {order.holds} of {order.pairs} pairs{broken}")
    if scale == "small":
        out.append("at small size the order may hold, the numbers need not: use --scale full for the paper's size")
        done = dict.fromkeys(cell.method for cell in cells)
        spelled = {method: preset.run_as(method, scale) for method in done}
        out += [f"{method} is run as {other} at this size" for method, other in spelled.items() if other != method]
    return out + [f"note: {sentence}" for sentence in preset.unknown]


def _table() -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "personal", "worst 5 %", "pooled", "generic", "harmed", "traffic", "seconds"):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    return table


def new_clients_line(summary: dict[str, Any]) -> str:
    """How new clients were served; empty if there were none."""
    found = summary.get("new_clients")
    if not found:
        return ""
    metric = metric_of(summary)
    generic = "" if found["generic"] is None else f" (the generic model: {metric.text(found['generic'])})"
    before, after = metric.text(found["before"]), metric.text(found["after"])
    return f"{found['n']} new clients: {before} at once, {after} after {len(found['curve']) - 1} epochs{generic}"


def result_table(results: dict[str, Result]) -> Table:
    """One row for each run."""
    table = _table()
    for name, result in results.items():
        table.add_row(*result_cells(name, result.summary))
    return table


def result_line(name: str, summary: dict[str, Any]) -> str:
    """A method's numbers in one line, for the time that a comparison takes."""
    cells = result_cells(name, summary)
    return f"{cells[0]:16} personal {cells[1]:>8}   worst 5 % {cells[2]:>8}   generic {cells[4]:>8}   {cells[7]:>7} s"


def result_cells(name: str, summary: dict[str, Any]) -> list[str]:
    personal, metric = summary["personal"] or {}, metric_of(summary)
    return [
        name,
        metric.text(personal.get("mean")),
        metric.text(personal.get("worst5")),
        metric.text(personal.get("pooled")),
        metric.text(generic_of(summary)),
        "-" if summary["harmed"] is None else str(summary["harmed"]),
        in_bytes(summary["bytes"]["down"] + summary["bytes"]["up"]),
        f"{summary['seconds']['total']:.1f}",
    ]
