"""A campaign of faults: runs are killed, files damaged, disks filled, options and messages made up. What is lost?

    python scripts/faults.py run                    all kinds; what is recorded already is not tried again
    python scripts/faults.py run kills bits         these kinds: kills bits writes configs answers requests
    python scripts/faults.py run --only kills:37    one trial again, with all that it says
    python scripts/faults.py write                  the tables in docs/reliability.md, from the records

Every trial follows from the seed, its kind and its number. Each adds a line to docs/results/faults/KIND.jsonl, so the
campaign may be stopped at any moment.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the hostile messages, which the tests share

from scripts.fault_kinds import bits, configs, kills, messages, processes, writes  # noqa: E402
from scripts.fault_kinds.processes import Outcome  # noqa: E402

RECORDS = ROOT / "docs" / "results" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
KINDS: dict[str, ModuleType] = {"kills": kills, "bits": bits, "writes": writes, "configs": configs}
MESSAGES = ("answers", "requests")


def number_of(kind: str, work: Path) -> int:
    """How many trials of a kind there are."""
    module = KINDS[kind]
    return module.NUMBER if hasattr(module, "NUMBER") else module.number_of_trials(work)


def try_one(kind: str, number: int, seed: int, work: Path) -> Outcome:
    """One trial."""
    return KINDS[kind].trial(number, Random(f"{seed}:{kind}:{number}"), work)


def campaign(kind: str, seed: int, work: Path, records: Path, most: int | None = None) -> None:
    """The trials of a kind that are not recorded yet."""
    path = records / f"{kind}.jsonl"
    records.mkdir(parents=True, exist_ok=True)
    done = set(read_records(path))
    if kind in MESSAGES:
        found = {} if done else dict(enumerate(messages.try_all(kind, work)))
    else:
        todo = [number for number in range(number_of(kind, work)) if number not in done][:most]
        found = dict.fromkeys(todo)
    for number in found:
        began = time.perf_counter()
        outcome = found[number] or try_one(kind, number, seed, work)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"n": number, **outcome._asdict()}) + "\n")
        seconds = time.perf_counter() - began
        print(f"{kind}:{number} {outcome.outcome} ({seconds:.1f} s) {outcome.what}", flush=True)
        if not outcome.is_good:
            print(f"    {outcome.said}", flush=True)


def read_records(path: Path) -> dict[int, Outcome]:
    """The recorded trials of a kind, by their number; a line that was not written to its end is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        number = values.pop("n")
        found[number] = Outcome(**values)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("kinds", nargs="*", help="kills bits writes configs answers requests; all, if left out")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--out", type=Path, default=RECORDS, help="the folder of records")
    runs.add_argument("--work", type=Path, help="a folder for what is tried; if left out, one that is removed")
    runs.add_argument("--most", type=int, help="trials of each kind in this call")
    runs.add_argument("--only", help="KIND:NUMBER, one trial, which is printed and not recorded")
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "write":
        return 0
    work = Path(tempfile.mkdtemp(prefix="faults-")) if given.work is None else given.work
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "warm", ignore_errors=True)
    processes.warm_up(work)
    try:
        if given.only:
            kind, _, number = given.only.partition(":")
            outcome = try_one(kind, int(number), given.seed, work)
            print(f"{outcome.outcome}: {outcome.what}\n{outcome.said}")
            return 0 if outcome.is_good else 1
        for kind in given.kinds or (*KINDS, *MESSAGES):
            campaign(kind, given.seed, work, given.out, given.most)
    finally:
        if given.work is None:
            shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
