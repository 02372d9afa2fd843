"""The soak over a real network: Flower with TLS and keys, real commands, clients that are killed and come back.

`plures federate server`, `plures federate start` and the client whose memory is looked at are commands of their own.
The other clients are the same command in processes that are forked from this one, so that some can be told to
misbehave: one answers after the deadline now and then, one sends every kind of hostile answer in turn, and some are
killed in the middle of their work and started again later. `start` is interrupted half-way, killed later on, and
resumed both times. What was merged is read from the server's audit log. A simulation then plays the same rounds.

All that a later call needs is in the folder of the soak: with the same --work, a soak that was interrupted goes on.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from plures.cli.main import call
from plures.federate import audit, wire
from plures.federate.client import Client
from plures.runs import checkpoint
from plures.runs.config import make_config
from scripts.fault_kinds import processes
from scripts.fault_kinds.soak import HOSTILE, HOSTILE_KINDS, METHOD, SLOW, SLOW_EVERY, STEADY, compare, memory_mb
from tests.federate.federation import write_data

LEAVE = 0.08  # chance that a client is killed in a round; one that comes back is let in after about a minute
FIRST = 2  # round after which one is killed in any case
AWAY = (1, 4)  # rounds until it is started again
CALM = 5  # last rounds in which nobody is killed, so that all can be there at the end
MOST_FAILURES = 20  # of `start`, which is then started again, as an operator would
LATE = 3.0  # seconds after the deadline at which the slow client answers
OPTIONS = {"method": METHOD, "lr": 0.05, "batch": 10, "seed": 3, "eval_every": 25}
PLURES = [sys.executable, "-c", "from plures.cli.main import main; main()"]
ROOT = Path(__file__).resolve().parent.parent.parent


# What clients do that they should not


def misbehave(name: str, work: Path, deadline: float, parent: int) -> None:
    """Make this process, which is about to be a client, end with the soak, die when it is told to, and more by name."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    honest, answer_round, doomed = Client.answer, Client._answer_round, work / "doomed" / name
    random = Random(f"{name} {os.getpid()}")

    def answer_or_die(self: Client, asked: wire.RoundRequest, tensors: Any) -> bytes:
        if asked.train and doomed.exists():
            doomed.unlink()
            threading.Timer(random.uniform(0.0, 0.2), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return answer_round(self, asked, tensors)

    def answer(self: Client, message: bytes, unseal: Callable[[bytes], bytes] | None = None) -> bytes:
        found = honest(self, message, unseal)
        fields, tensors = wire.unpack(found, 1 << 30)
        if fields.get("kind") != "round" or fields.get("loss") is None:
            return found
        if name == SLOW and fields["round"] % SLOW_EVERY == SLOW_EVERY - 1:
            time.sleep(deadline + LATE)
        if name == HOSTILE:
            path = work / "hostile.txt"
            n = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
            found = HOSTILE_KINDS[n % len(HOSTILE_KINDS)](fields, tensors)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"round {fields['round'] + 1}\n")
        return found

    Client._answer_round, Client.answer = answer_or_die, answer  # type: ignore[method-assign]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# The processes


class Federation:
    """The folder of a soak and its processes, all of which end with it."""

    def __init__(self, work: Path, n_clients: int, deadline: float) -> None:
        self.work, self.deadline, self.run = work, deadline, work / "run"
        self.names = [f"client-{k:02d}" for k in range(n_clients)]
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        self.forked: dict[str, int] = {}
        (work / "doomed").mkdir(exist_ok=True)
        for path in work.glob("*.out"):
            path.unlink()  # what was said before a soak goes on
        if not (work / "federation").exists():
            write_data(work / "data", {name: 60 + k for k, name in enumerate(self.names)})
            words = [word for name in self.names for word in ("--client", name)]
            assert call(["federate", "init", str(work / "federation"), *words, "--port", str(_free_port())]) == 0
        self.command("server", "federate", "server")
        self.wait_for("server", "listening on https://")
        for name in self.names:
            self.start_client(name)
        for name in self.names:
            self.wait_for(name, "connected to")

    def private(self, name: str) -> Path:
        """Where a client keeps what is its own."""
        return self.work / "federation" / "clients" / name / "private"

    def command(self, name: str, *words: str) -> None:
        """Start a command of the program, whose output is added to NAME.out."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with open(self.work / f"{name}.out", "ab") as output:
            self.commands[name] = subprocess.Popen(
                [*PLURES, *words], cwd=self.work, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def start_client(self, name: str) -> None:
        words = ["federate", "client", "--name", name, "--data", f"data/{name}.npz"]
        if name == STEADY:
            self.command(name, *words)
            return
        log = self.work / f"{name}.out"
        log.touch()
        sys.stdout.flush()
        parent = os.getpid()
        self.forked[name] = os.fork()
        if self.forked[name] == 0:
            processes.be_child(words, self.work, log, partial(misbehave, name, self.work, self.deadline, parent))

    def start_run(self, rounds: int) -> None:
        """Start the run, or resume it if there is one."""
        limits = ["--deadline", str(self.deadline), "--quorum", "0.3"]
        if (self.run / "config.toml").exists():
            self.command("start", "federate", "start", "--resume", "run", *limits)
            return
        words = [word for key, value in OPTIONS.items() if key != "method" for word in (_option(key), str(value))]
        words += ["--rounds", str(rounds), "--out", "run", "--clients", str(len(self.names)), "--wait", "300"]
        self.command("start", "federate", "start", METHOD, *words, *limits)

    def wait_for(self, name: str, words: str, seconds: float = 300.0) -> None:
        """Until a process has said something."""
        until = time.monotonic() + seconds
        while words not in self.said(name):
            ended = name in self.commands and self.commands[name].poll() is not None
            if ended or time.monotonic() > until:
                raise RuntimeError(f"{name} does not say {words!r}: {self.said(name)[-2000:]}")
            time.sleep(0.1)

    def said(self, name: str) -> str:
        path = self.work / f"{name}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def dead(self) -> dict[str, bool]:
        """The forked clients that have ended since the last call, and whether they were killed."""
        found = {}
        for name, process in list(self.forked.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.forked[name]
                found[name] = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        return found

    def round(self) -> int:
        """How many rounds are in the newest checkpoint."""
        return max((int(path.name) for path in (self.run / "checkpoint").glob("[0-9]*")), default=0)

    def memory(self) -> list[float]:
        """MB of SuperLink, which is the child of the server, of `start`, and of one client."""
        server = self.commands["server"].pid
        children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
        return [memory_mb(int(children[0])), *(memory_mb(self.commands[name].pid) for name in ("start", STEADY))]

    def close(self) -> None:
        self._end("start")
        for process in self.forked.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self._end(STEADY)
        self._end("server")

    def _end(self, name: str) -> None:
        if name in self.commands and self.commands[name].poll() is None:
            self.commands[name].send_signal(signal.SIGINT)
            try:
                self.commands[name].wait(60)
            except subprocess.TimeoutExpired:
                self.commands[name].kill()
                self.commands[name].wait()


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The soak


def soak(work: Path, n_clients: int, rounds: int, seed: int, deadline: float) -> dict[str, Any]:
    """The soak, or what is left of it; returns what is recorded, also of one that is interrupted."""
    notes = work / "notes.json"
    record: dict[str, Any] = {
        **{"over": "Flower, TLS", "clients": n_clients, "rounds": rounds, "method": METHOD, "deadline": deadline},
        **{"kills": 0, "returns": 0, "starts_of_server": 0, "seconds": 0.0, "memory": [], "interrupted": 0},
        **{"ended_by_themselves": 0, "failures": []},  # clients, and starts that nobody stopped
    }
    if notes.exists():
        record |= json.loads(notes.read_text(encoding="utf-8"))
        if [record[key] for key in ("clients", "rounds")] != [n_clients, rounds]:
            raise SystemExit(f"{work} has a soak of {record['clients']} clients and {record['rounds']} rounds")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    federation = Federation(work, n_clients, deadline)
    try:
        _play(federation, record, rounds, Random(f"soak {seed} {federation.round()}"))
    except KeyboardInterrupt:
        print("interrupted; what has been played is recorded", flush=True)
        record["interrupted"] += 1
    finally:
        federation.close()
        notes.write_text(json.dumps(record), encoding="utf-8")
    return record | _judge(federation, rounds)


def _play(federation: Federation, record: dict[str, Any], rounds: int, random: Random) -> None:
    """Until the run has ended: kill, start again, and write down what happens."""
    away: dict[str, int] = {}  # client -> the round in which it is started again
    endings = {rounds // 2: signal.SIGINT, 3 * rounds // 4: signal.SIGKILL}  # of `start`, by round
    began, at = time.monotonic(), federation.round()
    endings = {number: how for number, how in endings.items() if number > at}
    federation.start_run(rounds)
    record["starts_of_server"] += 1
    while True:
        time.sleep(0.1)
        for name, was_killed in federation.dead().items():
            record["kills" if was_killed else "ended_by_themselves"] += 1
            away[name] = federation.round() + random.randrange(*AWAY)
        start = federation.commands["start"]
        now = federation.round()
        if start.poll() is not None:
            if (federation.run / "summary.json").exists():
                break
            record["failures"].append([now, federation.said("start").strip().splitlines()[-1]])
            print(f"`start` ended, and is started again: {record['failures'][-1]}", flush=True)
            if len(record["failures"]) > MOST_FAILURES:
                raise RuntimeError(f"`start` ended again and again: {federation.said('start')[-2000:]}")
            federation.start_run(rounds)
            record["starts_of_server"] += 1
            continue
        if now == at:
            continue
        record["seconds"] += time.monotonic() - began
        began, at = time.monotonic(), now
        if at % 10 == 1:
            record["memory"].append([at, *federation.memory()])
            (federation.work / "notes.json").write_text(json.dumps(record), encoding="utf-8")
        print(f"round {at}: {record['seconds']:.0f} s, {record['kills']} killed, {record['returns']} back", flush=True)
        for name in [name for name, until in away.items() if until <= at or at >= rounds - CALM]:
            federation.start_client(name)
            record["returns"] += 1
            del away[name]
        others = [name for name in federation.forked if name not in (SLOW, HOSTILE)]
        is_time = at == FIRST or random.random() < LEAVE
        if is_time and at < rounds - CALM and len(others) > len(federation.names) // 3:
            (federation.work / "doomed" / random.choice(others)).touch()
        if due := [number for number in endings if number <= at]:
            start.send_signal(endings.pop(due[0]))
            start.wait(3600)  # an interrupted run completes its round
            federation.start_run(rounds)
            record["starts_of_server"] += 1
    record["seconds"] += time.monotonic() - began


def _judge(federation: Federation, rounds: int) -> dict[str, Any]:
    """What the audit log and the last checkpoint tell, and the simulation of the same rounds."""
    found = checkpoint.read(federation.run / "checkpoint")[0]
    if found is None:
        raise SystemExit("no round was completed: nothing is recorded")
    done, manifest = int(found.manifest["round"]), found.manifest
    answers = _last_answers(federation.work / "federation" / "server" / audit.FILE, done)
    outliers = {(one["round"], one["client"]) for one in manifest["refusals"]}
    merged = {
        str(number): [
            k
            for k, name in enumerate(federation.names)
            if _is_update(answers.get((number, name), "")) and (number, name) not in outliers
        ]
        for number in range(1, done + 1)
    }
    refused = [name for (_, name), answer in answers.items() if answer.startswith("refused")]
    config = make_config(OPTIONS | {"rounds": done})
    path = federation.work / "hostile.txt"
    return {
        "rounds_played": done,
        "merged": merged,
        "hostile_answers": len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0,
        "hostile_answers_refused": refused.count(HOSTILE),
        "hostile_answers_merged": sum(federation.names.index(HOSTILE) in ids for ids in merged.values()),
        "other_answers_refused": len(refused) - refused.count(HOSTILE),
        "silent": sum(answer == "nothing" for answer in answers.values()),
        "seconds_of_a_round": _quartiles([row["train_seconds"] for row in manifest["rows"]]),
    } | compare(federation.private, federation.work / "data", federation.run, config, merged)


def _last_answers(path: Path, done: int) -> dict[tuple[int, str], str]:
    """(round, client) -> its answer to the last request to train in that round: a run that is killed asks again."""
    found = {}
    for line in audit.read(path):
        words = line["asked"].split(", ")
        if words[0].startswith("round ") and "train" in words:
            number = int(words[0].removeprefix("round ")) + 1
            if number <= done:
                found[number, line["who"]] = line["answered"]
    return found


def _is_update(answer: str) -> bool:
    return answer.endswith(" bytes") and not answer.startswith("refused")


def _quartiles(seconds: list[float]) -> list[float]:
    """Least, a quarter, the median, three quarters, most."""
    ordered = sorted(seconds)
    return [round(ordered[int(share * (len(ordered) - 1))], 2) for share in (0, 0.25, 0.5, 0.75, 1)]
