"""Files: written whole or not at all, TOML in and out, and numbers of bytes in words."""

import errno
import os
import tomllib
from pathlib import Path
from typing import Any

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


def disk_failure(error: OSError, where: Path) -> RunFailed:
    """The error for a write that failed."""
    said = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return RunFailed(
        f"cannot write to {where}: {said}. The last checkpoint there is whole; make room, then `plures resume`"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no config file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def to_toml(values: dict[str, Any]) -> str:
    """Values as TOML; tables come after plain values."""
    return tomli_w.dumps(values)


def in_bytes(n: float) -> str:
    """1,234,567 -> 1.2 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError
