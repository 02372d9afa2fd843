"""Writes: every change that a run makes to its files fails, once or from then on, by an error or a full disk."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

from scripts.fault_kinds import processes
from scripts.fault_kinds.disk import ERRORS, FREES_SPACE, FaultyDisk, fail_at
from scripts.fault_kinds.kills import reference
from scripts.fault_kinds.processes import NotTried, Outcome, difference, record_of

WORDS = ["run", "ditto", "--clients", "4", "--rounds", "2", "--batch", "50", "--share", "0.3", "--workers", "1"]
WORDS += ["--checkpoint-every", "1", "--executor", "vectorised", "--memory-limit-mb", "0"]
SIZES_KB = tuple(range(4, 404, 8))  # of disks that really become full


def trials(work: Path) -> list[tuple[str, int, bool]]:
    """All trials: the error, at which change, whether it lasts; and full disks, by their size."""
    operations = reference(WORDS, work)["operations"]
    found = []
    for error in ERRORS:
        for at, name in enumerate(operations, 1):
            for lasting in (False, True):
                if error == "I/O error" or name not in FREES_SPACE:
                    found.append((error, at, lasting))
    return found + [("small disk", size, True) for size in SIZES_KB]


def number_of_trials(work: Path) -> int:
    return len(trials(work))


def trial(number: int, random: Random, work: Path) -> Outcome:
    """A run on a disk that fails; then the disk is well again, and the run is resumed."""
    kind, at, lasting = trials(work)[number]
    known = reference(WORDS, work)
    folder = work / "failing"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "disk").mkdir(parents=True)
    run = folder / "disk" / "run"
    if kind == "small disk":
        return _on_small_disk(at, folder, known["record"])
    name = known["operations"][at - 1]
    what = f"{kind} at change {at} ({name}), {'from then on' if lasting else 'once'}"
    break_disk = FaultyDisk(run, fail_at(at, ERRORS[kind], lasting)).install
    return _run_and_resume(what, run, folder, known["record"], break_disk, lambda: None)


def _on_small_disk(size: int, folder: Path, expected: dict) -> Outcome:
    disk, what = folder / "disk", f"a disk of {size} kB"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "plures", str(disk)], capture_output=True)
    if mounted.returncode:
        raise NotTried("only root can mount a small disk")

    def enlarge() -> None:
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)

    try:
        return _run_and_resume(what, disk / "run", folder, expected, None, enlarge)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _run_and_resume(
    what: str, run: Path, folder: Path, expected: dict, before: Callable[[], None] | None, heal: Callable[[], None]
) -> Outcome:
    ended = processes.run([*WORDS, "--out", str(run)], folder, before=before)
    if failed := ended.failure(what):
        return failed
    said = processes.shorten(ended.sentence)
    if ended.code == 0:
        differs = difference(record_of(run), expected)
        return Outcome("silent" if differs else "survived", what, differs)
    heal()
    before_resume = os.path.exists(run / "config.toml")
    ended = processes.run(["resume", str(run), "--quiet", "--workers", "1"], folder)
    if failed := ended.failure(what + "; resumed"):
        return failed
    if ended.code and not before_resume:
        return Outcome("told", what, said)
    if ended.code:
        return Outcome("lost", what, processes.shorten(ended.sentence))
    differs = difference(record_of(run), expected)
    return Outcome("silent" if differs else "told", what, differs or said)
