"""The command line: what each command takes. What it does is imported when it is called, so that help comes at once."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plures._version import __version__
from plures.cli import federate, listing
from plures.cli.options import (
    ConfigFile,
    DataDir,
    DryRun,
    Json,
    Log,
    Out,
    Quiet,
    RunFolder,
    Setting,
    Trust,
    Workers,
    collect,
    with_run_options,
)
from plures.errors import PluresError
from plures.runs import signals

if TYPE_CHECKING:
    from types import ModuleType

app = typer.Typer(
    name="plures",
    help="Personalized federated learning: every client ends up with a model of its own. After any command, --debug "
    "shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"plures {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _tuning() -> "ModuleType":
    with signals.leaving():
        from plures.cli import tuning  # here: it imports torch, as below

        return tuning


def _commands() -> "ModuleType":
    with signals.leaving():
        from plures.cli import commands  # here: it imports torch, which takes seconds, and help must come at once

        return commands


@app.command()
@with_run_options
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
) -> None:
    """One run."""
    values = collect(config, given | {"method": method}, set_)
    _commands().run(values, out, log, as_json, quiet, dry_run)


@app.command()
@with_run_options
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="two or more methods; with --tuned, if left out, all of the tuning")
    ] = None,
    *,
    given: dict[str, Any],
    tuned: Annotated[
        Path | None,
        typer.Option("--tuned", help="use what `plures tune` found, and its options, on other seeds", metavar="DIR"),
    ] = None,
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
) -> None:
    """Several methods on the same split, schedule and initial weights; a table and a report."""
    values = collect(config, given, set_)
    _commands().compare(list(methods or []), values, tuned, seeds, equal, latex, out, log, as_json, quiet, dry_run)


@app.command()
@with_run_options
def tune(
    methods: Annotated[list[str], typer.Argument(help="one or more methods; what stands in a name is held")],
    *,
    given: dict[str, Any],
    trials: Annotated[int, typer.Option("--trials", help="settings that are tried for each method", min=1)] = 30,
    budget: Annotated[
        str, typer.Option("--budget", help="what each method may spend as much of as the first: trials, flops, seconds")
    ] = "trials",
    objective: Annotated[
        str, typer.Option("--objective", help="what is searched for, on validation rows: personal, worst5 or generic")
    ] = "personal",
    search: Annotated[
        str | None,
        typer.Option(
            "--search",
            help="options that are searched besides methods' settings, and settings that are searched only if named",
            show_default="lr,epochs",
        ),
    ] = None,
    space: Annotated[
        Path | None, typer.Option("--space", help="other ranges, from a TOML file", metavar="FILE")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="e.g. 0,1; a trial is its mean over them")] = None,
    set_: Setting = None,
    config: ConfigFile = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> None:
    """Search for better settings of methods, on validation rows, with the same budget for each."""
    values = collect(config, given, set_)
    words = (seeds, trials, budget, objective, search, space, out, as_json, quiet, dry_run)
    _tuning().tune(list(methods), values, *words)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="a run folder, or that of a comparison or a tuning", metavar="RUN")],
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="play on until there are so many rounds in all", min=1)
    ] = None,
    workers: Workers = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run, a comparison or a tuning, exactly where it stopped."""
    if rounds is None and (folder / "tuning.toml").exists():
        _tuning().resume_tuning(folder, workers, trust, as_json, quiet)
        return
    _commands().resume(folder, rounds, workers, trust, as_json, quiet)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a run folder, or that of a comparison", metavar="RUN")],
    workers: Workers = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a run again, from its config, split and data, and tell whether it gives the same digest and numbers."""
    raise typer.Exit(_commands().verify(folder, workers, trust, as_json, quiet))


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
    dry_run: DryRun = False,
) -> None:
    """A paper's table, with the published numbers beside ours. If it was stopped, it is resumed."""
    _commands().reproduce(preset, scale, only or [], data_dir, workers, out, as_json, quiet, dry_run)


@app.command()
def claims(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="papers (FedALA, Fed-RoD, pFedLA, PLGU, AFML) or claims; all if left out", metavar="PAPER"),
    ] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="folder of data sets")] = None,
    workers: Workers = None,
    out: Annotated[Path, typer.Option("--out", help="the folder of records; what is there is not run again")] = Path(
        "claims"
    ),
    as_json: Json = False,
    quiet: Quiet = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what is missing, and how long it will take")] = False,
) -> None:
    """Test what the papers claim: methods tuned alike, other seeds scored, a verdict. It goes on where it stopped."""
    _tuning().claims(words or [], data_dir, workers, out, as_json, quiet, dry_run)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help=", ".join(listing.LISTS))]) -> None:
    """The methods, data sets, models, partitions or presets that can be named."""
    listing.print_list(what)


data_app = typer.Typer(help="Data sets: which are here, and fetch or check one.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """Which data sets are here, and where they are looked for."""
    listing.print_data(data_dir)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="a data set; see `plures data list`")], data_dir: DataDir = None
) -> None:
    """Check a data set, and fetch it from its publisher if it is not here."""
    listing.get_data(name, data_dir)


@data_app.command("schema")
@with_run_options
def data_schema(
    file: Annotated[str, typer.Argument(help="a .csv or .parquet file, or a folder of .csv files")],
    *,
    given: dict[str, Any],
    config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the file to write", show_default="print it")] = None,
) -> None:
    """What the columns of a table are, and how their cells become numbers: by the training rows of the run."""
    _commands().schema(collect(config, given | {"data": file}, None), out)


@app.command("show")
@with_run_options
def show_(
    method: Annotated[str, typer.Argument(help="a method, e.g. fedala or ditto+ala")], *, given: dict[str, Any]
) -> None:
    """The idea of a method, the paper, its settings, what travels and what stays."""
    if not given and listing.print_known_method(method):
        return
    _commands().show(method, collect(None, given | {"method": method}, None))


@app.command()
@with_run_options
def doctor(
    method: Annotated[str, typer.Argument(help="a method")] = "fedavg",
    *,
    given: dict[str, Any],
    set_: Setting = None,
    config: ConfigFile = None,
) -> None:
    """What will go wrong, before it does: sizes, memory, traffic, odd clients."""
    _commands().doctor(collect(config, given | {"method": method}, set_))


@app.command()
def export(
    folder: RunFolder,
    client: Annotated[str, typer.Option("--client", help="whose model: the client's number, or its name")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write, or the folder for peft")] = Path(
        "model.safetensors"
    ),
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="safetensors, torchscript, onnx or peft", show_default="by the ending of the file"
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """The personal model of a client as a file: .safetensors, .pt (TorchScript) or .onnx; or its LoRA as a folder."""
    _commands().export(folder, client, out, form, trust)


@app.command()
def adapt(
    folder: RunFolder,
    client_data: Annotated[
        Path | None, typer.Option("--client-data", help="the new client's rows: a .npz or .csv file", metavar="FILE")
    ] = None,
    class_counts: Annotated[
        str | None, typer.Option("--class-counts", help="instead of rows, how many there are of each class: 12,0,3")
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", help="passes over the new client's rows", min=0)] = 5,
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write")] = Path("model.safetensors"),
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """A personal model for a client that was not in training."""
    _commands().adapt(folder, client_data, class_counts, epochs, out, trust, as_json)


@app.command("report")
def report_(
    folders: Annotated[list[Path], typer.Argument(help="run folders", metavar="RUN ...")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the page to write")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="a folder for the figures as SVG, PDF and PNG", metavar="DIR")
    ] = None,
    trust: Trust = False,
) -> None:
    """One self-contained page about one or more runs, or about a folder of runs."""
    _commands().report(folders, out, figures, trust)


app.add_typer(federate.app)


def main() -> None:
    """Run a command; mistakes and Ctrl-C are told in a sentence, with their exit code."""
    signals.set_handler(signals.Interrupts())
    try:
        code = call(sys.argv[1:])
    except KeyboardInterrupt:  # in the middle of telling something else
        code = signals.EXIT_CODE
    signals.set_handler(signal.SIG_IGN)  # what is left is to end
    sys.exit(code)


def _said_once(message: str) -> str:
    """A message without a hint that it gives twice."""
    sentences = re.split(r"(?<=[.?])\s+", message)
    return " ".join(dict.fromkeys(sentences))


def call(arguments: list[str]) -> int:
    """Run the command that these words name, and return its exit code."""
    debug = "--debug" in arguments
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        # What a command returns is no exit code, but for that of typer.Exit, which is returned here and not raised.
        code = command([word for word in arguments if word != "--debug"], standalone_mode=False)
        if code == signals.EXIT_CODE:  # what the parser makes of Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except PluresError as error:
        if debug:
            raise
        print(f"plures: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("plures: interrupted", file=sys.stderr)
        return signals.EXIT_CODE
    except OSError as error:
        if debug:
            raise
        of = f"{error.filename}: " if error.filename else ""
        print(f"plures: {of}{error.strerror or error}; --debug shows the traceback", file=sys.stderr)
        return 4
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # a usage error of the parser
            print(f"plures: {_said_once(error.format_message())}", file=sys.stderr)
            return 2
        if debug:
            raise
        print(f"plures: {type(error).__name__}: {error}; --debug shows where", file=sys.stderr)
        return 4
