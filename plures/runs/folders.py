"""Run folders: their names, what a new one holds, and how one is opened again."""

import json
from pathlib import Path

from plures import devices
from plures.data.partition import split_to_json
from plures.errors import UsageError
from plures.files import read_toml, write_text
from plures.runs import older
from plures.runs.config import Config, config_toml, make_config
from plures.runs.scene import Objects, Scene, make_scene


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
    write_text(folder / "config.toml", config_toml(scene.config))
    write_text(folder / "split.json", split_to_json(scene.split))
    if scene.schema:
        write_text(folder / "schema.toml", scene.schema)
    if scene.class_names:
        write_text(folder / "classes.json", json.dumps(scene.class_names) + "\n")


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
    return make_config(older.with_old_defaults(read_toml(folder / "config.toml")))


def open_scene(folder: Path, objects: Objects = Objects()) -> Scene:  # noqa: B008
    """The scene of a run folder."""
    return make_scene(open_config(folder), folder / "split.json", objects)
