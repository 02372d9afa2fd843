"""`plures federate ...`: what each command takes. Torch and Flower are imported when a command is called."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plures.cli.options import ConfigFile, Json, Out, Quiet, Setting, Trust, collect, with_run_options
from plures.errors import UsageError
from plures.registry import doubting
from plures.runs import signals

if TYPE_CHECKING:
    from types import ModuleType

app = typer.Typer(
    name="federate",
    help="The same methods over a real network, on Flower.",
    no_args_is_help=True,
)

HOME = Path("federation")
HomeOption = Annotated[Path, typer.Option("--home", help="the folder that `init` made, or of a client its own part")]
Deadline = Annotated[float, typer.Option(help="seconds after which a round ends without those who are silent")]
Quorum = Annotated[float, typer.Option(help="share of the clients of a round that must answer", min=0, max=1)]
Resend = Annotated[float, typer.Option(help="seconds without an answer, until a message is sent again")]


@contextmanager
def _importing() -> Iterator[None]:
    """While modules are imported that need the extra `deploy`, and torch."""
    try:
        with signals.leaving():
            yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography"):
            raise
        raise UsageError("`plures federate` needs Flower; install it with: pip install 'plures[deploy]'") from None


def _operate() -> "ModuleType":
    with _importing():
        from plures.federate import operate  # here: see above

        return operate


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="the folder to make", metavar="DIR")] = HOME,
    client: Annotated[list[str] | None, typer.Option(help="the name of a client, repeatable")] = None,
    address: Annotated[str, typer.Option(help="what clients call the server: HOST or HOST:PORT")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="where the server listens, on 127.0.0.1")] = 8000,
    host: Annotated[list[str] | None, typer.Option(help="one more name in the certificate, repeatable")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="plain HTTP and no keys, on 127.0.0.1 alone")] = False,
) -> None:
    """Make certificates and keys, or add clients, and say what to type."""
    _operate().init(folder, client or [], address, port, host or [], insecure)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="the name of a client", metavar="NAME")],
    home: HomeOption = HOME,
) -> None:
    """Take a client's right to take part, at once."""
    _operate().remove(name, home)


@app.command()
def rotate(
    name: Annotated[
        str | None,
        typer.Argument(help="a client, which gets new keys; without one, the server's certificate", metavar="NAME"),
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="the public key of a pair that the client has made itself")
    ] = None,
    home: HomeOption = HOME,
) -> None:
    """New keys for a client, or a new certificate for the server; the old keys are worth nothing from then on."""
    _operate().rotate(name, public_key, home)


@app.command()
def server(home: HomeOption = HOME) -> None:
    """Carry messages between clients and runs, until Ctrl-C."""
    _operate().run_server(home)


@app.command()
def client(
    data: Annotated[Path, typer.Option(help="our rows: a table (with --target), or an .npz file with x and y")],
    name: Annotated[str, typer.Option(help="our name in the federation")],
    home: HomeOption = HOME,
    model: Annotated[list[str] | None, typer.Option(help="a model of ours that may be asked for: module:Class")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="a method of ours that may be asked for: module:Class")
    ] = None,
    threads: Annotated[int, typer.Option(help="of the processor, that training may use", min=1)] = 1,
    target: Annotated[str | None, typer.Option(help="of a table: the column to predict")] = None,
    drop: Annotated[str | None, typer.Option(help="of a table: columns that are not used, with commas")] = None,
    time_column: Annotated[str | None, typer.Option(help="of a table: when a row was; the latest are tested")] = None,
    task: Annotated[str | None, typer.Option(help="classes, binary, labels, number or count")] = None,
    data_schema: Annotated[Path | None, typer.Option(help="of a table: a schema, if none is agreed on")] = None,
) -> None:
    """Take part in runs with our own rows, which stay here, until Ctrl-C."""
    with _importing():
        from plures.federate import join  # here: see above

    reading = join.reading_of_client(target, drop, time_column, task, data_schema)
    join.run_client(data, name, home, tuple(model or []), tuple(method or []), threads, reading)


@app.command()
def schema(
    home: HomeOption = HOME,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the file", show_default="HOME/schema.toml")] = None,
    seed: Annotated[int, typer.Option(help="as that of the runs: test rows tell nothing", min=0)] = 0,
    test_share: Annotated[float, typer.Option(help="as that of the runs", min=0.01, max=0.99)] = 0.25,
    wait: Annotated[float, typer.Option(help="seconds to wait until all clients are there")] = 60.0,
    deadline: Deadline = 600.0,
) -> None:
    """Let clients with tables agree on how cells become numbers: they tell counts, means and words that they allow."""
    _operate().make_schema(home, out, seed, test_share, wait, deadline)


@app.command("start")
@with_run_options
def start(
    method: Annotated[str | None, typer.Argument(help="e.g. fedala, ditto:lam=0.5, fedavg+ft")] = None,
    *,
    given: dict[str, Any],
    home: HomeOption = HOME,
    resume: Annotated[Path | None, typer.Option("--resume", help="resume this run", metavar="RUN")] = None,
    wait: Annotated[float, typer.Option(help="seconds to wait until --clients N, or all, are there")] = 60.0,
    deadline: Deadline = 600.0,
    quorum: Quorum = 0.5,
    resend: Resend = 120.0,
    most_rows: Annotated[int, typer.Option(help="rows that a client is believed to have", min=1)] = 1_000_000,
    most_classes: Annotated[int, typer.Option(help="classes that a client is believed to have", min=1)] = 1000,
    most_tokens: Annotated[int, typer.Option(help="tokens that a client is believed to have", min=1)] = 200_000,
    most_share: Annotated[float, typer.Option(help="largest share of one client in a mean", min=0, max=1)] = 1.0,
    most_update: Annotated[float, typer.Option(help="largest update, in medians of the round", min=1)] = 100.0,
    set_: Setting = None,
    config: ConfigFile = None,
    out: Out = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One run with the clients that are connected: the options are those of `plures run`."""
    with signals.leaving():
        from plures.cli import commands  # here: it imports torch, and help must come at once

    operate = _operate()
    operate.refuse_options_of_simulation(given)
    values = collect(config, given | {"method": method}, set_) if method is not None else None
    limits = commands.RoundLimits(deadline, quorum, resend)
    caps = commands.Caps(most_rows, most_classes, most_tokens, most_share, most_update)
    commands.start_federated(operate, values, home, resume, wait, limits, caps, out, trust, as_json, quiet)


@app.command()
def status(home: HomeOption = HOME, as_json: Json = False) -> None:
    """Who is there, and how far runs are."""
    _operate().print_status(home, as_json)


@app.command()
def stop(
    run: Annotated[Path | None, typer.Argument(help="a run folder; without one, the server", metavar="RUN")] = None,
    home: HomeOption = HOME,
) -> None:
    """Stop a run after its round, so that it can be resumed later; or stop the server."""
    _operate().stop(run, home)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="the file to write, e.g. federation.tar.gz", metavar="FILE")],
    home: HomeOption = HOME,
) -> None:
    """Write what the server needs to begin again, here or elsewhere: keys, audit log, runs. It may go on meanwhile."""
    _operate().back_up(file, home)


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="a file that `backup` wrote", metavar="FILE")],
    folder: Annotated[Path, typer.Argument(help="the folder to make", metavar="DIR")] = HOME,
    address: Annotated[
        str | None, typer.Option(help="what clients call the server now, if it has moved: HOST or HOST:PORT")
    ] = None,
) -> None:
    """Make the folder of a federation from a backup."""
    _operate().restore(file, folder, address)


@app.command()
def adapt(
    run: Annotated[Path, typer.Argument(help="the folder of a federated run", metavar="RUN")],
    client: Annotated[str, typer.Option(help="the name of a client that is connected and was not in training")],
    epochs: Annotated[int, typer.Option(help="passes over the new client's rows", min=0)] = 5,
    home: HomeOption = HOME,
    deadline: Deadline = 600.0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """A client that was not in training makes a model of its own, during a run or after it, and keeps it."""
    with doubting(run, trust):
        _operate().adapt(run, client, epochs, home, deadline, as_json)
