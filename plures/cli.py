"""The command line: a thin layer over the Python functions."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from safetensors.torch import save

from . import __version__, fetch, report, show
from . import reproduce as presets
from .adapt import from_counts, from_rows
from .comparison import Ask, Equal, lines, write_tables
from .comparison import compare as compare_methods
from .config import Config, make_config, read_toml, to_toml
from .datasets import DATA, data_folder
from .errors import PluresError, UsageError, unknown
from .federate import commands as federate
from .loggers import makers, with_loggers
from .run import Result, folder_name, new_folder, opened, set_scene, start
from .run import resume as resume_run
from .tree import Params

app = typer.Typer(
    name="plures",
    help="Personalized federated learning: every client ends up with a model of its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The options of run, compare and doctor are the fields of Config: written once, there.

Setting = Annotated[list[str] | None, typer.Option("--set", help="a setting of the method: key=value, repeatable")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="options from a TOML file; the command line wins")]
Workers = Annotated[int | None, typer.Option("--workers", help="processes of one thread", show_default="one a core")]
Out = Annotated[Path | None, typer.Option("--out", help="the run folder", show_default="runs/...")]
Json = Annotated[bool, typer.Option("--json", help="standard output is exactly the summary as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print results only")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, run nothing")]
Log = Annotated[
    list[str] | None, typer.Option("--log", help="tensorboard:DIR or mlflow:DIR: the numbers of every round as files")
]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

Command = Callable[..., None]


def with_options(command: Command) -> Command:
    """Give a command an option for every field of Config; it gets those that were used as `given`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    names = [name for name in Config.model_fields if name not in ("method", "settings")]
    options = []
    for name in names:
        field = Config.model_fields[name]
        kinds = (field.annotation, *get_args(field.annotation))
        metavar = "N" if int in kinds else "X" if float in kinds else "WORD"
        default = "one a core" if name == "workers" else str(field.default)
        flag = "--" + name.replace("_", "-")
        shown = False if field.default is None else default
        option = typer.Option(flag, metavar=metavar, help=field.description, show_default=shown)
        hint = Annotated[str | None, option]  # Config reads numbers, so that all mistakes are told in one way
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))

    def wrapped(*positional: Any, **values: Any) -> None:
        given = {name: value for name in names if (value := values.pop(name)) is not None}
        command(*positional, given=given, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapped.__signature__ = inspect.Signature(parameters + options)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters + options}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def _options(config: Path | None, given: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """The options of a TOML file, overridden by those of the command line."""
    values = (read_toml(config) if config is not None else {}) | given
    chosen = dict(values.get("settings", {}))
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {text!r}")
        chosen[key.strip()] = value.strip()
    if "epochs" in given and "steps" in given:
        raise UsageError("--epochs and --steps are two ways to say how long clients train; give one of them")
    values["settings"] = chosen
    values.setdefault("workers", _n_cores())
    return values


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _console(to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=130)  # room for the tables


def _watcher(console: Console, name: str, folder: Path | None, quiet: bool) -> show.Progresses:
    return show.Progresses(console, name, folder / "log.txt" if folder else None, quiet)


def _end(result: Result, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.summary, indent=2))
        return
    console.print(show.result_table({result.summary["method"]: result}))
    if result.folder is not None:
        console.print(f"run folder: {result.folder}", markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_options
def run(
    method: Annotated[str, typer.Argument(help="e.g. fedala, fedrod:loss=ce, ditto+ala; see `plures list methods`")],
    *,
    given: dict[str, Any],
    set_: Setting = None,
    config: ConfigFile = None,
    out: Out = None,
    log: Log = None,
    as_json: Json = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """One run."""
    console = _console(to_stderr=as_json)
    loggers = makers(log)
    scene = set_scene(make_config(_options(config, given | {"method": method}, set_)))
    if dry_run:
        console.print(to_toml(scene.config), markup=False, highlight=False)
        return
    folder = new_folder(scene.config, out)
    watcher = _watcher(console, method, folder, quiet)
    _end(start(scene, folder, watcher.say, with_loggers(watcher, loggers, folder.name)), console, as_json)


@app.command()
@with_options
def compare(
    methods: Annotated[list[str], typer.Argument(help="two or more methods")],
    *,
    given: dict[str, Any],
    seeds: Annotated[str | None, typer.Option("--seeds", help="e.g. 0,1,2; each method is run with each")] = None,
    equal: Annotated[
        str, typer.Option("--equal", help="what all spend as much of as the first: rounds, bytes, seconds or flops")
    ] = "rounds",
    latex: Annotated[bool, typer.Option("--latex", help="print the table for LaTeX, too")] = False,
    set_: Setting = None,
    config: ConfigFile = None,
    out: Out = None,
    log: Log = None,
    as_json: Json = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """The same split, schedule and start for several methods; a table and a report."""
    console = _console(to_stderr=as_json)
    loggers = makers(log)
    chosen = make_config(_options(config, given, set_))
    wanted = [chosen.seed] if seeds is None else _numbers("--seeds", seeds)
    if equal not in get_args(Equal):
        raise unknown("thing to be equal", equal, get_args(Equal))
    if dry_run:
        for method in methods:
            set_scene(chosen.model_copy(update={"method": method, "seed": wanted[0]}))
        console.print(f"{len(methods)} methods, seeds {wanted}: all can be run", markup=False)
        return
    folder = comparison_folder(chosen, out)
    table = show.GrowingTable(console, quiet)
    with table:
        runs = compare_methods(
            Ask(list(methods), chosen, wanted, cast(Equal, equal)),
            folder,
            table.say,
            lambda method, seed, place: with_loggers(
                table.watcher(method, seed, place), loggers, f"{folder_name(method)}-seed{seed}"
            ),
            table.done,
        )
    write_tables(runs, folder)
    if as_json:
        print(json.dumps({name: result.summary for name, result in runs.named().items()}, indent=2))
    else:
        console.print(show.comparison_table(lines(runs)))
        if latex:
            console.print((folder / "table.tex").read_text("utf-8"), markup=False, highlight=False, soft_wrap=True)
    page = report.write([r.folder for r in runs.values() if r.folder is not None], folder / "report.html")
    for path in (folder / "table.csv", folder / "table.tex"):
        console.print(f"table: {path}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def comparison_folder(config: Config, out: Path | None) -> Path:
    """A new folder, or the one that was named: a comparison goes on where it stopped."""
    if out is not None and out.is_dir():
        if (out / "config.toml").exists():
            raise UsageError(f"{out} holds a single run; choose another --out")
        return out
    return new_folder(config.model_copy(update={"method": "compare"}), out)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes whole numbers with commas between, got {text!r}") from None


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="a run folder", metavar="RUN")],
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Go on exactly where a run stopped."""
    console = _console(to_stderr=as_json)
    watcher = _watcher(console, folder.name, folder if folder.is_dir() else None, quiet)
    _end(resume_run(folder, watcher.say, watcher, workers or _n_cores()), console, as_json)


@app.command()
def reproduce(
    preset: Annotated[str, typer.Argument(help="a table of a paper; see `plures list presets`")],
    scale: Annotated[str, typer.Option("--scale", help="smoke, small or full")] = "small",
    only: Annotated[list[str] | None, typer.Option("--method", help="only this method of it; repeatable")] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="folder of data sets")] = None,
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option("--out", help="the folder", show_default="runs/PRESET-SCALE")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """A paper's table, with the published numbers beside ours. Stopped, it goes on where it was."""
    if scale not in get_args(presets.Scale):
        raise unknown("scale", scale, get_args(presets.Scale))
    found = presets.find(preset)
    for method in only or []:
        if method not in found.published:
            raise unknown(f"method of {preset}", method, found.published)
    size = cast(presets.Scale, scale)
    ask = found.ask(size, data_dir, workers or _n_cores(), only or ())
    console = _console(to_stderr=as_json)
    folder = out or Path("runs") / f"{preset}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    table = show.GrowingTable(console, quiet)
    with table:
        runs = compare_methods(ask, folder, table.say, table.watcher, table.done)
    cells = presets.cells(found, presets.numbers(found, runs, size))
    presets.write_csv(cells, folder)
    if as_json:
        print(json.dumps([cell._asdict() | {"ours": cell.ours._asdict()} for cell in cells], indent=2))
        return
    console.print(show.reproduction_table(found.title, cells, size))
    for line in show.reproduction_words(found, cells, size):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"folder: {folder}", markup=False, highlight=False, soft_wrap=True)


_LISTS = ("methods", "data", "models", "partitions", "presets")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help=", ".join(_LISTS))],
    debug: Debug = False,
) -> None:
    """What there is."""
    if what not in _LISTS:
        raise unknown("list", what, _LISTS)
    console = _console(to_stderr=False)
    found = show.listing(what)
    width = max(len(name) for name, _ in found)
    for name, line in found:
        console.print(f"{name:{width}}  {line}", markup=False, highlight=False, soft_wrap=True)


data_app = typer.Typer(help="Data sets: what is here, and fetch or check one.", no_args_is_help=True)
app.add_typer(data_app, name="data")
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="folder of data sets")]


@data_app.command("list")
def data_list(data_dir: DataDir = None, debug: Debug = False) -> None:
    """What there is of each data set, and where it is looked for."""
    console = _console(to_stderr=False)
    width = max(map(len, DATA))
    for name in DATA:
        line = f"{name:{width}}  {fetch.status(name, data_dir)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"looked for in {data_folder(data_dir)}", markup=False, highlight=False, soft_wrap=True)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="a data set; see `plures data list`")],
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Check a data set, and fetch it from its publisher if it is not here."""
    console = _console(to_stderr=False)
    fetch.get(name, data_dir, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))


@app.command("show")
@with_options
def show_(
    method: Annotated[str, typer.Argument(help="a method, e.g. fedala or ditto+ala")],
    *,
    given: dict[str, Any],
    debug: Debug = False,
) -> None:
    """The idea of a method, the paper, its settings, what travels and what stays."""
    scene = set_scene(make_config(_options(None, given | {"method": method}, None)))
    _console(to_stderr=False).print(show.about_method(method, scene), markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_options
def doctor(
    method: Annotated[str, typer.Argument(help="a method")] = "fedavg",
    *,
    given: dict[str, Any],
    set_: Setting = None,
    config: ConfigFile = None,
    debug: Debug = False,
) -> None:
    """What will go wrong, before it does: sizes, memory, traffic, odd clients."""
    scene = set_scene(make_config(_options(config, given | {"method": method}, set_)))
    console = _console(to_stderr=False)
    for line in show.diagnosis(scene):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write_model(path: Path, model: Params, about: dict[str, str]) -> None:
    content = save({k: v.contiguous() for k, v in model.items()}, metadata={"plures": __version__, **about})
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="a run folder", metavar="RUN")],
    client: Annotated[int, typer.Option("--client", help="whose model")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write")] = Path("model.safetensors"),
    debug: Debug = False,
) -> None:
    """The personal model of a client as a safetensors file."""
    console = _console(to_stderr=False)
    run = opened(folder, lambda line: console.print(line, markup=False))
    try:
        model = run.personal_model(client)
        config = run.scene.config
        _write_model(out, model, {"method": config.method, "model": str(config.model), "client": str(client)})
    finally:
        run.close()
    n_weights = sum(x.numel() for x in model.values())
    console.print(f"{out}: {len(model)} tensors, {n_weights:,} numbers, after round {run.round}", markup=False)


@app.command()
def adapt(
    folder: Annotated[Path, typer.Argument(help="a run folder", metavar="RUN")],
    client_data: Annotated[
        Path | None, typer.Option("--client-data", help="the new client's rows: a .npz or .csv file", metavar="FILE")
    ] = None,
    class_counts: Annotated[
        str | None, typer.Option("--class-counts", help="instead of rows, how many there are of each class: 12,0,3")
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", help="passes over the new client's rows", min=0)] = 5,
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write")] = Path("model.safetensors"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A personal model for a client that was not in training."""
    console = _console(to_stderr=as_json)
    if (client_data is None) == (class_counts is None):
        raise UsageError("give the new client's rows with --client-data FILE, or their numbers with --class-counts")
    run = opened(folder, lambda line: console.print(line, markup=False))
    try:
        if client_data is not None:
            found = from_rows(run, client_data, epochs)
        else:
            found = from_counts(run, _numbers("--class-counts", str(class_counts)))
        _write_model(out, found.model, {"method": run.scene.config.method, "model": str(run.scene.config.model)})
    finally:
        run.close()
    if as_json:
        print(json.dumps(found.summary | {"model": str(out)}, indent=2))
        return
    for number, accuracy in enumerate(found.summary.get("curve", [])):
        console.print(f"after {number} epochs: {show.percent(accuracy)} of its test rows are right", markup=False)
    console.print(f"{out}: {len(found.model)} tensors", markup=False, highlight=False)


@app.command("report")
def report_(
    folders: Annotated[list[Path], typer.Argument(help="run folders", metavar="RUN ...")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the page to write")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="a folder for the figures as SVG, PDF and PNG", metavar="DIR")
    ] = None,
    debug: Debug = False,
) -> None:
    """One self-contained page about one or more runs, or about a folder of runs."""
    console = _console(to_stderr=False)
    page = report.write(folders, out, figures)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    if figures is not None:
        console.print(f"figures: {figures}", markup=False, highlight=False, soft_wrap=True)


app.add_typer(federate.app)


@federate.app.command("start")
@with_options
def federate_start(
    method: Annotated[str | None, typer.Argument(help="e.g. fedala, ditto:lam=0.5, fedavg+ft")] = None,
    *,
    given: dict[str, Any],
    home: federate.HomeOption = federate.HOME,
    resume: Annotated[Path | None, typer.Option("--resume", help="go on with this run", metavar="RUN")] = None,
    wait: Annotated[float, typer.Option(help="seconds to wait until --clients N, or all, are there")] = 60.0,
    deadline: federate.Deadline = 600.0,
    quorum: federate.Quorum = 0.5,
    resend: federate.Resend = 120.0,
    set_: Setting = None,
    config: ConfigFile = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """One run with the clients that are connected: the options are those of `plures run`."""
    console = _console(to_stderr=as_json)
    terms = federate.Terms(deadline, quorum, resend)
    result = federate.start_run(
        method, given, lambda values: _options(config, values, set_), home, resume, wait, terms, out, quiet, console
    )
    _end(result, console, as_json)


def main() -> None:
    """Run a command; mistakes are told in a sentence, with their exit code."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        command(arguments, standalone_mode=False)
        return 0
    except typer.Exit as error:
        return error.exit_code
    except PluresError as error:
        if debug:
            raise
        print(f"plures: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("plures: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # a usage error of the parser
            print(f"plures: {error.format_message()}", file=sys.stderr)
            return 2
        if debug:
            raise
        print(f"plures: {type(error).__name__}: {error}; --debug shows where", file=sys.stderr)
        return 4
