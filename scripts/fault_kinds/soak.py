"""The soak: a long federation of client processes that come and go, one slow and one hostile, and the same simulated.

Clients are processes of their own with the real client code, and the real server code sends them the bytes of its wire
through pipes instead of Flower's connections. Clients are killed in the middle of their work and come back later. The
slow one misses the deadline now and then, the hostile one sends every kind of hostile answer in turn, and the server
is stopped half-way and resumed from its folder. So that the soak does not depend on how busy the machine is, the
deadline of a round is the moment when all clients that are there and not slow have answered. At the end a simulation
plays the same rounds with the clients whose updates were merged: the server's state and every client's own must be
the same, bit for bit.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import torch

from plures.errors import Interrupted, RunFailed
from plures.federate import server, wire
from plures.federate.client import Client
from plures.federate.server import About, FederatedClients, RoundLimits
from plures.runs import checkpoint
from plures.runs.callbacks import Callback
from plures.runs.config import Config, make_config
from plures.runs.scene import Scene, make_scene
from plures.runs.simulation import Simulation
from plures.runs.state import Answers
from plures.simulate.workers import one_thread
from tests.federate.federation import OPEN, write_data
from tests.federate.hostile import ANSWERS

METHOD = "ditto"  # its clients keep a model of their own
STEADY, SLOW, HOSTILE = "client-00", "client-01", "client-02"  # the first is never killed: its memory is looked at
SLOW_EVERY, LEAVE = 10, 0.2  # rounds between late answers; chance that a client leaves in a round
HOSTILE_KINDS = [bend for name, bend in ANSWERS.items() if not name.startswith("hello")]


def serve(pipe: Connection, name: str, rows: Path, folder: Path) -> None:
    """The life of a client process: each message is a number and a request, each answer has the same number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    client = Client(name, rows, folder, lambda line: None, policy=OPEN)
    n_hostile = 0
    while True:
        try:
            received = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        number, request = received[:8], received[8:]
        answer = client.answer(request)
        fields, tensors = wire.unpack(answer, 1 << 30)
        is_update = fields.get("kind") == "round" and fields.get("loss") is not None
        if name == HOSTILE and is_update:
            answer = HOSTILE_KINDS[n_hostile % len(HOSTILE_KINDS)](fields, tensors)
            n_hostile += 1
        try:
            pipe.send_bytes(number + answer)
        except OSError:
            os._exit(0)


class Pipes:
    """A link to client processes. A message to one that is busy waits; one to a client that is gone is lost."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.rows = {path.stem: path for path in sorted(data.glob("*.npz"))}
        self.folder, self.fork = folder, multiprocessing.get_context("fork")
        self.ends: dict[str, Connection] = {}
        self.processes: dict[str, Any] = {}
        self.busy: set[str] = set()
        self.held: dict[str, bytes] = {}
        self.doomed: set[str] = set()  # they are killed as soon as they have their next message
        self.n, self.n_late, self.n_kills, self.n_returns = 0, 0, 0, 0
        self.found: dict[str, bytes] = {}
        self.awaited: set[str] = set()  # those that will answer in time
        self.is_slow = False  # whether the slow client is, in this round
        for name in self.rows:
            self.start(name)

    def start(self, name: str) -> None:
        ours, theirs = self.fork.Pipe()
        args = (theirs, name, self.rows[name], self.folder / name)
        process = self.fork.Process(target=serve, args=args, daemon=True)
        process.start()
        theirs.close()
        self.ends[name], self.processes[name] = ours, process
        self.busy.discard(name)
        self.held.pop(name, None)

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()
        self.ends.pop(name).close()
        self.awaited.discard(name)
        self.busy.discard(name)
        self.n_kills += 1

    def clients(self) -> list[str]:
        return sorted(self.ends)

    def push(self, client: str, message: bytes) -> str:
        self.n += 1
        content = self.n.to_bytes(8, "big") + message
        if client in self.ends and not (client == SLOW and self.is_slow):
            self.awaited.add(client)
        if client in self.busy:
            self.held[client] = content
        elif client in self.ends:
            self._send(client, content)
        return str(self.n)

    def _send(self, client: str, content: bytes) -> None:
        self.ends[client].send_bytes(content)
        self.busy.add(client)
        if client in self.doomed:
            self.doomed.discard(client)
            time.sleep(0.005)  # it has begun
            self.kill(client)

    def pull(self, numbers: list[str], most: int) -> list[tuple[str, bytes | None]]:
        for end in wait(list(self.ends.values()), timeout=0.05):
            client = next(name for name, known in self.ends.items() if known is end)
            content = self.ends[client].recv_bytes()
            self.busy.discard(client)
            if client == SLOW and self.is_slow:
                self.n_late += 1
                continue  # it comes when nobody waits for it any more
            self.awaited.discard(client)
            self.found[str(int.from_bytes(content[:8], "big"))] = content[8:]
            if client in self.held:
                self._send(client, self.held.pop(client))
        return [(number, self.found.pop(number)) for number in numbers if number in self.found]

    def close(self) -> None:
        for name in list(self.ends):
            self.processes[name].kill()
            self.ends[name].close()


class Patience:
    """The limits of a round, whose deadline has come when all who will answer in time have done so."""

    quorum, resend = 0.3, 3600.0

    def __init__(self, link: Pipes) -> None:
        self.link = link

    @property
    def deadline(self) -> float:
        return 3600.0 if self.link.awaited else 0.05


def memory_mb(process: int) -> float:
    """What a process holds now."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


class Watched(FederatedClients):
    """The clients of the soak: before every round some leave and some return, and what happened is written down."""

    link: Pipes
    record: dict[str, Any]
    random: Random
    away: dict[str, int]  # client -> the round in which it returns
    stop_at: int

    def play(self, score: bool) -> Answers:
        at = self.state.round
        self._note_participation()
        if at == self.stop_at:
            self.stop_at = -1
            raise KeyboardInterrupt
        for name in [name for name, until in self.away.items() if until <= at]:
            self.link.start(name)
            self.link.n_returns += 1
            del self.away[name]
        candidates = [name for name in self.link.clients() if name not in (STEADY, SLOW, HOSTILE)]
        if self.random.random() < LEAVE and len(candidates) > 12:
            name = self.random.choice(candidates)
            self.link.doomed.add(name)
            self.away[name] = at + self.random.randrange(1, 4)
        self.link.is_slow = at % SLOW_EVERY == SLOW_EVERY - 1
        self.link.found.clear()
        if at % 10 == 0:
            steady = self.link.processes[STEADY].pid
            self.record["memory"].append([at, memory_mb(os.getpid()), memory_mb(steady)])
        return super().play(score)

    def _note_participation(self) -> None:
        """Whose updates were merged in the round before."""
        if self.state.round:
            merged = [i for i, version in enumerate(self.versions()) if version == self.state.round]
            self.record["merged"][str(self.state.round)] = merged

    def evaluate(self, is_last: bool) -> Any:
        self._note_participation()
        self.link.is_slow = False
        for name in list(self.away):
            self.link.start(name)
            self.link.n_returns += 1
            del self.away[name]
        return super().evaluate(is_last)


def soak(work: Path, n_clients: int, rounds: int, seed: int = 0, say: Any = print) -> dict[str, Any]:
    """The whole soak; returns what is recorded."""
    data = write_data(work / "data", {f"client-{k:02d}": 40 + k for k in range(n_clients)})
    link = Pipes(data, work / "clients")
    folder = work / "run"
    folder.mkdir()
    record: dict[str, Any] = {"clients": n_clients, "rounds": rounds, "method": METHOD, "memory": [], "merged": {}}
    limits: Any = Patience(link)
    config = make_config({"method": METHOD, "rounds": rounds, "lr": 0.05, "batch": 10, "seed": 3, "eval_every": 25})
    began, processor = time.perf_counter(), time.process_time()
    random, away = Random(f"soak {seed}"), {}
    try:
        found = server.collect_hellos(link, link.clients(), config, RoundLimits(), lambda line: None)
        about = server.new_experiment(found)
        scene = server.write_start(config, about, folder)
        stop_at, starts = rounds // 2, 0
        while True:
            starts += 1
            clients = _clients(scene, about, folder, link, limits, record, random, away, stop_at)
            clients.load()
            try:
                result = server.play(clients, Callback())
                break
            except (Interrupted, RunFailed) as stopped:  # half-way, or when too few answer: what an operator would do
                say(f"the server is started again: {stopped}")
                stop_at = -1
                scene, about = server.open_scene(folder)
        record["starts_of_server"] = starts
    finally:
        link.close()
    summary = result.summary
    record |= {
        "seconds": round(time.perf_counter() - began),
        "processor_seconds_of_server": round(time.process_time() - processor),
        "kills": link.n_kills,
        "returns": link.n_returns,
        "late_answers": link.n_late,
        "hostile_answers_refused": sum(one["client"] == HOSTILE for one in clients.state.refusals),
        "other_answers_refused": sum(one["client"] != HOSTILE for one in clients.state.refusals),
        "silent": len(summary["silent"]),
        "rows": len(result.rounds),
        "personal_mean": summary["personal"]["mean"],
    }
    record |= compare(lambda name: work / "clients" / name, data, folder, config, record["merged"])
    return record


def _clients(
    scene: Scene,
    about: About,
    folder: Path,
    link: Pipes,
    limits: Any,
    record: dict[str, Any],
    random: Random,
    away: dict[str, int],
    stop_at: int,
) -> Watched:
    clients = Watched(scene, about, folder, lambda line: None, link, limits)
    clients.record, clients.random, clients.away, clients.stop_at = record, random, away, stop_at
    return clients


def compare(
    private: Callable[[str], Path], data: Path, folder: Path, config: Config, merged: dict[str, list[int]]
) -> dict[str, Any]:
    """The simulation with the same participation, and how far its end is from that of the federation.

    private: name of a client -> the folder of what it keeps.
    """
    there = make_config(config.model_dump() | {"data": str(data), "executor": "one_by_one", "eval_every": 0})
    with one_thread():
        simulation = Simulation(make_scene(there), None, lambda line: None)
        state = simulation.state
        state.cohort = lambda round=None: merged[str(state.round + 1)]  # type: ignore[method-assign]
        try:
            for _ in range(config.rounds):
                simulation.play_round()
        finally:
            simulation.close()
    here = checkpoint.read(folder / "checkpoint")[0]
    assert here is not None
    expected = checkpoint.stored("server", state.server)
    differences = [float((x - here.server[name.partition("/")[2]]).abs().max()) for name, x in expected.items()]
    _, about = server.open_scene(folder)
    ids, versions = here.clients()
    n_equal = 0
    for place, client in enumerate(ids.tolist()):
        at = int(versions["version"][place])
        own = checkpoint.read_state(private(about.clients[client].name) / "state" / about.id / f"{at:06d}")
        simulated = checkpoint.stored("client", {"": state.store.rows(torch.tensor([client]))})
        wanted = {name.replace("client//", "client/"): x[0] for name, x in simulated.items()}
        n_equal += own.keys() == wanted.keys() and all(torch.equal(own[name], x) for name, x in wanted.items())
    return {
        "largest_difference_of_server": max(differences),
        "clients_that_took_part": len(ids),
        "clients_with_equal_state": n_equal,
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """The record as a file; who took part is told by numbers of clients alone, which is short enough."""
    each = record.pop("merged")
    record["merged_per_round"] = {"least": min(map(len, each.values())), "most": max(map(len, each.values()))}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
