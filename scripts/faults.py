"""A campaign of faults: runs are killed, files damaged, disks filled, options and messages made up. What is lost?

    python scripts/faults.py run                    all kinds; what is recorded already is not tried again
    python scripts/faults.py run kills bits         these kinds: kills bits writes configs answers requests
    python scripts/faults.py run --only kills:37    one trial again, with all that it says
    python scripts/faults.py soak                   a long federation with clients that come and go
    python scripts/faults.py soak --over flower     the same with real commands, Flower and TLS
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the hostile messages, which the tests share

from scripts.fault_kinds import bits, configs, kills, messages, processes, soak, writes  # noqa: E402
from scripts.fault_kinds.processes import NotTried, Outcome  # noqa: E402

RECORDS = ROOT / "docs" / "results" / "faults"
SOAKS = {"pipes": ROOT / "docs" / "results" / "soak.json", "flower": ROOT / "docs" / "results" / "soak-flower.json"}
PAGE = ROOT / "docs" / "reliability.md"
KINDS: dict[str, ModuleType] = {"kills": kills, "bits": bits, "writes": writes, "configs": configs}
MESSAGES = ("answers", "requests")
PLANNED = "planned.json"


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
        planned = number_of(kind, work)
        note_planned(kind, planned, records)
        found = dict.fromkeys([number for number in range(planned) if number not in done][:most])
    for number in found:
        began = time.perf_counter()
        try:
            outcome = found[number] or try_one(kind, number, seed, work)
        except NotTried as error:
            print(f"{kind}:{number} not tried: {error}", flush=True)
            continue
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"n": number, **outcome._asdict()}) + "\n")
        seconds = time.perf_counter() - began
        print(f"{kind}:{number} {outcome.outcome} ({seconds:.1f} s) {outcome.what}", flush=True)
        if not outcome.is_good:
            print(f"    {outcome.said}", flush=True)


def note_planned(kind: str, n: int, records: Path) -> None:
    """Write down how many trials of a kind there are, so that the page can say how many are left."""
    path = records / PLANNED
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | {kind: n}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


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


# The page

WORDS = {
    "kills": "a run is killed, up to three times, and resumed",
    "bits": "one bit of one file of a run folder is flipped",
    "writes": "a change to the disk fails, once or from then on, or the disk is full",
    "configs": "a command with random options, good and bad",
    "answers": "a hostile answer of a client",
    "requests": "a hostile request of a server",
}
ENDS = ("survived", "told", "lost", "silent", "traceback", "hung")


def table(records: Path = RECORDS) -> str:
    """The campaign as a table."""
    lines = ["| kind | what is tried | tried | survived | told | lost | silent | tracebacks | hung |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    total = [0] * (len(ENDS) + 1)
    for kind, words in WORDS.items():
        found = [one.outcome for one in read_records(records / f"{kind}.jsonl").values()]
        numbers = [len(found), *(found.count(end) for end in ENDS)]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        lines.append(f"| {kind} | {words} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    lines.append("| all | | " + " | ".join(f"{n:,}" for n in total) + " |")
    if left := untried(records):
        lines += ["", "Not tried yet: " + ", ".join(f"{n:,} of {of:,} {kind}" for kind, (n, of) in left.items()) + "."]
    return "\n".join(lines)


def untried(records: Path) -> dict[str, tuple[int, int]]:
    """Kind -> how many of how many trials are not recorded yet."""
    path = records / PLANNED
    planned = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    left = {kind: (n - len(read_records(records / f"{kind}.jsonl")), n) for kind, n in planned.items()}
    return {kind: (n, of) for kind, (n, of) in left.items() if n > 0}


def soak_table(path: Path) -> str:
    """A soak as a table."""
    if not path.exists():
        return "Not recorded yet."
    one = json.loads(path.read_text(encoding="utf-8"))
    memory = [row for row in one["memory"] if row[0] >= one["rounds"] // 10] or one["memory"]
    when = f"round {memory[0][0]}, at the end, most" if memory else "no time"
    rows = {
        "clients, rounds, method": f"{one['clients']}, {one['rounds']}, {one['method']}",
        "rounds that were played": f"{one.get('rounds_played', one['rounds'])}",
        "clients killed in the middle of their work; returned": f"{one['kills']}; {one['returns']}",
        "updates merged in a round": f"{one['merged_per_round']['least']} to {one['merged_per_round']['most']}",
        "requests without an answer in time": f"{one['silent']}",
        "hostile answers refused": f"{one['hostile_answers_refused']}",
        "other answers refused": f"{one['other_answers_refused']}",
        "starts of the server, which was stopped on the way": f"{one['starts_of_server']}",
    }
    whose = ("the server", "one client") if "over" not in one else ("Flower's SuperLink", "`start`", "one client")
    for k, who in enumerate(whose, 1):
        sizes = [row[k] for row in memory]
        rows[f"memory of {who}: at {when}"] = ", ".join(f"{x:.0f} MB" for x in (sizes[0], sizes[-1], max(sizes)))
    rows |= {
        "largest difference of the server's state to the simulation": f"{one['largest_difference_of_server']:g}",
        "clients whose own state is that of the simulation, bit for bit": (
            f"{one['clients_with_equal_state']} of {one['clients_that_took_part']} that took part"
        ),
        "minutes": f"{one['seconds'] / 60:.0f}",
    }
    if "seconds_of_a_round" in one:
        least, _, median, _, most = one["seconds_of_a_round"]
        rows["seconds of a round: least, median, most"] = f"{least:g}, {median:g}, {most:g}"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def write_page() -> int:
    """Put the tables between their marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, content in (
        ("campaign", table()),
        ("soak", soak_table(SOAKS["pipes"])),
        ("soak over Flower", soak_table(SOAKS["flower"])),
    ):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)  # which fails if the marks are not there
        _, after = rest.split(end)
        text = before + start + content + "\n" + end + after
    PAGE.write_text(text, encoding="utf-8")
    print(table())
    return 0


def run_soak(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A soak, whose record is returned."""
    if given.over == "pipes":
        return soak.soak(work, given.clients, given.rounds, given.seed)
    from scripts.fault_kinds import soak_flower  # here: it needs Flower

    return soak_flower.soak(work, given.clients, given.rounds, given.seed, given.deadline)


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
    long = commands.add_parser("soak")
    long.add_argument("--clients", type=int, default=20)
    long.add_argument("--rounds", type=int, default=500)
    long.add_argument("--seed", type=int, default=0)
    long.add_argument("--over", choices=list(SOAKS), default="pipes", help="flower: real commands, Flower and TLS")
    long.add_argument("--deadline", type=float, default=10.0, help="seconds of a round over Flower")
    long.add_argument("--out", type=Path, help="the file of the record")
    long.add_argument("--work", type=Path, help="as for run; over Flower, an interrupted soak goes on from there")
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "write":
        return write_page()
    work = Path(tempfile.mkdtemp(prefix="faults-")) if given.work is None else given.work
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "warm", ignore_errors=True)
    processes.warm_up(work)
    try:
        if given.command == "soak":
            soak.write_record(run_soak(given, work), given.out or SOAKS[given.over])
            return 0
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
