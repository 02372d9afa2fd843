"""Options that commands share. Those of a run are the fields of Config: written once, there."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from plures.errors import UsageError
from plures.files import read_toml
from plures.runs.config import Config

Setting = Annotated[list[str] | None, typer.Option("--set", help="a setting of the method: key=value, repeatable")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="options from a TOML file; the command line wins")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="processes of one thread", show_default="one for each core")
]
Out = Annotated[Path | None, typer.Option("--out", help="the run folder", show_default="runs/...")]
Json = Annotated[bool, typer.Option("--json", help="standard output is exactly the summary as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print results only")]
Trust = Annotated[bool, typer.Option("--trust", help="run code that the folder names, such as a model of your own")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, run nothing")]
Log = Annotated[
    list[str] | None, typer.Option("--log", help="tensorboard:DIR or mlflow:DIR: the numbers of every round as files")
]
RunFolder = Annotated[Path, typer.Argument(help="a run folder", metavar="RUN")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="folder of data sets")]

Command = Callable[..., None]


def with_run_options(command: Command) -> Command:
    """Give a command an option for every field of Config; it gets those that were used as `given`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    names = [name for name in Config.model_fields if name not in ("method", "settings")]
    options = []
    for name in names:
        field = Config.model_fields[name]
        kinds = (field.annotation, *get_args(field.annotation))
        metavar = "N" if int in kinds else "X" if float in kinds else "WORD"
        notes = []
        if get_origin(field.annotation) is Literal:
            notes.append(" | ".join(get_args(field.annotation)))
        elif bool in kinds:
            notes.append("true | false")
        if name == "workers":
            notes.append("default: one for each core")
        elif field.default is not None:
            notes.append(f"default: {str(field.default).lower() if bool in kinds else field.default}")
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} ({'; '.join(notes)})" if notes else field.description
        option = typer.Option(flag, metavar=metavar, help=text, show_default=False)
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


def collect(config: Path | None, given: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
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
    values.setdefault("workers", n_cores() if values.get("device", "cpu") == "cpu" else 1)
    return values


def n_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def whole_numbers(option: str, text: str) -> list[int]:
    """1,2,3 as numbers."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes whole numbers with commas between, got {text!r}") from None
