"""The server side of a run: what is sent to which client, which answers are accepted, and what happens without one.

A round ends when all clients have answered, or at its deadline if enough have. An answer is checked before it is
merged; a refused answer is counted and reported, and the run continues. Late answers and repeated ones are ignored. The
state of a client stays with the client. The server only keeps the version of that state, which is the round after which
it was last accepted. So a resumed server and a client that missed rounds agree on the state to use.
"""

import hashlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.data import schema as schemas
from plures.data.dataset import Target
from plures.data.partition import Split
from plures.data.population import Population
from plures.engine import Usage
from plures.errors import DataError, RunFailed, UsageError
from plures.federate import agree, wire
from plures.federate.wire import Refused
from plures.files import write_text
from plures.learn.metrics import ACCURACY, DEFAULT, find_metric
from plures.methods.messages import one_of
from plures.methods.spec import all_settings
from plures.runs import results
from plures.runs.callbacks import Callback, Say
from plures.runs.config import Config
from plures.runs.folders import read_config, write_config
from plures.runs.loop import Result, play_run
from plures.runs.scene import (
    Scene,
    announce,
    as_configured,
    default_model,
    method_of,
    refuse_without_classes,
    task_of,
    with_own_options,
)
from plures.runs.state import Answers, RunState, UpdateLimits
from plures.simulate import bounds
from plures.simulate.evaluate import Evaluation, Values
from plures.simulate.executor import Trained
from plures.simulate.workers import one_thread
from plures.tree import Tree

POLL_SECONDS, MOST_POLL_SECONDS = 0.25, 2.0  # between requests for answers: the longer a round takes, the rarer
HELLO_SECONDS = 60.0  # shortest deadline for clients to describe their data
LOST_SECONDS = 2.0  # delay before a lost message is sent again
ABOUT = "federation.json"  # file in the run folder: which clients take part, in the order of their numbers


class RoundLimits(NamedTuple):
    """How long the server waits for answers, and how many it needs."""

    deadline: float = 600.0  # seconds after which a round ends
    quorum: float = 0.5  # share of the cohort that must have answered by then
    resend: float = 120.0  # seconds without an answer after which a message is sent again


class Caps(NamedTuple):
    """What the server believes of a client, at most; the operator sets it."""

    rows: int = 1_000_000  # training rows, and as many test rows
    classes: int = 1000
    tokens: int = 200_000
    share: float = 1.0  # of the weight in a mean
    update: float = bounds.TIMES_MEDIAN  # size of an update, in medians of the round


TIMES_MEDIAN_ROWS = 10_000  # nobody is believed to have so many times the median of the rows
MOST_SCHEMA_BYTES = 50_000_000  # of what a client tells of its columns
MOST_LOSS = 1e6  # a larger loss of a row is no loss, and would spoil the record


Note = Callable[[str, str, str], None]  # for the audit log: (client, what it was asked, what it answered)


def note_nothing(client: str, asked: str, answered: str) -> None:
    """No audit log."""


class Link(Protocol):
    """Carries messages to clients, which it knows by name, and their answers back."""

    def clients(self) -> list[str]:
        """The clients that are connected."""

    def push(self, client: str, message: bytes) -> str:
        """Send a message; returns its number, which its answer will have too; empty if the client was removed."""

    def pull(self, numbers: list[str], most: int) -> list[tuple[str, bytes | None]]:
        """(number, answer) for each answer that has arrived; the answer is None if the message was lost.

        most: bytes of an answer; of a larger one, no more than that is read.
        """


def gather(
    link: Link,
    messages: dict[str, Callable[[], bytes]],
    accept: Callable[[str, bytes], None],
    limits: RoundLimits,
    most: int,
) -> list[str]:
    """Send every client its message and pass answers to `accept`. Returns the clients that miss the deadline.

    most: bytes of an answer.
    """
    began = time.monotonic()
    waiting, due = set(messages), dict.fromkeys(messages, began)
    sent: dict[str, str] = {}  # number of a message -> client
    removed: list[str] = []  # nobody waits for them
    while waiting and time.monotonic() < began + limits.deadline:
        now = time.monotonic()
        for client in sorted(waiting):
            if due[client] <= now:
                number = link.push(client, messages[client]())
                if not number:
                    waiting.discard(client)
                    removed.append(client)
                    continue
                sent[number] = client
                due[client] = now + limits.resend
        for number, answer in link.pull(list(sent), most):
            client = sent.pop(number, "")
            if client not in waiting:
                continue
            if answer is None:
                due[client] = min(due[client], now + LOST_SECONDS)
                continue
            waiting.discard(client)
            accept(client, answer)
        if waiting:
            time.sleep(min(MOST_POLL_SECONDS, max(POLL_SECONDS, (time.monotonic() - began) / 20)))
    return sorted([*waiting, *removed])


# Clients and their data


def collect_hellos(
    link: Link,
    names: list[str],
    config: Config,
    limits: RoundLimits,
    say: Say,
    caps: Caps = Caps(),  # noqa: B008
    note: Note = note_nothing,
) -> dict[str, wire.Hello]:
    """Ask each client to describe its data. Returns those that can take part."""
    values = _values_to_send(with_own_options(config))
    request = wire.pack(wire.HelloRequest(seed=config.seed, test_share=config.test_share, config=values), {})
    found: dict[str, wire.Hello] = {}

    def accept(client: str, answer: bytes) -> None:
        try:
            hello, tensors = _read_answer(wire.Hello, answer, wire.most_bytes())
            wire.refuse_others(tensors)
            if hello.name != client:
                raise Refused(f"it says that its name is {hello.name}")
            found[client] = hello
            note(client, "hello", f"{hello.n_train} and {hello.n_test} rows")
        except Refused as refusal:
            note(client, "hello", f"refused: {refusal}")
            say(f"{client} cannot take part: {refusal}")

    limits = limits._replace(deadline=max(limits.deadline, HELLO_SECONDS))
    for client in gather(link, dict.fromkeys(names, lambda: request), accept, limits, wire.most_bytes()):
        note(client, "hello", "nothing")
        say(f"{client} does not answer and is left out")
    found = fitting(found, caps, say)
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


def fitting(found: dict[str, wire.Hello], caps: Caps, say: Say) -> dict[str, wire.Hello]:
    """The clients whose data can be used together. The others are left out, with a word on each."""
    forms = Counter(_form(one) for one in found.values())
    usual = max(forms, key=lambda form: forms[form], default=None)
    rows = sorted(one.n_train for one in found.values())
    most_rows = min(caps.rows, TIMES_MEDIAN_ROWS * max(1, rows[(len(rows) - 1) // 2])) if rows else 0
    kept = {}
    for name, one in sorted(found.items()):
        why = ""
        if _form(one) != usual and usual is not None:
            why = f"its rows have shape {tuple(one.shape)} ({one.dtype}), those of most others {usual[0]}"
            if _form(one)[:3] == usual[:3]:
                why = "it predicts something else than most others, or reads its table by another schema"
        for number, most, what in (
            (max(one.n_train, one.n_test), most_rows, "rows"),
            (one.n_classes, caps.classes, "classes"),
            (one.n_tokens, caps.tokens, "tokens"),
        ):
            if number > most:
                why = f"it claims {number} {what}, and at most {most} are believed (--most-{what})"
        if why:
            say(f"{name} is left out: {why}")
        else:
            kept[name] = one
    total = sum(one.n_train for one in kept.values())
    for name, one in kept.items():
        if len(kept) > 2 and caps.share == 1 and 2 * one.n_train > total:
            say(
                f"{name} claims {one.n_train / total:.1%} of all training rows, and has that share in every mean; "
                "--most-share bounds it"
            )
    return kept


def _form(one: wire.Hello) -> tuple[tuple[int, ...], str, int, str, str]:
    """What must be the same for all clients."""
    return tuple(one.shape), one.dtype, one.label_axes, one.task, one.schema_hash


def collect_schema(link: Link, names: list[str], seed: int, test_share: float, limits: RoundLimits, say: Say) -> str:
    """Ask all clients for what their tables hold, and let them agree on a schema. Returns its text."""
    found = _ask_columns(link, names, seed, test_share, [], limits)
    as_words = agree.columns_of_words(found)
    if as_words:
        found = _ask_columns(link, names, seed, test_share, as_words, limits)
    text = schemas.to_text(agree.join(dict(sorted(found.items()))))
    offer = wire.pack(wire.SchemaOffer(text=text), {})
    hashes: dict[str, str] = {}

    def accept_check(client: str, answer: bytes) -> None:
        try:
            hashes[client] = _read_answer(wire.OfferReply, answer, wire.most_bytes())[0].schema_hash
        except Refused as refusal:
            raise RunFailed(f"{client} cannot read its rows by the schema: {refusal}") from None

    silent = gather(link, dict.fromkeys(names, lambda: offer), accept_check, limits, wire.most_bytes())
    if silent:
        raise RunFailed(f"{', '.join(silent)} did not answer; ask again with `plures federate schema`")
    wrong = [name for name, one in hashes.items() if one != hashlib.sha256(text.encode()).hexdigest()]
    if wrong:
        raise RunFailed(f"{', '.join(wrong)} read another schema than was sent")
    say(f"{len(names)} clients read their tables by one schema of {text.count('[[column]]')} columns")
    return text


def _ask_columns(
    link: Link, names: list[str], seed: int, test_share: float, as_words: list[str], limits: RoundLimits
) -> dict[str, wire.SchemaReply]:
    """What each client tells of the columns of its table."""
    request = wire.pack(wire.SchemaRequest(seed=seed, test_share=test_share, as_words=as_words), {})
    found: dict[str, wire.SchemaReply] = {}
    most = wire.most_bytes() + MOST_SCHEMA_BYTES

    def accept(client: str, answer: bytes) -> None:
        try:
            found[client] = _read_answer(wire.SchemaReply, answer, most)[0]
        except Refused as refusal:
            raise RunFailed(f"{client} tells nothing of its table: {refusal}") from None

    silent = gather(link, dict.fromkeys(names, lambda: request), accept, limits, most)
    if silent:
        raise RunFailed(f"{', '.join(silent)} did not answer; a schema needs all clients")
    return found


def new_experiment(found: dict[str, wire.Hello]) -> About:
    """A new experiment with these clients, in the order of their names."""
    clients = [found[name] for name in sorted(found)]
    if not clients:
        raise RunFailed("no client can take part")
    return About(secrets.token_hex(8), clients)


def _values_to_send(config: Config) -> dict[str, Any]:
    return config.model_dump(exclude=wire.NEVER_SENT, exclude_none=True)


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
    refuse_without_classes(method, Target(first.task))
    task = task_of(config, example, about.n_classes, about.n_tokens, None, first.task)
    label = torch.zeros(example.shape if first.label_axes == 2 else (), dtype=torch.int64)
    if first.task != "classes":
        label = torch.zeros((about.n_classes,) if first.task == "labels" else ())
    # Only the numbers of rows matter: every row is row 0 of a table of zeros.
    train = [np.zeros(one.n_train, np.int64) for one in about.clients]
    test = [np.zeros(one.n_test, np.int64) for one in about.clients]
    population = Population(example[None], label[None], train, test, about.n_classes, config.seed, task.smallest_batch)
    population = as_configured(population, config)._replace(target=Target(first.task))
    if not population.eligible():
        raise DataError("no client has a row to train on")
    known = announce(config, method, task, population)
    metric = find_metric(config.metric or DEFAULT[first.task], first.task)
    scene = Scene(config, *known, Split(train, test), tuple(one.name for one in about.clients))
    return scene._replace(metric=metric)


def _read_answer(kind: Any, answer: bytes, most: int) -> tuple[Any, dict[str, Tensor]]:
    """The fields of an answer of this kind, and its tensors. An error of the client is refused."""
    fields, tensors = wire.unpack(answer, most)
    if fields.get("kind") == "error":
        reply = wire.check_fields(wire.ErrorReply, fields)
        if reply.code:
            raise Refused(f"it refuses the request by its own rules ({reply.code}); its own log says more")
        raise Refused(f"it had an error ({reply.error}); its own log says more")
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

    def __init__(
        self,
        scene: Scene,
        about: About,
        folder: Path,
        say: Say,
        link: Link,
        limits: RoundLimits,
        caps: Caps = Caps(),  # noqa: B008
        note: Note = note_nothing,
    ) -> None:
        self.note = note
        bounded = UpdateLimits(times_median=caps.update, most_share=caps.share)
        self.state = RunState(scene, folder, say, ClientVersion(torch.tensor(0)), bounded)
        self.about, self.link, self.limits = about, link, limits
        self.shapes = self.state.shapes
        self.how_to_resume = f"resume it with: plures federate start --resume {folder}"
        self.experiment = wire.Experiment(
            id=about.id,
            config=_values_to_send(scene.config),
            n_clients=len(about.clients),
            n_classes=about.n_classes,
            n_tokens=about.n_tokens,
            task=about.clients[0].task,
            metric=scene.metric.name,
            frozen=scene.task.frozen_fingerprint,
        )
        self.silent: list[dict[str, Any]] = []
        self.wire_bytes = {"down": 0, "up": 0}

    def versions(self) -> list[int]:
        """The version of each client's state: the round after which it was last accepted."""
        return self.state.store.rows(torch.arange(len(self.about.clients))).version.tolist()

    def usage(self) -> Usage:
        return Usage()  # clients train on other machines

    def manifest(self) -> dict[str, Any]:
        own = {"wire": self.wire_bytes, "silent": self.silent}
        return self.state.manifest(self.usage()) | own

    def load(self) -> None:
        """Load the newest complete checkpoint."""
        found = self.state.load()
        if found:
            self.wire_bytes, self.silent = found["wire"], found["silent"]

    def models(self) -> dict[int, Tree]:
        return {}  # clients write their own models

    def close(self) -> None:
        pass

    def play(self, score: bool) -> Answers:
        began = time.perf_counter()
        state = self.state
        ids = state.cohort()
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
        refused = sum(one["round"] == state.round + 1 and one["client"] in names for one in state.refusals)
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
        return {"wire": self.wire_bytes, "refusals": self.state.named_refusals, "silent": self.silent}, rows

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
                self.note(name, self._in_words(asked[i]), f"{len(answer)} bytes")
            except Refused as refusal:
                self.note(name, self._in_words(asked[i]), f"refused: {refusal}")
                state.refusals.append({"round": state.round + 1, "client": name, "why": str(refusal)})
                state.say(f"{now}: the answer of {name} is refused: {refusal}")
                return
            if answers[i].fields.state == "lost":
                state.say(f"{now}: {name} lost its state and started from the initial state")

        messages = {self.about.clients[i].name: message_maker(i) for i in asked}
        most = wire.most_bytes(self.shapes.upload if to_train else {})
        for name in gather(self.link, messages, accept, self.limits, most):
            self.note(name, self._in_words(asked[numbers[name]]), "nothing")
            self.silent.append({"round": state.round + 1, "client": name})
            state.say(f"{now}: {name} did not answer in {self.limits.deadline:g} s")
        return dict(sorted(answers.items()))

    def _in_words(self, asked: wire.RoundRequest) -> str:
        words = [f"round {asked.round}", f"experiment {self.about.id}", str(self.experiment.config["method"])]
        return ", ".join(words + [word for word in ("train", "score", "last") if getattr(asked, word)])

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
        if fields.loss is not None and abs(fields.loss) > MOST_LOSS:
            raise Refused(f"its loss is {fields.loss:.3g}")
        for scores, wanted in ((fields.personal, asked.score), (fields.generic, asked.score and self.shapes.generic)):
            if scores is not None and not wanted:
                raise Refused("its scores were not asked for")
            if scores is not None and scores.value is not None and abs(scores.value) > MOST_LOSS:
                raise Refused(f"its score is {scores.value:.3g}")
            if scores is not None and not (scores.n == one.n_test and 0 <= scores.hits <= scores.n):
                raise Refused("its scores are not those of its test rows")
            if scores is not None and scores.loss is not None and abs(scores.loss) > MOST_LOSS * scores.n:
                raise Refused(f"its loss on test rows is {scores.loss:.3g}")
        upload = wire.take_part("upload", tensors, form)
        wire.refuse_others(tensors)
        _check_numbers(upload, len(self.about.clients))
        return Answer(fields, upload)

    def _evaluation(self, answers: dict[int, Answer], began: float) -> Evaluation:
        # A client may keep its scores for itself.
        found = {i: one.fields for i, one in answers.items() if one.fields.personal is not None}

        def sums(part: str) -> dict[str, list[float]]:
            each = [getattr(fields, part) for fields in found.values()]
            losses = [math.nan if one.loss is None else one.loss for one in each]
            return {"hits": [one.hits for one in each], "loss": losses, "n": [float(one.n) for one in each]}

        generic = sums("generic") if tree.leaves(self.shapes.generic) else None
        versions = self.versions()
        never = tuple(i for i in found if self.state.round and versions[i] == 0)
        seconds, metric = time.perf_counter() - began, self.state.scene.metric
        evaluation = Evaluation(list(found), sums("personal"), generic, seconds, never_trained=never, metric=metric)
        if metric is ACCURACY:
            return evaluation
        parts = {"personal": _values([one.personal for one in found.values()])}
        if generic is not None:
            parts["generic"] = _values([one.generic for one in found.values()])
        return evaluation._replace(measured={metric.name: parts})


def _values(scores: list[wire.Scores | None]) -> Values:
    """A metric as clients tell it. Nobody sees all rows: the value of all is the mean, weighted by test rows."""
    each = np.array([math.nan if one is None or one.value is None else one.value for one in scores])
    n = np.array([0 if one is None else one.n for one in scores], np.float64)
    known = np.isfinite(each)
    return Values(each, float(np.average(each[known], weights=n[known])) if known.any() else math.nan)


def _check_numbers(upload: Tree, n_clients: int) -> None:
    """Refuse integers that are not numbers of clients: the server uses integers of an upload as indices."""
    for name, x in zip(tree.names(upload), tree.leaves(upload), strict=True):
        if not x.is_floating_point() and not bool(((x >= 0) & (x < n_clients)).all()):
            raise Refused(f"upload/{name} names a client that does not exist")


# Whole runs


def write_start(config: Config, about: About, folder: Path) -> Scene:
    """Write the config and the clients of a new run to its folder, and make its scene."""
    scene = make_scene(config, about)
    write_text(folder / ABOUT, about.to_json())
    write_config(folder, scene.config)
    return scene


def open_scene(folder: Path) -> tuple[Scene, About]:
    """The scene of a run that was started before, and its experiment."""
    if not (folder / ABOUT).exists():
        raise UsageError(f"{folder} is not the folder of a federated run: it has no {ABOUT}")
    config = read_config(folder)  # which checks the file of the clients, too
    about = About.from_json((folder / ABOUT).read_text(encoding="utf-8"))
    return make_scene(config, about), about


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
    most = wire.most_bytes() + 32 * epochs

    def accept(name: str, answer: bytes) -> None:
        try:
            reply, tensors = _read_answer(wire.AdaptReply, answer, most)
            wire.refuse_others(tensors)
            most_told = 1.0 if state.scene.metric is ACCURACY else MOST_LOSS
            if reply.experiment != clients.about.id or not all(abs(x) <= most_told for x in reply.curve):
                raise Refused("it is for another experiment, or its scores are none")
            found.append(reply)
            clients.note(name, f"adapt, experiment {clients.about.id}", f"{len(answer)} bytes")
        except Refused as refusal:
            clients.note(name, f"adapt, experiment {clients.about.id}", f"refused: {refusal}")
            raise RunFailed(f"the answer of {name} is refused: {refusal}") from None

    if gather(clients.link, {client: lambda: message}, accept, clients.limits, most):
        raise RunFailed(f"{client} did not answer in {clients.limits.deadline:g} s")
    return {"client": client, "round": state.round, "epochs": epochs} | found[0].model_dump(exclude={"kind"})
