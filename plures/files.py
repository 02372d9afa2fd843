"""Files: written whole or not at all, locks, TOML in and out, and numbers of bytes in words."""

import errno
import fcntl
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import tomli_w

from plures.errors import RunFailed, UsageError


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader sees the old or the new content, never half of it."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_flushed(new, content)
        os.replace(new, path)
    except OSError as error:
        raise disk_failure(error, path.parent) from error


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def telling_disk_failures(where: Path) -> Iterator[None]:
    """What the disk refuses in here is told in words."""
    try:
        yield
    except OSError as error:
        raise disk_failure(error, where) from error


def disk_failure(error: OSError, where: Path) -> RunFailed:
    """The error for a write that failed."""
    said = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return RunFailed(
        f"cannot write to {where}: {said}. The last checkpoint there is whole; make room, then `plures resume`"
    )


# Locks

_held: set[IO[str]] = set()


def _forget_locks() -> None:
    """A lock is the parent's alone: a child that outlives it must not keep others away."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def lock(path: Path, what: str, note: str = "") -> Iterator[None]:
    """Let only one process run at a time. The file holds its number, for `stop`, and a note that survives a crash."""
    with telling_disk_failures(path.parent):
        file = open(path, "a+", encoding="utf-8")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = (file.read().split() or ["unknown"])[0]
            raise UsageError(f"{what} is running already, as process {holder} ({path})") from None
        _held.add(file)
        with telling_disk_failures(path.parent):
            file.truncate(0)
            file.write(f"{os.getpid()} {note}\n")
            file.flush()
        yield
        with suppress(OSError):  # what it says is of no use to anybody any more
            file.truncate(0)
    finally:
        _held.discard(file)
        with suppress(OSError):
            file.close()


@contextmanager
def lock_in_turn(path: Path) -> Iterator[None]:
    """Let only one process run at a time; others wait for their turn."""
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether this process is the only one in here; a process that is killed lets go by that."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def note_after_crash(path: Path) -> str:
    """The note of a process that was killed while it held the lock; else empty."""
    words = path.read_text(encoding="utf-8").split() if path.exists() and lock_holder(path) is None else []
    return words[1] if len(words) > 1 else ""


def lock_holder(path: Path) -> int | None:
    """The number of the process that holds a lock; None if there is none."""
    try:
        with open(path, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except OSError:
                file.seek(0)
                return int((file.read().split() or ["0"])[0]) or None
    except FileNotFoundError:
        return None


# TOML


MOST_TOML_BYTES = 100_000_000


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    return read_toml_with_text(path)[0]


def read_toml_with_text(path: Path) -> tuple[dict[str, Any], str]:
    """The values of a TOML file, and its text with the comments: read once, for another process may replace it."""
    try:
        if path.stat().st_size > MOST_TOML_BYTES:
            raise UsageError(f"{path} has {in_bytes(path.stat().st_size)}, which is too much for a config file")
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise UsageError(f"there is no config file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is not TOML that can be read: it is nested too deeply") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The values in a text that was written here."""
    return tomllib.loads(text)


def to_toml(values: dict[str, Any]) -> str:
    """Values as TOML; tables come after plain values."""
    return tomli_w.dumps(values)


def sum_of(values: Any) -> str:
    """The SHA-256 of values that can be written as JSON, whatever the order of their names."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(values)), sort_keys=True).encode()).hexdigest()


def in_bytes(n: float) -> str:
    """1,234,567 -> 1.2 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError
