"""The server's half of a run: what is sent to whom, what is taken of what comes back, and what is done about silence.

A round ends when all clients have answered, or at its deadline if enough have. An answer is checked before it
is merged; one that is refused is counted and named, and ends nothing. Late answers and second ones are ignored.
The state of a client is with the client. Here is kept after which round it is the one that counts, so that a
server that goes on from a checkpoint and a client that missed something agree on where they are.
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

from .. import checkpoint, partition, rows, tree
from ..choose import all_settings, choose
from ..config import CARRIED_OUT, Config, make_config, read_toml, to_toml
from ..errors import DataError, Interrupted, RunFailed, UsageError
from ..execute import Population, Trained
from ..method import Each, Same
from ..run import (
    Course,
    Result,
    Say,
    Scene,
    StopRequest,
    Watcher,
    cohort,
    default_model,
    made_known,
    summary_of,
    task_of,
    write_results,
)
from ..tree import Tree
from . import wire
from .wire import Refused

POLL_SECONDS = 0.25
HELLO_SECONDS = 60.0  # that clients have at least, to say what they have
LOST_SECONDS = 2.0  # after a message was lost on the way, until it is sent again
ABOUT = "federation.json"  # in the run folder: who takes part, and with what number


class Terms(NamedTuple):
    """How long the server waits, and for how many."""

    deadline: float = 600.0  # seconds of a round
    quorum: float = 0.5  # share of the clients of a round without whose answers it cannot end
    resend: float = 120.0  # seconds without an answer, until a message is sent again


class Link(Protocol):
    """The way to the clients, by their names."""

    def clients(self) -> list[str]:
        """Who can be reached now."""

    def push(self, client: str, message: bytes) -> str:
        """Send a message; its number is that of the answer."""

    def pull(self, numbers: list[str]) -> list[tuple[str, bytes | None]]:
        """The answers that are there; None for a message that was lost."""


def gather(
    link: Link, messages: dict[str, Callable[[], bytes]], take: Callable[[str, bytes], None], terms: Terms
) -> list[str]:
    """Send every client its message and take the answers as they come; at the deadline, who has not answered."""
    began = time.monotonic()
    waiting, due = set(messages), dict.fromkeys(messages, began)
    sent: dict[str, str] = {}  # number of a message -> client
    while waiting and time.monotonic() < began + terms.deadline:
        now = time.monotonic()
        for client in sorted(waiting):
            if due[client] <= now:
                sent[link.push(client, messages[client]())] = client
                due[client] = now + terms.resend
        for number, answer in link.pull(list(sent)):
            client = sent.pop(number, "")
            if client not in waiting:
                continue
            if answer is None:
                due[client] = min(due[client], now + LOST_SECONDS)
                continue
            waiting.discard(client)
            take(client, answer)
        if waiting:
            time.sleep(POLL_SECONDS)
    return sorted(waiting)


# Who takes part, and what of


def hellos(link: Link, names: list[str], config: Config, terms: Terms, say: Say) -> dict[str, wire.Hello]:
    """What each client says of its data."""
    request = wire.pack(wire.HelloRequest(seed=config.seed, test_share=config.test_share), {})
    found: dict[str, wire.Hello] = {}

    def take(client: str, answer: bytes) -> None:
        try:
            hello = _checked(wire.Hello, answer, wire.room())[0]
            if hello.name != client:
                raise Refused(f"it says that its name is {hello.name}")
            found[client] = hello
        except Refused as refusal:
            say(f"{client} cannot take part: {refusal}")

    patient = terms._replace(deadline=max(terms.deadline, HELLO_SECONDS))
    for client in gather(link, dict.fromkeys(names, lambda: request), take, patient):
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
        return max(client.n_classes for client in self.clients)

    @property
    def n_tokens(self) -> int:
        return max(client.n_tokens for client in self.clients)

    def to_json(self) -> str:
        return json.dumps({"experiment": self.id, "clients": [one.model_dump() for one in self.clients]}, indent=2)

    @staticmethod
    def from_json(text: str) -> "About":
        values = json.loads(text)
        return About(values["experiment"], [wire.Hello.model_validate(one) for one in values["clients"]])


def agreed(found: dict[str, wire.Hello]) -> About:
    """A new experiment of these clients, by name, if their rows are alike."""
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


NOT_HERE = (
    *["data", "data_dir", "partition", "split", "share", "new_clients", "new_epochs", "attack", "attackers"],
    *["executor", "workers", "address", "validation", "unchosen", "pool_rows", "pool_every", "personal_epochs"],
)
NEVER_SENT = {*CARRIED_OUT, *NOT_HERE, "clients"}  # of a config, to clients


def set_scene(config: Config, about: About) -> Scene:
    """What the server knows: the clients' numbers of rows, but no row."""
    first = about.clients[0]
    method = choose(config.method, config.settings, config.solver())
    if method.public_rows:
        raise UsageError(
            f"{config.method} needs rows of each class that everybody may see, and in a federation there are none; "
            "choose other settings (for fedrod, another loss)"
        )
    fields = {"data": "federation", "partition": "natural", "executor": "one_by_one", "clients": len(about.clients)}
    model = config.model or default_model(first.label_axes, about.n_tokens)
    config = config.model_copy(update=fields | {"model": model, "settings": all_settings(method)})
    dtype = torch.int64 if first.dtype == "int64" else torch.float32
    example = torch.zeros(first.shape, dtype=dtype)
    task = task_of(config, example, about.n_classes, about.n_tokens)
    label = torch.zeros(example.shape if first.label_axes == 2 else (), dtype=torch.int64)
    # Rows that exist in number only: every one is row 0 of a table of zeros.
    train, test = ([np.zeros(n, np.int64) for n in sizes] for sizes in zip(*_sizes(about), strict=True))
    population = Population(example[None], label[None], train, test, about.n_classes, config.seed, task.smallest_batch)
    if not population.eligible():
        raise DataError("no client has a row to train on")
    known = made_known(config, method, task, population)
    return Scene(config, *known, partition.Split(train, test), tuple(one.name for one in about.clients))


def _sizes(about: About) -> list[tuple[int, int]]:
    return [(one.n_train, one.n_test) for one in about.clients]


def _checked(kind: Any, answer: bytes, most: int) -> tuple[Any, dict[str, Tensor]]:
    """The fields of an answer of this kind and its tensors; that of an error is refused."""
    fields, tensors = wire.unpack(answer, most)
    if fields.get("kind") == "error":
        raise Refused(f"it had an error ({wire.checked(wire.ErrorReply, fields).error}); its own log says more")
    return wire.checked(kind, fields), tensors


# Rounds


class Away(NamedTuple):
    """What is kept here of a client."""

    version: Tensor  # after which round its state, which it keeps itself, is the one that counts


class Answer(NamedTuple):
    fields: wire.RoundReply
    upload: Tree  # None when it did not train


class FederatedRun(Course):
    """A run whose clients are elsewhere."""

    def __init__(self, scene: Scene, about: About, folder: Path, say: Say, link: Link, terms: Terms) -> None:
        super().__init__(scene, folder, say, Away(torch.tensor(0)))
        self.about, self.link, self.terms = about, link, terms
        self.forms = wire.forms(scene.method, scene.task, len(about.clients))
        values = scene.config.model_dump(exclude=NEVER_SENT, exclude_none=True)
        self.experiment = wire.Experiment(
            id=about.id,
            config=values,
            n_clients=len(about.clients),
            n_classes=about.n_classes,
            n_tokens=about.n_tokens,
        )
        self.earlier = self.versions()  # of the checkpoint before the last one
        self.refusals: list[dict[str, Any]] = []
        self.silent: list[dict[str, Any]] = []
        self.wire_bytes = {"down": 0, "up": 0}

    def versions(self) -> list[int]:
        return self.store.rows(torch.arange(len(self.about.clients))).version.tolist()

    def counted(self) -> dict[str, Any]:
        return super().counted() | {"wire": self.wire_bytes, "refusals": self.refusals, "silent": self.silent}

    def load(self) -> dict[str, Any]:
        found = super().load()
        self.earlier = self.versions()
        if found:
            self.wire_bytes, self.refusals, self.silent = found["wire"], found["refusals"], found["silent"]
        return found

    def play_round(self, score: bool) -> rows.Evaluation | None:
        """One message a client: it scores the state as it is, if asked, and trains. Gives the scores."""
        began = time.perf_counter()
        ids, before = self.cohort(), self.versions()
        message, n_flops = self.send(ids)
        answers = self._exchange(dict(zip(ids, _each(message, len(ids)), strict=True)), score, last=False)
        found = {i: answers[i] for i in ids if i in answers}
        needed = max(1, math.ceil(self.terms.quorum * len(ids)))
        if len(found) < needed:
            raise RunFailed(
                f"round {self.round + 1}: {len(found)} of {len(ids)} clients gave an update that could be taken, "
                f"{needed} are needed; look at the clients, or lower --quorum."
            )
        trained = Trained(
            Away(torch.full((len(found),), self.round + 1)),
            tree.stack([one.upload for one in found.values()]),
            {"loss": torch.tensor([one.fields.loss for one in found.values()])},
            n_flops + sum(one.fields.flops for one in found.values()),
        )
        refused = sum(one["round"] == self.round + 1 and one["client"] in self._names(ids) for one in self.refusals)
        self.merge(ids, message, refused, list(found), trained, began)
        self.earlier = before
        return self._evaluation(answers, began) if score else None

    def evaluate(self) -> rows.Evaluation:
        """The scores at the end; every client may write its own model down."""
        began = time.perf_counter()
        return self._evaluation(self._exchange({}, score=True, last=True), began)

    def _exchange(self, to_train: dict[int, Tree], score: bool, last: bool) -> dict[int, Answer]:
        """What clients answer: those that train, and those that are scored, by their numbers."""
        method, task = self.scene.method, self.scene.task
        served = self.eligible if last else self.scored if score else []
        others = [i for i in served if i not in to_train]
        # Asked for the very clients that train, most methods serve what they send, bit for bit: it travels once.
        to_serve = {i: one for i, one in (self._served(list(to_train)) | self._served(others)).items() if i in served}
        with torch.no_grad():
            generic = (method.generic(task, self.server) or {}) if score else {}
        asked = {i: self._request(i, i in to_train, score, last) for i in sorted({*to_train, *to_serve})}

        def made(i: int) -> Callable[[], bytes]:
            def make() -> bytes:
                parts: dict[str, Tree] = {}
                if i in to_train:
                    parts["train"] = method.needed(task, to_train[i])
                if i in to_serve:
                    parts["serve"] = method.needed(task, to_serve[i])
                if asked[i].score:
                    parts["generic"] = generic
                message = wire.pack(asked[i], parts)
                self.wire_bytes["down"] += len(message)
                return message

            return make

        now = f"round {self.round + 1}" if to_train else f"after round {self.round}"
        answers: dict[int, Answer] = {}
        numbers = {one.name: i for i, one in enumerate(self.about.clients)}

        def take(name: str, answer: bytes) -> None:
            i = numbers[name]
            self.wire_bytes["up"] += len(answer)
            try:
                answers[i] = self.checked(asked[i], answer)
            except Refused as refusal:
                self.refusals.append({"round": self.round + 1, "client": name, "why": str(refusal)})
                self.say(f"{now}: the answer of {name} is refused: {refusal}")
                return
            if answers[i].fields.state == "lost":
                self.say(f"{now}: {name} had lost its state and began anew")

        messages = {self.about.clients[i].name: made(i) for i in asked}
        for name in gather(self.link, messages, take, self.terms):
            self.silent.append({"round": self.round + 1, "client": name})
            self.say(f"{now}: {name} did not answer in {self.terms.deadline:g} s")
        return dict(sorted(answers.items()))

    def _served(self, ids: list[int]) -> dict[int, Tree]:
        if not ids:
            return {}
        with torch.no_grad():
            message = self.scene.method.serve(self.scene.task, self.server, torch.tensor(ids))
        return dict(zip(ids, _each(message, len(ids)), strict=True))

    def _request(self, i: int, train: bool, score: bool, last: bool) -> wire.RoundRequest:
        version = self.versions()[i]
        return wire.RoundRequest(
            experiment=self.experiment,
            client=i,
            round=self.round,
            version=version,
            keep=min(version, self.earlier[i]),
            missed=self._missed(i, version),
            train=train,
            score=score and i in self.scored,
            last=last,
        )

    def _missed(self, i: int, version: int) -> list[int]:
        """The rounds since its last one, counted from 1, in which it was asked for an update that was not merged."""
        config, turns = self.scene.config, self.scene.method.turns
        return [r + 1 for r in range(version, self.round) if i in cohort(config, self.eligible, r, turns)]

    def checked(self, asked: wire.RoundRequest, answer: bytes) -> Answer:
        """An answer that may be merged; raises Refused with the reason if it may not."""
        form = self.forms.upload if asked.train else {}
        fields, tensors = _checked(wire.RoundReply, answer, wire.room(form))
        one = self.about.clients[asked.client]
        wanted = (asked.experiment.id, asked.round, asked.client)
        if (fields.experiment, fields.round, fields.client) != wanted:
            raise Refused("it is for another experiment, round or client")
        if fields.n != one.n_train:
            raise Refused(f"it has {fields.n} training rows, and said {one.n_train} at the start")
        if asked.train == (fields.loss is None):
            raise Refused("its loss is missing, or there is one and it was not asked to train")
        for scores, expected in ((fields.personal, asked.score), (fields.generic, asked.score and self.forms.generic)):
            if (scores is not None) != bool(expected):
                raise Refused("its scores are missing, or were not asked for")
            if scores is not None and not (scores.n == one.n_test and 0 <= scores.hits <= scores.n):
                raise Refused("its scores are not those of its test rows")
        upload = wire.taken("upload", tensors, form)
        wire.nothing_left(tensors)
        _check_numbers(upload, len(self.about.clients))
        return Answer(fields, upload)

    def _evaluation(self, answers: dict[int, Answer], began: float) -> rows.Evaluation:
        found = {i: one.fields for i, one in answers.items() if one.fields.personal is not None}

        def sums(part: str) -> dict[str, list[float]]:
            each = [getattr(fields, part) for fields in found.values()]
            return {name: [float(getattr(one, name)) for one in each] for name in ("hits", "loss", "n")}

        generic = sums("generic") if tree.leaves(self.forms.generic) else None
        return rows.Evaluation(list(found), sums("personal"), generic, time.perf_counter() - began)

    def _names(self, ids: list[int]) -> set[str]:
        return {self.about.clients[i].name for i in ids}


def _each(message: Same | Each, n: int) -> list[Tree]:
    return [tree.row(message.tree, i) if isinstance(message, Each) else message.tree for i in range(n)]


def _check_numbers(upload: Tree, n_clients: int) -> None:
    """Whole numbers in an upload name clients: the server looks things up by them."""
    for name, x in zip(tree.names(upload), tree.leaves(upload), strict=True):
        if not x.is_floating_point() and not bool(((x >= 0) & (x < n_clients)).all()):
            raise Refused(f"upload/{name} names a client that there is not")


# A whole run


def carry_out(run: FederatedRun, watcher: Watcher) -> Result:
    """Play all rounds that are left, and write the run folder. A round is in a checkpoint before the next begins."""
    config, began, folder = run.scene.config, time.perf_counter(), run.folder
    assert folder is not None
    try:
        # The last row is still to be scored: scores of a round come with the answers of the next one.
        rows.write_rounds(folder, run.rows[:-1])
        watcher.started(run)
        with StopRequest(run.say) as request:
            try:
                while run.round < config.rounds:
                    evaluation = run.play_round(score=_is_due(config, run.round))
                    if evaluation is not None:
                        run.rows[-2] = run.rows[-2].scored(evaluation)
                    run.save()
                    _tell(run, run.rows[-2:-1], watcher)
                    if request.asked and run.round < config.rounds:
                        raise KeyboardInterrupt
                evaluation = run.evaluate()
                if _is_due(config, config.rounds):
                    run.rows[-1] = run.rows[-1].scored(evaluation)
                    run.save()
                _tell(run, run.rows[-1:], watcher)
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted after round {run.round}; {_how_to_resume(folder)}") from None
            except RunFailed as failure:
                raise RunFailed(
                    f"{failure}; the state after round {run.round} is kept; {_how_to_resume(folder)}"
                ) from None
        watcher.ended()
        summary = summary_of(run, evaluation, run.forms.upload, time.perf_counter() - began)
        summary |= {"wire": run.wire_bytes, "refusals": run.refusals, "silent": run.silent}
        population = run.scene.population
        clients = rows.clients(population.train, population.test, population.y.numpy(), evaluation, run.scene.names)
        for row in clients:
            row |= {"n_classes": None, "role": "client"}  # the server is not told which classes a client has
        write_results(folder, summary, clients)
        return Result(summary, [row.to_json() for row in run.rows], clients, {}, folder)
    finally:
        watcher.ended()
        run.close()


def _is_due(config: Config, round: int) -> bool:
    """Whether the state after a round is to be scored."""
    return round > 0 and config.eval_every > 0 and round % config.eval_every == 0


def _tell(run: FederatedRun, ended: list[rows.Round], watcher: Watcher) -> None:
    assert run.folder is not None
    for row in ended:
        rows.append_round(run.folder, row)
        watcher.played(run, row)


def _how_to_resume(folder: Path) -> str:
    return f"go on with: plures federate start --resume {folder}"


def begin(config: Config, about: About, folder: Path) -> Scene:
    """Write down what a new run is made of."""
    scene = set_scene(config, about)
    checkpoint.write_text(folder / "config.toml", to_toml(scene.config))
    checkpoint.write_text(folder / ABOUT, about.to_json())
    return scene


def reopened(folder: Path) -> tuple[Scene, About]:
    """The scene of a run that was begun before."""
    if not (folder / ABOUT).exists():
        raise UsageError(f"{folder} is not the folder of a federated run: it has no {ABOUT}")
    about = About.from_json((folder / ABOUT).read_text(encoding="utf-8"))
    return set_scene(make_config(read_toml(folder / "config.toml")), about), about


def adapt(run: FederatedRun, client: str, epochs: int) -> dict[str, Any]:
    """A client that was not in training makes its own model; it keeps it, and its accuracies come back."""
    with torch.no_grad():
        received = run.scene.method.newcomer(run.scene.task, run.server)
    message = wire.pack(wire.AdaptRequest(experiment=run.experiment, epochs=epochs), {"newcomer": received})
    found: list[wire.AdaptReply] = []

    def take(name: str, answer: bytes) -> None:
        try:
            reply, tensors = _checked(wire.AdaptReply, answer, wire.room() + 32 * epochs)
            wire.nothing_left(tensors)
            if reply.experiment != run.about.id or not all(0 <= x <= 1 for x in reply.curve):
                raise Refused("it is for another experiment, or its accuracies are none")
            found.append(reply)
        except Refused as refusal:
            raise RunFailed(f"the answer of {name} is refused: {refusal}") from None

    if gather(run.link, {client: lambda: message}, take, run.terms):
        raise RunFailed(f"{client} did not answer in {run.terms.deadline:g} s")
    return {"client": client, "round": run.round, "epochs": epochs} | found[0].model_dump(exclude={"kind"})
