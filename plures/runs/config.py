"""What a run is made of: one checked record that the command line, TOML files and Python share."""

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plures.errors import UsageError, unknown
from plures.files import to_toml
from plures.learn.solver import Solver
from plures.methods.search import Search, among, around, linear
from plures.runs import older

Value = bool | int | float | str


def _search(range: Search) -> dict[str, Any]:
    """Where `plures tune` looks for better values of an option, if it is searched."""
    return {"search": range}


class Config(BaseModel):
    """Everything that a run depends on, and how it is carried out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field("fedavg", description="name, with settings and add-ons: fedrod:loss=ce, ditto+ala")
    settings: dict[str, Value] = Field(default_factory=dict, description="settings of the method")
    data: str = Field(
        "digits",
        description="name of a data set; a .csv, .parquet or .npz file; or a folder of files, images or texts",
    )
    data_dir: str | None = Field(None, description="folder in which named data sets are looked for")
    client_column: str | None = Field(None, description="of a table: the column that says whose row it is")
    target: str | None = Field(
        None, description="of a table: the column to predict; several with commas are labels that are there or not"
    )
    drop: str | None = Field(None, description="of a table: columns that are not used, with commas between")
    time_column: str | None = Field(
        None, description="of a table: when a row was; the latest rows of a client are its test rows"
    )
    text_column: str | None = Field(None, description="of a table: the column of texts, which alone are read")
    window: int | None = Field(
        None, ge=1, description="of a table: rows are read as time series; so many rows before it tell the next one"
    )
    data_schema: str | None = Field(
        None, description="of a table: a file of `plures data schema` with columns, scales and categories"
    )
    image_size: int | None = Field(None, ge=1, le=1024, description="images in folders are scaled to so many pixels")
    task: Literal["classes", "binary", "labels", "number", "count"] | None = Field(
        None, description="what is predicted; if left out it follows from the column"
    )
    model: str | None = Field(
        None,
        description="name of a model, your own as module:Class, or a Hugging Face folder as hf:FOLDER; if left out "
        "mlp, for text fasttext or charlstm",
    )
    freeze: str | None = Field(
        None,
        description="weights that do not train: head, body, or names of layers or tensors, with * for anything, joined "
        "by commas; frozen ones are not sent and not kept by clients",
    )
    adapter: str | None = Field(
        None,
        description="small weights beside a frozen model that train with its head: lora:rank=4,layers=PATTERN, scale, "
        "bias, or head alone",
    )
    train: str | None = Field(None, description="weights that train, named as for --freeze; all others do not")
    features: Literal["once", "each"] = Field(
        "once",
        description="frozen layers that come first are run once for every row (once), or in every step (each)",
    )
    share: float = Field(1.0, gt=0, le=1, description="share of the rows of each class that is used")
    partition: str | None = Field(
        None, description="how rows are dealt to clients; if left out natural, or dirichlet:0.1 where the data has none"
    )
    split: str | None = Field(None, description="file that says who has which rows, instead of a partition")
    min_rows: int = Field(0, ge=0, description="clients with fewer training rows are left out, and named")
    test_share: float = Field(0.25, gt=0, lt=1, description="share of each client's rows that it is tested on")
    clients: int | None = Field(None, ge=1, description="number of clients; if left out 20, or all of the data's own")
    participation: float = Field(1.0, gt=0, le=1, description="share of clients that take part in a round")
    rounds: int = Field(20, ge=0, le=10**8, description="number of rounds")
    epochs: int = Field(
        1, ge=0, le=10**5, description="passes over a client's rows per round", json_schema_extra=_search(around(3))
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="batches per client and round, instead of epochs",
        json_schema_extra=_search(around(3)),
    )
    batch: int = Field(10, ge=1, le=10**9, description="rows in a batch", json_schema_extra=_search(around(4)))
    lr: float = Field(
        0.05, ge=0, le=1e30, description="learning rate of clients", json_schema_extra=_search(around(10))
    )
    lr_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="factor by which the learning rate shrinks in every round",
        json_schema_extra=_search(linear(0.9, 1)),
    )
    lr_decay_every: int = Field(1, ge=1, description="rounds between two such steps, with --schedule step")
    schedule: Literal["constant", "exponential", "step", "cosine"] = Field(
        "exponential",
        description="how the learning rate falls: by lr_decay in every round (exponential), by lr_decay in every "
        "lr_decay_every rounds (step), to zero at the last round (cosine), or not at all (constant)",
    )
    momentum: float = Field(
        0.0, ge=0, lt=1, description="momentum of clients' SGD", json_schema_extra=_search(linear(0, 0.95))
    )
    nesterov: bool = Field(False, description="Nesterov's form of momentum")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="weight decay of clients' training: an L2 penalty, or decoupled with adamw",
        json_schema_extra=_search(among(0.0, 1e-4, 5e-4, 1e-3, 5e-3)),
    )
    clip: float = Field(
        0.0,
        ge=0,
        description="clients' gradients are scaled down to this norm; 0 leaves them alone",
        json_schema_extra=_search(among(0.0, 1.0, 5.0, 10.0)),
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimizer of clients")
    last_batch: Literal["even", "drop", "keep"] = Field(
        "even",
        description="rows that fill no batch: make all batches nearly equal (even), leave these rows out of the epoch "
        "(drop), or make a smaller last batch (keep)",
    )
    augment: str = Field(
        "none", description="random changes of training images: crop (shifts by up to 4 pixels), flip, or crop,flip"
    )
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = Field(
        "sgd", description="FedOpt: how the server takes the mean update as a step, for methods that average"
    )
    server_lr: float | None = Field(
        None, gt=0, description="learning rate of the server; if left out 1, or 0.03 for adam and yogi"
    )
    local_work: str | None = Field(
        None,
        description="uniform:A-B, clients train A to B epochs (or steps, with --steps), drawn for every client and "
        "round; if left out all do the same",
    )
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of a client's training rows that is kept apart, to choose the best round by"
    )
    new_clients: int = Field(0, ge=0, description="clients held out of training, to be served as new ones at the end")
    new_epochs: int = Field(5, ge=0, description="epochs that a new client adapts for")
    attack: Literal["none", "labels", "random", "replace"] = Field(
        "none", description="attackers train on random labels, upload noise, or enlarge their updates"
    )
    attackers: float = Field(0.2, ge=0, lt=1, description="share of clients that attack")
    seed: int = Field(0, ge=0, description="all randomness comes from it")
    executor: Literal["auto", "vectorised", "one_by_one", "ray"] = Field(
        "auto",
        description="how clients are run: stacked (vectorised), one by one, or as vectorised by actors of Ray (ray); "
        "auto: the faster one, by a few steps where that is in doubt",
    )
    stack: int | None = Field(
        None, ge=1, description="most clients stacked together in training; if left out as many as pay"
    )
    engine: str = Field(
        "traced",
        description="how training steps are run: traced (fast) or eager (the reference); traced:winograd=off and the "
        "like switch off one of its passes",
    )
    precision: Literal["float32", "float64", "bf16"] = Field(
        "float32",
        description="type of weights and numbers in the data; bf16: weights are float32, products in models bfloat16",
    )
    device: str = Field("cpu", description="where tensors are and models compute: cpu, cuda, cuda:1 and so on, or mps")

    # These change nothing of the state.
    workers: int = Field(1, ge=1, description="worker processes, each with one thread")
    address: str | None = Field(
        None, description="a running Ray cluster, which must be trusted, for --executor ray; else Ray is started here"
    )
    eval_every: int = Field(1, ge=0, description="rounds between evaluations; 0 evaluates at the end only")
    unchosen: Literal["carry", "refresh"] = Field(
        "carry",
        description="a client is scored with the state it has kept, or after one more training on a copy of it",
    )
    pool_rows: int | None = Field(
        None,
        ge=0,
        description="test rows of all clients together that every personal model is tested on at the end; if left "
        "out 2000, or fewer where that takes long",
    )
    pool_every: int = Field(0, ge=0, description="evaluations between tests on these rows; 0 tests at the end only")
    personal_epochs: int = Field(
        0, ge=0, description="at the end, score every client as if it were new, after 0, 1, ... so many epochs"
    )
    metric: str | None = Field(
        None,
        description="what rounds, tables and the report go by: accuracy, auc, ap, f1, balanced, calibration, or rmse, "
        "mae, r2 for numbers; if left out accuracy, rmse for numbers, mae for counts",
    )
    metrics: Literal["one", "all"] | None = Field(
        None, description="metrics at the end: the one above, or all; if left out all for tables, else one"
    )
    goal: float | None = Field(None, description="value of the metric; the cost of reaching it is recorded")
    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    memory_limit_mb: int = Field(4096, ge=0, description="clients' state beyond it is kept in a file")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"momentum is for sgd; {self.optimizer} has its own. Leave momentum out, or choose sgd")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is a form of momentum, which is 0; set momentum, or leave nesterov out")
        if self.schedule in ("constant", "cosine") and self.lr_decay != 1:
            raise ValueError(f"lr_decay is for the schedules exponential and step, not {self.schedule}; leave one out")
        if self.schedule == "step" and self.lr_decay == 1:
            raise ValueError("schedule step needs lr_decay, the factor of a step; set it below 1")
        self.work_range()
        if self.stack is not None and self.executor == "one_by_one":
            raise ValueError("stack is for stacked clients, and executor is one_by_one; leave one of them out")
        self._check_device()
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"address is for the executor ray, got {self.executor}; leave one of them out")
        return self

    def _check_device(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", self.device):
            raise ValueError(f"device is cpu, cuda, cuda:1 (or another number) or mps; got {self.device!r}")
        if self.device == "cpu":
            return
        if self.workers > 1:
            raise ValueError(
                f"a run on the device {self.device} is one process, got {self.workers} workers; leave workers out"
            )
        if self.executor == "ray":
            raise ValueError(f"the executor ray computes on the CPU, and device is {self.device}; leave one out")
        if self.device == "mps" and self.precision == "float64":
            raise ValueError("the device mps has no float64; choose another precision or another device")

    @property
    def style(self) -> Literal["vectorised", "one_by_one"]:
        """How the clients of a group are run; it is what the numbers depend on."""
        return "one_by_one" if self.executor == "one_by_one" else "vectorised"

    def settled_like(self, other: "Config") -> "Config":
        """With the choice that another config has, if this one leaves it to be made."""
        if self.executor != "auto":
            return self
        return self.model_copy(update={"executor": other.executor, "stack": other.stack})

    def work_range(self) -> tuple[int, int] | None:
        """Least and most epochs (or steps) of a client in a round, where this is drawn."""
        if self.local_work is None:
            return None
        found = re.fullmatch(r"uniform:(\d+)-(\d+)", self.local_work)
        if not found or not int(found[1]) <= int(found[2]) or int(found[2]) == 0:
            raise ValueError(
                f"local_work is written uniform:A-B, with whole numbers A up to B, e.g. uniform:1-5; "
                f"got {self.local_work!r}"
            )
        return int(found[1]), int(found[2])

    def solver(self) -> Solver:
        """How clients train."""
        return Solver(
            kind=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            clip=self.clip,
            schedule=self.schedule,
            decay=self.lr_decay,
            decay_every=self.lr_decay_every,
            rounds=max(1, self.rounds) if self.schedule == "cosine" else 1,
            varied=self.local_work is not None,
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
        )

    def identity(self) -> str:
        """A hash of what the state depends on: a checkpoint of another identity cannot be continued."""
        return self._hash({*HOW_IT_IS_RUN, *SCORING})

    def record_identity(self) -> str:
        """A hash of what any number in the record depends on: a run of another one must not stand for this one."""
        return self._hash(set(HOW_IT_IS_RUN))

    def _hash(self, without: set[str]) -> str:
        same = {"executor": self.style, "device": self.device.partition(":")[0]}  # which one of several plays no part
        fields = older.left_out(self.model_dump(exclude=without) | same)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# Options that change no number of a run. A split file and a schema are compared by what is in them, not by their names.
HOW_IT_IS_RUN = ("workers", "address", "checkpoint_every", "memory_limit_mb", "data_dir", "split", "data_schema")
# Options that change what is scored, and when, but nothing of the state.
SCORING = ("eval_every", "unchosen", "pool_rows", "pool_every", "personal_epochs", "metric", "metrics", "goal")


def search_of(option: str) -> Search | None:
    """The range in which an option is searched; None for those that are not."""
    extra = Config.model_fields[option].json_schema_extra
    return extra["search"] if isinstance(extra, dict) else None  # type: ignore[return-value]


def make_config(values: dict[str, Any]) -> Config:
    """A config from names and values; a mistake is told in words."""
    for key in values:
        if key not in Config.model_fields:
            raise unknown("option", key, Config.model_fields)
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][:1])) or "the configuration"
        said = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            said = f"{name}: {said[0].lower()}{said[1:]}, got {first['input']!r}"
        raise UsageError(said) from None


def config_toml(config: Config) -> str:
    """The config as TOML; what is not set is left out."""
    return to_toml(config.model_dump(exclude_none=True))
