"""Bits: one bit is flipped in a file of a run folder; then the run is resumed, reported, exported and adapted.

Each command must do the same as with the whole folder, or say what is wrong. Runs that have ended and runs that were
interrupted are tried; of each file the first and the last byte, and others by chance.
"""

import hashlib
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from scripts.fault_kinds import processes
from scripts.fault_kinds.disk import FaultyDisk, die_at
from scripts.fault_kinds.kills import reference
from scripts.fault_kinds.processes import Ended, Outcome, difference, record_of

FLIPS = 8  # of each file
OF_LARGE = 2  # of files of which there are several alike
WORDS = ["run", "fedala", "--clients", "4", "--rounds", "3", "--batch", "50", "--share", "0.3", "--workers", "1"]
WORDS += ["--checkpoint-every", "1", "--executor", "vectorised", "--eval-every", "1", "--goal", "0.3"]
# How far the run of a folder came: all of it, killed in round 3, killed before its first checkpoint.
STATES = ("ended", "interrupted", "begun")
COUNTS = "1,2,3,4,5,6,7,8,9,10"


@cache
def folders(work: Path) -> dict[str, Path]:
    """A folder for each state, made once."""
    found = {}
    operations = reference(WORDS, work)["operations"]
    checkpoints = [n for n, name in enumerate(operations, 1) if name == "rmdir"]
    for state in STATES:
        place = work / "whole" / state
        found[state] = place / "run"
        if (place / "whole").exists():
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run = place / "run"
        at = {"ended": 10**9, "interrupted": checkpoints[0], "begun": _first_checkpoint(operations)}[state]
        ended = processes.run(
            [*WORDS, "--out", str(run)], place, lambda r=run, a=at: FaultyDisk(r, die_at(a)).install()
        )
        assert ended.code == (0 if state == "ended" else -9), ended.text
        (place / "whole").touch()
    return found


def _first_checkpoint(operations: list[str]) -> int:
    """The change at which the first checkpoint begins: a folder in a folder is made."""
    return next(n for n, pair in enumerate(pairwise(operations), 1) if pair == ("mkdir", "mkdir"))


def trials(work: Path) -> list[tuple[str, str, int]]:
    """All trials: the state, the file, and the number of the flip."""
    found = []
    for state, folder in folders(work).items():
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for name in names:
            n = OF_LARGE if name.startswith("pictures/") else FLIPS
            found += [(state, name, flip) for flip in range(n if (folder / name).stat().st_size else 0)]
    return found


def number_of_trials(work: Path) -> int:
    return len(trials(work))


def trial(number: int, random: Random, work: Path) -> Outcome:
    """Flip one bit, and use the folder in every way."""
    state, name, flip = trials(work)[number]
    expected, known = reference(WORDS, work)["record"], _uses(state, work)  # first: it uses the same folder
    folder = work / "flipped"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copytree(folders(work)[state], folder / "run")
    content = bytearray((folder / "run" / name).read_bytes())
    at = (0, len(content) - 1)[flip] if flip < 2 else random.randrange(len(content))
    bit = random.randrange(8)
    content[at] ^= 1 << bit
    (folder / "run" / name).write_bytes(content)
    what = f"{state}: {name}, bit {bit} of byte {at}"
    told = ""
    with_report = not name.startswith("checkpoint/") or flip == 0  # it takes long, and reads them as export does
    for command, ended, product in _use(folder, with_report):
        if failed := ended.failure(f"{what}; {command}"):
            return failed
        if ended.code:
            told = told or f"{command}: {processes.shorten(ended.sentence)}"
            continue
        words = _warnings(ended)
        told = told or (f"{command}: {words}" if words else "")
        if command == "resume":
            differs = difference(record_of(folder / "run"), expected)
        else:
            differs = "" if product == known[command] else "it gives something else"
        if differs and not words:
            return Outcome("silent", f"{what}; {command}", differs)
        if differs and command == "resume":
            return Outcome("lost", f"{what}; {command}", differs)
    return Outcome("told" if told else "survived", what, told)


def _warnings(ended: Ended) -> str:
    """What a command that did its work said of a damage."""
    found = [line for line in ended.text.splitlines() if "cannot be read" in line or "has changed" in line]
    return processes.shorten(" ".join(found))


@cache
def _uses(state: str, work: Path) -> dict[str, Any]:
    """What each command gives with the whole folder."""
    folder = work / "flipped"  # pages name their folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copytree(folders(work)[state], folder / "run")
    return {command: product for command, _, product in _use(folder, True)}


def _use(folder: Path, with_report: bool) -> list[tuple[str, Ended, Any]]:
    """Every command on a folder, the last of which may change it."""
    run, out = str(folder / "run"), folder / "model.safetensors"
    found = []
    for command in (["export", run, "--client", "1"], ["adapt", run, "--class-counts", COUNTS]):
        ended = processes.run([*command, "-o", str(out)], folder)
        found.append((command[0], ended, _hash(out.read_bytes()) if ended.code == 0 else ended.sentence))
        out.unlink(missing_ok=True)
    if with_report:
        page = folder / "page.html"
        ended = processes.run(["report", run, "-o", str(page)], folder)
        found.append(("report", ended, _hash(page.read_bytes()) if ended.code == 0 else ended.sentence))
        if ended.code == 0:  # what the page itself says of a damage
            text = page.read_text(encoding="utf-8")
            notes = [
                text[max(0, m.start() - 150) : m.end()] for m in re.finditer("cannot be read|has changed since", text)
            ]
            found[-1] = ("report", ended._replace(text="\n".join([ended.text, *notes])), found[-1][2])
    found.append(("resume", processes.run(["resume", run, "--quiet", "--workers", "1"], folder), None))
    return found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
