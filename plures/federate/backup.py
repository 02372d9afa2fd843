"""Backups of a federation: all that its server needs to begin again, here or on another machine, in one file.

It has the keys of the server and of the clients that it made keys for, the audit log, and its runs with their newest
checkpoints, and nothing of the clients' own state. Flower's own records are not needed: it is told of all keys again.
"""

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plures.errors import DataError, RunFailed, UsageError
from plures.federate import audit, credentials
from plures.federate.credentials import Home
from plures.files import disk_failure, write_text
from plures.runs import checkpoint

TRIES = 5  # to copy a checkpoint of a run that goes on and replaces it
MARK = "federation/federation.toml"


def _files(home: Home) -> Iterator[Path]:
    """The files of the folder of a federation that are backed up."""
    skipped = {home.folder / "server", *(home.folder / "clients").glob("*/private")}
    for path in sorted(home.folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not skipped & {*path.parents}:
            yield path
    for name in (audit.FILE,):
        if (home.folder / "server" / name).exists():
            yield home.folder / "server" / name


def write(home: Home, runs: list[Path], target: Path) -> None:
    """Write a backup. The server and its runs may go on."""
    if target.exists():
        raise UsageError(f"{target} is there already; name another file, or remove it")
    new = target.with_name(f".{target.name}.new")
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # there are keys in it
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path in _files(home):
                archive.add(path, f"federation/{path.relative_to(home.folder)}")
            for number, run in enumerate(runs):
                _add_run(archive, run, f"runs/{number:04d}-{run.name}")
        os.replace(new, target)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise disk_failure(error, target.parent) from error


def _add_run(archive: tarfile.TarFile, run: Path, name: str) -> None:
    for path in sorted(run.iterdir()):
        if path.is_file() and path.name != "pid":
            # A file that is written to while it is read is taken as it was when it was opened.
            content = path.read_bytes()
            entry = tarfile.TarInfo(f"{name}/{path.name}")
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
    for _ in range(TRIES):
        folders = checkpoint.folders(run / "checkpoint")
        if not folders:
            return
        with tempfile.TemporaryDirectory() as place:
            copied = Path(place) / folders[-1].name
            try:
                shutil.copytree(folders[-1], copied)
                checkpoint.whole_manifest(copied)
            except (OSError, ValueError, shutil.Error):
                continue  # the run has replaced it meanwhile
            archive.add(copied, f"{name}/checkpoint/{copied.name}")
            return
    raise RunFailed(f"no whole checkpoint of {run} could be copied; is its disk sound?")


def restore(source: Path, folder: Path, address: str | None) -> Home:
    """Make the folder of a federation from a backup; with `address`, for a server that clients find elsewhere now."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new folder")
    with tempfile.TemporaryDirectory(dir=_parent(folder)) as place:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(place, filter="data")
        except (OSError, tarfile.TarError, EOFError) as error:
            raise DataError(f"{source} is not a backup of a federation, or not whole: {error}") from None
        if not (Path(place) / MARK).exists():
            raise DataError(f"{source} is not a backup of a federation: it has no {MARK}")
        if folder.exists():
            folder.rmdir()
        os.replace(Path(place) / "federation", folder)
        os.chmod(folder, 0o700)
        if (Path(place) / "runs").exists():
            os.replace(Path(place) / "runs", folder / "runs")
    runs = sorted(path.resolve() for path in (folder / "runs").glob("*"))
    (folder / "server").mkdir(exist_ok=True)
    write_text(folder / "server" / "runs.txt", "".join(f"{path}\n" for path in runs))
    home = credentials.open_home(folder)
    return credentials.move(home, address) if address else home


def _parent(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.parent
