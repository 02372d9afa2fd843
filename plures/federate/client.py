"""The client side of a run: its rows, its private state on its own disk, and its answers to the server.

Rows and state never leave the client. An answer holds the tensors that the method uploads, which are checked against
the list of what may be sent, and some numbers: the number of rows, the loss, the hits on test rows. What is asked for
must be within the client's own policy.
"""

import hashlib
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from plures import tree
from plures._version import __version__
from plures.data import schema as schemas
from plures.data import sources
from plures.data.dataset import Dataset
from plures.data.population import Population
from plures.data.reading import Reading
from plures.data.tables import Plan, plan_table, read_table
from plures.errors import DataError, PluresError, RunFailed, UsageError
from plures.federate import agree, audit, wire
from plures.federate.ledger import Ledger, prune_versions
from plures.federate.policy import Policy
from plures.federate.wire import Refused
from plures.files import disk_failure, write_bytes, write_text
from plures.learn.metrics import ACCURACY, Metric, find_metric
from plures.methods.base import Schedule
from plures.methods.messages import Same
from plures.methods.naming import own_code
from plures.models.names import split_sizes
from plures.runs import checkpoint
from plures.runs.adapt import own_rows
from plures.runs.callbacks import Say
from plures.runs.config import Config, make_config
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
    rounds: int  # that the experiment has
    metric: Metric = ACCURACY  # that it goes by

    def do(self, kind: Kind, asked: wire.RoundRequest, received: Tree, state: Tree) -> dict[str, Tree]:
        """Train or score, with the rows and the random keys of a round."""
        is_new = kind in ("score", "outputs") and asked.is_new
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
        policy: Policy = Policy(),  # noqa: B008
        reading: Reading = Reading(),  # noqa: B008
    ) -> None:
        """`own_models` and `own_methods` name code on this machine, as module:Class, that a server may ask for.

        reading: how our table is read, if our rows are one.
        """
        self.name, self.folder, self.say = name, folder, say
        self.own_models, self.own_methods, self.policy = own_models, own_methods, policy
        self.ledger = Ledger(folder, policy)
        self.path, self.reading = data, reading._replace(alone=True)
        reading = self.reading
        self.plan = plan_table(read_table(data), reading) if reading.target and not reading.text else None
        self.data, self.schema_hash = self._read_rows()
        self._memberships: dict[str, Membership] = {}
        self._last = (b"", b"")  # hash of the last message, and the answer to it

    def _read_rows(self) -> tuple[Dataset, str]:
        """Our rows, and the hash of the schema that they are read by; until there is one, they are not numbers yet."""
        agreed, reading = self.folder / agree.FILE, self.reading
        if reading.schema is None and agreed.exists():
            reading = reading._replace(schema=str(agreed))
        data = sources.load(str(self.path), None, reading)
        if data.encode is None or (self.plan is not None and reading.schema is None):
            return data, ""
        encoded = data.encode(np.arange(len(data.y)))
        for note in encoded.notes:
            self.say(note)
        return encoded, hashlib.sha256(encoded.schema.encode()).hexdigest()

    def answer(self, message: bytes, unseal: Callable[[bytes], bytes] | None = None) -> bytes:
        """The answer to a message. If an error occurs, only its type is sent, never its text.

        unseal: gives what is in a signed message, or raises Refused if nobody who may ask has signed it.
        """
        key = hashlib.blake2b(message).digest()
        if key != self._last[0]:  # else the message was sent twice
            asked = "what is not a request of ours"
            try:
                message = message if unseal is None else unseal(message)
                self.ledger.count_request()
                fields, tensors = wire.unpack(message, MOST_BYTES)
                asked = _in_words(fields)
                self._last = (key, self._answer(fields, tensors))
                self._note(asked, f"{len(self._last[1])} bytes")
            except Exception as error:
                with suppress(RunFailed):  # the error itself is told all the same
                    self._note(asked, f"refused ({_code(error) or type(error).__name__})")
                reason = str(error) if isinstance(error, Refused | PluresError) else traceback.format_exc()
                self.say(
                    f"a request is refused: {reason}" if _code(error) else f"a message could not be answered: {reason}"
                )
                return wire.pack(wire.ErrorReply(error=type(error).__name__, code=_code(error)), {})
        return self._last[1]

    def _note(self, asked: str, answered: str) -> None:
        try:
            audit.write(self.folder / audit.FILE, "server", asked, answered)
        except OSError as error:
            raise disk_failure(error, self.folder) from error

    def _answer(self, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
        kind = fields.get("kind")
        if kind == "hello":
            return self._answer_hello(wire.check_fields(wire.HelloRequest, fields))
        if kind == "schema":
            return self._answer_schema(wire.check_fields(wire.SchemaRequest, fields))
        if kind == "offer":
            return self._answer_offer(wire.check_fields(wire.SchemaOffer, fields))
        if kind == "round":
            return self._answer_round(wire.check_fields(wire.RoundRequest, fields), tensors)
        if kind == "adapt":
            return self._answer_adapt(wire.check_fields(wire.AdaptRequest, fields), tensors)
        raise Refused("its kind is unknown")

    def _own_plan(self) -> Plan:
        if self.plan is None:
            raise Refused("our rows are no table; start us with --target", "schema")
        return self.plan

    def _answer_schema(self, asked: wire.SchemaRequest) -> bytes:
        plan = self._own_plan()
        self.ledger.count_start(f"rows by seed {asked.seed} and share {asked.test_share}")
        train, _ = own_rows(self.data, asked.seed, asked.test_share)
        reply = agree.describe(plan, train, self.policy, asked.as_words)
        told = [column.name for column in reply.columns if column.words]
        told_of = ", ".join(told) or "none"
        self.say(f"we tell numbers of rows, means and variances of {len(reply.columns)} columns; words of: {told_of}")
        return wire.pack(reply, {})

    def _answer_offer(self, asked: wire.SchemaOffer) -> bytes:
        schema = agree.check_offer(asked.text, self._own_plan())
        text = schemas.to_text(schema)
        write_text(self.folder / agree.FILE, text)
        self.reading = self.reading._replace(schema=None)
        self.data, self.schema_hash = self._read_rows()
        self._memberships = {}
        self.say(f"we read our rows by the schema of the federation, {len(schema.columns)} columns, in {agree.FILE}")
        return wire.pack(wire.OfferReply(schema_hash=self.schema_hash), {})

    def _answer_hello(self, asked: wire.HelloRequest) -> bytes:
        data = self.data
        if data.encode is not None:
            raise Refused("we have no schema yet: the operator makes one with `plures federate schema`", "schema")
        self.ledger.count_start(f"rows by seed {asked.seed} and share {asked.test_share}")
        train, test = own_rows(data, asked.seed, asked.test_share)
        self.policy.check_rows(len(train))
        if asked.config:
            config = self._allowed_config(asked.config)
            self.policy.check_config(config, method_of(config), len(train), 1)
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
                task=data.target.kind,
                schema_hash=self.schema_hash,
                version=__version__,
            ),
            {},
        )

    # Rounds

    def _answer_round(self, asked: wire.RoundRequest, tensors: dict[str, torch.Tensor]) -> bytes:
        if asked.client >= asked.experiment.n_clients:
            raise Refused("the client's number is beyond the number of clients")
        member, client = self._membership(asked.experiment, asked.client), asked.client
        population = member.work.population
        if asked.round > member.rounds or asked.version > asked.round:
            raise Refused(f"round {asked.round} from version {asked.version} is none of {member.rounds}", "rounds")
        models = _hash_of(tensors)
        parts = self._read_parts(member, asked, tensors)
        if asked.score:
            self.ledger.count_scoring(asked.experiment.id, asked.round, models)
        state, had = self._read_state(member, asked.version)
        if asked.missed:
            self.say(f"the server completed {_rounds(asked.missed)} without us; our state is that of {_after(asked)}")
        personal = generic = loss = None
        upload: dict[str, Tree] = {}
        n_flops = 0
        if asked.score and len(population.test[client]) >= self.policy.least_test_rows:
            received = parts["newcomer" if asked.is_new else "serve"]
            outputs = None
            if member.metric is not ACCURACY:
                outputs = member.do("outputs", asked, received, state)["outputs"][0]
            personal = self._scores(member, asked, member.do("score", asked, received, state), outputs)
            if parts["generic"]:
                if member.metric is not ACCURACY:
                    outputs = member.do("generic outputs", asked, parts["generic"], state)["outputs"][0]
                generic = self._scores(member, asked, member.do("generic", asked, parts["generic"], state), outputs)
        if asked.last:
            self._write_model(member, asked, parts["newcomer" if asked.is_new else "serve"], state)
        if asked.train:
            found = member.do("train", asked, parts["train"], state)
            new, own, metrics = tree.row(found["trained"], 0)
            loss, n_flops = self.policy.loss_to_tell(float(metrics["loss"])), int(found["flops"])
            self._write_state(member, asked, new)
            upload = {"upload": self._check_upload(member, own)}
            self.ledger.count_training()
        prune_versions(member.folder, asked.version)
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
        config, data = self._allowed_config(experiment.config), self.data
        if data.n_classes > experiment.n_classes or data.n_tokens > experiment.n_tokens:
            raise DataError("our rows have labels or tokens beyond those of the experiment")
        if experiment.n_classes > max(self.policy.most_classes, data.n_classes):
            raise Refused(f"{experiment.n_classes} classes; most_classes = {self.policy.most_classes}", "setting")
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        if data.encode is not None or data.target.kind != experiment.task:
            raise Refused("our rows are not what the experiment predicts, or we have no schema yet", "schema")
        task = task_of(config, x[0], experiment.n_classes, experiment.n_tokens, None, experiment.task)
        metric = find_metric(experiment.metric, experiment.task)
        if task.frozen_fingerprint != experiment.frozen:
            raise DataError(f"the frozen weights of {config.model} here are not those of the server")
        method = method_of(config)
        method = method.with_schedule(Schedule(experiment.n_clients, config.rounds, config.participation))
        train, test = own_rows(data, config.seed, config.test_share)
        self.policy.check_config(config, method, len(train), task.smallest_batch)
        none = np.zeros(0, np.int64)
        everybody: dict[str, Any] = {
            part: [rows if i == client else none for i in range(experiment.n_clients + 1)]
            for part, rows in (("train", train), ("test", test))
        }
        population = Population(
            x=x, y=y, n_classes=experiment.n_classes, seed=config.seed, smallest=task.smallest_batch, **everybody
        )
        population = as_configured(population, config)._replace(target=data.target)
        shapes = shapes_of(method, task, torch.arange(experiment.n_clients))
        self.ledger.bind(experiment, client, shapes)
        self.ledger.forget_old(experiment.id, self.say)
        with torch.no_grad():
            initial = method.init_client(task, task.initial)
        self.say(f"experiment {experiment.id}: {config.method}, {config.model}, {len(train)} training rows of ours")
        for line in wire.manifest_lines(shapes):
            self.say(line)
        work = Work(method, task, population, initial, "one_by_one", new_epochs=config.new_epochs)
        return Membership(work, shapes, self.ledger.place(experiment.id), config.rounds, metric)

    def _allowed_config(self, values: dict[str, Any]) -> Config:
        """The config of a run, if it names no code of ours that we have not allowed."""
        for name in sorted(wire.NEVER_SENT & values.keys()):
            raise Refused(f"the server asks for {name}, which is not for it to ask", "setting")
        config = make_config(values)
        if ":" in split_sizes(str(config.model))[0] and config.model not in self.own_models:
            raise UsageError(f"the server asks for the model {config.model}; allow it with --model {config.model}")
        for code in own_code(config.method):
            if code not in self.own_methods:
                raise UsageError(f"the server asks for the method {code}; allow it with --method {code}")
        return config

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
        # It has the number after those of all clients, and so random keys of its own.
        newcomer = asked.experiment.n_clients
        if asked.epochs > self.policy.adapt_epochs:
            raise Refused(
                f"an adaptation of {asked.epochs} epochs; adapt_epochs = {self.policy.adapt_epochs}", "setting"
            )
        member = self._membership(asked.experiment, newcomer)
        self.ledger.count_scoring(asked.experiment.id, "adapt", _hash_of(tensors))
        population = member.work.population
        received = wire.take_part("newcomer", tensors, member.shapes.newcomer)
        wire.refuse_others(tensors)
        alone = population._replace(train=[population.train[newcomer]], test=[population.test[newcomer]])
        work = member.work._replace(population=alone)
        n_train, n_test = len(alone.train[0]), len(alone.test[0])
        curve: list[float] = []
        if n_test >= self.policy.least_test_rows:
            found = adaptation_curve(work, received, newcomer, asked.epochs, asked.round, member.metric)
            curve = [self._curve_to_tell(member.metric, each[0], alone.test[0]) for each in found]
        adapted = adapted_model(work, received, asked.epochs, asked.round)
        self._save_model(asked.experiment, work.task.whole(adapted))
        reply = wire.AdaptReply(experiment=asked.experiment.id, curve=curve, n_train=n_train, n_test=n_test)
        return wire.pack(reply, {})

    # Scores

    def _curve_to_tell(self, metric: Metric, value: float, rows: np.ndarray) -> float:
        if metric is ACCURACY:
            return self._hits_to_tell(value * len(rows), rows) / len(rows)
        return self.policy.value_to_tell(value) or 0.0

    def _scores(
        self, member: Membership, asked: wire.RoundRequest, found: dict[str, Tree], outputs: torch.Tensor | None
    ) -> wire.Scores:
        """What is told of a model: by the policy, no more than it allows."""
        one, population = tree.row(found["scores"], 0), member.work.population
        rows, value = population.test[asked.client], None
        hits = self._hits_to_tell(float(one["hits"]), rows)
        if outputs is not None:
            y = population.y[rows].numpy()
            value = self.policy.value_to_tell(member.metric.of(outputs[: len(rows)].numpy(), y, population.target))
        loss = float(one["loss"]) if self.policy.test_loss else None
        return wire.Scores(hits=hits, loss=loss, n=int(one["n"]), value=value)

    def _hits_to_tell(self, hits: float, rows: np.ndarray) -> float:
        if not self.data.target.is_classes:
            return 0.0 if self.data.target.is_real else self.policy.hits_to_tell(hits, len(rows), 0.0)
        labels = self.data.y[rows]
        most_frequent = np.bincount(labels.ravel()).max(initial=0) * len(rows) / max(1, labels.size)
        return self.policy.hits_to_tell(hits, len(rows), float(most_frequent))


def _hash_of(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for name, x in sorted(tensors.items()):
        total.update(name.encode() + x.contiguous().numpy().tobytes())
    return total.hexdigest()


def _in_words(fields: dict[str, Any]) -> str:
    """A request in a few words, for the log; its fields are not checked yet."""
    experiment = fields.get("experiment")
    words = [str(fields.get("kind"))]
    if isinstance(experiment, dict):
        config = experiment.get("config")
        method = config.get("method") if isinstance(config, dict) else None
        words += [f"round {fields.get('round')}", f"experiment {experiment.get('id')}", str(method)]
        words += [word for word in ("train", "score", "last") if fields.get(word) is True]
    return ", ".join(wire.printable(word) for word in words)


def _code(error: Exception) -> str:
    """The rule that a request is outside of; empty if it is another error."""
    return error.code if isinstance(error, Refused) else ""


def _rounds(numbers: list[int]) -> str:
    """Such as `rounds 2, 5 to 340`: they may be very many."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(' to '.join(map(str, span)) for span in spans)}"


def _after(asked: wire.RoundRequest) -> str:
    return f"round {asked.version}" if asked.version else "the start"


def _round_line(asked: wire.RoundRequest, loss: float | None, personal: wire.Scores | None) -> str:
    parts = [f"loss {loss:.4f}"] if loss is not None else []
    if personal is not None:
        parts.append(f"own model {100 * personal.hits / personal.n:.2f} % of {personal.n} test rows")
    round = f"round {asked.round + 1}" if asked.train else f"after round {asked.round}"
    return f"{round}: {', '.join(parts) or 'done'}"
