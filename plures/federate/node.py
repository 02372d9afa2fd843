"""A client's half of a run: its rows, its private state on its own disk, and its answers to the server.

Rows and state never leave. An answer holds the tensors that the method uploads, which are held against
the list of what travels before they are sent, and numbers: how many rows, the loss, the hits on test rows.
"""

import hashlib
import shutil
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from .. import checkpoint, datasets, newcomers, tree
from ..adapt import own_rows
from ..choose import choose
from ..config import make_config
from ..errors import DataError, UsageError
from ..execute import Job, Population, Work, personal_function, run_group
from ..method import Same, Schedule
from ..run import Say, task_of
from ..tree import Tree
from . import wire
from .wire import Refused

MOST_BYTES = 8 << 30  # of a message from the server


class Taking(NamedTuple):
    """A client's part in an experiment."""

    work: Work
    forms: wire.Forms
    folder: Path

    def do(self, kind: str, asked: wire.RoundRequest, received: Tree, state: Tree) -> Tree:
        """One of the things that clients do, with the rows and the keys of a round."""
        job = Job(kind, asked.round, False, 0, [0], [asked.client])
        return self.work.result(job, Same(received), tree.map(lambda x: x[None], state))


class Node:
    """Answers messages. All that it remembers is on disk, so it may be killed at any time."""

    def __init__(self, name: str, data: Path, folder: Path, say: Say, own_models: tuple[str, ...] = ()) -> None:
        self.name, self.folder, self.say, self.own_models = name, folder, say, own_models
        self.data = datasets.load(str(data))
        self._taking: dict[str, Taking] = {}
        self._last = (b"", b"")  # the last message, as its hash, and the answer to it

    def answer(self, message: bytes) -> bytes:
        """The answer to a message. Whatever goes wrong, no word of it leaves but the type of the error."""
        key = hashlib.blake2b(message).digest()
        if key != self._last[0]:  # else it was sent twice
            try:
                self._last = (key, self._answer(message))
            except Exception as error:
                said = str(error) if isinstance(error, Refused | UsageError | DataError) else traceback.format_exc()
                self.say(f"a message could not be answered: {said}")
                return wire.pack(wire.ErrorReply(error=type(error).__name__), {})
        return self._last[1]

    def _answer(self, message: bytes) -> bytes:
        fields, tensors = wire.unpack(message, MOST_BYTES)
        kind = fields.get("kind")
        if kind == "hello":
            return self._hello(wire.checked(wire.HelloRequest, fields))
        if kind == "round":
            return self._round(wire.checked(wire.RoundRequest, fields), tensors)
        if kind == "adapt":
            return self._adapt(wire.checked(wire.AdaptRequest, fields), tensors)
        raise Refused("its kind is none that is known")

    def _hello(self, asked: wire.HelloRequest) -> bytes:
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

    def _round(self, asked: wire.RoundRequest, tensors: dict[str, torch.Tensor]) -> bytes:
        taking, client = self._take_part(asked.experiment, asked.client), asked.client
        population = taking.work.population
        parts = self._received(taking, asked, tensors)
        state, had = self._state(taking, asked.version)
        if asked.missed:
            self.say(f"the server went on without us in {_rounds(asked.missed)}; our state is that of {_after(asked)}")
        personal = generic = loss = None
        upload: dict[str, Tree] = {}
        n_flops = 0
        if asked.score and len(population.test[client]):
            personal = _scores(taking.do("score", asked, parts["serve"], state))
            if parts["generic"]:
                generic = _scores(taking.do("generic", asked, parts["generic"], state))
        if asked.last:
            self._write_model(taking, asked, parts["serve"], state)
        if asked.train:
            trained, of_training = taking.do("train", asked, parts["train"], state)
            new, own, metrics = tree.row(trained, 0)
            loss, n_flops = float(metrics["loss"]), int(of_training)
            self._put(taking, asked, new)
            upload = {"upload": self._fit_to_leave(taking, own)}
        self._forget(taking, asked.keep)
        self.say(_told(asked, loss, personal))
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

    def _take_part(self, experiment: wire.Experiment, client: int) -> Taking:
        """The client's part in an experiment, set up when it first hears of it."""
        key = f"{experiment.model_dump_json()} {client}"
        if key not in self._taking:
            self._taking = {key: self._set_up(experiment, client)} | dict(list(self._taking.items())[:15])
        return self._taking[key]

    def _set_up(self, experiment: wire.Experiment, client: int) -> Taking:
        config, data = make_config(experiment.config), self.data
        if ":" in str(config.model) and config.model not in self.own_models:
            raise UsageError(f"the server asks for the model {config.model}; allow it with --model {config.model}")
        if data.n_classes > experiment.n_classes or data.n_tokens > experiment.n_tokens:
            raise DataError("our rows have labels or tokens beyond those of the experiment")
        if client > experiment.n_clients:
            raise Refused("the client's number is beyond the number of clients")
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        task = task_of(config, x[0], experiment.n_classes, experiment.n_tokens)
        method = choose(config.method, config.settings, config.solver())
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
        found = wire.forms(method, task, experiment.n_clients)
        with torch.no_grad():
            initial = method.init_client(task, task.initial)
        self.say(f"experiment {experiment.id}: {config.method}, {config.model}, {len(train)} training rows of ours")
        for line in wire.manifest_lines(found):
            self.say(line)
        work = Work(method, task, population, initial, "one_by_one")
        return Taking(work, found, self.folder / "state" / experiment.id)

    def _received(self, taking: Taking, asked: wire.RoundRequest, tensors: dict[str, torch.Tensor]) -> dict[str, Tree]:
        method, task, forms = taking.work.method, taking.work.task, taking.forms
        parts: dict[str, Tree] = {"serve": {}, "generic": {}}
        for part in ["train"] * asked.train + ["serve"] * (asked.score or asked.last):
            form = getattr(forms, part)
            parts[part] = wire.filled(part, tensors, form, lambda whole: method.needed(task, whole))
        if asked.score:
            parts["generic"] = wire.taken("generic", tensors, forms.generic)
        wire.nothing_left(tensors)
        return parts

    def _fit_to_leave(self, taking: Taking, upload: Tree) -> Tree:
        """The upload, if every tensor of it is on the list of what travels; else it is not sent."""
        tensors = checkpoint.named("upload", upload)
        fine = wire.taken("upload", tensors, taking.forms.upload)
        wire.nothing_left(tensors)
        return fine

    # State on disk: a folder for each experiment, in it one for each version

    def _state(self, taking: Taking, version: int) -> tuple[Tree, wire.State]:
        if version == 0:
            return taking.work.initial, "new"
        try:
            tensors = checkpoint.read_state(taking.folder / f"{version:06d}")
            own = {name.removeprefix("client/"): x for name, x in tensors.items()}
            return checkpoint.restore(taking.work.initial, own), "kept"
        except Exception as error:
            self.say(f"our state after round {version} cannot be read ({error}): we begin anew")
            return taking.work.initial, "lost"

    def _put(self, taking: Taking, asked: wire.RoundRequest, state: Tree) -> None:
        about = {"experiment": asked.experiment.id, "client": asked.client, "name": self.name}
        parts = [("state.safetensors", checkpoint.named("client", state))]
        checkpoint.write_parts(taking.folder, asked.round + 1, parts, about)

    def _forget(self, taking: Taking, keep: int) -> None:
        for path in checkpoint.folders(taking.folder):
            if int(path.name) < keep:
                shutil.rmtree(path, ignore_errors=True)

    def _write_model(self, taking: Taking, asked: wire.RoundRequest, received: Tree, state: Tree) -> None:
        work = taking.work
        shards = work.population.shards([asked.client], "train", "personalize", asked.round)
        stacked = tree.map(lambda x: x[None], state)
        fn = personal_function(work.method, work.task)
        self._save_model(asked.experiment, tree.row(run_group(work.style, fn, Same(received), stacked, shards), 0))

    def _save_model(self, experiment: wire.Experiment, model: Tree) -> None:
        path = self.folder / "models" / f"{experiment.id}.safetensors"
        about = {"method": str(experiment.config["method"]), "model": str(experiment.config["model"])}
        checkpoint.write_bytes(path, save(checkpoint.named("model", model), metadata=about))
        self.say(f"our own model is in {path}")

    # New clients

    def _adapt(self, asked: wire.AdaptRequest, tensors: dict[str, torch.Tensor]) -> bytes:
        newcomer = asked.experiment.n_clients  # its keys are those of a client after all others
        taking = self._take_part(asked.experiment, newcomer)
        method, task, population = taking.work[:3]
        received = wire.taken("newcomer", tensors, taking.forms.newcomer)
        wire.nothing_left(tensors)
        alone = population._replace(train=[population.train[newcomer]], test=[population.test[newcomer]])
        curve = newcomers.curve(method, task, received, alone, newcomer, asked.epochs, "one_by_one")
        self._save_model(asked.experiment, newcomers.own_model(method, task, received, alone, asked.epochs))
        n_train, n_test = len(alone.train[0]), len(alone.test[0])
        reply = wire.AdaptReply(
            experiment=asked.experiment.id, curve=[each[0] for each in curve if each], n_train=n_train, n_test=n_test
        )
        return wire.pack(reply, {})


def _scores(found: Tree) -> wire.Scores:
    one = tree.row(found, 0)
    return wire.Scores(hits=float(one["hits"]), loss=float(one["loss"]), n=int(one["n"]))


def _rounds(numbers: list[int]) -> str:
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _after(asked: wire.RoundRequest) -> str:
    return f"round {asked.version}" if asked.version else "the start"


def _told(asked: wire.RoundRequest, loss: float | None, personal: wire.Scores | None) -> str:
    said = [f"loss {loss:.4f}"] if loss is not None else []
    if personal is not None:
        said.append(f"own model {100 * personal.hits / personal.n:.2f} % of {personal.n} test rows")
    round = f"round {asked.round + 1}" if asked.train else f"after round {asked.round}"
    return f"{round}: {', '.join(said) or 'done'}"
