"""Run folders: their names, what a new one holds, and how one is opened again."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from plures import devices
from plures.data.partition import split_to_json
from plures.errors import DataError, Interrupted, UsageError
from plures.files import parse_toml, read_toml_with_text, sum_of, write_text
from plures.runs import older
from plures.runs.config import HOW_IT_IS_RUN, Config, config_toml, make_config
from plures.runs.scene import Objects, Scene, make_scene
from plures.runs.signals import undisturbed


def folder_name(method: str) -> str:
    """A method with its settings as a name that any file system takes."""
    for character in ":,/":
        method = method.replace(character, "-")
    return method.replace("=", "")


def new_folder(config: Config, out: Path | None) -> Path:
    """The folder of a new run: `out`, which must not hold one yet, or a free name under runs/."""
    devices.find(config.device)  # raises before a folder is made for nothing
    if out is None:
        name = folder_name(config.method)
        data = Path(config.data).stem.removeprefix("object:")
        for number in range(1, 100000):
            out = Path("runs") / f"{name}-{data}-{number:04d}"
            try:
                out.mkdir(parents=True)
                return out
            except FileExistsError:
                continue
    assert out is not None
    if (out / "config.toml").exists():
        before = read_config(out)
        same = before.record_identity() == config.settled_like(before).record_identity()
        raise UsageError(
            f"{out} already holds {'this run' if same else 'a run of another config'}; "
            + (f"resume it with `plures resume {out}`, or choose another --out" if same else "choose another --out")
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not a run folder; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}: {error.strerror}") from None
    return out


def write_start(folder: Path, scene: Scene) -> None:
    """What a run folder holds before its first round: enough to run again."""
    with undisturbed():
        write_text(folder / "split.json", split_to_json(scene.split))
        if scene.schema:
            write_text(folder / "schema.toml", scene.schema)
        if scene.class_names:
            write_text(folder / "classes.json", json.dumps(scene.class_names) + "\n")
        write_config(folder, scene.config)  # at the end: a folder with a config can be resumed


@contextmanager
def telling_how_to_resume(folder: Path, mark: str = "config.toml") -> Iterator[None]:
    """Turn Ctrl-C into words on what is left in a new folder, and how to go on; `mark` is written when it can be."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        if (folder / mark).exists():
            if str(error).endswith(f"plures resume {folder}"):
                raise  # it says so itself
            raise Interrupted(f"interrupted; resume it with: plures resume {folder}") from None
        with suppress(OSError):
            folder.rmdir()
        raise Interrupted("interrupted before anything was run") from None


BESIDE = ("split.json", "schema.toml", "classes.json", "federation.json")  # what a run began with, besides its config


def write_config(folder: Path, config: Config) -> None:
    """Write config.toml, with the SHA-256 of its options and of the files beside it as comments at its end."""
    text = config_toml(config)
    sums = {"config.toml": _sum_of_options(parse_toml(text))}
    sums |= {name: _sum_of_file(folder / name) for name in BESIDE if (folder / name).exists()}
    write_text(folder / "config.toml", text + "".join(f"# check {name} {known}\n" for name, known in sums.items()))


def read_values(folder: Path) -> dict[str, Any]:
    """The options in config.toml; raises if they, or the files beside it, are not those that the run began with."""
    path = folder / "config.toml"
    values, text = read_toml_with_text(path)
    for name, known in re.findall(r"^# check (\S+) (\w+)$", text, re.MULTILINE):
        try:
            found = _sum_of_options(values) if name == path.name else _sum_of_file(folder / name)
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read: {error.strerror}") from None
        if found != known:
            raise DataError(
                f"{folder / name} has changed since the run began. Put it back as it was; or, if you have changed it, "
                f"delete the line `# check {name} ...` in {path}"
            )
    return values


def _sum_of_options(values: dict[str, Any]) -> str:
    """The SHA-256 of the options that any number in the record depends on; a run may be resumed without Ray."""
    kept = {key: value for key, value in values.items() if key not in HOW_IT_IS_RUN}
    return sum_of(kept | ({"executor": "vectorised"} if kept.get("executor") == "ray" else {}))


def _sum_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def open_config(folder: Path) -> Config:
    """The config of a run folder."""
    if not (folder / "config.toml").exists():
        raise UsageError(f"{folder} is not a run folder: it has no config.toml")
    if (folder / "federation.json").exists():
        raise UsageError(
            f"{folder} is of a federated run, whose clients have their data and models themselves; "
            "use `plures federate start --resume`, `plures federate adapt`, or the models that clients wrote"
        )
    return read_config(folder)


def read_config(folder: Path) -> Config:
    """The config that was written into a folder, perhaps by an older version."""
    return make_config(older.with_old_defaults(read_values(folder)))


def open_scene(folder: Path, objects: Objects = Objects()) -> Scene:  # noqa: B008
    """The scene of a run folder."""
    return make_scene(open_config(folder), folder / "split.json", objects)
