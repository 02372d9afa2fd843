"""What Python users call: `run`, `compare` and `resume`, with every option as a keyword of its own; and `tune`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import nn

from plures.data.dataset import Dataset
from plures.data.objects import from_object
from plures.data.readers import Arrays
from plures.data.reading import Reading
from plures.runs.callbacks import Callback, ProgressLine, say_nothing
from plures.runs.config import Config, make_config
from plures.runs.folders import new_folder, open_config
from plures.runs.loop import Result
from plures.runs.scene import GIVEN, Objects, make_scene, reading_of
from plures.runs.simulation import resume as resume_run
from plures.runs.simulation import start
from plures.studies.compare import Comparison, Equal, compare_methods
from plures.studies.space import COMMON
from plures.studies.tune import Budget, Objective, Tuning, tune_methods, write_tuning
from plures.studies.tuned import Tuned, read_tuned, write_tuned

Value = bool | int | float | str
# A name, a file, arrays, the data of each client, or a data frame, which has no type that all packages share.
Data = str | Path | Dataset | Arrays | Any
Model = str | nn.Module | Callable[..., nn.Module]


def run(
    method: str,
    *,
    settings: dict[str, Value] | None = None,
    data: Data = "digits",
    data_dir: str | Path | None = None,
    client: str | None = None,
    target: str | None = None,
    drop: str | None = None,
    time_column: str | None = None,
    text_column: str | None = None,
    window: int | None = None,
    data_schema: str | Path | None = None,
    image_size: int | None = None,
    task: Literal["classes", "binary", "labels", "number", "count"] | None = None,
    model: Model | None = None,
    freeze: str | None = None,
    train: str | None = None,
    adapter: str | None = None,
    features: Literal["once", "each"] = "once",
    share: float = 1.0,
    partition: str | None = None,
    split: str | Path | None = None,
    min_rows: int = 0,
    test_share: float = 0.25,
    clients: int | None = None,
    participation: float = 1.0,
    rounds: int = 20,
    epochs: int = 1,
    steps: int | None = None,
    batch: int = 10,
    lr: float = 0.05,
    lr_decay: float = 1.0,
    lr_decay_every: int = 1,
    schedule: Literal["constant", "exponential", "step", "cosine"] = "exponential",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: float = 0.0,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    last_batch: Literal["even", "drop", "keep"] = "even",
    augment: str = "none",
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "sgd",
    server_lr: float | None = None,
    local_work: str | None = None,
    validation: float = 0.0,
    new_clients: int = 0,
    new_epochs: int = 5,
    attack: Literal["none", "labels", "random", "replace"] = "none",
    attackers: float = 0.2,
    seed: int = 0,
    executor: Literal["auto", "vectorised", "one_by_one", "ray"] = "auto",
    stack: int | None = None,
    engine: str = "traced",
    precision: Literal["float32", "float64", "bf16"] = "float32",
    device: str = "cpu",
    workers: int = 1,
    address: str | None = None,
    eval_every: int = 1,
    unchosen: Literal["carry", "refresh"] = "carry",
    pool_rows: int | None = None,
    pool_every: int = 0,
    personal_epochs: int = 0,
    metric: str | None = None,
    metrics: Literal["one", "all"] | None = None,
    goal: float | None = None,
    checkpoint_every: int = 10,
    memory_limit_mb: int = 4096,
    out: str | Path | None = None,
    progress: bool = False,
    callback: Callback | None = None,
) -> Result:
    """One run of a method.

    Without `out` nothing is written, and `result.models` has the personal model of every client.

    Args:
        method: a name, with settings and add-ons as on the command line: `fedala`, `fedrod:loss=ce`, `ditto+ala`,
            or a class of your own, `my_methods:FedHalf`.
        settings: settings of the method by name, instead of writing them into its name.
        data: the name of a data set, a file or folder, a data frame (of pandas, or a Hugging Face `Dataset`), a
            `plures.Dataset`, or arrays: a tuple (x, y) or (x, y, client), or a dict with the keys x, y and, if you
            like, client and is_test. Or the data of each client, in a dict by their names or in a list: a tuple (x, y)
            or a torch `Dataset`.
        data_dir: the folder that named data sets are looked for in.
        client: of a table, the column that says whose row it is.
        target: of a table, the column to predict; several with commas are labels that are there or not.
        drop: of a table, columns that are not used, with commas between.
        time_column: of a table, when a row was; the latest rows of a client are its test rows.
        text_column: of a table, the column of texts, which alone are read.
        window: of a table, rows are read as time series; so many rows before it tell the next one.
        data_schema: of a table, a file with columns, scales and categories.
        image_size: images in folders are scaled to so many pixels.
        task: what is predicted, `classes`, `binary`, `labels`, `number` or `count`; if left out it follows from the
            column.
        model: the name of a model, `module:Class`, an `nn.Module` (its weights are where training starts), or a
            function that makes one from the arguments shape, n_classes and n_tokens, as far as it takes them.
        freeze: weights that do not train: `head`, `body`, or names of layers or tensors, in which * stands for
            anything, joined by commas. Weights of an `nn.Module` with `requires_grad=False` do not train either.
        train: weights that train, named in the same way; all others do not.
        adapter: small weights beside a frozen model, which train with its head: `lora:rank=4,layers=PATTERN`, `scale`,
            `bias`, or `head` alone.
        features: frozen layers that come first are run `once` for every row, or in every step (`each`).
        share: the share of the rows of each class that is used.
        partition: how rows are dealt to clients, as `dirichlet:0.1`; if left out `natural`, or `dirichlet:0.1` where
            the data has no clients of its own.
        split: a file that says who has which rows, instead of a partition.
        min_rows: clients with fewer training rows are left out.
        test_share: the share of a client's rows that it is tested on.
        clients: the number of clients; if left out 20, or all of the data's own.
        participation: the share of clients in a round.
        rounds: the number of rounds.
        epochs: passes over a client's rows in a round.
        steps: batches of a client in a round, instead of epochs.
        batch: rows of a batch.
        lr: the learning rate of clients.
        lr_decay: the factor of the learning rate in every round.
        lr_decay_every: rounds between two such factors, with the schedule `step`.
        schedule: how the learning rate falls: `exponential`, `step`, `cosine` (to zero at the last round), `constant`.
        momentum: the momentum of clients' SGD.
        nesterov: Nesterov's form of momentum.
        weight_decay: the weight decay of clients' training: an L2 penalty, or decoupled with `adamw`.
        clip: clients' gradients are scaled down to this norm; 0 leaves them alone.
        optimizer: the optimizer of clients, `sgd`, `adam` or `adamw`.
        last_batch: rows that fill no batch: make all batches nearly equal (`even`), leave these rows out of the epoch
            (`drop`), or make a smaller last batch (`keep`).
        augment: random changes of training images: `crop`, `flip`, `crop,flip`.
        server_optimizer: how the server takes the mean update as a step, for methods that average.
        server_lr: the learning rate of the server; if left out 1, or 0.03 for `adam` and `yogi`.
        local_work: `uniform:A-B`: clients train A to B epochs (or steps), drawn for every client and round.
        validation: the share of a client's training rows that is kept apart, to choose the best round by.
        new_clients: how many clients are held out of training, to be served as new ones at the end.
        new_epochs: epochs that a new client adapts for.
        attack: what attackers do: train on random `labels`, upload `random` noise, or `replace` the model.
        attackers: the share of clients that attack.
        seed: all randomness comes from it.
        executor: how clients are run: `vectorised`, `one_by_one`, `ray`, or `auto`, the faster of the first two.
        stack: the most clients that are stacked together in training; if left out as many as pay.
        engine: how training steps are run: `traced` or `eager`.
        precision: the type of weights and of numbers in the data, `float32` or `float64`; with `bf16` weights are
            float32, and models compute in bfloat16.
        device: where tensors are and models compute: `cpu`, `cuda`, `cuda:1` and so on, or `mps`.
        workers: processes of one thread each. They change nothing of the result.
        address: a running Ray cluster, which must be trusted, for the executor `ray`.
        eval_every: rounds between evaluations; 0 evaluates at the end only.
        unchosen: a client is scored with the state it has kept (`carry`), or after one more training on a copy of
            it (`refresh`).
        pool_rows: test rows of all clients together that every personal model is tested on at the end.
        pool_every: evaluations between tests on these rows; 0 tests at the end only.
        personal_epochs: at the end, score every client as if it were new, after 0, 1, ... so many epochs.
        metric: what rounds, tables and the report go by: `accuracy`, `auc`, `ap`, `f1`, `balanced`, `calibration`, or
            `rmse`, `mae`, `r2` for numbers.
        metrics: what is measured at the end: this `one`, or `all`; if left out all for tables.
        goal: a value of the metric; the cost of reaching it is recorded.
        checkpoint_every: rounds between checkpoints.
        memory_limit_mb: clients' state beyond it is kept in a file.
        out: the run folder to write: config, numbers of every round, checkpoints, summary.
        progress: whether to show a progress bar, in a terminal or a notebook.
        callback: is told what happens; a subclass of `plures.Callback`.
    """
    config, objects = _options(locals())
    scene = make_scene(config, objects=objects)
    folder = new_folder(scene.config, Path(out)) if out is not None else None
    return start(scene, folder, say_nothing, callback or _progress(progress, method))


# The options are those of `run`, in the same order: a test compares the two.
# fmt: off
def compare(
    methods: Sequence[str], *, seeds: Sequence[int] = (0,), equal: Equal = "rounds",
    settings: dict[str, Value] | None = None, data: Data = "digits", data_dir: str | Path | None = None,
    client: str | None = None, target: str | None = None, drop: str | None = None, time_column: str | None = None,
    text_column: str | None = None, window: int | None = None, data_schema: str | Path | None = None,
    image_size: int | None = None, task: Literal["classes", "binary", "labels", "number", "count"] | None = None,
    model: Model | None = None, freeze: str | None = None, train: str | None = None,
    adapter: str | None = None, features: Literal["once", "each"] = "once", share: float = 1.0,
    partition: str | None = None, split: str | Path | None = None,
    min_rows: int = 0, test_share: float = 0.25, clients: int | None = None, participation: float = 1.0,
    rounds: int = 20, epochs: int = 1, steps: int | None = None, batch: int = 10, lr: float = 0.05,
    lr_decay: float = 1.0, lr_decay_every: int = 1,
    schedule: Literal["constant", "exponential", "step", "cosine"] = "exponential", momentum: float = 0.0,
    nesterov: bool = False, weight_decay: float = 0.0, clip: float = 0.0,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd", last_batch: Literal["even", "drop", "keep"] = "even",
    augment: str = "none", server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "sgd",
    server_lr: float | None = None, local_work: str | None = None,
    validation: float = 0.0, new_clients: int = 0, new_epochs: int = 5,
    attack: Literal["none", "labels", "random", "replace"] = "none", attackers: float = 0.2,
    executor: Literal["auto", "vectorised", "one_by_one", "ray"] = "auto", stack: int | None = None,
    engine: str = "traced", precision: Literal["float32", "float64", "bf16"] = "float32",
    device: str = "cpu", workers: int = 1, address: str | None = None, eval_every: int = 1,
    unchosen: Literal["carry", "refresh"] = "carry", pool_rows: int | None = None,
    pool_every: int = 0, personal_epochs: int = 0, metric: str | None = None,
    metrics: Literal["one", "all"] | None = None, goal: float | None = None, checkpoint_every: int = 10,
    memory_limit_mb: int = 4096, out: str | Path | None = None, progress: bool = False,
) -> dict[tuple[str, int], Result]:
    # fmt: on
    """Several methods on the same split, schedule and initial weights, for each seed: (method, seed) -> result.

    With `out` every run leaves a folder there, and a comparison that was stopped is resumed when it is asked for again.

    Args:
        methods: two or more methods, each as for `run`.
        seeds: each method is run with each of them.
        equal: what all methods may spend as much of as the first: rounds, bytes, seconds or flops.
    """
    config, objects = _options(locals())
    wanted = Comparison(list(methods), config, list(seeds), equal, objects)
    return compare_methods(
        wanted,
        Path(out) if out is not None else None,
        say_nothing,
        lambda method, seed, folder: _progress(progress, f"{method} ({seed})"),
    )


def resume(
    folder: str | Path,
    *,
    data: Data | None = None,
    model: Model | None = None,
    rounds: int | None = None,
    workers: int | None = None,
    trust: bool = False,
    progress: bool = False,
    callback: Callback | None = None,
) -> Result:
    """Resume a run that stopped, exactly where it was.

    Args:
        folder: the run folder.
        data: the data again, if it was given as an object and not by name.
        model: the model again, if it was given as an object and not by name.
        rounds: how many rounds the run is to have in all, if more than it was to have.
        workers: processes of one thread each; if left out, as many as before.
        trust: import the code, and connect to the Ray cluster, that the folder names.
        progress: whether to show a progress bar.
        callback: is told what happens; a subclass of `plures.Callback`.
    """
    reading = Reading() if data is None else reading_of(open_config(Path(folder)))
    _, objects = _objects(data, model, reading)
    told = callback or _progress(progress, Path(folder).name)
    return resume_run(Path(folder), say_nothing, told, workers, objects, rounds, trust)


def tune(
    methods: Sequence[str],
    *,
    trials: int = 30,
    budget: Budget = "trials",
    objective: Objective = "personal",
    search: Sequence[str] = COMMON,
    ranges: dict[str, dict[str, Any]] | None = None,
    seeds: Sequence[int] = (0,),
    data: Data = "digits",
    model: Model | None = None,
    options: dict[str, Value] | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Tuned]:
    """Search for better settings of methods, on validation rows, with the same budget for each: method -> its findings.

    `found["ditto"].spec` is the method with what is to be used, as `run` and `compare` take it. Test rows are not read.

    Args:
        methods: one or more methods, each as for `run`; what stands in a name is held.
        trials: how many settings are tried for each method; the first is the default.
        budget: what each method may spend as much of as the first: trials, flops or seconds.
        objective: the accuracy that is searched for: personal, worst5 or generic.
        search: options that are searched besides the methods' settings, and settings that are searched only if named.
        ranges: other ranges, as in a space file: {"ditto": {"lam": {"low": 0.1, "high": 10, "log": True}}}.
        seeds: of data and runs; a trial is scored by its mean over them.
        data: as for `run`.
        model: as for `run`.
        options: other options of `run` by name, such as {"rounds": 50}; `seed` is that of the search, `validation` the
            share of training rows that trials are scored on (a fifth, if left out), `workers` the processes that share
            the trials.
        out: the folder of the study; one that was stopped is resumed. Without it nothing is left behind.
        progress: whether to print a line for each batch of trials.
    """
    given: dict[str, Any] = dict(options or {})
    named = make_config(given | {"data": "given", "model": "given"})
    names, objects = _objects(data, model, reading_of(named))
    config = make_config(given | names)
    wanted = Tuning(
        list(methods), config, list(seeds), trials, budget, objective, tuple(search), ranges or {}, objects
    )
    with TemporaryDirectory() as unnamed:
        folder = Path(unnamed if out is None else out)
        folder.mkdir(parents=True, exist_ok=True)
        write_tuning(folder, wanted)
        tune_methods(wanted, folder, print if progress else say_nothing)
        _, found = read_tuned(folder)
        write_tuned(folder, found)
    return {one.method: one for one in found}


_OPTIONS = (run.__doc__ or "").partition("        settings: ")[1:]
_NOT_OF_COMPARE = ("        seed: ", "        callback: ")
compare.__doc__ = (compare.__doc__ or "").rstrip() + "\n" + "".join(
    line + "\n" for line in "".join(_OPTIONS).splitlines() if not line.startswith(_NOT_OF_COMPARE)
)


def _progress(wanted: bool, name: str) -> Callback:
    return ProgressLine(name) if wanted else Callback()


def _options(values: dict[str, Any]) -> tuple[Config, Objects]:
    """The keywords of a call as a config, and the objects among them."""
    given = {key: value for key, value in values.items() if key in Config.model_fields and value is not None}
    given = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    if values["client"] is not None:
        given["client_column"] = values["client"]
    named = make_config(given | {"data": "given", "model": "given"})
    names, objects = _objects(values["data"], values["model"], reading_of(named))
    return make_config(given | names), objects


def _objects(data: Any, model: Model | None, reading: Reading) -> tuple[dict[str, str], Objects]:
    """What data and model are called in a config, and the objects that they are."""
    names: dict[str, str] = {}
    objects = Objects()
    if isinstance(data, (str, Path)):
        names["data"] = str(data)
    elif data is not None:
        found = from_object(data, reading)
        names["data"], objects = GIVEN + found.name, objects._replace(data=found)
    if isinstance(model, str):
        names["model"] = model
    elif isinstance(model, nn.Module):
        names["model"], objects = GIVEN + type(model).__name__, objects._replace(model=lambda: model)
    elif model is not None:
        names["model"], objects = GIVEN + getattr(model, "__name__", "model"), objects._replace(model=model)
    return names, objects
