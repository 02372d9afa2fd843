"""Commands as processes that can be killed: forked from one that has imported everything, so that many can be tried."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plures.cli.main import call

SECONDS = 120.0  # of processor time that any command may take before it is said to hang
TIMES_WALL = 10  # and so many times as long in all, on a machine that has other things to do
DOCUMENTED = (0, 2, 3, 4, 130)  # exit codes: done, usage, data, run failed, interrupted
UNFORESEEN = ("Traceback (most recent call last)", "--debug shows where")  # how an error that nobody expected is told


class Outcome(NamedTuple):
    """What became of one trial."""

    outcome: str  # survived, told, lost, silent, traceback or hung
    what: str  # was done
    said: str = ""  # by the program, where it said something

    @property
    def is_good(self) -> bool:
        return self.outcome in ("survived", "told")


class NotTried(Exception):
    """A trial that this machine cannot do now; it is not recorded, and tried again by the next campaign."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int  # the exit code; negative for a signal
    text: str  # all that it printed
    seconds: float
    hung: bool = False

    @property
    def is_unforeseen(self) -> bool:
        """Whether it ended by an error that nobody expected."""
        return any(words in self.text for words in UNFORESEEN) or self.code not in (*DOCUMENTED, -signal.SIGKILL)

    @property
    def sentence(self) -> str:
        """What it said when it gave up."""
        found = [line for line in self.text.splitlines() if line.startswith("plures: ")]
        return found[-1].removeprefix("plures: ") if found else ""

    def failure(self, what: str) -> Outcome | None:
        """The outcome of a trial in which this command hung or broke; None if it did neither."""
        if self.hung:
            return Outcome("hung", what, shorten(self.text))
        if self.is_unforeseen or (self.code > 0 and not self.sentence):
            return Outcome("traceback", what, shorten(self.sentence or self.text, 2000))
        return None


def shorten(text: str, most: int = 240) -> str:
    """A text for a record: without the folders of this machine, and not too long."""
    text = re.sub(r"(/[\w.+=,-]+)*/faults-[\w-]+", "WORK", text.strip())
    return text if len(text) <= most else "..." + text[-most:]


def warm_up(folder: Path) -> None:
    """Import all that runs import: children are forked afterwards, and begin at once."""
    torch.set_num_threads(1)
    words = ["run", "ditto", "--clients", "3", "--rounds", "1", "--batch", "50", "--workers", "1", "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert call([*words, "--executor", "vectorised", "--out", str(folder / "warm")]) == 0


def run(
    words: list[str],
    folder: Path,
    before: Callable[[], None] | None = None,
    kill_after: float | None = None,
    kill_all: bool = False,
    seconds: float = SECONDS,
) -> Ended:
    """Run a command of the program in a process of its own.

    folder: where it is run, and where what it prints is kept.
    before: what is done in the process first, such as to break its disk.
    kill_after: seconds after which it is killed; with `kill_all`, its worker processes at the same moment.
    """
    log, began = folder / "printed.txt", time.perf_counter()
    log.write_bytes(b"")  # it may be killed before it has opened it
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        be_child(words, folder, log, before)
    hung, killed = False, False
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        passed = time.perf_counter() - began
        if kill_after is not None and passed >= kill_after and not killed:
            _kill(process, kill_all)
            killed = True
        elif passed > seconds and (passed > TIMES_WALL * seconds or _processor_seconds(process) > seconds):
            hung = True
            _kill(process, True)
        time.sleep(0.002)
    taken = time.perf_counter() - began
    left = wait_for_others(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    if "Ray did not start" in text:  # that says a machine with too much to do
        raise NotTried("Ray did not start")
    return Ended(os.waitstatus_to_exitcode(status), text + left, taken, hung or bool(left))


def be_child(words: list[str], folder: Path, log: Path, before: Callable[[], None] | None) -> None:
    """Run the command, and end this process however it ends."""
    code = 99
    try:
        os.setsid()  # so that its workers can be found by its number
        os.chdir(folder)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if before is not None:
            before()
        code = call(words)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kill(process: int, with_others: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if with_others:
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGKILL)


def wait_for_others(session: int, seconds: float = 20.0) -> str:
    """Wait until the workers of a command that has ended are gone; a sentence if they stay, and are killed."""
    for _ in range(int(seconds / 0.01)):
        if not _alive(session):
            return ""
        time.sleep(0.01)
    for process in _alive(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return "\na worker process has outlived its run"


def _alive(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


# The end of a run


TIMES = ("seconds", "peak_rss_mb", "engine", "sha256", "check")  # of a summary, no two runs have the same


def record_of(folder: Path) -> dict[str, Any] | None:
    """All that a run that has ended says of itself, but for times; None if it has not ended."""
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "summary": {key: value for key, value in summary.items() if key not in TIMES},
        "rounds": [
            {key: cell for key, cell in row.items() if not key.endswith("_seconds")}
            for row in _rows(folder / "rounds.csv")
        ],
        "clients": _rows(folder / "clients.csv"),
    }


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def difference(found: dict[str, Any] | None, expected: dict[str, Any]) -> str:
    """Where a record is another than it should be, in words; empty if it is the same."""
    if found is None:
        return "there is no summary.json"
    if found["summary"].get("digest") != expected["summary"]["digest"]:
        return "another digest"
    for part in ("summary", "rounds", "clients"):
        if found[part] != expected[part]:
            return f"other numbers in {part}"
    return ""
