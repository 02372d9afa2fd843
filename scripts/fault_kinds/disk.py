"""A disk that fails: every change to files below a folder is counted, and any of them can be made to go wrong.

It is put between this process and its files by replacing functions of `os` and `open`, so it is for forked children
alone. What changes a file: opening it to write, writing, flushing, fsync, closing, allocating; and making, renaming
and removing names. A write that fails has written the first half of its bytes, as on a disk that becomes full.
"""

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

Action = Callable[[int, str], None]  # the number of an operation, from 1, and its name; may raise, or end the process


def fail_at(at: int, number: int, lasting: bool) -> Action:
    """An error (ENOSPC, EIO) at one operation, or at this one and all later ones."""

    def act(n: int, name: str) -> None:
        if (n == at or (lasting and n > at)) and not (number == errno.ENOSPC and name in FREES_SPACE):
            raise OSError(number, os.strerror(number))

    return act


def die_at(at: int) -> Action:
    """The process is killed at one operation."""

    def act(n: int, name: str) -> None:
        if n == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def count_into(path: str) -> Action:
    """The names of all operations, as lines of a file."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    write = os.write
    return lambda n, name: (write(handle, f"{name}\n".encode()), None)[1]


FREES_SPACE = ("unlink", "rmdir")  # these never find the disk full


class FaultyDisk:
    """Counts the changes below a folder, and lets `act` spoil them."""

    def __init__(self, folder: Path, act: Action) -> None:
        self.folder, self.act, self.n, self.owner = os.path.realpath(folder), act, 0, 0

    def step(self, name: str) -> None:
        """One operation is about to happen."""
        if os.getpid() == self.owner:  # workers write nothing of the run's own
            self.n += 1
            self.act(self.n, name)

    def is_inside(self, path: Any, dir_fd: int | None = None) -> bool:
        if isinstance(path, int):
            return self._of_handle(path)
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text).startswith(self.folder)

    def _of_handle(self, handle: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{handle}").startswith(self.folder)
        except OSError:
            return False

    def install(self) -> None:
        """Put it in place, for good, in this process alone."""
        self.owner = os.getpid()
        real_open = builtins.open

        def faulty_open(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if not (set(mode) & set("wax+")) or not self.is_inside(file):
                return real_open(file, mode, *rest, **more)
            self.step("open")
            return FaultyFile(real_open(file, mode, *rest, **more), self)

        builtins.open = faulty_open  # type: ignore[assignment]
        io.open = faulty_open  # type: ignore[assignment]
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "posix_fallocate"):
            setattr(os, name, self._wrap(getattr(os, name), name))
        real_os_open = os.open

        def faulty_os_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_CREAT and self.is_inside(path, more.get("dir_fd")):
                self.step("open")
            return real_os_open(path, flags, *rest, **more)

        os.open = faulty_os_open  # type: ignore[assignment]

    def _wrap(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def faulty(path: Any, *rest: Any, **more: Any) -> Any:
            if self.is_inside(path, more.get("dir_fd")):
                self.step("unlink" if name == "remove" else name)
            return real(path, *rest, **more)

        return faulty


class FaultyFile:
    """A file that is open for writing on a faulty disk."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        try:
            self._disk.step("write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return int(self._file.write(data))

    def flush(self) -> None:
        self._disk.step("flush")
        self._file.flush()

    def truncate(self, *size: int) -> int:
        self._disk.step("truncate")
        return int(self._file.truncate(*size))

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._disk.step("close")
        finally:
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "FaultyFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)


ERRORS = {"full disk": errno.ENOSPC, "I/O error": errno.EIO}
