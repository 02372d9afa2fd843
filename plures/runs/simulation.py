"""Simulation: a run whose clients are simulated here."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plures import devices, tree
from plures.engine import Usage
from plures.errors import RunFailed, UsageError
from plures.files import lock, telling_disk_failures
from plures.learn.metrics import ACCURACY
from plures.methods.messages import Message, Same
from plures.models.names import is_of_ours
from plures.registry import doubting
from plures.runs import checkpoint, results
from plures.runs.callbacks import Callback, Callbacks, Say, say_nothing
from plures.runs.config import Config
from plures.runs.folders import open_config, open_scene, write_config, write_start
from plures.runs.loop import Result, play_run, read_result
from plures.runs.scene import Objects, Scene, make_scene, method_of
from plures.runs.snapshots import Snapshots
from plures.runs.state import Answers, RunState
from plures.simulate import attack
from plures.simulate.choosing import STEPS, choose, is_small_step
from plures.simulate.evaluate import Evaluation, Evaluator
from plures.simulate.executor import Executor
from plures.simulate.memory import keep_freed_memory
from plures.simulate.new_clients import NewClients, score_new_clients
from plures.simulate.ray import RayWorkers
from plures.simulate.sampling import draw_cohort
from plures.simulate.stacking import one_by_one
from plures.simulate.tables import Tables
from plures.simulate.work import Work, personal_function
from plures.simulate.workers import Forked, InProcess, Workers, one_thread
from plures.tree import Tree

ROOM_BYTES = 1 << 30  # of models of clients that are scored at once


class Simulation:
    """The clients of a run, simulated by an executor."""

    scores_late = False

    def __init__(
        self, scene: Scene, folder: Path | None, say: Say, device: torch.device = devices.CPU, once: bool = True
    ) -> None:
        """`once` lets the frozen part of the model run once for every row, if the config does.

        On another device than the CPU, this and all that is done with it stands inside `devices.here`.
        """
        self._at_home = scene  # on the CPU, for what is looked at when the run has ended
        self.state = state = RunState(scene, folder, say, device=device)
        scene = state.scene
        self.how_to_resume = f"resume it with: plures resume {folder}"
        keep_freed_memory()
        message, _ = state.send(state.eligible[:1])
        room = max(state.n_cohort, min(len(state.eligible), 256, ROOM_BYTES // tree.n_bytes(scene.task.initial)))
        work = scene.work(state.store.initial)
        self.features = scene.features(say) if once else None
        if self.features is not None:
            work = self.features.work(work)
        keeps = scene.metric is not ACCURACY or bool(scene.others)
        self.executor = Executor(work, state.shapes, state.store, message, workers_of(scene.config), room, keeps)
        is_refreshed = scene.config.unchosen == "refresh"
        self.evaluator = Evaluator(
            self.executor, state.eligible, state.scored, is_refreshed, scene.metric, scene.others
        )

    def close(self) -> None:
        self.executor.close()

    def usage(self) -> Usage:
        return self.executor.usage

    def manifest(self) -> dict[str, Any]:
        return self.state.manifest(self.usage())

    # One round

    def play(self, score: bool = False) -> Answers:
        """Send, train, and check losses. Scores are not asked for here: see `evaluate`."""
        began = time.perf_counter()
        state, scene, ids = self.state, self.state.scene, self.state.cohort()
        message, flops_of_sending = state.send(ids)
        trained = self.executor.train(state.round, message, ids)
        self._check_losses(ids, trained.metrics["loss"])
        uploads = trained.uploads
        if scene.attackers:
            attacks = torch.tensor([i in scene.attackers for i in ids])
            kind, seed = scene.config.attack, scene.config.seed
            with torch.no_grad():
                uploads = attack.change_uploads(kind, message, uploads, attacks, ids, seed, state.round)
        trained = trained._replace(uploads=uploads, flops=trained.flops + flops_of_sending)
        return Answers(ids, message, ids, trained, 0, began)

    def play_round(self) -> results.Round:
        """A whole round: play and merge."""
        return self.state.merge(self.play())

    def _check_losses(self, ids: list[int], losses: torch.Tensor) -> None:
        bad = [client for client, loss in zip(ids, losses.tolist(), strict=True) if not np.isfinite(loss)]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise RunFailed(
                f"round {self.state.round + 1}: the loss of client {bad[0]}{more} is not a finite number; lower lr "
                f"(it is {self.state.scene.config.lr:g}) or look at that client's data"
            )

    # Evaluation

    def evaluate(self, is_last: bool = False) -> Evaluation:
        state, config = self.state, self.state.scene.config
        with_pool = is_last
        if config.pool_every and config.eval_every:
            with_pool = is_last or state.round // config.eval_every % config.pool_every == 0
        return self.evaluator.evaluate(state.server, state.round, is_last, with_pool, state.store.written)

    def score_new_clients(self) -> NewClients | None:
        """Scores of the clients that were held out of training."""
        scene = self.state.scene
        if scene.new_clients is None:
            return None
        new = scene.new_clients if self.features is None else self.features.of(scene.new_clients)
        work = self.executor.work._replace(population=new)
        first, epochs = len(scene.population.train), scene.config.new_epochs
        return score_new_clients(work, self.state.server, first, epochs, self.state.round, scene.metric)

    def score_as_new(self) -> NewClients:
        """Scores of the clients of training with models made from the server's state alone, over some epochs."""
        epochs = self.state.scene.config.personal_epochs
        metric = self.state.scene.metric
        found = score_new_clients(self.executor.work, self.state.server, 0, epochs, self.state.round, metric)
        if found is None:
            raise RunFailed("personal_epochs: no client has rows to train and to test on")
        return found

    def results(self, evaluation: Evaluation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        scene, config = self.state.scene, self.state.scene.config
        more: dict[str, Any] = {"refusals": self.state.named_refusals} if self.state.refusals else {}
        if self.features is not None:
            found = self.features
            more["features"] = {"rows": len(found.rows), "bytes": found.table.nbytes, "seconds": found.seconds}
            more["features"]["flops"] = found.flops
        if config.personal_epochs:
            more["personal_epochs"] = self.score_as_new().to_json()
        new = self.score_new_clients()
        if new is not None:
            more["new_clients"] = new.to_json()
        if scene.attackers:
            more["attack"] = {"kind": config.attack, "attackers": list(scene.attackers)}
        population = scene.population
        rows = results.clients(population.train, population.test, population.y.numpy(), evaluation, scene.names)
        for row in rows:
            row["role"] = "attacker" if row["client"] in scene.attackers else "client"
        if new is not None and scene.new_clients is not None:
            rows += results.new_clients(scene.new_clients, new, scene.names)
        return more, rows

    # Models

    def models(self) -> Mapping[int, Tree]:
        if self.state.folder is not None:
            return ModelsOfFolder(self.state.folder, self._at_home, self.state.eligible)
        return ModelsInMemory(self._at_home, {i: self.whole_model(i) for i in self.state.eligible})

    def whole_model(self, client: int) -> Tree:
        """The model of one client with the weights that do not train, on the CPU."""
        return tree.map(torch.Tensor.cpu, self.state.scene.task.whole(self.personal_model(client)))

    def personal_model(self, client: int) -> Tree:
        """The model of one client, as `personalize` gives it now."""
        state, scene = self.state, self.state.scene
        if client not in state.eligible:
            raise UsageError(f"client {client} has no model: clients are {_in_short(state.eligible)}")
        is_new = client in self.evaluator.served_as_new(state.round, state.store.written)
        with torch.no_grad():
            if is_new:
                message: Message = Same(scene.method.newcomer(scene.task, state.server))
            else:
                message = scene.method.serve(scene.task, state.server, torch.tensor([client]))
            shards = self.executor.work.population.shards([client], "train", "personalize", state.round)
            states = state.store.rows(torch.tensor([client]))
            make = personal_function(self.executor.work, is_new)
            return tree.row(one_by_one(make, message, states, shards), 0)


class ModelsInMemory(dict[int, Tree]):
    """The personal models of a run that left no folder, and what they were made for."""

    def __init__(self, scene: Scene, models: dict[int, Tree]) -> None:
        super().__init__(models)
        self.scene = scene


class ModelsOfFolder(Mapping[int, Tree]):
    """The personal models of a run that left a folder: opened when the first of them is asked for."""

    def __init__(self, folder: Path, scene: Scene, clients: list[int]) -> None:
        self._folder, self.scene, self._clients = folder, scene, clients
        self._models: dict[int, Tree] = {}

    def __getitem__(self, client: int) -> Tree:
        if client not in self._models:
            if client not in self._clients:
                raise KeyError(client)
            with open_simulation(self._folder, scene=self.scene) as simulation:
                self._models = {i: simulation.whole_model(i) for i in self._clients}
        return self._models[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def workers_of(config: Config) -> Callable[[Work, Tables, Message], Workers]:
    """Who does the jobs of a run."""
    if config.executor == "ray":
        return lambda work, tables, message: RayWorkers(work, tables, message, config.workers, config.address)
    if config.workers > 1 and config.device == "cpu":  # a device is used by one process
        return lambda work, tables, message: Forked(work, tables, config.workers)
    return lambda work, tables, message: InProcess(work, tables)


def _in_short(ids: list[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if ids == list(range(ids[0], ids[-1] + 1)) else ", ".join(map(str, ids[:20]))


# Whole runs


def simulate(scene: Scene, folder: Path | None, say: Say, callback: Callback, resume: bool = False) -> Result:
    """A whole run. With `resume` it starts from the newest checkpoint in the folder."""
    alone = nullcontext() if folder is None else _alone_in(folder)
    device = devices.find(scene.config.device)
    with one_thread(), alone, devices.here(device):
        simulation = Simulation(scene, folder, say, device)
        if resume:
            try:
                simulation.state.load()
            except BaseException:
                simulation.close()
                raise
        return play_run(simulation, Callbacks([Snapshots(), callback]))


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    """Let no other process work in the folder of a run."""
    return lock(folder / "pid", f"the run in {folder}")


def settle(scene: Scene) -> Scene:
    """The scene with a choice of how clients are run, where its config leaves that open."""
    config, method, task = scene.config, scene.method, scene.task
    if config.executor != "auto":
        return scene
    if config.stack is not None or config.device != "cpu":  # which way is faster is known of the CPU alone
        return scene._replace(config=config.model_copy(update={"executor": "vectorised"}))
    with torch.no_grad():
        work = scene.work(method.init_client(task, task.initial))
    if scene.has_features:
        work = _few_features(scene, work)
    n_cohort = len(draw_cohort(work.population.eligible(), config.participation, config.seed, 0, method.sampling))
    with one_thread():
        choice = choose(work, n_cohort, is_of_ours(str(config.model)))
    config = config.model_copy(update={"executor": choice.style, "stack": choice.stack})
    return scene._replace(config=config, notes=(*scene.notes, *([choice.why] if choice.why else [])))


def _few_features(scene: Scene, work: Work) -> Work:
    """The work on features of few rows, by which a choice is made: the others are not computed for that."""
    config, task = scene.config, scene.task
    assert task.lower is not None
    is_small = is_small_step(task.starting_from(task.lower), config.batch, is_of_ours(str(config.model)))
    n = 1 if is_small else STEPS * min(config.batch, 64)
    few = work.population._replace(train=[own[:n] for own in work.population.train], test=[], validation=[])
    few = few._replace(pool=few.pool[:0])
    found = scene._replace(population=few, new_clients=None).features()
    assert found is not None
    return found.work(work._replace(population=few))


def start(scene: Scene, folder: Path | None, say: Say = say_nothing, callback: Callback = Callback()) -> Result:  # noqa: B008
    """A new run; with a folder, it first writes down what it is made of."""
    scene = settle(scene)
    if folder is not None:
        write_start(folder, scene)
    for note in scene.notes:
        say(note)
    return simulate(scene, folder, say, callback)


def resume(
    folder: Path,
    say: Say = say_nothing,
    callback: Callback = Callback(),  # noqa: B008
    workers: int | None = None,
    objects: Objects = Objects(),  # noqa: B008
    rounds: int | None = None,
    trust: bool = False,
) -> Result:
    """Resume a run that stopped, from its newest whole checkpoint; with `rounds`, play on until there are so many.

    Without `trust`, code that the folder names is not run, and a cluster that it names is not connected to.
    """
    with doubting(folder, trust):
        return _resume(folder, say, callback, workers, objects, rounds, trust)


def _resume(
    folder: Path,
    say: Say,
    callback: Callback,
    workers: int | None,
    objects: Objects,
    rounds: int | None,
    trust: bool,
) -> Result:
    if rounds is not None:
        extend(folder, rounds)
    if (folder / "summary.json").exists():
        say(f"the run in {folder} has ended; --rounds N plays on")
        return read_result(folder)
    scene = open_scene(folder, objects)
    if scene.config.address and not trust:
        raise UsageError(
            f"{folder} names a Ray cluster that would be connected to: {scene.config.address!r}. "
            "If you trust this folder, add --trust"
        )
    if workers is not None:
        scene = scene._replace(config=scene.config.model_copy(update={"workers": workers}))
    return simulate(scene, folder, say, callback, resume=True)


def extend(folder: Path, rounds: int) -> None:
    """Let a run have more rounds than it was to have: as if it had been started with so many."""
    config = open_config(folder)
    if rounds < config.rounds:
        raise UsageError(f"the run in {folder} has {config.rounds} rounds already; --rounds must be more than that")
    if config.schedule == "cosine":
        raise UsageError("with schedule cosine the learning rate depends on the number of rounds; start a new run")
    if method_of(config).depends_on_rounds:
        raise UsageError(f"{config.method} plans its steps by the number of rounds; start a new run of {rounds} rounds")
    if rounds > config.rounds:
        with _alone_in(folder):  # a run that goes on must not find another config
            with telling_disk_failures(folder):  # this first: killed in between, the run ends once more as it did
                (folder / "summary.json").unlink(missing_ok=True)
            write_config(folder, config.model_copy(update={"rounds": rounds}))


@contextmanager
def open_simulation(folder: Path, say: Say = say_nothing, scene: Scene | None = None) -> Iterator[Simulation]:
    """The run of a folder at its newest checkpoint, to look at; without a scene, it is read from the folder."""
    config = open_config(folder) if scene is None else scene.config
    here = config.model_copy(update={"executor": config.style, "workers": 1})
    scene = make_scene(here, folder / "split.json") if scene is None else scene._replace(config=here)
    with one_thread():
        simulation = Simulation(scene, folder, say, once=False)  # where few rows are looked at, few are computed
        try:
            if not simulation.state.load() and checkpoint.folders(folder / "checkpoint"):
                raise RunFailed(f"no checkpoint in {folder} can be read; `plures resume` plays the run anew")
            yield simulation
        finally:
            simulation.close()
