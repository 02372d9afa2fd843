"""A run: a config becomes rounds, rows of numbers, and a model for every client.

Nothing that happens between rounds is needed to go on but the state (server, clients, round) and
the rows so far. Both are in every checkpoint, so a run that stopped goes on as if it had not.
"""

import json
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import (
    __version__,
    attack,
    checkpoint,
    datasets,
    diagnose,
    execute,
    flops,
    memory,
    models,
    newcomers,
    partition,
    pictures,
    ray_crew,
    rows,
    seeds,
    tree,
)
from .choose import all_settings, choose
from .config import Config, make_config, read_toml, to_toml
from .errors import DataError, Interrupted, RunFailed, UsageError
from .execute import Alone, Crew, Executor, Forked, Population, Trained, Work
from .method import Each, Federation, Method, Same, Schedule
from .newcomers import Newcomers
from .store import ClientStore
from .task import Task, build
from .tree import Params, Tree

Say = Callable[[str], None]


class Scene(NamedTuple):
    """What a run starts from: made from the config alone."""

    config: Config
    method: Method
    task: Task
    population: Population
    split: partition.Split
    names: tuple[str, ...] = ()  # of the clients, if the data has names for them
    newcomers: Population | None = None  # clients that were held out of training; their ids follow the others'
    attackers: tuple[int, ...] = ()


def load_data(config: Config) -> datasets.Dataset:
    return datasets.load(config.data, Path(config.data_dir) if config.data_dir else None)


def set_scene(config: Config, split_file: Path | None = None, data: datasets.Dataset | None = None) -> Scene:
    """Read the data, if it is not given, deal it out, build model and method. Raises where something cannot be."""
    if config.executor == "ray":
        ray_crew.refuse_without_ray()
    method = choose(config.method, config.settings, config.solver())
    if config.partition is not None:
        partition.parse(config.partition)
    data = load_data(config) if data is None else data
    if config.model is None:
        config = config.model_copy(update={"model": default_model(data.y.ndim, data.n_tokens)})
    if config.partition is None:
        config = config.model_copy(update={"partition": "dirichlet:0.1" if data.client is None else "natural"})
    if split_file is None and config.split is not None:
        split_file = Path(config.split)
    if split_file is not None:
        split = partition.read_split(split_file, len(data.y), data.n_classes)
    else:
        split = partition.make_split(
            data, str(config.partition), config.clients, config.seed, config.test_share, config.share
        )
        split = partition.drawn_last(split, config.new_clients, config.seed)
    x, y = torch.from_numpy(data.x), torch.from_numpy(partition.relabelled(data.y, split))
    task = task_of(config, x[0], data.n_classes, data.n_tokens)
    _check_labels(config, task, x, y)
    population = Population(x, y, split.train, split.test, data.n_classes, config.seed, task.smallest_batch)
    population = population.with_validation(config.validation)
    config = config.model_copy(update={"clients": len(split.train), "settings": all_settings(method)})
    population, newcomers = population.parted(config.new_clients)
    if not population.eligible():
        raise DataError("no client has a row to train on; choose fewer clients or another partition")
    evil: tuple[int, ...] = ()
    if config.attack != "none":
        evil = tuple(attack.attackers(population.eligible(), config.attackers, config.seed))
    if config.attack == "labels":
        rows_of_evil = [population.train[i] for i in evil]
        y = attack.poisoned(population.y, rows_of_evil, data.n_classes, config.seed)
        population = population._replace(y=y)
    method, task, population = made_known(config, method, task, population)
    if not split.labels:  # where clients have names of their own for the classes, nobody else's rows make sense
        if config.pool_rows is None:
            config = config.model_copy(update={"pool_rows": affordable_pool(len(population.train), task)})
        population = population.with_pool(config.pool_rows or 0)
    names = partition.names_of_clients(data, split)
    return Scene(config, method, task, population, split, names, newcomers, evil)


def default_model(label_axes: int, n_tokens: int) -> str:
    text = "charlstm" if label_axes == 2 else "fasttext"
    return text if n_tokens else "mlp"


def _check_labels(config: Config, task: Task, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        per_row = task.logits(task.initial, x[:1].to(task.example.dtype)).dim() - 2
    if per_row != y.dim() - 1:
        have, gives = (f"one {'for each position' if n else 'a row'}" for n in (y.dim() - 1, per_row))
        raise UsageError(
            f"{config.data} has labels, {have}; the model {config.model} gives {gives}. Choose another model"
        )


def made_known(config: Config, method: Method, task: Task, population: Population) -> tuple[Method, Task, Population]:
    """What everybody knows before a run: its schedule, and public rows, taken from the clients, if the method asks."""
    method = method.with_schedule(Schedule(len(population.train), config.rounds, config.participation))
    if method.public_rows:
        population, public = population.with_public(method.public_rows)
        task = task.with_public(population.x[public], population.y[public])
    return method, task, population


_tasks: dict[tuple[Any, ...], Task] = {}


def task_of(config: Config, example: Tensor, n_classes: int, n_tokens: int) -> Task:
    """The model as a task. Tasks of named models are kept: steps traced for one serve all runs that share it."""
    name = str(config.model)
    key = (name, tuple(example.shape), n_classes, n_tokens, config.seed)
    if key in _tasks:
        return _tasks[key]
    make = models.maker(name, tuple(example.shape), n_classes, n_tokens)
    task = build(make, example, n_classes, config.seed)
    if ":" not in name:
        _tasks[key] = task
    return task


def cohort(config: Config, eligible: list[int], round: int, turns: str) -> list[int]:
    """The clients of a round, ascending; a function of seed and round alone."""
    n = max(1, round_half_up(config.participation * len(eligible)))
    if turns == "in turn":
        order = seeds.generator(config.seed, "turns").permutation(len(eligible))
        places = [order[(round * n + k) % len(eligible)] for k in range(n)]
    else:
        places = list(seeds.generator(config.seed, "cohort", round).choice(len(eligible), n, replace=False))
    return sorted(eligible[int(i)] for i in places)


def round_half_up(value: float) -> int:
    return int(value + 0.5)


MOST_ON_POOL = 1000  # clients whose models are tested on the pool, where every test is a large one


def affordable_pool(n_clients: int, task: Task) -> int:
    """Rows that all personal models can be tested on in a minute or so."""
    of_a_row = min(n_clients, MOST_ON_POOL) * max(1, task.flops)
    return min(2000, max(100, int(1e12 / of_a_row)))


def _summed(blocks: Iterable[dict[str, Tensor]]) -> dict[str, list[float]]:
    """Hits, loss and number of rows of each client, block after block."""
    out: dict[str, list[float]] = {"hits": [], "loss": [], "n": []}
    for block in blocks:
        for name, values in block.items():
            out[name] += values.tolist()
    return out


def crew_of(config: Config) -> Callable[[Executor, Same | Each], Crew]:
    """Who runs the groups of clients."""
    if config.executor == "ray":
        return lambda executor, message: ray_crew.RayCrew(executor, message, config.workers, config.address)
    if config.workers > 1:
        return lambda executor, message: Forked(config.workers, executor.do)
    return lambda executor, message: Alone(executor.do)


class Course:
    """The state of a run, whoever carries it out: what the server has, how far it is, and the rows so far."""

    def __init__(self, scene: Scene, folder: Path | None, say: Say, kept: Tree) -> None:
        """`kept` is what is kept here of a client before it has taken part."""
        self.scene, self.folder, self.say = scene, folder, say
        config, task, method = scene.config, scene.task, scene.method
        self.eligible = scene.population.eligible()
        honest = [i for i in self.eligible if i not in scene.attackers]
        self.scored = [i for i in honest if len(scene.population.test[i])]
        self.sizes = scene.population.sizes()
        federation = Federation(self.sizes, torch.tensor(seeds.key_of(config.seed, "server")))
        self.round = 0
        self.rows: list[rows.Round] = []
        self.refused = 0
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that any number of workers gives the same bits
        self.n_cohort = len(self.cohort())
        memory.refuse_too_large(memory.forecast(method, task, self.sizes, self.n_cohort))
        with torch.no_grad():
            self.server: Tree = method.init_server(task, task.initial, federation)
        limit = config.memory_limit_mb << 20
        self.store = ClientStore(kept, len(self.sizes), limit, folder / "state" if folder else None)

    def close(self) -> None:
        torch.set_num_threads(self.threads)

    def cohort(self) -> list[int]:
        """The clients of the next round."""
        return cohort(self.scene.config, self.eligible, self.round, self.scene.method.turns)

    def send(self, ids: list[int]) -> tuple[Same | Each, int]:
        """What the clients of a round are sent, and the FLOPs of making it."""
        with flops.direct() as sending, torch.no_grad():
            message = self.scene.method.send(self.scene.task, self.server, torch.tensor(ids))
        return message, sending.total

    def merge(
        self,
        asked: list[int],
        message: Same | Each,
        refused: int,
        ids: list[int],
        trained: Trained,
        began: float,
    ) -> rows.Round:
        """End a round: check, merge, count. The state changes at the very end or not at all.

        The message went to the clients `asked`, and some answers were refused before. `trained` is of the others,
        `ids`; `trained.clients` is what is kept of them here, `trained.flops` all that was done for the round so far.
        """
        method, task = self.scene.method, self.scene.task
        clients, uploads = trained.clients, trained.uploads
        fine = tree.all_finite(uploads, len(ids)) & tree.all_finite(clients, len(ids))
        if not fine.any():
            raise RunFailed(f"round {self.round + 1}: every client's update has numbers that are not finite; lower lr")
        kept = torch.tensor(ids)[fine]
        if not fine.all():
            clients, uploads = tree.rows(clients, fine), tree.rows(uploads, fine)
        with torch.no_grad():
            with flops.direct() as merging:
                server = tree.apart(method.merge(task, self.server, kept, uploads, self.sizes[kept]), uploads)
            if not bool(tree.all_finite(tree.map(lambda x: x[None], server), 1)):
                raise RunFailed(f"round {self.round + 1}: the server's state is no longer finite; lower lr")
            sent = message
            if isinstance(message, Each) and len(kept) < len(asked):
                sent = Each(tree.rows(message.tree, torch.tensor([asked.index(i) for i in kept.tolist()])))
            drift = diagnose.drift(task, sent, uploads)
        down, up = self._traffic(message, tree.row(uploads, 0), len(asked))
        row = rows.Round(
            round=self.round + 1,
            clients=len(asked),
            loss=float(trained.metrics["loss"].mean()),
            bytes_down=down,
            bytes_up=up,
            refused=refused + len(ids) - len(kept),
            update_norm=drift.norm,
            update_variance=drift.variance,
            flops=trained.flops + merging.total,
            train_seconds=time.perf_counter() - began,
        )
        with undisturbed():
            self.server = server
            self.store.put(kept, clients)
            self.refused += row.refused
            self.round += 1
            self.rows.append(row)
        return row

    def _traffic(self, message: Same | Each, upload: Tree, n: int) -> tuple[int, int]:
        """Bytes down and up of n clients."""
        method, task = self.scene.method, self.scene.task
        if isinstance(message, Same):
            down, up = method.n_bytes(task, message.tree, upload)
            return n * down, n * up
        each = [method.n_bytes(task, tree.row(message.tree, i), upload) for i in range(n)]
        return sum(down for down, _ in each), sum(up for _, up in each)

    def traffic_by_group(self, upload: Tree) -> dict[str, dict[str, int]]:
        """Bytes of a client and round now, by what they are: the model's body and head, its statistics, and others."""
        method, task = self.scene.method, self.scene.task
        message, _ = self.send(self.eligible[:1])
        one = tree.row(message.tree, 0) if isinstance(message, Each) else message.tree
        down, up = method.counted(task, one, upload)
        return {"down_each": rows.bytes_by_group(task, down), "up_each": rows.bytes_by_group(task, up)}

    # State on disk

    def counted(self) -> dict[str, Any]:
        """What a checkpoint says of the run so far, besides its tensors."""
        return {
            "plures": __version__,
            "config": self.scene.config.identity(),
            "refused": self.refused,
            "rows": [row.to_json() for row in self.rows],
        }

    def save(self) -> None:
        if self.folder is None:
            return
        with undisturbed():
            checkpoint.write(self.folder / "checkpoint", self.round, self.server, self.store, self.counted())

    def load(self) -> dict[str, Any]:
        """Go back to the newest whole checkpoint and give what it counted; without any, stay at the start."""
        assert self.folder is not None
        found, torn = checkpoint.read(self.folder / "checkpoint")
        for sentence in torn:
            self.say(sentence)
        if found is None:
            return {}
        if found.manifest["config"] != self.scene.config.identity():
            raise UsageError(f"the checkpoint in {self.folder} is from another config than its config.toml")
        self.server = checkpoint.restore(self.server, found.server)
        checkpoint.restore_rows(self.store, found)
        self.round, self.refused = found.manifest["round"], found.manifest["refused"]
        self.rows = [rows.Round.from_json(row) for row in found.manifest["rows"]]
        return found.manifest

    def digest(self) -> str:
        return checkpoint.digest(self.server, self.store)


class Run(Course):
    """A run whose clients are simulated here."""

    def __init__(self, scene: Scene, folder: Path | None, say: Say) -> None:
        config, task, method = scene.config, scene.task, scene.method
        with torch.no_grad():
            kept = method.init_client(task, task.initial)
        super().__init__(scene, folder, say, kept)
        memory.keep_what_is_freed()
        message, _ = self.send(self.eligible[:1])
        room = max(self.n_cohort, min(len(self.eligible), 256, (1 << 30) // tree.n_bytes(task.initial)))
        work = Work(method, task, scene.population, self.store.initial, config.style)
        self.executor = Executor(work, self.store, message, crew_of(config), room)

    def close(self) -> None:
        self.executor.close()
        super().close()

    # One round

    def play_round(self) -> rows.Round:
        """Send, train, check, merge."""
        began = time.perf_counter()
        scene, ids = self.scene, self.cohort()
        message, of_sending = self.send(ids)
        trained = self.executor.train(self.round, message, ids)
        self._check_losses(ids, trained.metrics["loss"])
        if scene.attackers:
            evil = torch.tensor([i in scene.attackers for i in ids])
            with torch.no_grad():
                uploads = attack.changed(
                    scene.config.attack, message, trained.uploads, evil, ids, scene.config.seed, self.round
                )
            trained = trained._replace(uploads=uploads)
        return self.merge(ids, message, 0, ids, trained._replace(flops=trained.flops + of_sending), began)

    def _check_losses(self, ids: list[int], losses: Tensor) -> None:
        bad = [client for client, loss in zip(ids, losses.tolist(), strict=True) if not np.isfinite(loss)]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise RunFailed(
                f"round {self.round + 1}: the loss of client {bad[0]}{more} is not a finite number; lower lr "
                f"(it is {self.scene.config.lr:g}) or look at that client's data"
            )

    # Evaluation: reads the state, changes nothing

    def evaluate(self, last: bool = False) -> rows.Evaluation:
        """Scores of every client's personal model, and of the one for all; at the end, of more."""
        began = time.perf_counter()
        population, method, task = self.scene.population, self.scene.method, self.scene.task
        config = self.scene.config
        with torch.no_grad():
            personal = _summed(self._score(self.scored, "test"))
            validation = None
            if population.validation:
                validation = _summed(
                    self._score([i for i in self.scored if len(population.validation[i])], "validation")
                )
            generic_model = method.generic(task, self.server)
            if generic_model is None and last:
                generic_model = self._mean_of_personal()
            generic = None
            if self._one_for_all(generic_model):
                generic = personal
            elif generic_model is not None:
                generic = _summed(self.executor.score_generic(generic_model, ids) for ids in self._blocks(self.scored))
            due = last or (bool(config.pool_every) and self.round // config.eval_every % config.pool_every == 0)
            pool = self._pool(generic_model) if due and len(population.pool) and self.scored else None
        return rows.Evaluation(self.scored, personal, generic, time.perf_counter() - began, validation, pool)

    def _one_for_all(self, generic_model: Params | None) -> bool:
        """Whether every client's personal model is the generic one: then it need not be scored twice."""
        method = self.scene.method
        if method.scored != "global" or not self.scored:
            return False
        served = method.serve(self.scene.task, self.server, torch.tensor(self.scored[:1]))
        return isinstance(served, Same) and served.tree is generic_model

    def _blocks(self, ids: list[int]) -> Iterator[list[int]]:
        """As many clients at a time as the executor has room for."""
        for at in range(0, len(ids), self.executor.capacity):
            yield ids[at : at + self.executor.capacity]

    def _score(self, ids: list[int], part: execute.Rows) -> Iterator[dict[str, Tensor]]:
        """Of personal models, block by block; class by class on the pool."""
        method, task, fresh = self.scene.method, self.scene.task, self.scene.config.unchosen == "refresh"
        for block in self._blocks(ids):
            if fresh:  # trained on a copy: what comes out is scored and forgotten
                self.executor.train(self.round, method.send(task, self.server, torch.tensor(block)), block)
            message = method.serve(task, self.server, torch.tensor(block))
            if part == "pool":
                yield {"hits": self.executor.score_classes(self.round, message, block, fresh)}
            else:
                yield self.executor.score(self.round, message, block, part, fresh)

    def _pool(self, generic_model: Params | None) -> rows.Pool:
        """Hits on all clients' test rows together, of the first clients if there are very many."""
        population, ids = self.scene.population, self.scored[:MOST_ON_POOL]
        personal = torch.cat([block["hits"] for block in self._score(ids, "pool")])
        hits = None
        if generic_model is not None:
            shards = population.shards([0], "pool", "test", 0)
            fn = execute.classes_function(Method(), self.scene.task)
            hits = execute.run_group("one_by_one", fn, Same(generic_model), (), shards, shards)[0].numpy()
        n = np.bincount(population.y.numpy()[population.pool].ravel(), minlength=population.n_classes)
        counts = population.shards(ids, "train", "pool", 0).counts.numpy()
        return rows.Pool(ids, n, personal.numpy(), hits, counts)

    def _mean_of_personal(self) -> Params:
        """The mean of all personal models, weighted by rows: for methods that have no model for all."""
        method, task = self.scene.method, self.scene.task
        total, n_rows = None, 0
        for ids in self._blocks(self.eligible):
            message = method.serve(task, self.server, torch.tensor(ids))
            part = self.executor.sum_of_personal(self.round, message, ids)
            total = part if total is None else tree.add(total, part)
            n_rows += int(self.sizes[ids].sum())
        return tree.scale(1 / n_rows, total)

    def welcome(self) -> Newcomers | None:
        """Scores of the clients that were held out of training."""
        scene = self.scene
        if scene.newcomers is None:
            return None
        first, config = len(scene.population.train), scene.config
        return newcomers.welcome(
            scene.method, scene.task, self.server, scene.newcomers, first, config.new_epochs, config.style
        )

    def as_if_new(self) -> Newcomers:
        """Scores of the clients of training with models made from the server's state alone, over some epochs."""
        scene, config = self.scene, self.scene.config
        found = newcomers.welcome(
            scene.method, scene.task, self.server, scene.population, 0, config.personal_epochs, config.style
        )
        if found is None:
            raise RunFailed("personal_epochs: no client has rows to train and to test on")
        return found

    def personal_model(self, client: int) -> Tree:
        """The model of one client, as `personalize` gives it now."""
        scene = self.scene
        if client not in self.eligible:
            raise UsageError(f"client {client} has no model: clients are {_in_short(self.eligible)}")
        with torch.no_grad():
            message = scene.method.serve(scene.task, self.server, torch.tensor([client]))
            shards = scene.population.shards([client], "train", "personalize", self.round)
            fn = execute.personal_function(scene.method, scene.task)
            states = self.store.rows(torch.tensor([client]))
            return tree.row(execute.one_by_one(fn, message, states, shards), 0)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


class Result(NamedTuple):
    """What a run gives: numbers, and models while the run is open."""

    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    models: dict[int, Params]  # each client's own
    folder: Path | None


class StopRequest:
    """Ctrl-C or SIGTERM: the first asks to stop after the round, the second stops at once."""

    def __init__(self, say: Say) -> None:
        self.asked, self.say = False, say
        self.old: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("stopping after this round; press Ctrl-C again to stop at once")


class Watcher:
    """Is told what happens in a run. As it stands here it does not care."""

    def started(self, run: Course) -> None: ...
    def played(self, run: Course, row: rows.Round) -> None: ...
    def ended(self) -> None: ...


def carry_out(scene: Scene, folder: Path | None, say: Say, watcher: Watcher, going_on: bool = False) -> Result:
    """Play all rounds that are left, evaluate, and write the run folder."""
    config = scene.config
    began = time.perf_counter()
    run = Run(scene, folder, say)
    stop: AbstractContextManager[StopRequest] = StopRequest(say)
    evaluation: rows.Evaluation | None = None
    try:
        if going_on:
            run.load()
        if folder is not None:
            rows.write_rounds(folder, run.rows)
        watcher.started(run)
        pictures.keep(run)
        with stop as request:
            try:
                while run.round < config.rounds:
                    row = run.play_round()
                    if config.eval_every and run.round % config.eval_every == 0:
                        evaluation = run.evaluate(last=run.round == config.rounds)
                        row = run.rows[-1] = row.scored(evaluation)
                        pictures.keep(run)
                    if folder is not None:
                        rows.append_round(folder, row)
                    watcher.played(run, row)
                    if run.round % config.checkpoint_every == 0 or run.round == config.rounds or request.asked:
                        run.save()
                    if request.asked and run.round < config.rounds:
                        raise Interrupted(_how_to_resume(folder, run.round))
                evaluated = evaluation is not None and config.rounds > 0 and config.rounds % config.eval_every == 0
                if not evaluated:
                    evaluation = run.evaluate(last=True)
            except KeyboardInterrupt:
                run.save()
                raise Interrupted(_how_to_resume(folder, run.round)) from None
            except RunFailed as failure:
                run.save()
                if folder is not None:
                    raise RunFailed(f"{failure}; the state after round {run.round} is in {folder}") from None
                raise
        watcher.ended()
        assert evaluation is not None
        summary = summary_of(run, evaluation, run.executor.template[1], time.perf_counter() - began)
        if config.personal_epochs:
            summary["personal_epochs"] = run.as_if_new().to_json()
        new = run.welcome()
        if new is not None:
            summary["new_clients"] = new.to_json()
        if scene.attackers:
            summary["attack"] = {"kind": config.attack, "attackers": list(scene.attackers)}
        population = scene.population
        clients = rows.clients(population.train, population.test, population.y.numpy(), evaluation, scene.names)
        for row_of in clients:
            row_of["role"] = "attacker" if row_of["client"] in scene.attackers else "client"
        if new is not None and scene.newcomers is not None:
            clients += rows.new_clients(scene.newcomers, new, scene.names)
        if folder is not None:
            write_results(folder, summary, clients)
        kept = {} if folder is not None else {i: run.personal_model(i) for i in run.eligible}
        return Result(summary, [row.to_json() for row in run.rows], clients, kept, folder)
    finally:
        watcher.ended()
        run.close()


def summary_of(run: Course, evaluation: rows.Evaluation, upload: Tree, seconds: float) -> dict[str, Any]:
    """The numbers of summary.json that every run has; `upload` is like a client's."""
    config = run.scene.config
    summary = rows.summary(run.rows, evaluation, config, run.scene.method.scored)
    summary |= {
        "bytes": summary["bytes"] | run.traffic_by_group(upload),
        "flops": sum(row.flops for row in run.rows),
        "seconds": rows.seconds(run.rows, evaluation, seconds),
        "peak_rss_mb": _peak_rss_mb(),
        "refused_updates": run.refused,
        "digest": run.digest(),
    }
    if config.target is not None:
        summary["to_target"] = {"target": config.target, "cost": rows.to_target(run.rows, config.target)}
    return summary


def write_results(folder: Path, summary: dict[str, Any], clients: list[dict[str, Any]]) -> None:
    """What a run folder has when the run has ended."""
    rows.write_clients(folder, clients)
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _how_to_resume(folder: Path | None, round: int) -> str:
    if folder is None:
        return f"interrupted after round {round}"
    return f"interrupted after round {round}; go on with: plures resume {folder}"


def _peak_rss_mb() -> float:
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round((own + children) / 1024, 1)


def _in_short(ids: list[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if ids == list(range(ids[0], ids[-1] + 1)) else ", ".join(map(str, ids[:20]))


# Run folders


def folder_name(method: str) -> str:
    """A method with its settings as a name that any file system takes."""
    for character in ":,/":
        method = method.replace(character, "-")
    return method.replace("=", "")


def new_folder(config: Config, out: Path | None) -> Path:
    """The folder of a new run: `out`, which must not hold one yet, or a free name under runs/."""
    if out is None:
        name = folder_name(config.method)
        data = Path(config.data).stem
        for number in range(1, 100000):
            out = Path("runs") / f"{name}-{data}-{number:04d}"
            try:
                out.mkdir(parents=True)
                return out
            except FileExistsError:
                continue
    assert out is not None
    if (out / "config.toml").exists():
        same = make_config(read_toml(out / "config.toml")).identity() == config.identity()
        raise UsageError(
            f"{out} already holds {'this run' if same else 'a run of another config'}; "
            + (f"go on with `plures resume {out}`, or choose another --out" if same else "choose another --out")
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not a run folder; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}: {error.strerror}") from None
    return out


def start(scene: Scene, folder: Path | None, say: Say, watcher: Watcher) -> Result:
    if folder is not None:
        checkpoint.write_text(folder / "config.toml", to_toml(scene.config))
        checkpoint.write_text(folder / "split.json", partition.split_to_json(scene.split))
    return carry_out(scene, folder, say, watcher)


def open_config(folder: Path) -> Config:
    """The config of a run folder."""
    if not (folder / "config.toml").exists():
        raise UsageError(f"{folder} is not a run folder: it has no config.toml")
    if (folder / "federation.json").exists():
        raise UsageError(
            f"{folder} is of a federated run, whose clients have their data and models themselves; "
            "use `plures federate start --resume`, `plures federate adapt`, or the models that clients wrote"
        )
    return make_config(read_toml(folder / "config.toml"))


def open_scene(folder: Path) -> Scene:
    """The scene of a run folder."""
    return set_scene(open_config(folder), folder / "split.json")


def resume(folder: Path, say: Say, watcher: Watcher, workers: int | None = None) -> Result:
    """Go on with a run that stopped, from its newest whole checkpoint."""
    scene = open_scene(folder)
    if workers is not None:
        scene = scene._replace(config=scene.config.model_copy(update={"workers": workers}))
    return carry_out(scene, folder, say, watcher, going_on=True)


def opened(folder: Path, say: Say) -> Run:
    """The run of a folder at its newest checkpoint, to look at. Close it after use."""
    config = open_config(folder)
    here = config.model_copy(update={"executor": config.style, "workers": 1})
    run = Run(set_scene(here, folder / "split.json"), folder, say)
    run.load()
    return run
