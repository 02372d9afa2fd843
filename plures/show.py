"""What users see in the terminal: progress, tables, and what `show`, `list` and `doctor` tell."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import datasets, memory, models, partition, reproduce, rows, tree
from .choose import all_settings, choose, doc, setting_fields
from .comparison import Line, percent_of
from .execute import cost_of, groups, run_group, train_function
from .fit import Solver
from .memory import in_bytes
from .method import Each, Federation, Same
from .methods import METHODS
from .parts import PARTS
from .run import Course, Result, Scene, Watcher, cohort
from .shard import batches_an_epoch
from .tree import Tree

SECONDS_BETWEEN_LINES = 1.0  # where there is no terminal to draw a bar on


def percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.2f} %"


class Progresses(Watcher):
    """A bar on a terminal, plain lines elsewhere; both end up in the log."""

    def __init__(self, console: Console, name: str, log: Path | None, quiet: bool) -> None:
        self.console, self.name, self.log, self.quiet = console, name, log, quiet
        self.began, self.last_line, self.n_bytes, self.first = 0.0, 0.0, 0, 0
        self.bar: Progress | None = None

    def note(self, line: str) -> None:
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def say(self, line: str) -> None:
        self.note(line)
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def started(self, run: Course) -> None:
        self.began, self.first = time.perf_counter(), run.round
        self.n_bytes = sum(row.bytes_down + row.bytes_up for row in run.rows)
        config = run.scene.config
        odd = len(run.scene.population.train) - len(run.eligible)
        self.say(
            f"{config.method}: {config.clients} clients of {config.data} ({config.split or config.partition}), "
            f"{config.model}, {config.rounds} rounds, seed {config.seed}"
            + (f"; {odd} clients have no rows and sit out" if odd else "")
            + (f"; going on after round {run.round}" if run.round else "")
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
            self.task = self.bar.add_task("", total=config.rounds, completed=run.round, numbers="")

    def played(self, run: Course, row: rows.Round) -> None:
        self.n_bytes += row.bytes_down + row.bytes_up
        numbers = f"loss {row.loss:.4f}"
        if row.personal_mean is not None:
            numbers += f"  personal {percent(row.personal_mean)}"
        numbers += f"  {in_bytes(self.n_bytes)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=row.round, numbers=numbers)
        spent = time.perf_counter() - self.began
        left = spent / max(1, row.round - self.first) * (run.scene.config.rounds - row.round)
        line = f"round {row.round}/{run.scene.config.rounds}  {numbers}  {left:.0f} s left"
        now = time.perf_counter()
        if self.bar is None and (now - self.last_line > SECONDS_BETWEEN_LINES or row.round == run.scene.config.rounds):
            self.last_line = now
            self.say(line)
        else:
            self.note(line)

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

    def progress(self, name: str, run: Course, row: rows.Round | None) -> None:
        if self.live is None:
            return
        at = f"{run.round}/{run.scene.config.rounds}"
        accuracy = percent(row.personal_mean) if row is not None and row.personal_mean is not None else "..."
        self.running = [name, accuracy, "", "", "", "", "", at]
        self.live.update(self.table())

    def done(self, method: str, seed: int, result: Result) -> None:
        name, self.running = f"{method} ({seed})", None
        self.found.append(result_cells(name, result.summary))
        if self.live is not None:
            self.live.update(self.table())
        elif not self.quiet:
            self.console.print(result_line(name, result.summary), markup=False, highlight=False, soft_wrap=True)

    def watcher(self, method: str, seed: int, folder: Path | None) -> "Watcher":
        return _Row(self, f"{method} ({seed})", folder)


class _Row(Progresses):
    """The run that is going on, as the last row of a growing table; all lines go to the run's log."""

    def __init__(self, table: GrowingTable, name: str, folder: Path | None) -> None:
        super().__init__(table.console, name, folder / "log.txt" if folder else None, quiet=True)
        self.table = table

    def started(self, run: Course) -> None:
        super().started(run)
        self.table.progress(self.name, run, run.rows[-1] if run.rows else None)

    def played(self, run: Course, row: rows.Round) -> None:
        super().played(run, row)
        self.table.progress(self.name, run, row)


def comparison_table(found: list[Line]) -> Table:
    """One row a method, over its seeds."""
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    heads = ["method", *found[0].spreads, "harmed", "traffic", "FLOPs", "seconds", "p"]
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for line in found:
        table.add_row(
            line.method,
            *[percent_of(spread) for spread in line.spreads.values()],
            "-" if not line.harmed else f"{np.mean(line.harmed):.4g}",
            in_bytes(line.n_bytes),
            f"{line.flops:.1e}",
            f"{line.seconds:.1f}",
            "" if line.p is None else f"{line.p:.2g}",
        )
    table.caption = "accuracies in %; p: that clients' accuracies differ from the first method's by chance alone"
    return table


def reproduction_table(title: str, cells: list[reproduce.Cell], scale: str) -> Table:
    """Theirs and ours, a row a method and column of the paper; a smoke test is not to be compared."""
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


def reproduction_words(preset: reproduce.Preset, cells: list[reproduce.Cell], scale: reproduce.Scale) -> list[str]:
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


def result_table(results: dict[str, Result]) -> Table:
    """One row a run."""
    table = _table()
    for name, result in results.items():
        table.add_row(*result_cells(name, result.summary))
    return table


def result_line(name: str, summary: dict[str, Any]) -> str:
    """A method's numbers in one line, for while a comparison goes on."""
    cells = result_cells(name, summary)
    return f"{cells[0]:16} personal {cells[1]:>8}   worst 5 % {cells[2]:>8}   generic {cells[4]:>8}   {cells[7]:>7} s"


def result_cells(name: str, summary: dict[str, Any]) -> list[str]:
    personal, generic = summary["personal"] or {}, summary["generic"] or {}
    return [
        name,
        percent(personal.get("mean")),
        percent(personal.get("worst5")),
        percent(personal.get("pooled")),
        percent(generic.get("accuracy")),
        "-" if summary["harmed"] is None else str(summary["harmed"]),
        in_bytes(summary["bytes"]["down"] + summary["bytes"]["up"]),
        f"{summary['seconds']['total']:.1f}",
    ]


# list and show


def listing(what: str) -> list[tuple[str, str]]:
    """(name, one line) for each of what there is."""
    if what == "methods":
        found = [(name, doc(name).splitlines()[0].partition(": ")[2]) for name in METHODS]
        return found + [(f"+{name}", (part.__doc__ or "").splitlines()[0]) for name, part in PARTS.items()]
    if what == "data":
        own = [
            ("FILE.npz", "your own rows: arrays x and y, and if you like client and is_test"),
            ("FOLDER", "your own clients, one file each: all .npz, all .csv (numbers and a label) or all .txt"),
        ]
        return [(name, entry.description) for name, entry in datasets.DATA.items()] + own
    if what == "models":
        return [(name, (model.__doc__ or "").splitlines()[0]) for name, model in models.MODELS.items()]
    if what == "partitions":
        return [(name, entry.description) for name, entry in partition.PARTITIONS.items()]
    if what == "presets":
        return [(name, preset.title) for name, preset in reproduce.load().items()]
    raise KeyError(what)


def about_method(spec: str, scene: Scene) -> str:
    """The idea, the paper, the settings, and what travels and what stays for a model."""
    method = choose(spec, {}, Solver())
    base = spec.partition("+")[0].partition(":")[0]
    lines = [doc(base), ""]
    for text in spec.split("+")[1:]:
        part = text.partition(":")[0]
        lines += [f"Wearing {part}: {(sys.modules[PARTS[part].__module__].__doc__ or '').splitlines()[0]}", ""]
    lines.append("Settings")
    fields, values = setting_fields(method), all_settings(method)
    if not fields:
        lines.append("  none")
    for name, field in fields.items():
        allowed = f" ({' | '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(f"  {name} = {values[name]}{allowed}: {field.metadata['help']}")
    server, client, message, upload = first_round(scene)
    down = tree.row(message.tree, 0) if isinstance(message, Each) else message.tree
    lines += ["", f"With model {scene.config.model} on {scene.config.data} and {scene.config.clients} clients"]
    kind = "each client its own" if isinstance(message, Each) else "the same for all"
    n_down, n_up = scene.method.n_bytes(scene.task, down, upload)
    lines += _tensors(f"down, a client and round ({kind})", down, n_down)
    lines += _tensors("up, a client and round", upload, n_up)
    lines += _tensors("state kept by a client, never sent", client, tree.n_bytes(client))
    lines += [f"  state kept by the server: {in_bytes(tree.n_bytes(server))}"]
    return "\n".join(lines)


def first_round(scene: Scene) -> tuple[Tree, Tree, Same | Each, Tree]:
    """What server and client keep, what is sent, and what comes back, of one client with one row."""
    method, task, population = scene.method, scene.task, scene.population
    first = population.eligible()[0]
    with torch.no_grad():
        server = method.init_server(task, task.initial, Federation(population.sizes(), torch.tensor(0)))
        client = method.init_client(task, task.initial)
        message = method.send(task, server, torch.tensor([first]))
    small = population._replace(train=[population.train[first][:1]], test=[])
    state = tree.map(lambda x: x[None], client)
    shards = small.shards([0], "train", "show", 0)
    _, uploads, _ = run_group("one_by_one", train_function(method, task), message, state, shards)
    return server, client, message, tree.row(uploads, 0)


def traffic(scene: Scene) -> tuple[int, int]:
    """Bytes down and up, a client and round, as they are in the first."""
    _, _, message, upload = first_round(scene)
    one = tree.row(message.tree, 0) if isinstance(message, Each) else message.tree
    return scene.method.n_bytes(scene.task, one, upload)


def _tensors(title: str, of: Any, total: int) -> list[str]:
    found = list(zip(tree.names(of), tree.leaves(of), strict=True))
    lines = [f"  {title}: {in_bytes(total) if found else 'nothing'}"]
    lines += [f"    {name} {'x'.join(map(str, x.shape)) or 'number'}" for name, x in found[:40]]
    if len(found) > 40:
        lines.append(f"    and {len(found) - 40} more")
    return lines


# doctor


def diagnosis(scene: Scene) -> list[str]:
    """What will go wrong, before it does: sizes, memory, traffic, odd clients, and the parts of the model."""
    config, task, method, population = scene.config, scene.task, scene.method, scene.population
    sizes = population.sizes().numpy()
    eligible = population.eligible()
    labels = population.y.numpy()
    present = [len(np.unique(labels[rows])) for rows in population.train]
    lines = [
        f"data       {config.data}: {len(labels)} rows of shape {tuple(population.x.shape[1:])}, "
        f"{population.n_classes} classes, {in_bytes(population.x.nbytes)} in memory",
        f"split      {len(sizes)} clients, {sizes.min()} to {sizes.max()} training rows "
        f"(median {int(np.median(sizes))}), {min(present)} to {max(present)} classes",
    ]
    n_weights = sum(x.numel() for name, x in task.initial.items() if not tree.is_statistic(name))
    lines += [f"model      {config.model}: {n_weights:,} weights, {in_bytes(tree.n_bytes(task.initial))}"]
    for layer, names in task.layers.items():
        mark = "  <- head" if layer == task.head or task.is_head(names[0]) else ""
        shapes = ", ".join("x".join(map(str, task.initial[name].shape)) for name in names)
        lines.append(f"           {layer}: {shapes}{mark}")
    ids = cohort(config, eligible, 0, method.turns)
    needed = memory.forecast(method, task, population.sizes(), len(ids))
    where = "in a file" if needed.clients > config.memory_limit_mb << 20 else "in memory"
    if needed.held > 0.9 * memory.available():
        free = f"{in_bytes(memory.available())} of memory are free"
        return [*lines, f"memory     {needed.in_words()}: it does not fit, {free}"]
    down, up = traffic(scene)
    lines += [
        f"traffic    {in_bytes(down)} down and {in_bytes(up)} up a client and round, "
        f"{in_bytes((down + up) * len(ids) * config.rounds)} in {config.rounds} rounds of {len(ids)} clients",
        f"memory     {needed.in_words()} ({where})",
    ]
    per_epoch = batches_an_epoch(sizes, config.batch, population.smallest)
    n_steps = [int(config.steps or per_epoch[i] * config.epochs) for i in ids]
    stacks = groups(n_steps, cost_of(task, config.batch, 3, tree.n_bytes(task.initial) * 8))
    lines.append(
        f"round      {len(ids)} clients in {len(stacks)} groups, {sum(n_steps)} steps, "
        f"the longest client has {max(n_steps)}"
    )
    lines += [f"look at    {sentence}" for sentence in _odd_clients(scene, sizes, present)]
    return lines


def _odd_clients(scene: Scene, sizes: np.ndarray, present: list[int]) -> list[str]:
    config, population = scene.config, scene.population
    tested = np.array([len(rows) for rows in population.test])
    kinds = [
        ("have no rows: they sit out", sizes == 0),
        ("have one training row", sizes == 1),
        ("have one class: a constant answer is right for them", (np.array(present) == 1) & (sizes > 1)),
        (f"have fewer rows than a batch of {config.batch}", (sizes > 1) & (sizes < config.batch)),
        ("have no test rows: they are not scored", (tested == 0) & (sizes > 0)),
    ]
    return [
        f"{mask.sum()} of {len(sizes)} clients {words} (e.g. client {int(np.flatnonzero(mask)[0])})"
        for words, mask in kinds
        if mask.any()
    ]
