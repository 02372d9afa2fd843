"""The server side of a run: what is sent to which client, which answers are accepted, and what happens without one.

A round ends when all clients have answered, or at its deadline if enough have. An answer is checked before it is
merged; a refused answer is counted and reported, and the run continues. Late answers and repeated ones are ignored. The
state of a client stays with the client. The server only keeps the version of that state, which is the round after which
it was last accepted. So a resumed server and a client that missed rounds agree on the state to use.
"""

import json
import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data.partition import Split
from plures.data.population import Population
from plures.engine import Usage
from plures.errors import DataError, RunFailed, UsageError
from plures.federate import wire
from plures.federate.wire import Refused
from plures.files import write_text
from plures.methods.messages import one_of
from plures.methods.spec import all_settings
from plures.runs import results
from plures.runs.callbacks import Callback, Say
from plures.runs.config import HOW_IT_IS_RUN, SCORING, Config, config_toml
from plures.runs.folders import read_config
from plures.runs.loop import Result, play_run
from plures.runs.scene import Scene, announce, as_configured, default_model, method_of, task_of, with_own_options
from plures.runs.state import Answers, RunState
from plures.simulate.evaluate import Evaluation
from plures.simulate.executor import Trained
from plures.simulate.workers import one_thread
from plures.tree import Tree

POLL_SECONDS = 0.25
HELLO_SECONDS = 60.0  # shortest deadline for clients to describe their data
LOST_SECONDS = 2.0  # delay before a lost message is sent again
ABOUT = "federation.json"  # file in the run folder: which clients take part, in the order of their numbers


class RoundLimits(NamedTuple):
    """How long the server waits for answers, and how many it needs."""

    deadline: float = 600.0  # seconds after which a round ends
    quorum: float = 0.5  # share of the cohort that must have answered by then
    resend: float = 120.0  # seconds without an answer after which a message is sent again


class Link(Protocol):
    """Carries messages to clients, which it knows by name, and their answers back."""

    def clients(self) -> list[str]:
        """The clients that are connected."""

    def push(self, client: str, message: bytes) -> str:
        """Send a message; returns its number, which its answer will have too."""

    def pull(self, numbers: list[str]) -> list[tuple[str, bytes | None]]:
        """(number, answer) for each answer that has arrived; the answer is None if the message was lost."""


def gather(
    link: Link, messages: dict[str, Callable[[], bytes]], accept: Callable[[str, bytes], None], limits: RoundLimits
) -> list[str]:
    """Send every client its message and pass answers to `accept`. Returns the clients that miss the deadline."""
    began = time.monotonic()
    waiting, due = set(messages), dict.fromkeys(messages, began)
    sent: dict[str, str] = {}  # number of a message -> client
    while waiting and time.monotonic() < began + limits.deadline:
        now = time.monotonic()
        for client in sorted(waiting):
            if due[client] <= now:
                sent[link.push(client, messages[client]())] = client
                due[client] = now + limits.resend
        for number, answer in link.pull(list(sent)):
            client = sent.pop(number, "")
            if client not in waiting:
                continue
            if answer is None:
                due[client] = min(due[client], now + LOST_SECONDS)
                continue
            waiting.discard(client)
            accept(client, answer)
        if waiting:
            time.sleep(POLL_SECONDS)
    return sorted(waiting)


# Clients and their data


def collect_hellos(
    link: Link, names: list[str], config: Config, limits: RoundLimits, say: Say
) -> dict[str, wire.Hello]:
    """Ask each client to describe its data."""
    request = wire.pack(wire.HelloRequest(seed=config.seed, test_share=config.test_share), {})
    found: dict[str, wire.Hello] = {}

    def accept(client: str, answer: bytes) -> None:
        try:
            hello = _read_answer(wire.Hello, answer, wire.most_bytes())[0]
            if hello.name != client:
                raise Refused(f"it says that its name is {hello.name}")
            found[client] = hello
        except Refused as refusal:
            say(f"{client} cannot take part: {refusal}")

    limits = limits._replace(deadline=max(limits.deadline, HELLO_SECONDS))
    for client in gather(link, dict.fromkeys(names, lambda: request), accept, limits):
        say(f"{client} does not answer and is left out")
    if config.clients is not None and len(found) < config.clients:
        raise RunFailed(f"{len(found)} of {config.clients} clients can take part: {', '.join(found) or 'none'}")
    return found


class About(NamedTuple):
    """An experiment: its id, and its clients in the order of their numbers."""

    id: str
    clients: list[wire.Hello]

    @property
    def n_classes(self) -> int:
        """The largest number of classes of all clients."""
        return max(client.n_classes for client in self.clients)

    @property
    def n_tokens(self) -> int:
        """The largest vocabulary of all clients."""
        return max(client.n_tokens for client in self.clients)

    def to_json(self) -> str:
        """The text of the file federation.json."""
        return json.dumps({"experiment": self.id, "clients": [one.model_dump() for one in self.clients]}, indent=2)

    @staticmethod
    def from_json(text: str) -> "About":
        """The experiment in the text of a file federation.json."""
        values = json.loads(text)
        return About(values["experiment"], [wire.Hello.model_validate(one) for one in values["clients"]])


def new_experiment(found: dict[str, wire.Hello]) -> About:
    """A new experiment with these clients, in the order of their names; their rows must have the same form."""
    clients = [found[name] for name in sorted(found)]
    if not clients:
        raise RunFailed("no client can take part")
    first = clients[0]
    for one in clients:
        if (one.shape, one.dtype, one.label_axes) != (first.shape, first.dtype, first.label_axes):
            raise DataError(
                f"{one.name} has rows of shape {tuple(one.shape)} ({one.dtype}) and {first.name} of "
                f"{tuple(first.shape)} ({first.dtype}); they must be alike"
            )
    return About(secrets.token_hex(8), clients)


SIMULATION_ONLY = (  # options that a federation does not have
    *["data", "data_dir", "partition", "split", "share", "new_clients", "attack", "attackers"],
    *["executor", "workers", "address", "validation", "unchosen", "pool_rows", "pool_every", "personal_epochs"],
    *["engine", "precision", "stack"],
)
NEVER_SENT = {*HOW_IT_IS_RUN, *SCORING, *SIMULATION_ONLY, "clients"}  # fields of a config that are not sent to clients


def make_scene(config: Config, about: About) -> Scene:
    """The scene as far as the server knows it: it has the clients' numbers of rows, but no rows."""
    first = about.clients[0]
    config = with_own_options(config)
    method = method_of(config)
    if method.public_rows:
        raise UsageError(
            f"{config.method} needs rows of each class that everybody may see, and in a federation there are none; "
            "choose other settings (for fedrod, another loss)"
        )
    # Every round is written to a checkpoint before the next one begins: clients must never be ahead of the server.
    fields = {"data": "federation", "partition": "natural", "executor": "one_by_one", "clients": len(about.clients)}
    fields |= {"model": config.model or default_model(first.label_axes, about.n_tokens), "checkpoint_every": 1}
    config = config.model_copy(update=fields | {"settings": all_settings(method)})
    dtype = torch.int64 if first.dtype == "int64" else torch.float32
    example = torch.zeros(first.shape, dtype=dtype)
    task = task_of(config, example, about.n_classes, about.n_tokens)
    label = torch.zeros(example.shape if first.label_axes == 2 else (), dtype=torch.int64)
    # Only the numbers of rows matter: every row is row 0 of a table of zeros.
    train = [np.zeros(one.n_train, np.int64) for one in about.clients]
    test = [np.zeros(one.n_test, np.int64) for one in about.clients]
    population = Population(example[None], label[None], train, test, about.n_classes, config.seed, task.smallest_batch)
    population = as_configured(population, config)
    if not population.eligible():
        raise DataError("no client has a row to train on")
    known = announce(config, method, task, population)
    return Scene(config, *known, Split(train, test), tuple(one.name for one in about.clients))


def _read_answer(kind: Any, answer: bytes, most: int) -> tuple[Any, dict[str, Tensor]]:
    """The fields of an answer of this kind, and its tensors. An error of the client is refused."""
    fields, tensors = wire.unpack(answer, most)
    if fields.get("kind") == "error":
        raise Refused(f"it had an error ({wire.check_fields(wire.ErrorReply, fields).error}); its own log says more")
    return wire.check_fields(kind, fields), tensors


# Rounds


class ClientVersion(NamedTuple):
    """What the server keeps of a client's state, which stays with the client."""

    version: Tensor  # the round after which the state was last accepted; 0 is the initial state


class Answer(NamedTuple):
    """What one client answered."""

    fields: wire.RoundReply
    upload: Tree  # empty if it did not train


class FederatedClients:
    """The clients of a run, reached over a network."""

    scores_late = True  # one message per client and round: the client scores the state that it receives, then trains

    def __init__(self, scene: Scene, about: About, folder: Path, say: Say, link: Link, limits: RoundLimits) -> None:
        self.state = RunState(scene, folder, say, ClientVersion(torch.tensor(0)))
        self.about, self.link, self.limits = about, link, limits
        self.shapes = self.state.shapes
        self.how_to_resume = f"resume it with: plures federate start --resume {folder}"
        values = scene.config.model_dump(exclude=NEVER_SENT, exclude_none=True)
        self.experiment = wire.Experiment(
            id=about.id,
            config=values,
            n_clients=len(about.clients),
            n_classes=about.n_classes,
            n_tokens=about.n_tokens,
            frozen=scene.task.frozen_fingerprint,
        )
        self.earlier = self.versions()  # versions in the checkpoint before the last one
        self.refusals: list[dict[str, Any]] = []
        self.silent: list[dict[str, Any]] = []
        self.wire_bytes = {"down": 0, "up": 0}

    def versions(self) -> list[int]:
        """The version of each client's state: the round after which it was last accepted."""
        return self.state.store.rows(torch.arange(len(self.about.clients))).version.tolist()

    def usage(self) -> Usage:
        return Usage()  # clients train on other machines

    def manifest(self) -> dict[str, Any]:
        own = {"wire": self.wire_bytes, "refusals": self.refusals, "silent": self.silent}
        return self.state.manifest(self.usage()) | own

    def load(self) -> None:
        """Load the newest complete checkpoint."""
        found = self.state.load()
        self.earlier = self.versions()
        if found:
            self.wire_bytes, self.refusals, self.silent = found["wire"], found["refusals"], found["silent"]

    def models(self) -> dict[int, Tree]:
        return {}  # clients write their own models

    def close(self) -> None:
        pass

    def play(self, score: bool) -> Answers:
        began = time.perf_counter()
        state = self.state
        ids, before = state.cohort(), self.versions()
        message, n_flops = state.send(ids)
        answers = self._exchange({i: one_of(message, k) for k, i in enumerate(ids)}, score, is_last=False)
        found = {i: answers[i] for i in ids if i in answers}
        needed = max(1, math.ceil(self.limits.quorum * len(ids)))
        if len(found) < needed:
            raise RunFailed(
                f"round {state.round + 1}: {len(found)} of {len(ids)} clients gave an update that could be accepted, "
                f"{needed} are needed; look at the clients, or lower --quorum."
            )
        trained = Trained(
            ClientVersion(torch.full((len(found),), state.round + 1)),
            tree.stack([one.upload for one in found.values()]),
            {"loss": torch.tensor([one.fields.loss for one in found.values()])},
            n_flops + sum(one.fields.flops for one in found.values()),
        )
        names = {self.about.clients[i].name for i in ids}
        refused = sum(one["round"] == state.round + 1 and one["client"] in names for one in self.refusals)
        self.earlier = before
        scores = self._evaluation(answers, began) if score else None
        return Answers(ids, message, list(found), trained, refused, began, scores)

    def evaluate(self, is_last: bool) -> Evaluation:
        """Score all clients. After the last round, every client also writes its personal model to its disk."""
        began = time.perf_counter()
        return self._evaluation(self._exchange({}, score=True, is_last=is_last), began)

    def results(self, evaluation: Evaluation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        scene = self.state.scene
        population = scene.population
        rows = results.clients(population.train, population.test, population.y.numpy(), evaluation, scene.names)
        for row in rows:
            row |= {"n_classes": None, "role": "client"}  # the server is not told which classes a client has
        return {"wire": self.wire_bytes, "refusals": self.refusals, "silent": self.silent}, rows

    def _exchange(self, to_train: dict[int, Tree], score: bool, is_last: bool) -> dict[int, Answer]:
        """Send messages to all clients that train or are scored. Returns their answers by number of the client."""
        state, method, task = self.state, self.state.scene.method, self.state.scene.task
        served = state.eligible if is_last else state.scored if score else []
        others = [i for i in served if i not in to_train]
        # For the clients that train, most methods serve exactly what they send; equal tensors are then sent only once.
        to_serve = {i: one for i, one in (self._serve(list(to_train)) | self._serve(others)).items() if i in served}
        with torch.no_grad():
            generic = (method.generic(task, state.server) or {}) if score else {}
            newcomer = method.newcomer(task, state.server)
        asked = {i: self._request(i, i in to_train, score, is_last) for i in sorted({*to_train, *to_serve})}

        def message_maker(i: int) -> Callable[[], bytes]:
            def make() -> bytes:
                parts: dict[str, Tree] = {}
                if i in to_train:
                    parts["train"] = method.trim(task, to_train[i])
                if i in to_serve and asked[i].is_new:
                    parts["newcomer"] = newcomer
                elif i in to_serve:
                    parts["serve"] = method.trim(task, to_serve[i])
                if asked[i].score:
                    parts["generic"] = generic
                message = wire.pack(asked[i], parts)
                self.wire_bytes["down"] += len(message)
                return message

            return make

        now = f"round {state.round + 1}" if to_train else f"after round {state.round}"
        answers: dict[int, Answer] = {}
        numbers = {one.name: i for i, one in enumerate(self.about.clients)}

        def accept(name: str, answer: bytes) -> None:
            i = numbers[name]
            self.wire_bytes["up"] += len(answer)
            try:
                answers[i] = self.check_answer(asked[i], answer)
            except Refused as refusal:
                self.refusals.append({"round": state.round + 1, "client": name, "why": str(refusal)})
                state.say(f"{now}: the answer of {name} is refused: {refusal}")
                return
            if answers[i].fields.state == "lost":
                state.say(f"{now}: {name} lost its state and started from the initial state")

        messages = {self.about.clients[i].name: message_maker(i) for i in asked}
        for name in gather(self.link, messages, accept, self.limits):
            self.silent.append({"round": state.round + 1, "client": name})
            state.say(f"{now}: {name} did not answer in {self.limits.deadline:g} s")
        return dict(sorted(answers.items()))

    def _serve(self, ids: list[int]) -> dict[int, Tree]:
        if not ids:
            return {}
        with torch.no_grad():
            message = self.state.scene.method.serve(self.state.scene.task, self.state.server, torch.tensor(ids))
        return {i: one_of(message, k) for k, i in enumerate(ids)}

    def _request(self, i: int, train: bool, score: bool, is_last: bool) -> wire.RoundRequest:
        version = self.versions()[i]
        return wire.RoundRequest(
            experiment=self.experiment,
            client=i,
            round=self.state.round,
            version=version,
            keep=min(version, self.earlier[i]),
            missed=self._missed_rounds(i, version),
            train=train,
            score=score and i in self.state.scored,
            last=is_last,
            is_new=self._is_new(version),
        )

    def _is_new(self, version: int) -> bool:
        """Whether a client with this version is served as a new one: it never took part, and would have to."""
        has_own = bool(tree.leaves(self.shapes.kept)) or self.shapes.is_each
        lacks_something = has_own and not self.state.scene.method.is_served_whole
        return version == 0 and self.state.round > 0 and lacks_something

    def _missed_rounds(self, i: int, version: int) -> list[int]:
        """The rounds since its version, counted from 1, that asked the client for an update but merged none."""
        return [r + 1 for r in range(version, self.state.round) if i in self.state.cohort(r)]

    def check_answer(self, asked: wire.RoundRequest, answer: bytes) -> Answer:
        """The answer, if it may be merged; else raises Refused with the reason."""
        form = self.shapes.upload if asked.train else {}
        fields, tensors = _read_answer(wire.RoundReply, answer, wire.most_bytes(form))
        one = self.about.clients[asked.client]
        expected = (asked.experiment.id, asked.round, asked.client)
        if (fields.experiment, fields.round, fields.client) != expected:
            raise Refused("it is for another experiment, round or client")
        if fields.n != one.n_train:
            raise Refused(f"it has {fields.n} training rows, and said {one.n_train} at the start")
        if asked.train == (fields.loss is None):
            raise Refused("its loss is missing, or there is one and it was not asked to train")
        for scores, wanted in ((fields.personal, asked.score), (fields.generic, asked.score and self.shapes.generic)):
            if (scores is not None) != bool(wanted):
                raise Refused("its scores are missing, or were not asked for")
            if scores is not None and not (scores.n == one.n_test and 0 <= scores.hits <= scores.n):
                raise Refused("its scores are not those of its test rows")
        upload = wire.take_part("upload", tensors, form)
        wire.refuse_others(tensors)
        _check_numbers(upload, len(self.about.clients))
        return Answer(fields, upload)

    def _evaluation(self, answers: dict[int, Answer], began: float) -> Evaluation:
        found = {i: one.fields for i, one in answers.items() if one.fields.personal is not None}

        def sums(part: str) -> dict[str, list[float]]:
            each = [getattr(fields, part) for fields in found.values()]
            return {name: [float(getattr(one, name)) for one in each] for name in ("hits", "loss", "n")}

        generic = sums("generic") if tree.leaves(self.shapes.generic) else None
        versions = self.versions()
        never = tuple(i for i in found if self.state.round and versions[i] == 0)
        return Evaluation(list(found), sums("personal"), generic, time.perf_counter() - began, never_trained=never)


def _check_numbers(upload: Tree, n_clients: int) -> None:
    """Refuse integers that are not numbers of clients: the server uses integers of an upload as indices."""
    for name, x in zip(tree.names(upload), tree.leaves(upload), strict=True):
        if not x.is_floating_point() and not bool(((x >= 0) & (x < n_clients)).all()):
            raise Refused(f"upload/{name} names a client that does not exist")


# Whole runs


def write_start(config: Config, about: About, folder: Path) -> Scene:
    """Write the config and the clients of a new run to its folder, and make its scene."""
    scene = make_scene(config, about)
    write_text(folder / "config.toml", config_toml(scene.config))
    write_text(folder / ABOUT, about.to_json())
    return scene


def open_scene(folder: Path) -> tuple[Scene, About]:
    """The scene of a run that was started before, and its experiment."""
    if not (folder / ABOUT).exists():
        raise UsageError(f"{folder} is not the folder of a federated run: it has no {ABOUT}")
    about = About.from_json((folder / ABOUT).read_text(encoding="utf-8"))
    return make_scene(read_config(folder), about), about


def play(clients: FederatedClients, callback: Callback) -> Result:
    """Run all remaining rounds and write the run folder."""
    with one_thread():
        return play_run(clients, callback)


def adapt(clients: FederatedClients, client: str, epochs: int) -> dict[str, Any]:
    """Let a client that did not take part make a personal model, which it keeps. Returns its accuracies."""
    state = clients.state
    with torch.no_grad():
        received = state.scene.method.newcomer(state.scene.task, state.server)
    message = wire.pack(
        wire.AdaptRequest(experiment=clients.experiment, epochs=epochs, round=state.round), {"newcomer": received}
    )
    found: list[wire.AdaptReply] = []

    def accept(name: str, answer: bytes) -> None:
        try:
            reply, tensors = _read_answer(wire.AdaptReply, answer, wire.most_bytes() + 32 * epochs)
            wire.refuse_others(tensors)
            if reply.experiment != clients.about.id or not all(0 <= x <= 1 for x in reply.curve):
                raise Refused("it is for another experiment, or its accuracies are not between 0 and 1")
            found.append(reply)
        except Refused as refusal:
            raise RunFailed(f"the answer of {name} is refused: {refusal}") from None

    if gather(clients.link, {client: lambda: message}, accept, clients.limits):
        raise RunFailed(f"{client} did not answer in {clients.limits.deadline:g} s")
    return {"client": client, "round": state.round, "epochs": epochs} | found[0].model_dump(exclude={"kind"})
