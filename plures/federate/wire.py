"""Messages: each is one safetensors file whose header holds some fields, which are validated. Reading one runs no code.

The shapes of all tensors that may be sent in an experiment follow from its method, model and number of clients. Both
sides compute them independently (`simulate.shapes`), print them, and check every message against them.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from plures import tree
from plures.data.dataset import TaskKind
from plures.files import in_bytes
from plures.runs.config import HOW_IT_IS_RUN, SCORING
from plures.simulate.shapes import Shapes
from plures.tree import Tree

HEADER_BYTES = 1 << 16  # allowed in a message besides its tensors
TOO_LARGE = b"too large"  # stands for an answer that was not read to its end
TENSOR_BYTES = 512  # allowed for the name, the shape and the position of each tensor


SIMULATION_ONLY = (  # options that a federation does not have
    *["data", "data_dir", "partition", "split", "share", "new_clients", "attack", "attackers"],
    *["executor", "workers", "address", "validation", "unchosen", "pool_rows", "pool_every", "personal_epochs"],
    *[
        "engine",
        "precision",
        "device",
        "stack",
        "features",
        "client_column",
        "target",
        "drop",
        "time_column",
        "text_column",
        "window",
        "data_schema",
    ],
    *["image_size", "task", "metrics"],
)
NEVER_SENT = {*HOW_IT_IS_RUN, *SCORING, *SIMULATION_ONLY, "clients"}  # fields of a config that are not sent to clients


class Refused(Exception):
    """A message is not as it should be. The text quotes values from outside only if they are short.

    A client's refusal by its own rules has a code, a word that the server is told; the text stays with the client.
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


def printable(text: str) -> str:
    """A text from outside, shortened and without control characters, for terminals and logs."""
    return "".join(c if c.isprintable() else "?" for c in text[:60])


# Fields


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Field(ge=0, le=10**9)
Number = Field(allow_inf_nan=False)


class HelloRequest(_Fields):
    """The server asks a client to describe its data, and whether it would take part in a run."""

    kind: Literal["hello"] = "hello"
    seed: int = Count
    test_share: float = Field(gt=0, lt=1)
    config: dict[str, Any] = Field(default_factory=dict)  # of the run; empty if there is none yet


class Hello(_Fields):
    """What the server must know about a client's data: numbers and shapes, but no rows."""

    kind: Literal["hello"] = "hello"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    n_train: int = Count
    n_test: int = Count
    shape: list[int] = Field(max_length=8)
    dtype: Literal["float32", "int64"]
    label_axes: int = Field(ge=1, le=2)
    n_classes: int = Field(ge=1, le=10**6)
    n_tokens: int = Field(ge=0, le=10**6)
    task: TaskKind = "classes"
    schema_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")  # of the schema of its table
    version: str = Field(default="", pattern=r"^[0-9A-Za-z.+-]{0,30}$")  # of Plures at the client


class Experiment(_Fields):
    """What all clients of an experiment must know to take part in it."""

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    config: dict[str, Any]
    n_clients: int = Field(ge=1, le=10**6)
    n_classes: int = Field(ge=1, le=10**6)
    n_tokens: int = Field(ge=0, le=10**6)
    task: TaskKind = "classes"
    metric: str = Field(default="accuracy", max_length=30)
    frozen: str = Field("", pattern=r"^([0-9a-f]{64})?$")  # SHA-256 of the weights that do not train


class ColumnSummary(_Fields):
    """What a client's training rows say of a column of its table."""

    name: str = Field(max_length=200)
    column_kind: Literal["number", "date", "words"]
    n: int = Count
    n_blank: int = Count
    mean: float = Number
    variance: float = Field(ge=0, allow_inf_nan=False)
    words: list[Annotated[str, Field(max_length=200)]] = Field(max_length=10_000)
    counts: list[Annotated[int, Count]] = Field(max_length=10_000)


class SchemaRequest(_Fields):
    """The server asks a client what its columns are."""

    kind: Literal["schema"] = "schema"
    seed: int = Count
    test_share: float = Field(gt=0, lt=1)
    as_words: list[Annotated[str, Field(max_length=200)]] = Field(max_length=10_000)  # columns that are words elsewhere


class SchemaReply(_Fields):
    """The answer to a SchemaRequest."""

    kind: Literal["schema"] = "schema"
    columns: list[ColumnSummary] = Field(max_length=10_000)
    targets: list[Annotated[str, Field(max_length=200)]] = Field(max_length=1000)
    task: TaskKind
    classes: list[Annotated[str, Field(max_length=200)]] = Field(max_length=10_000)
    target: ColumnSummary


class SchemaOffer(_Fields):
    """The server offers a schema, which a client may refuse."""

    kind: Literal["offer"] = "offer"
    text: str = Field(max_length=20_000_000)


class OfferReply(_Fields):
    """The client reads its rows by the schema with this SHA-256 from now on."""

    kind: Literal["offer"] = "offer"
    schema_hash: str = Field(pattern=r"^[0-9a-f]{64}$")


class RoundRequest(_Fields):
    """What a client shall do with the tensors of the message: train, score its model, or both."""

    kind: Literal["round"] = "round"
    experiment: Experiment
    client: int = Count  # its number in the experiment
    round: int = Count  # counted from 0: so many rounds are complete
    version: int = Count  # the round after which its state was last accepted; 0 is the initial state
    missed: list[int]  # rounds, counted from 1, that were completed without it
    train: bool
    score: bool
    last: bool  # the run has ended: the client writes its personal model to its disk
    is_new: bool = False  # it has never taken part, and is served as a new client


class Scores(_Fields):
    """Sums over a client's test rows."""

    hits: float = Number
    loss: float | None = Number  # None if the client does not tell it
    n: int = Count
    value: float | None = Field(default=None, allow_inf_nan=False)  # of another metric than accuracy, where it says so


State = Literal["kept", "new", "lost"]  # the client read its state, needed none, or lost it and used the initial one


class RoundReply(_Fields):
    """The answer to a RoundRequest."""

    kind: Literal["round"] = "round"
    experiment: str = Field(pattern=r"^[0-9a-f]{16}$")
    client: int = Count
    round: int = Count
    n: int = Count  # training rows
    state: State
    loss: float | None = Number
    flops: int = Field(ge=0, le=10**20)  # of training
    personal: Scores | None
    generic: Scores | None


class AdaptRequest(_Fields):
    """Asks a client that did not take part to make a personal model from the tensors of the message."""

    kind: Literal["adapt"] = "adapt"
    experiment: Experiment
    epochs: int = Field(ge=0, le=10**4)
    round: int = Count  # so many rounds are complete: the learning rate may depend on it


class AdaptReply(_Fields):
    """The answer to an AdaptRequest."""

    kind: Literal["adapt"] = "adapt"
    experiment: str = Field(pattern=r"^[0-9a-f]{16}$")
    curve: list[float] = Field(max_length=10**4 + 1)  # its accuracy after 0, 1, ... epochs; empty without test rows
    n_train: int = Count
    n_test: int = Count


class ErrorReply(_Fields):
    """An error occurred at the client. The text of the error is only in its own log, as it may contain data."""

    kind: Literal["error"] = "error"
    error: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,60}$")  # the type of the error
    code: str = Field(default="", pattern=r"^[a-z]{0,20}$")  # which rule of the client the request is outside of


# Messages

SomeFields = TypeVar("SomeFields", bound=_Fields)


def pack(fields: _Fields, parts: dict[str, Tree]) -> bytes:
    """One message. Equal tensors are stored only once."""
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    seen: dict[str, str] = {}
    for part, content in parts.items():
        for name, x in tree.by_path(part, content).items():
            key = f"{x.dtype} {tuple(x.shape)} {hashlib.blake2b(x.numpy().tobytes()).hexdigest()}"
            if key in seen:
                same[name] = seen[key]
            else:
                seen[key], tensors[name] = name, x
    return save(tensors, metadata={"fields": fields.model_dump_json(), "same": json.dumps(same)})


def unpack(data: bytes, most: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a message, not yet validated, and its tensors by name."""
    if len(data) > most or data == TOO_LARGE:
        size = "too many bytes to be read" if data == TOO_LARGE else in_bytes(len(data))
        raise Refused(f"it has {size}, but at most {in_bytes(most)} were expected")
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"]
        fields, same = json.loads(header["fields"]), json.loads(header["same"])
        tensors = load(data)
        tensors |= {name: tensors[other] for name, other in same.items()}
        if not isinstance(fields, dict):
            raise TypeError
    except Exception:  # the bytes may be anything at all
        raise Refused("it is not a message of ours (safetensors with checked fields)") from None
    return fields, tensors


def check_fields(kind: type[SomeFields], fields: dict[str, Any]) -> SomeFields:
    """The validated fields of a message of this kind; raises Refused if one is wrong."""
    if "kind" in kind.model_fields and fields.get("kind") != kind.model_fields["kind"].default:
        raise Refused("it is of another kind, or of none")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        raise Refused(f"its field {printable(where)} is wrong ({first['type']})") from None


def most_bytes(*contents: Tree) -> int:
    """The largest size that a message with this content may have."""
    each = [x for content in contents for x in tree.leaves(content)]
    return HEADER_BYTES + sum(x.numel() * x.element_size() + TENSOR_BYTES for x in each)


def take_part(part: str, tensors: dict[str, Tensor], form: Tree) -> Tree:
    """Take the tensors of a part out of `tensors`, as a tree like `form`.

    Raises Refused if one is missing, has another shape or type, or has numbers that are not finite.
    """
    leaves = []
    for name, x in zip(tree.names(form), tree.leaves(form), strict=True):
        found = tensors.pop(f"{part}/{name}", None)
        if found is None:
            raise Refused(f"{part}/{name} is missing")
        if found.shape != x.shape or found.dtype != x.dtype:
            raise Refused(f"{part}/{name} is {_shape_and_type(found)}, not {_shape_and_type(x)}")
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise Refused(f"{part}/{name} has numbers that are not finite")
        leaves.append(found)
    return tree.unflatten(leaves, tree.flatten(form)[1])


def take_trimmed_part(part: str, tensors: dict[str, Tensor], form: Tree, needed: Callable[[Tree], Tree]) -> Tree:
    """As `take_part`, but tensors that the receiver does not need may be missing, and are zeros."""
    names, present = tree.names(form), set(tensors)
    for name, x in zip(names, tree.leaves(form), strict=True):
        tensors.setdefault(f"{part}/{name}", torch.zeros(x.shape, dtype=x.dtype))
    whole = take_part(part, tensors, form)
    if {f"{part}/{name}" for name in tree.names(needed(whole))} != {f"{part}/{name}" for name in names} & present:
        raise Refused(f"tensors of {part} are missing")
    return whole


def refuse_others(tensors: dict[str, Tensor]) -> None:
    """Refuse a message with tensors that were not asked for."""
    for name, x in tensors.items():
        raise Refused(f"{printable(name)} ({_shape_and_type(x)}) is not on the list of what travels")


def _shape_and_type(x: Tensor) -> str:
    return f"{'x'.join(map(str, x.shape)) or 'one'} {str(x.dtype).removeprefix('torch.')}"


# What may be sent


def manifest(shapes: Shapes) -> list[dict[str, Any]]:
    """Every tensor that may be sent: direction, name, shape, type and bytes."""
    out = []
    for part in ("train", "serve", "generic", "newcomer", "upload"):
        form = getattr(shapes, part)
        for name, x in zip(tree.names(form), tree.leaves(form), strict=True):
            direction = "up" if part == "upload" else "down"
            dtype = str(x.dtype).removeprefix("torch.")
            size = x.numel() * x.element_size()
            row = {"direction": direction, "name": f"{part}/{name}", "shape": list(x.shape), "dtype": dtype}
            out.append(row | {"bytes": size})
    return out


def manifest_lines(shapes: Shapes) -> list[str]:
    """The manifest as lines of text."""
    rows = manifest(shapes)
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [
        f"  {row['direction']:4}  {row['name']:{width}}  {'x'.join(map(str, row['shape'])) or 'one':>12}  "
        f"{row['dtype']:8} {in_bytes(row['bytes'])}"
        for row in rows
    ]
    stays = ", ".join(tree.names(shapes.kept)) or "nothing"
    return ["what travels (equal tensors once), and nothing else:", *lines, f"  stays with the client: {stays}"]
