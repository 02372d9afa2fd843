"""Scene: what a run starts from, made from its config: data dealt to clients, the model as a task, and the method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from plures.data import partition, sources
from plures.data.dataset import Dataset, Target, TaskKind
from plures.data.population import Population
from plures.data.reading import Reading
from plures.engine import Engine
from plures.errors import DataError, UsageError
from plures.learn import augment as augmentation
from plures.learn.frozen import Chosen
from plures.learn.metrics import ACCURACY, DEFAULT, WORDS, Metric, find_metric, has_sklearn, metrics_for
from plures.learn.task import Task, build
from plures.methods.base import Method, Schedule
from plures.methods.spec import all_settings, make_method, own_options
from plures.models.names import bind_arguments, model_maker, split_sizes, tokenizer_of
from plures.runs.config import Config, make_config
from plures.simulate import attack, features, ray
from plures.simulate.evaluate import affordable_pool
from plures.simulate.work import Work

LARGE_COLUMN = 10.0  # mean or standard deviation of a column beyond which a user is warned
GIVEN = "object:"  # begins the name of data or of a model that was given as an object, from Python


class Scene(NamedTuple):
    """What a run starts from."""

    config: Config
    method: Method
    task: Task
    population: Population
    split: partition.Split
    names: tuple[str, ...] = ()  # of the clients, if the data has names for them
    new_clients: Population | None = None  # held out of training; their ids follow the others'
    attackers: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()  # of the classes, if the data has names for them
    notes: tuple[str, ...] = ()  # what a user should know of data, split and method before they are run
    metric: Metric = ACCURACY  # what rounds, tables and the report go by
    others: tuple[Metric, ...] = ()  # what is measured at the end, besides
    schema: str = ""  # of a table, as TOML

    def on(self, device: torch.device) -> "Scene":
        """The same with data and model on a device; the rows of new clients are in the same tables."""
        population = self.population.on(device)
        new_clients = self.new_clients and self.new_clients._replace(moved=population.moved)
        return self._replace(task=self.task.on(device), population=population, new_clients=new_clients)

    def work(self, initial: Any) -> Work:
        """What the jobs of this run are done with, on raw rows; `initial` is the state of a client that has not taken
        part."""
        config = self.config
        engine = Engine.parse(config.engine)
        if config.precision == "bf16" and engine.kind == "traced":
            engine = Engine("eager", (), "the fast engine is for float32 and float64, and precision is bf16")
        how = (config.style, engine, config.stack, config.new_epochs)
        return Work(self.method, self.task, self.population, initial, *how)

    @property
    def has_features(self) -> bool:
        """Whether the frozen part of the model is run once for every row, before the first round."""
        return self.config.features == "once" and features.pays(self.task)

    def features(self, say: Callable[[str], None] = lambda line: None) -> "features.Features | None":
        """What the frozen part of the model gives for all rows that clients have; None if it is run in every step."""
        if not self.has_features:
            return None
        known = (self.population, *([self.new_clients] if self.new_clients is not None else []))
        folder = sources.data_folder(Path(self.config.data_dir) if self.config.data_dir else None) / "features"
        rows = features.rows_of(known)
        return features.make_features(self.task, self.population.x, rows, folder, self.config.workers, say)


class Objects(NamedTuple):
    """Data, a model and a split that were given as objects, and not by name."""

    data: Dataset | None = None
    model: Callable[..., nn.Module] | None = None  # makes it from shape, n_classes, n_tokens, as far as it takes them
    split: partition.Split | None = None


def load_data(config: Config) -> Dataset:
    """The data set that a config names."""
    if config.data.startswith(GIVEN):
        raise DataError(
            "this run was given its data as an object, from Python: give it again, as in "
            "plures.resume(folder, data=...), or write it to an .npz file"
        )
    return sources.load(config.data, Path(config.data_dir) if config.data_dir else None, reading_of(config))


def schema_of(config: Config) -> tuple[str, tuple[str, ...]]:
    """The schema of a table by the training rows that a run of this config has, and what is to be said of it."""
    data = load_data(config)
    if data.encode is None:
        raise DataError(f"{config.data} is no table; a schema needs a .csv or .parquet file and --target")
    config = _with_partition(config, data)
    data = data.encode(np.concatenate(_split(config, data, None).train))
    if not data.schema:
        raise DataError(f"{config.data} holds texts, which have words and no schema")
    return data.schema, data.notes


def reading_of(config: Config) -> Reading:
    """How a table, images or texts are to be read."""
    return Reading(
        client=config.client_column,
        target=config.target,
        drop=tuple(name.strip() for name in config.drop.split(",")) if config.drop else (),
        time=config.time_column,
        text=config.text_column,
        window=config.window or 0,
        schema=config.data_schema,
        image_size=config.image_size or 0,
        task=config.task,
        tokenizer=tokenizer_of(config.model),
    )


def make_scene(config: Config, split_file: Path | None = None, objects: Objects = Objects()) -> Scene:  # noqa: B008
    """Read the data, deal it out, build model and method. Raises where something cannot be.

    split_file: who has which rows, instead of the config's own split or partition.
    objects: data and a model that are not read by the names in the config.
    """
    Engine.parse(config.engine)
    if config.executor == "ray":
        ray.refuse_without_ray()
    config = with_own_options(config)
    method = method_of(config)
    if config.partition is not None:
        partition.parse(config.partition)
    data = load_data(config) if objects.data is None else objects.data
    if config.model is None:
        config = config.model_copy(update={"model": default_model(data.y.ndim, data.n_tokens)})
    config = _with_partition(config, data)
    split = _split(config, data, split_file) if objects.split is None else objects.split
    if data.encode is not None:
        data = data.encode(np.concatenate(split.train))
    x, y = _as_float(torch.from_numpy(data.x), config), torch.from_numpy(partition.relabel(data.y, split))
    y = _as_float(y, config)
    refuse_without_classes(method, data.target)
    metric, others = metrics_of(config, data)
    task = task_of(config, x[0], data.n_classes, data.n_tokens, objects.model, data.target.kind)
    _check_labels(config, task, x, y)
    population = Population(x, y, split.train, split.test, data.n_classes, config.seed, task.smallest_batch)
    population = as_configured(population, config)._replace(target=data.target).with_validation(config.validation)
    config = config.model_copy(update={"clients": len(split.train), "settings": all_settings(method)})
    population, new_clients = population.split_new(config.new_clients)
    if not population.eligible():
        raise DataError("no client has a row to train on; choose fewer clients or another partition")
    attackers: tuple[int, ...] = ()
    if config.attack != "none":
        attackers = tuple(attack.draw_attackers(population.eligible(), config.attackers, config.seed))
    if config.attack == "labels" and not data.target.is_classes:
        raise UsageError("the attack labels draws classes at random; choose random or replace where there are none")
    if config.attack == "labels":
        their_rows = [population.train[i] for i in attackers]
        y = attack.poison_labels(population.y, their_rows, data.n_classes, config.seed)
        population = population._replace(y=y)
    method, task, population = announce(config, method, task, population)
    if not data.target.is_classes:
        config = config.model_copy(update={"pool_rows": 0})
    if not split.labels:  # where clients have names of their own for the classes, nobody else's rows make sense
        if config.pool_rows is None:
            config = config.model_copy(
                update={"pool_rows": affordable_pool(len(population.train), _trained_part(config, task))}
            )
        population = population.with_pool(config.pool_rows or 0)
    names = partition.names_of_clients(data, split)
    notes = (*data.notes, *split.notes, *unscaled_columns(data), *method.notes(task))
    notes += nothing_to_send(method, task)
    if config.features == "once" and (why := features.why_not(task)):
        notes += (why,)
    return Scene(
        config,
        method,
        task,
        population,
        split,
        names,
        new_clients,
        attackers,
        data.class_names,
        notes,
        metric,
        others,
        data.schema,
    )


def _trained_part(config: Config, task: Task) -> Task:
    """The task that is run in every step: from features, if these are computed once."""
    has_features = config.features == "once" and features.pays(task) and task.lower is not None
    return task.starting_from(task.lower) if has_features else task  # type: ignore[arg-type]


def refuse_without_classes(method: Method, target: Target) -> None:
    """Raise if a method needs classes and none are predicted."""
    if method.needs_classes and not target.is_classes:
        raise UsageError(f"{method.title} is for classes: {method.needs_classes}; here {WORDS[target.kind]} predicted")


def metrics_of(config: Config, data: Dataset) -> tuple[Metric, tuple[Metric, ...]]:
    """What a run goes by, and what else is measured at its end."""
    kind = data.target.kind
    metric = find_metric(config.metric or DEFAULT[kind], kind)
    if data.y.ndim > 1 and kind == "classes" and metric is not ACCURACY:
        raise UsageError("rows with a label for each position are measured by accuracy alone; leave --metric out")
    wants_all = config.metrics == "all" or (config.metrics is None and bool(data.schema))
    if not wants_all or (data.y.ndim > 1 and kind == "classes"):
        return metric, ()
    others = [other for other in metrics_for(kind) if other is not metric]
    return metric, tuple(other for other in others if not other.needs_sklearn or has_sklearn())


def as_configured(population: Population, config: Config) -> Population:
    """The clients with the batches and the amounts of work that a config asks for."""
    return population._replace(last_batch=config.last_batch, work=config.work_range())


def with_own_options(config: Config) -> Config:
    """The config with the options that its method has for itself, as in `ditto:lr=0.01`."""
    own = own_options(config.method)
    return make_config(config.model_dump() | own) if own else config


def method_of(config: Config) -> Method:
    """The method of a config, with its settings, solver and the server's optimizer."""
    return make_method(config.method, config.settings, config.solver(), config.server_optimizer, config.server_lr)


def _with_partition(config: Config, data: Dataset) -> Config:
    """The config with the partition that is taken if none is named."""
    if config.partition is not None:
        return config
    dealt = "dirichlet:0.1" if data.target.is_classes else "iid"
    return config.model_copy(update={"partition": dealt if data.client is None else "natural"})


def _split(config: Config, data: Dataset, split_file: Path | None) -> partition.Split:
    if split_file is None and config.split is not None:
        split_file = Path(config.split)
    if split_file is not None:
        return partition.read_split(split_file, len(data.y), data.n_classes)
    split = partition.make_split(
        data, str(config.partition), config.clients, config.seed, config.test_share, config.share, config.min_rows
    )
    return partition.move_new_last(split, config.new_clients, config.seed)


def unscaled_columns(data: Dataset) -> tuple[str, ...]:
    """A warning where rows are columns of numbers of very different size: nets learn little from them."""
    if data.n_tokens or data.x.ndim != 2:
        return ()
    x = data.x[: data.n_train]
    size = np.maximum(np.abs(x.mean(0)), x.std(0))
    wide = np.flatnonzero(size > LARGE_COLUMN)
    if not len(wide):
        return ()
    at = int(wide[np.argmax(size[wide])])
    return (
        f"{len(wide)} of {x.shape[1]} columns hold large numbers (column {at}: mean {x[:, at].mean():.4g}, standard "
        f"deviation {x[:, at].std():.4g}); scale each to mean 0 and standard deviation 1, or models may learn nothing",
    )


def nothing_to_send(method: Method, task: Task) -> tuple[str, ...]:
    """A word where all that a method sends of a model is frozen."""
    if not task.frozen or method.shared(task, task.initial):
        return ()
    return (f"all that {method.title} would send of the model is frozen: nothing travels, and clients train alone",)


def _as_float(x: Tensor, config: Config) -> Tensor:
    """Rows of numbers in the precision of the config; tokens stay as they are."""
    return x.to(torch.float64) if config.precision == "float64" and x.is_floating_point() else x


def default_model(label_axes: int, n_tokens: int) -> str:
    """The model that is taken if none is named."""
    text = "charlstm" if label_axes == 2 else "fasttext"
    return text if n_tokens else "mlp"


def _check_labels(config: Config, task: Task, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        per_row = task.logits(task.initial, x[:1].to(task.example.dtype)).dim() - 2
    if task.kind == "classes" and per_row != y.dim() - 1:
        have, gives = (f"one {'for each position' if n else 'per row'}" for n in (y.dim() - 1, per_row))
        raise UsageError(
            f"{config.data} has labels, {have}; the model {config.model} gives {gives}. Choose another model"
        )


def announce(config: Config, method: Method, task: Task, population: Population) -> tuple[Method, Task, Population]:
    """What everybody knows before a run: its schedule, and public rows, taken from the clients, if the method asks."""
    method.refuse_frozen(task)
    method = method.with_schedule(Schedule(len(population.train), config.rounds, config.participation))
    if method.public_rows:
        population, public = population.with_public(method.public_rows)
        task = task.with_public(population.x[public], population.y[public])
        if method.trains_on_public:
            population = population.with_rows_for_all(public)
    return method, task, population


_tasks: dict[tuple[Any, ...], Task] = {}


def task_of(
    config: Config,
    example: Tensor,
    n_classes: int,
    n_tokens: int,
    given: Callable[..., nn.Module] | None = None,
    kind: TaskKind = "classes",
) -> Task:
    """The model as a task. Tasks of named models are kept: steps compiled for one serve all runs that share it."""
    name = str(config.model)
    chosen = Chosen(config.freeze or "", config.train or "", config.adapter or "")
    key = (name, tuple(example.shape), n_classes, n_tokens, config.seed, config.precision, config.augment, kind, chosen)
    if key in _tasks:
        return _tasks[key]
    if given is None and name.startswith(GIVEN):
        raise UsageError(
            "this run was given its model as an object, from Python: give it again, as in "
            "plures.resume(folder, model=...)"
        )
    shape = tuple(example.shape)
    if given is not None:
        make = bind_arguments(given, shape, n_classes, n_tokens)
    else:
        make = model_maker(name, shape, n_classes, n_tokens)
    in_precision = (lambda: make().double()) if config.precision == "float64" else make
    task = build(in_precision, example, n_classes, config.seed, kind, chosen)
    kinds = augmentation.parse(config.augment)
    task = task.with_augmentation(kinds) if kinds else task
    task = task.in_bf16() if config.precision == "bf16" else task
    if ":" not in split_sizes(name)[0]:
        _tasks[key] = task
    return task
