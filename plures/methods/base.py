"""Method: frozen settings and a few pure functions. As it stands here, it is FedAvg.

Client functions (`init_client`, `train`, `personalize`, `predict`, `adapt`) are written for one client and never see
the client axis. Server functions (`init_server`, `send`, `merge`, `generic`, `newcomer`) are written for a cohort:
row i belongs to client `ids[i]`. So the same text runs for one client after another, vectorised over many, and on a
real network.

State is data: a function takes a tree of tensors and returns a new one. What travels is a dict, so that it names
itself on the wire; what stays is a NamedTuple, so that a typing slip is caught at home.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.data.batches import Batch
from plures.data.shard import Shard
from plures.errors import UsageError
from plures.learn.fit import Fitted, fit
from plures.learn.solver import Solver
from plures.learn.task import Task
from plures.methods.messages import Each, Same
from plures.methods.search import Search, among
from plures.tree import Params, Tree

Metrics = dict[str, Tensor]


class Federation(NamedTuple):
    """What the server knows of its clients before training."""

    sizes: Tensor  # [client], rows of training data
    key: Tensor  # for what the server draws

    @property
    def n_clients(self) -> int:
        return len(self.sizes)


class Schedule(NamedTuple):
    """What everybody knows of a run before it begins."""

    n_clients: int = 1
    rounds: int = 1
    participation: float = 1.0  # share of clients in a round

    @property
    def rounds_per_client(self) -> float:
        """In how many rounds a client is expected to take part."""
        return max(1.0, self.rounds * self.participation)


class Penalty(NamedTuple):
    """A term that an add-on adds to the loss of the shared model p: <linear, p> + weight/2 |p - anchor|^2."""

    linear: Params
    weight: Tensor
    anchor: Params

    def of(self, params: Params) -> Tensor:
        """Its value; what is empty adds nothing."""
        terms = []
        if self.linear:
            terms.append(tree.dot(self.linear, params))
        if self.anchor:
            terms.append(self.weight / 2 * tree.sq_dist(self.anchor, params))
        return sum(terms, start=torch.zeros(()))


class AddonTerms(NamedTuple):
    """What add-ons change in the local training of their host."""

    start: Params | None = None  # where the shared model starts, if not at the received one
    penalties: tuple[Penalty, ...] = ()  # added to the loss of the shared model

    def start_from(self, received: Params) -> Params:
        """Where the shared model starts."""
        return received if self.start is None else self.start

    def plus(self, penalty: Penalty) -> "AddonTerms":
        """The same with one more penalty."""
        return self._replace(penalties=(*self.penalties, penalty))


NO_TERMS = AddonTerms()


def with_penalties(loss: Tensor, params: Params, penalties: tuple[Penalty, ...]) -> Tensor:
    """The loss of the shared model with the penalties of add-ons."""
    for penalty in penalties:
        loss = loss + penalty.of(params)
    return loss


def setting(
    default: Any,
    help: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    choices: tuple[str, ...] = (),
    search: Search | None = None,
) -> Any:
    """A field of a method: its default, what it means, what it may be, and where `plures tune` looks for a better one.

    Words and booleans need no `search`: all their values are tried if a user names the setting.
    """
    if search is None and isinstance(default, bool):
        search = among(True, False).if_named()
    elif search is None and choices:
        search = among(*choices).if_named()
    metadata = {"help": help, "least": least, "most": most, "choices": choices, "search": search}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method:
    """Clients train the received model; the server takes the mean, weighted by rows."""

    solver: Solver = Solver()
    schedule: Schedule = Schedule()

    sampling: ClassVar[Literal["random", "in turn"]] = "random"  # how the clients of a round are chosen
    depends_on_rounds: ClassVar[bool] = False  # whether a round is another one in a run of more rounds
    refuses: ClassVar[dict[str, str]] = {}  # add-ons that make no sense around it, and why
    trains: ClassVar[tuple[str, ...]] = ()  # parts, head or body, that it treats apart, so that they must train
    insides: ClassVar[str] = ""  # module:function that draws what is inside its models, for the report

    def __post_init__(self) -> None:
        for field in settings_of(type(self)):
            _check_setting(type(self).__name__, field, getattr(self, field.name))

    @property
    def title(self) -> str:
        """What it is called in sentences; an add-on is called by its host."""
        return type(self).__name__

    @property
    def takes_terms(self) -> bool:
        """Whether it trains a shared model whose start or loss an add-on can change: then `train` takes `terms`."""
        return "terms" in inspect.signature(self.train).parameters

    @property
    def public_rows(self) -> int:
        """How many rows of each class it needs that everybody may see: `task.public`."""
        return 0

    @property
    def trains_on_public(self) -> bool:
        """Whether these rows are among the training rows of every client."""
        return False

    @property
    def needs_classes(self) -> str:
        """What of it makes sense only where classes are predicted; empty if nothing does."""
        return "it needs public rows of each class" if self.public_rows else ""

    def shared(self, task: Task, params: Params) -> Params:
        """The part of a model that travels; of a message, that part without what else is in it."""
        return params

    def with_solver(self, solver: Solver) -> "Method":
        return dataclasses.replace(self, solver=solver)

    def with_schedule(self, schedule: Schedule) -> "Method":
        return dataclasses.replace(self, schedule=schedule)

    # Server: row i belongs to client ids[i]

    def init_server(self, task: Task, params: Params, federation: Federation) -> Tree:
        """The server's state before the first round."""
        return self.shared(task, params)

    def send(self, task: Task, server: Tree, ids: Tensor) -> Same | Each:
        """What the clients of a round receive."""
        return Same(server)

    def serve(self, task: Task, server: Tree, ids: Tensor) -> Same | Each:
        """What clients make their own models from: as sent, unless they train on something else."""
        return self.send(task, server, ids)

    def merge(self, task: Task, server: Tree, ids: Tensor, uploads: Tree, sizes: Tensor) -> Tree:
        """The server's state after a round, from the stacked uploads and the clients' numbers of rows."""
        return tree.mean(uploads, sizes)

    def generic(self, task: Task, server: Tree) -> Params | None:
        """The one model for all; None when there is none but the mean of the personal ones."""
        return server

    def newcomer(self, task: Task, server: Tree) -> Tree:
        """What a client that has not taken part is sent."""
        return server

    def notes(self, task: Task) -> tuple[str, ...]:
        """What a user should know before it is run with this model: that it is another method there, and the like."""
        return ()

    def refuse_frozen(self, task: Task) -> None:
        """Raise if a part of the model is frozen without which the method makes no sense."""
        for part in self.trains:
            if not any(task.is_head(name) == (part == "head") for name in tree.trainable(task.initial)):
                raise UsageError(
                    f"{self.title} trains the model's {part} apart from the rest, and it is frozen; let it train, or "
                    "choose another method, e.g. fedavg"
                )

    def snapshot(self, task: Task, server: Tree) -> dict[str, Tensor]:
        """What a report may show of the server's state over the rounds, by name; small, and read by nothing else."""
        return {}

    # One client

    def init_client(self, task: Task, params: Params) -> Tree:
        """The client's state before its first round."""
        return ()

    def train(
        self, task: Task, received: Tree, client: Tree, shard: Shard, terms: AddonTerms = NO_TERMS
    ) -> tuple[Tree, Tree, Metrics]:
        """What the client keeps, what it uploads, and numbers to show."""

        def objective(params: Params, batch: Batch, penalties: tuple[Penalty, ...]) -> Tensor:
            return with_penalties(task.loss(params, batch), params, penalties)

        fitted = fit(objective, terms.start_from(received), shard, self.solver, given=(terms.penalties,))
        return client, fitted.params, {"loss": fitted.loss, "steps": fitted.steps}

    def local_model(self, task: Task, received: Tree, client: Tree) -> Params:
        """The whole model that local training begins from: the received part and what the client kept."""
        return received

    def personalize(self, task: Task, received: Tree, client: Tree, shard: Shard) -> Tree:
        """The client's own model, from what the server would send it now and what it kept."""
        return received

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        """Logits of the client's own model."""
        return task.logits(personal, x)

    def adapt(self, task: Task, received: Tree, shard: Shard, epochs: int) -> Tree:
        """The own model of a client that has not taken part, after so many epochs on its rows.

        With no epoch there must be no look at a row; the numbers of rows of each class are known.
        """
        client = self.init_client(task, task.initial)
        model = task.initial | self.local_model(task, received, client)  # what never travels is as at the start
        return fine_tune(task, model, shard, self.solver, epochs)

    @property
    def personal_model_name(self) -> str:
        """Which model `personalize` gives, in a word."""
        return "global"

    @property
    def is_served_whole(self) -> bool:
        """Whether the personal model is made of the model for all and the client's rows, and nothing else."""
        return self.personal_model_name == "global"

    def trim(self, task: Task, message: Tree) -> Tree:
        """The part of the message to one client that must travel; the client has no use for the rest."""
        return message

    def traffic(self, task: Task, message: Tree, upload: Tree) -> tuple[Tree, Tree]:
        """The parts of one client's message and upload that are counted as traffic."""
        return self.trim(task, message), upload

    def n_bytes(self, task: Task, message: Tree, upload: Tree) -> tuple[int, int]:
        """Bytes down to and up from one client."""
        down, up = self.traffic(task, message, upload)
        return tree.n_bytes(down), tree.n_bytes(up)


def fine_tune(task: Task, params: Params, shard: Shard, solver: Solver, epochs: int) -> Params:
    """A whole model after plain training on a client's rows."""
    return fit(task.loss, params, shard, solver.for_epochs(epochs)).params


def fit_head(task: Task, head: Params, body: Params, shard: Shard, solver: Solver, epochs: int) -> Fitted:
    """A head after some epochs on a fixed body in inference mode, so that its statistics do not move."""

    def loss(head: Params, batch: Batch, body: Params) -> Tensor:
        return task.loss_of(task.classify(head, task.features(body, batch.x)), batch)

    return fit(loss, head, shard, solver.for_epochs(epochs), given=(body,))


def weights_setting(default: str = "samples") -> Any:
    """How uploads are weighted in the mean: a setting that many methods have."""
    return setting(default, "how uploads are weighted in the mean", choices=("samples", "uniform"))


@dataclass(frozen=True)
class Averaged(Method):
    """A method whose server takes the mean of what clients upload."""

    weights: str = weights_setting()

    def merge(self, task: Task, server: Tree, ids: Tensor, uploads: Tree, sizes: Tensor) -> Tree:
        return tree.mean(uploads, sizes if self.weights == "samples" else torch.ones_like(sizes))


@dataclass(frozen=True)
class Collected(Method):
    """A method whose server keeps the last model of every client, and none for all.

    `server.models` are the models, `server.seen` is 1 for clients that have uploaded one, and 0 for the others.
    """

    def merge(self, task: Task, server: Tree, ids: Tensor, uploads: Tree, sizes: Tensor) -> Tree:
        return server._replace(models=tree.put(server.models, ids, uploads), seen=server.seen.index_fill(0, ids, 1.0))

    def generic(self, task: Task, server: Tree) -> Params | None:
        return None

    def newcomer(self, task: Task, server: Tree) -> Tree:
        """The mean of the models that were trained; of all, before there are any."""
        return mean_of_seen(server.models, server.seen)


def mean_of_seen(models: Params, seen: Tensor) -> Params:
    """The plain mean of the stacked models of those who have uploaded one; of all, if nobody has."""
    return tree.mean(models, torch.where(seen.any(), seen, torch.ones_like(seen)))


def settings_of(method: type) -> list[dataclasses.Field[Any]]:
    """The fields that a user may set."""
    return [field for field in dataclasses.fields(method) if "help" in field.metadata]


def _check_setting(owner: str, field: dataclasses.Field[Any], value: Any) -> None:
    rule, name = field.metadata, f"{owner}.{field.name}"
    if rule["choices"]:
        if value not in rule["choices"]:
            raise UsageError(f"{name} must be one of {', '.join(rule['choices'])}, got {value!r}")
        return
    kind = type(field.default)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise UsageError(f"{name} must be {_kind_in_words(kind)}, got {value!r}")
    if kind in (int, float) and not rule["least"] <= value <= rule["most"]:
        raise UsageError(f"{name} must be {_bounds_in_words(rule['least'], rule['most'])}, got {value!r}")


def _kind_in_words(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]


def _bounds_in_words(least: float, most: float) -> str:
    if most == math.inf:
        return f"{least:g} or more"
    if least == -math.inf:
        return f"{most:g} or less"
    return f"between {least:g} and {most:g}"


Maker = Callable[[], Method]  # a class of methods, or a function that makes one
