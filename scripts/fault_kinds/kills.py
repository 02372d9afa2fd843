"""Kills: a run is killed at a random moment, or at a change to one of its files, once or more, and resumed."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from plures.methods import METHODS
from scripts.fault_kinds import processes
from scripts.fault_kinds.disk import FaultyDisk, count_into, die_at
from scripts.fault_kinds.processes import Outcome, difference, record_of

NUMBER = 200
RAY_EVERY = 40  # Ray takes half a minute to start
SPECIAL = ("ditto+ala", "fedavg+sam", "fedrod+prox", "fedavg+scaffold", "fedrep+ala", "fedavg+c:c_epochs=2")
OPTIONS = ["--clients", "5", "--rounds", "4", "--batch", "50", "--partition", "dirichlet:0.5", "--share", "0.5"]


def words_of(number: int, random: Random) -> list[str]:
    """The run that is killed: methods in turn, all else by chance."""
    methods = [*METHODS, *SPECIAL]
    method, executor = methods[number % len(methods)], random.choice(("vectorised", "one_by_one"))
    words = [method, *OPTIONS, "--checkpoint-every", random.choice("112"), "--workers", random.choice("122")]
    words += ["--eval-every", random.choice("1112")]
    if random.random() < 0.2:
        words += ["--memory-limit-mb", "0"]  # clients' state is kept in a file
    if random.random() < 0.3:
        words += ["--participation", "0.6"]
    if number % RAY_EVERY == RAY_EVERY - 1:
        executor = "ray"
    return ["run", *words, "--executor", executor, "--quiet"]


def reference(words: list[str], work: Path) -> dict[str, Any]:
    """The undisturbed run of a command: its record, how long it took, and its changes to files; made once."""
    place = work / "references" / ("-".join(words).replace("/", "_") + ".json")
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = work / "undisturbed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        counts = str(folder / "operations")
        ended = processes.run(
            [*words, "--out", str(folder / "run")],
            folder,
            before=lambda: FaultyDisk(folder / "run", count_into(counts)).install(),
        )
        if ended.code:
            raise RuntimeError(f"the undisturbed run {words} ended with {ended.code}: {ended.text}")
        operations = Path(counts).read_text(encoding="utf-8").split()
        record = record_of(folder / "run")
        place.write_text(json.dumps([record, ended.seconds, operations]), encoding="utf-8")
        shutil.rmtree(folder)
    record, seconds, operations = json.loads(place.read_text(encoding="utf-8"))
    return {"record": record, "seconds": seconds, "operations": operations}


def trial(number: int, random: Random, work: Path) -> Outcome:
    """Kill a run, perhaps its resumed ones too, and compare the end with that of the undisturbed run."""
    words = words_of(number, random)
    known = reference(words, work)
    folder = work / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = folder / "run"
    history = [" ".join(words[1:2] + words[12:])]
    command = [*words, "--out", str(run)]
    for _ in range(random.choice((1, 1, 2, 3))):
        kill_all = random.random() < 0.5
        if random.random() < 0.5:
            at = random.randrange(1, len(known["operations"]) + 1)
            history.append(f"killed at change {at} of {len(known['operations'])}")
            ended = processes.run(command, folder, before=lambda at=at: FaultyDisk(run, die_at(at)).install())
        else:
            at_second = random.uniform(0.0, known["seconds"])
            history.append(f"killed after {at_second:.2f} s" + (" with its workers" if kill_all else ""))
            ended = processes.run(command, folder, kill_after=at_second, kill_all=kill_all)
        if failed := ended.failure("; ".join(history)):
            return failed
        if ended.code == 2 and not (run / "config.toml").exists():
            break  # killed before anything was written
        if ended.code not in (0, -9):
            return Outcome("lost", "; ".join(history), ended.sentence)
        command = ["resume", str(run), "--quiet", "--workers", random.choice("12")]
        if ended.code == 0:
            history[-1] += ", when it was done"
            break
    ended = processes.run(["resume", str(run), "--quiet", "--workers", random.choice("12")], folder)
    what = "; ".join(history)
    if failed := ended.failure(what):
        return failed
    if ended.code == 2 and not (run / "config.toml").exists():
        return Outcome("told", what, processes.shorten(ended.sentence))
    if ended.code:
        return Outcome("lost", what, processes.shorten(ended.sentence))
    differs = difference(record_of(run), known["record"])
    return Outcome("silent" if differs else "survived", what, differs)
