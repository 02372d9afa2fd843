"""The client side of a run: its rows, its private state on its own disk, and its answers to the server.

Rows and state never leave the client. An answer holds the tensors that the method uploads, which are checked against
the list of what may be sent, and some numbers: the number of rows, the loss, the hits on test rows.
"""

import hashlib
import shutil
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from plures import tree
from plures.data import sources
from plures.data.population import Population
from plures.errors import DataError, UsageError
from plures.federate import wire
from plures.federate.wire import Refused
from plures.files import write_bytes
from plures.methods.base import Schedule
from plures.methods.messages import Same
from plures.methods.naming import own_code
from plures.runs import checkpoint
from plures.runs.adapt import own_rows
from plures.runs.callbacks import Say
from plures.runs.config import make_config
from plures.runs.scene import as_configured, method_of, task_of
from plures.simulate.new_clients import adaptation_curve, adapted_model
from plures.simulate.shapes import Shapes, shapes_of
from plures.simulate.stacking import as_stack
from plures.simulate.work import Job, Kind, Work, personal_function
from plures.tree import Tree

MOST_BYTES = 8 << 30  # largest size of a message from the server


class Membership(NamedTuple):
    """A client's part in an experiment."""

    work: Work
    shapes: Shapes
    folder: Path

    def do(self, kind: Kind, asked: wire.RoundRequest, received: Tree, state: Tree) -> dict[str, Tree]:
        """Train or score, with the rows and the random keys of a round."""
        is_new = kind == "score" and asked.is_new
        job = Job(kind, asked.round, False, 0, [0], [asked.client], states="new" if is_new else "kept")
        return self.work.compute(job, Same(received), () if is_new else as_stack(state))[0]


class Client:
    """Answers messages. All of its state is on disk, so it may be killed at any time."""

    def __init__(
        self,
        name: str,
        data: Path,
        folder: Path,
        say: Say,
        own_models: tuple[str, ...] = (),
        own_methods: tuple[str, ...] = (),
    ) -> None:
        """`own_models` and `own_methods` name code on this machine, as module:Class, that a server may ask for."""
        self.name, self.folder, self.say = name, folder, say
        self.own_models, self.own_methods = own_models, own_methods
        self.data = sources.load(str(data))
        self._memberships: dict[str, Membership] = {}
        self._last = (b"", b"")  # hash of the last message, and the answer to it

    def answer(self, message: bytes) -> bytes:
        """The answer to a message. If an error occurs, only its type is sent, never its text."""
        key = hashlib.blake2b(message).digest()
        if key != self._last[0]:  # else the message was sent twice
            try:
                self._last = (key, self._answer(message))
            except Exception as error:
                reason = str(error) if isinstance(error, Refused | UsageError | DataError) else traceback.format_exc()
                self.say(f"a message could not be answered: {reason}")
                return wire.pack(wire.ErrorReply(error=type(error).__name__), {})
        return self._last[1]

    def _answer(self, message: bytes) -> bytes:
        fields, tensors = wire.unpack(message, MOST_BYTES)
        kind = fields.get("kind")
        if kind == "hello":
            return self._answer_hello(wire.check_fields(wire.HelloRequest, fields))
        if kind == "round":
            return self._answer_round(wire.check_fields(wire.RoundRequest, fields), tensors)
        if kind == "adapt":
            return self._answer_adapt(wire.check_fields(wire.AdaptRequest, fields), tensors)
        raise Refused("its kind is unknown")

    def _answer_hello(self, asked: wire.HelloRequest) -> bytes:
        data = self.data
        train, test = own_rows(data, asked.seed, asked.test_share)
        return wire.pack(
            wire.Hello(
                name=self.name,
                n_train=len(train),
                n_test=len(test),
                shape=list(data.x.shape[1:]),
                dtype="int64" if data.n_tokens else "float32",
                label_axes=data.y.ndim,
                n_classes=data.n_classes,
                n_tokens=data.n_tokens,
            ),
            {},
        )

    # Rounds

    def _answer_round(self, asked: wire.RoundRequest, tensors: dict[str, torch.Tensor]) -> bytes:
        member, client = self._membership(asked.experiment, asked.client), asked.client
        population = member.work.population
        parts = self._read_parts(member, asked, tensors)
        state, had = self._read_state(member, asked.version)
        if asked.missed:
            self.say(f"the server completed {_rounds(asked.missed)} without us; our state is that of {_after(asked)}")
        personal = generic = loss = None
        upload: dict[str, Tree] = {}
        n_flops = 0
        if asked.score and len(population.test[client]):
            personal = _scores(member.do("score", asked, parts["newcomer" if asked.is_new else "serve"], state))
            if parts["generic"]:
                generic = _scores(member.do("generic", asked, parts["generic"], state))
        if asked.last:
            self._write_model(member, asked, parts["newcomer" if asked.is_new else "serve"], state)
        if asked.train:
            found = member.do("train", asked, parts["train"], state)
            new, own, metrics = tree.row(found["trained"], 0)
            loss, n_flops = float(metrics["loss"]), int(found["flops"])
            self._write_state(member, asked, new)
            upload = {"upload": self._check_upload(member, own)}
        self._delete_old_states(member, asked.keep)
        self.say(_round_line(asked, loss, personal))
        reply = wire.RoundReply(
            experiment=asked.experiment.id,
            client=client,
            round=asked.round,
            n=len(population.train[client]),
            state=had,
            loss=loss,
            flops=n_flops,
            personal=personal,
            generic=generic,
        )
        return wire.pack(reply, upload)

    def _membership(self, experiment: wire.Experiment, client: int) -> Membership:
        """The client's part in an experiment, set up when its first message arrives."""
        key = f"{experiment.model_dump_json()} {client}"
        if key not in self._memberships:
            self._memberships = {key: self._join(experiment, client)} | dict(list(self._memberships.items())[:15])
        return self._memberships[key]

    def _join(self, experiment: wire.Experiment, client: int) -> Membership:
        config, data = make_config(experiment.config), self.data
        if ":" in str(config.model) and config.model not in self.own_models:
            raise UsageError(f"the server asks for the model {config.model}; allow it with --model {config.model}")
        for code in own_code(config.method):
            if code not in self.own_methods:
                raise UsageError(f"the server asks for the method {code}; allow it with --method {code}")
        if data.n_classes > experiment.n_classes or data.n_tokens > experiment.n_tokens:
            raise DataError("our rows have labels or tokens beyond those of the experiment")
        if client > experiment.n_clients:
            raise Refused("the client's number is beyond the number of clients")
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        task = task_of(config, x[0], experiment.n_classes, experiment.n_tokens)
        if task.frozen_fingerprint != experiment.frozen:
            raise DataError(f"the frozen weights of {config.model} here are not those of the server")
        method = method_of(config)
        method = method.with_schedule(Schedule(experiment.n_clients, config.rounds, config.participation))
        train, test = own_rows(data, config.seed, config.test_share)
        none = np.zeros(0, np.int64)
        everybody: dict[str, Any] = {
            part: [rows if i == client else none for i in range(experiment.n_clients + 1)]
            for part, rows in (("train", train), ("test", test))
        }
        population = Population(
            x=x, y=y, n_classes=experiment.n_classes, seed=config.seed, smallest=task.smallest_batch, **everybody
        )
        population = as_configured(population, config)
        shapes = shapes_of(method, task, torch.arange(experiment.n_clients))
        with torch.no_grad():
            initial = method.init_client(task, task.initial)
        self.say(f"experiment {experiment.id}: {config.method}, {config.model}, {len(train)} training rows of ours")
        for line in wire.manifest_lines(shapes):
            self.say(line)
        work = Work(method, task, population, initial, "one_by_one", new_epochs=config.new_epochs)
        return Membership(work, shapes, self.folder / "state" / experiment.id)

    def _read_parts(
        self, member: Membership, asked: wire.RoundRequest, tensors: dict[str, torch.Tensor]
    ) -> dict[str, Tree]:
        method, task, shapes = member.work.method, member.work.task, member.shapes
        parts: dict[str, Tree] = {"serve": {}, "newcomer": {}, "generic": {}}
        is_served = asked.score or asked.last
        if is_served and asked.is_new:
            parts["newcomer"] = wire.take_part("newcomer", tensors, shapes.newcomer)
        for part in ["train"] * asked.train + ["serve"] * (is_served and not asked.is_new):
            form = getattr(shapes, part)
            parts[part] = wire.take_trimmed_part(part, tensors, form, lambda whole: method.trim(task, whole))
        if asked.score:
            parts["generic"] = wire.take_part("generic", tensors, shapes.generic)
        wire.refuse_others(tensors)
        return parts

    def _check_upload(self, member: Membership, upload: Tree) -> Tree:
        """The upload, if all of its tensors are on the list of what may be sent; else raises Refused."""
        tensors = tree.by_path("upload", upload)
        checked = wire.take_part("upload", tensors, member.shapes.upload)
        wire.refuse_others(tensors)
        return checked

    # State on disk: a folder for each experiment, which holds a folder for each version

    def _read_state(self, member: Membership, version: int) -> tuple[Tree, wire.State]:
        if version == 0:
            return member.work.initial, "new"
        try:
            tensors = checkpoint.read_state(member.folder / f"{version:06d}")
            own = {name.removeprefix("client/"): x for name, x in tensors.items()}
            return checkpoint.restore(member.work.initial, own), "kept"
        except Exception as error:
            self.say(f"our state after round {version} cannot be read ({error}); we start from the initial state")
            return member.work.initial, "lost"

    def _write_state(self, member: Membership, asked: wire.RoundRequest, state: Tree) -> None:
        about = {"experiment": asked.experiment.id, "client": asked.client, "name": self.name}
        parts = [("state.safetensors", checkpoint.stored("client", state))]
        checkpoint.write_parts(member.folder, asked.round + 1, parts, about)

    def _delete_old_states(self, member: Membership, keep: int) -> None:
        for path in checkpoint.folders(member.folder):
            if int(path.name) < keep:
                shutil.rmtree(path, ignore_errors=True)

    def _write_model(self, member: Membership, asked: wire.RoundRequest, received: Tree, state: Tree) -> None:
        work = member.work
        shards = work.population.shards([asked.client], "train", "personalize", asked.round)
        fn = personal_function(work, asked.is_new)
        personal = work.run(fn, Same(received), () if asked.is_new else as_stack(state), shards)
        self._save_model(asked.experiment, work.task.whole(tree.row(personal, 0)))

    def _save_model(self, experiment: wire.Experiment, model: Tree) -> None:
        path = self.folder / "models" / f"{experiment.id}.safetensors"
        about = {"method": str(experiment.config["method"]), "model": str(experiment.config["model"])}
        write_bytes(path, save(tree.by_path("model", model), metadata=about))
        self.say(f"our own model is in {path}")

    # New clients

    def _answer_adapt(self, asked: wire.AdaptRequest, tensors: dict[str, torch.Tensor]) -> bytes:
        newcomer = (
            asked.experiment.n_clients
        )  # it has the number after those of all clients, and so random keys of its own
        member = self._membership(asked.experiment, newcomer)
        population = member.work.population
        received = wire.take_part("newcomer", tensors, member.shapes.newcomer)
        wire.refuse_others(tensors)
        alone = population._replace(train=[population.train[newcomer]], test=[population.test[newcomer]])
        work = member.work._replace(population=alone)
        curve = adaptation_curve(work, received, newcomer, asked.epochs, asked.round)
        adapted = adapted_model(work, received, asked.epochs, asked.round)
        self._save_model(asked.experiment, work.task.whole(adapted))
        n_train, n_test = len(alone.train[0]), len(alone.test[0])
        reply = wire.AdaptReply(
            experiment=asked.experiment.id, curve=[each[0] for each in curve if each], n_train=n_train, n_test=n_test
        )
        return wire.pack(reply, {})


def _scores(found: dict[str, Tree]) -> wire.Scores:
    one = tree.row(found["scores"], 0)
    return wire.Scores(hits=float(one["hits"]), loss=float(one["loss"]), n=int(one["n"]))


def _rounds(numbers: list[int]) -> str:
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _after(asked: wire.RoundRequest) -> str:
    return f"round {asked.version}" if asked.version else "the start"


def _round_line(asked: wire.RoundRequest, loss: float | None, personal: wire.Scores | None) -> str:
    parts = [f"loss {loss:.4f}"] if loss is not None else []
    if personal is not None:
        parts.append(f"own model {100 * personal.hits / personal.n:.2f} % of {personal.n} test rows")
    round = f"round {asked.round + 1}" if asked.train else f"after round {asked.round}"
    return f"{round}: {', '.join(parts) or 'done'}"
