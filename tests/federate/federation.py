"""Small federations for tests: clients' files of digits, nodes in this process, and simulations of the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from plures.data import sources
from plures.federate import server
from plures.federate.client import Client
from plures.federate.policy import Policy
from plures.federate.server import Caps, FederatedClients, RoundLimits
from plures.runs import checkpoint
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.loop import Result
from plures.runs.scene import make_scene
from plures.runs.simulation import start

SIZES = {"hospital-a": 24, "hospital-b": 33, "hospital-c": 15, "hospital-d": 41}
PATIENT = RoundLimits()
BELIEVED = Caps()
OPTIONS = {"rounds": 3, "lr": 0.1, "batch": 5, "seed": 3}
# Clients with few rows that tell all that a simulation knows, so that both can be compared.
OPEN = Policy(
    limits={},
    least_batch=1,
    least_rows=1,
    least_steps=1,
    least_test_rows=1,
    score_step=1,
    score_floor=False,
    test_loss=True,
    loss_step=0.0,
    starts_per_hour=10**6,
    requests_per_minute=10**6,
)


def write_data(folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """One file for each client, a third of whose rows are for testing."""
    data = sources.load("digits")
    rows, at = np.random.default_rng(5).permutation(len(data.y)), 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in sizes.items():
        own, at = rows[at : at + n], at + n
        is_test = (np.arange(n) % 3 == 2).astype(np.int64)
        y = np.r_[data.y[own][:-1], 9]  # so that every file tells of all ten classes
        np.savez(folder / f"{name}.npz", x=data.x[own], y=y, is_test=is_test)
    return folder


def quiet(line: str) -> None:
    """Nobody listens."""


class Here:
    """A link to clients in this process. `bend` may change an answer, or swallow it by None."""

    def __init__(self, nodes: dict[str, Client], bend: Callable[[str, bytes], bytes | None] | None = None) -> None:
        self.nodes, self.bend = nodes, bend or (lambda name, answer: answer)
        self.answers: dict[str, bytes | None] = {}
        self.sent: list[tuple[str, bytes]] = []

    def clients(self) -> list[str]:
        return sorted(self.nodes)

    def push(self, client: str, message: bytes) -> str:
        self.sent.append((client, message))
        answer = self.bend(client, self.nodes[client].answer(message))
        if answer is not None:
            self.answers[str(len(self.sent))] = answer
        return str(len(self.sent))

    def pull(self, numbers: list[str], most: int) -> list[tuple[str, bytes | None]]:
        return [(number, self.answers.pop(number)) for number in numbers if number in self.answers]


def client_of(path: Path, folder: Path, policy: Policy = OPEN, say=quiet) -> Client:
    return Client(path.stem, path, folder / path.stem, say, policy=policy)


def nodes_of(data: Path, folder: Path, policy: Policy = OPEN) -> dict[str, Client]:
    return {path.stem: client_of(path, folder, policy) for path in sorted(data.glob("*.npz"))}


def federated(
    method: str, link: Here, folder: Path, terms: RoundLimits = PATIENT, say=quiet, caps: Caps = BELIEVED, **options
) -> FederatedClients:
    """A run that has not begun."""
    config = make_config({**OPTIONS, "method": method, **options})
    about = server.new_experiment(server.collect_hellos(link, link.clients(), config, terms, say, caps))
    folder.mkdir(parents=True)
    return FederatedClients(server.write_start(config, about, folder), about, folder, say, link, terms, caps)


def resumed(folder: Path, link: Here, terms: RoundLimits = PATIENT) -> FederatedClients:
    scene, about = server.open_scene(folder)
    found = FederatedClients(scene, about, folder, quiet, link, terms)
    found.load()
    return found


def simulated(method: str, data: Path, folder: Path, **options) -> Result:
    values = {**OPTIONS, "method": method, "data": str(data), "executor": "one_by_one", **options}
    folder.mkdir(parents=True)
    return start(make_scene(make_config(values)), folder, quiet, Callback())


def assert_same_state(folder: Path, simulation: Path, private: Callable[[str], Path], tolerance: float) -> None:
    """The server's state and what each client has on its own disk are those of the simulation."""
    here, there = checkpoint.read(folder / "checkpoint")[0], checkpoint.read(simulation / "checkpoint")[0]
    _, about = server.open_scene(folder)
    assert here is not None and there is not None
    (ids, versions), (expected_ids, rows) = here.clients(), there.clients()
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(here.server, there.server, atol=tolerance, rtol=0)
    for place, client in enumerate(ids.tolist()):
        path = private(about.clients[client].name) / "state" / about.id / f"{int(versions['version'][place]):06d}"
        own = checkpoint.read_state(path)
        expected = {f"client/{name}": x[place] for name, x in rows.items()}
        torch.testing.assert_close(own, expected, atol=tolerance, rtol=0)
