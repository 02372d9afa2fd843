"""Hostile requests of a server and hostile answers of a client, as tables that tests and campaigns share.

`try_requests` and `try_answers` play them against honest sides in this process. An outcome says what was refused and in
which words; a traceback, an answer with tensors, or an answer that is merged is a failure.
"""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from plures.data import sources
from plures.federate import server, wire
from plures.federate.client import Client
from plures.federate.policy import Policy
from plures.federate.wire import Refused
from tests.federate.federation import Here, federated

Tensors = dict[str, torch.Tensor]
Bend = Callable[[dict[str, Any], Tensors], bytes]  # fields and tensors of an honest message -> a hostile one


class Outcome(NamedTuple):
    name: str
    refused: bool
    words: str  # of the side that refused


def message(fields: Any, tensors: Tensors, same: Any = None) -> bytes:
    return save(tensors, metadata={"fields": json.dumps(fields), "same": json.dumps(same or {})})


def with_fields(**changes: Any) -> Bend:
    return lambda fields, tensors: message(fields | changes, tensors)


def in_experiment(**changes: Any) -> Bend:
    return lambda fields, tensors: message(fields | {"experiment": fields["experiment"] | changes}, tensors)


def in_config(**changes: Any) -> Bend:
    def bend(fields: dict[str, Any], tensors: Tensors) -> bytes:
        experiment = fields["experiment"]
        config = experiment["config"] | changes
        return message(fields | {"experiment": experiment | {"id": "f" * 16, "config": config}}, tensors)

    return bend


def with_tensors(change: Callable[[Tensors], Tensors]) -> Bend:
    return lambda fields, tensors: message(fields, change(dict(tensors)))


def raw(content: bytes) -> Bend:
    return lambda fields, tensors: content


def first(tensors: Tensors) -> str:
    return next(name for name, x in tensors.items() if x.is_floating_point())


def replace_first(make: Callable[[torch.Tensor], torch.Tensor]) -> Bend:
    return with_tensors(lambda tensors: tensors | {first(tensors): make(tensors[first(tensors)])})


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this must not be run",))


def torn(fields: dict[str, Any], tensors: Tensors) -> bytes:
    whole = message(fields, tensors)
    return whole[: len(whole) // 2]


def long_header(fields: dict[str, Any], tensors: Tensors) -> bytes:
    return (1 << 62).to_bytes(8, "little") + message(fields, tensors)[8:]


def nested(fields: dict[str, Any], tensors: Tensors) -> bytes:
    deep = "[" * 100_000 + "]" * 100_000
    return save(tensors, metadata={"fields": deep, "same": "{}"})


RUBBISH: dict[str, Bend] = {
    "nothing": raw(b""),
    "zeros": raw(bytes(1000)),
    "noise": raw(bytes(range(256)) * 4),
    "a pickle": raw(pickle.dumps(Evil())),
    "JSON": raw(b'{"kind": "round"}'),
    "half a message": torn,
    "a header of many bytes": long_header,
    "deep brackets": nested,
    "fields that are a list": lambda fields, tensors: message([1, 2, 3], tensors),
    "fields that are a word": lambda fields, tensors: message("round", tensors),
    "no fields": lambda fields, tensors: save(tensors),
    "a tensor that is another, which is not there": lambda f, t: message(f, t, {"train/x": "nowhere"}),
    "an unknown kind": with_fields(kind="shell"),
    "no kind": lambda fields, tensors: message({k: v for k, v in fields.items() if k != "kind"}, tensors),
}

REQUESTS: dict[str, Bend] = {
    **{f"rubbish: {name}": bend for name, bend in RUBBISH.items()},
    "erase what is kept": with_fields(keep=10**9),
    "a command": with_fields(run="rm -rf /"),
    "a negative round": with_fields(round=-1),
    "a round beyond the last": with_fields(round=10**6),
    "a version of the future": with_fields(version=10**6),
    "another client's number": with_fields(client=1),
    "a number of no client": with_fields(client=10**9),
    "an experiment whose number is a path": in_experiment(id="../../../etc/pas"),
    "many clients": in_experiment(n_clients=10**9),
    "many classes": in_experiment(id="e" * 16, n_classes=10**6),
    "no class": in_experiment(id="e" * 16, n_classes=1),
    "another method under the same number": lambda f, t: message(
        f | {"experiment": f["experiment"] | {"config": f["experiment"]["config"] | {"method": "mtl"}}}, t
    ),
    "a method that does not exist": in_config(method="fedevil"),
    "a method that is code": in_config(method="os:system"),
    "a model that is code": in_config(model="os:system"),
    "a setting that does not exist": in_config(settings={"evil": 1}),
    "a file of the client as data": in_config(data="/etc/passwd"),
    "a cluster to connect to": in_config(address="ray://evil:10001"),
    "an option that does not exist": in_config(evil=1),
    "one row a step": in_config(batch=1, steps=1),
    "one step": in_config(steps=1),
    "no learning rate": in_config(lr=0.0),
    "an infinite learning rate": in_config(lr=math.inf),
    "epochs without end": in_config(epochs=10**5),
    "rounds without end": in_config(rounds=10**8),
    "work of nothing": in_config(local_work="uniform:0-5"),
    "almost no test rows": in_config(test_share=1e-6),
    "a tensor too many": with_tensors(lambda t: t | {"train/evil": torch.zeros(3)}),
    "a tensor too few": with_tensors(lambda t: {k: x for k, x in t.items() if k != first(t)}),
    "a model that is not finite": replace_first(lambda x: torch.full_like(x, torch.nan)),
    "a model of another shape": replace_first(lambda x: torch.zeros(3, 3)),
    "a model of another type": replace_first(lambda x: x.double()),
    "a huge tensor": replace_first(lambda x: torch.zeros(1 << 20)),
}


def after(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Bend:
    return lambda fields, tensors: message(change(fields), tensors)


HELLOS: dict[str, Bend] = {
    "another name": with_fields(name="b"),
    "a name that is a path": with_fields(name="../../x"),
    "a name of HTML": with_fields(name="<script>alert(1)</script>"),
    "a name without end": with_fields(name="a" * 10**5),
    "rows without end": with_fields(n_train=10**9),
    "more rows than there are numbers": with_fields(n_train=10**30),
    "half a row": with_fields(n_train=1.5),
    "fewer than no rows": with_fields(n_train=-5),
    "test rows without end": with_fields(n_test=10**9),
    "many classes in it": with_fields(n_classes=10**6),
    "no class in it": with_fields(n_classes=0),
    "many tokens": with_fields(n_tokens=10**6),
    "a row of another shape": with_fields(shape=[2, 2]),
    "a row of negative shape": with_fields(shape=[-1]),
    "a row without end": with_fields(shape=[10**9] * 8),
    "a row of many axes": with_fields(shape=[1] * 100),
    "rows of another type": with_fields(dtype="int64"),
    "rows of objects": with_fields(dtype="object"),
    "labels of other axes": with_fields(label_axes=2),
    "a version that is a command": with_fields(version="$(reboot)"),
    "a small tensor in a hello": lambda fields, tensors: message(fields, {"x": torch.zeros(1)}),
    "tensors in a hello": lambda fields, tensors: message(fields, {"x": torch.zeros(1 << 20)}),
}

ANSWERS: dict[str, Bend] = {
    **{f"rubbish: {name}": bend for name, bend in RUBBISH.items()},
    **{f"hello: {name}": bend for name, bend in HELLOS.items()},
    "an answer to another round": with_fields(round=7),
    "an answer of another client": with_fields(client=1),
    "an answer to another experiment": with_fields(experiment="0" * 16),
    "more rows than at the start": with_fields(n=10**7),
    "no rows": with_fields(n=-1),
    "no loss": with_fields(loss=None),
    "a loss of 1e308": with_fields(loss=1e308),
    "a loss of minus infinity": with_fields(loss=-math.inf),
    "a loss that is a word": with_fields(loss="small"),
    "work without end": with_fields(flops=10**30),
    "a state that is none": with_fields(state="mine"),
    "scores that nobody asked for": with_fields(personal={"hits": 1.0, "loss": 1.0, "n": 30}),
    "a field of its own": with_fields(rows=[1, 2, 3]),
    "an error whose type is a text": lambda f, t: message({"kind": "error", "error": "row 7: cancer"}, {}),
    "an error without end": lambda f, t: message({"kind": "error", "error": "E" * 10**5}, {}),
    "a code that is a text": lambda f, t: message({"kind": "error", "error": "Refused", "code": "row 7!"}, {}),
    "an upload that is not a number": replace_first(lambda x: torch.full_like(x, torch.nan)),
    "an upload without end": replace_first(lambda x: torch.full_like(x, torch.inf)),
    "an upload of another shape": replace_first(lambda x: torch.zeros(3)),
    "an upload of another type": replace_first(lambda x: x.half()),
    "an upload of many bytes": replace_first(lambda x: torch.zeros(1 << 20)),
    "a tensor missing": with_tensors(lambda t: {k: x for k, x in t.items() if k != first(t)}),
    "no tensor": with_tensors(lambda t: {}),
    "a private tensor": with_tensors(lambda t: t | {"client/model/head.bias": torch.zeros(10)}),
    "a tensor whose name is a path": with_tensors(lambda t: t | {"../../evil": torch.zeros(1)}),
    "a tensor whose name is a terminal's command": with_tensors(lambda t: t | {"\x1b[2Jevil": torch.zeros(1)}),
}


def write_rows(folder: Path, names: tuple[str, ...] = ("a", "b", "c"), n: int = 90) -> Path:
    """A file for each client, with enough rows for the default policy."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = sources.load("digits")
    for number, name in enumerate(names):
        rows = slice(number * n, (number + 1) * n)
        np.savez(folder / f"{name}.npz", x=digits.x[rows], y=digits.y[rows], is_test=np.arange(n) % 3 == 2)
    return folder


class Sides(NamedTuple):
    """A run of Ditto after a round, and its three honest clients."""

    run: Any
    link: Here
    clients: dict[str, Client]
    request: bytes  # to the first client, for the next round
    answer: bytes  # of a client in its place with the same rows
    said: list[str]  # by the clients


def honest_sides(folder: Path) -> Sides:
    data, said = write_rows(folder / "data"), []
    clients = {
        path.stem: Client(path.stem, path, folder / "own" / path.stem, said.append, policy=Policy())
        for path in sorted(data.glob("*.npz"))
    }
    link = Here(clients)
    run = federated("ditto", link, folder / "run", lr=0.1, batch=10, rounds=5)
    run.state.merge(run.play(False))
    with torch.no_grad():
        sent = run.state.scene.method.send(run.state.scene.task, run.state.server, torch.tensor([0]))
    request = wire.pack(run._request(0, train=True, score=False, is_last=False), {"train": sent.tree})
    return Sides(run, link, clients, request, clients["a"].answer(request), said)


def try_requests(folder: Path) -> list[Outcome]:
    """Every hostile request to an honest client with the default policy."""
    sides, found = honest_sides(folder), []
    client, said = sides.clients["a"], sides.said
    fields, tensors = wire.unpack(sides.request, 1 << 30)
    for name, bend in REQUESTS.items():
        said.clear()
        reply, sent = wire.unpack(client.answer(bend(fields, tensors)), 1 << 30)
        found.append(Outcome(name, reply["kind"] == "error" and not sent, " ".join(said)))
    return found


def try_answers(folder: Path) -> list[Outcome]:
    """Every hostile answer to an honest server."""
    sides, found = honest_sides(folder), []
    asked = sides.run._request(0, train=True, score=False, is_last=False)
    fields, tensors = wire.unpack(sides.answer, 1 << 30)
    hello = wire.unpack(sides.clients["a"].answer(wire.pack(wire.HelloRequest(seed=3, test_share=0.25), {})), 1 << 20)
    for name, bend in ANSWERS.items():
        said: list[str] = []
        if name.startswith("hello: "):
            hostile, honest = bend(*hello), sides.link.bend
            sides.link.bend = lambda who, answer, hostile=hostile: hostile if who == "a" else answer
            config = sides.run.state.scene.config.model_copy(update={"clients": None, "settings": {}})
            kept = server.collect_hellos(sides.link, ["a", "b", "c"], config, sides.run.limits, said.append)
            sides.link.bend = honest
            found.append(Outcome(name, "a" not in kept and {"b", "c"} <= set(kept), " ".join(said)))
            continue
        try:
            sides.run.check_answer(asked, bend(fields, tensors))
            found.append(Outcome(name, False, ""))
        except Refused as refusal:
            found.append(Outcome(name, True, str(refusal)))
    return found
