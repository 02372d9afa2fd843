"""Tuning: settings of several methods are searched on validation rows, each method with the same budget.

The search is Optuna's. A study is a folder with a SQLite file, in which every trial stands with what it has reached.
Trials come in batches. Those of a batch are drawn from what the batches before it have shown, by a generator of their
number, then played for a few rounds; the better third of all trials goes on, exactly where it stopped, for more rounds,
and again. Nothing depends on which process does what, or when: so a study that was killed, or that several processes
share, has the same trials and the same best as one that ran alone.

Test rows are not in the data that trials are given; what they are scored on are validation rows.
"""

import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from plures import seeds
from plures.data.dataset import Dataset
from plures.data.partition import Split
from plures.data.population import draw_validation
from plures.errors import RunFailed, UsageError
from plures.files import lock_in_turn, read_toml, to_toml, try_lock, write_text
from plures.learn.metrics import METRICS
from plures.methods.search import rounded
from plures.methods.spec import make_method
from plures.runs.callbacks import Say, say_nothing
from plures.runs.config import HOW_IT_IS_RUN, Config, make_config
from plures.runs.folders import folder_name
from plures.runs.results import generic_scores, personal_scores
from plures.runs.scene import GIVEN, Objects, Scene, load_data, make_scene
from plures.runs.signals import NUMBERS, leave_to_parent, undisturbed
from plures.runs.simulation import Simulation
from plures.simulate.evaluate import Evaluation
from plures.simulate.workers import one_thread
from plures.studies.space import COMMON, Dimension, Given, Space, check_names, for_method, space_of

Budget = Literal["trials", "flops", "seconds"]
Objective = Literal["personal", "worst5", "generic"]
TUNING, STORAGE = "tuning.toml", "study.db"
VALIDATION = 0.2  # share of training rows that trials are scored on, if the config names none
BATCH = 5  # trials that are drawn at once
RANDOM = 10  # trials before the search learns from them
KEPT = 3  # one of so many trials goes on
MOST = 10  # times the trials of the first method that another one may have within the same FLOPs or seconds
TRIES = 20  # draws until one is new, where few values can be tried
WAIT = 0.05  # seconds, while other processes have all there is to do


class Tuning(NamedTuple):
    """What is to be tuned."""

    methods: list[str]
    config: Config  # its seed is that of the search
    seeds: list[int]  # of data and runs; a trial is scored by its mean over them
    trials: int = 30
    budget: Budget = "trials"
    objective: Objective = "personal"
    named: tuple[str, ...] = COMMON  # options that are searched, and settings that are searched only if named
    ranges: Given = {}
    objects: Objects = Objects()

    def options(self) -> dict[str, Any]:
        """The options that trials were run with, for a comparison of what was found."""
        return self.config.model_dump(exclude_unset=True, exclude={"method", "seed", "validation"})

    @property
    def rungs(self) -> list[int]:
        """The rounds after which trials are compared; the last are those of a whole run."""
        rounds = self.config.rounds
        return sorted({-(-rounds // KEPT**k) for k in range(3)})

    def space(self, method: str) -> Space:
        """What is searched of a method."""
        return space_of(method, self.config, self.named, self.ranges)


def check_tuning(wanted: Tuning) -> dict[str, Space]:
    """Raise what is wrong before the first trial; returns what is searched of each method."""
    if not wanted.methods:
        raise UsageError("name at least one method to tune")
    if len(set(wanted.methods)) < len(wanted.methods):
        raise UsageError(f"a method is named twice: {' '.join(wanted.methods)}")
    if wanted.trials < 1 or wanted.config.rounds < 1 or not wanted.seeds:
        raise UsageError("tuning needs at least one trial, one round and one seed")
    check_names(wanted.methods, wanted.named, wanted.ranges, wanted.config)
    for name in wanted.ranges:
        if name != "all" and name not in wanted.methods:
            raise UsageError(f"the space file has a table for {name}, which is not tuned here; write its name as given")
    spaces = {method: wanted.space(method) for method in wanted.methods}
    for method, space in spaces.items():
        if not space.searched:
            raise UsageError(f"{method}: nothing is left to search; all its settings and options are held")
        for values in _corners(space):
            make_method(space.spec(method, values), {}, wanted.config.solver())
    return spaces


def _corners(space: Space) -> Iterator[dict[str, Any]]:
    """The default, and every value, or both ends, of each setting: what a method refuses is told at once."""
    yield space.default()
    for name, (search, default) in space.searched.items():
        for value in search.values or (search.low, search.high):
            yield space.default() | {name: type(default)(value)}


# The folder


def write_tuning(folder: Path, wanted: Tuning) -> None:
    """Write down what is tuned; a folder that holds the tuning of something else is refused."""
    about = _about(wanted)
    if (folder / TUNING).exists():
        before = read_toml(folder / TUNING)
        config, old = about.pop("config"), before.pop("config")
        differ = [name for name in about if about[name] != before.get(name)]
        differ += [name for name in {*config, *old} - {*HOW_IT_IS_RUN} if config.get(name) != old.get(name)]
        if differ:
            raise UsageError(
                f"{folder} holds a tuning with other options ({', '.join(sorted(differ))}); choose another --out"
            )
        return
    write_text(folder / TUNING, to_toml(about))


def _about(wanted: Tuning) -> dict[str, Any]:
    return {
        "methods": wanted.methods,
        "seeds": wanted.seeds,
        "trials": wanted.trials,
        "budget": wanted.budget,
        "objective": wanted.objective,
        "named": list(wanted.named),
        "ranges": wanted.ranges,
        "config": wanted.config.model_dump(exclude_none=True, exclude={"method"}),
    }


def is_tuning(folder: Path) -> bool:
    """Whether a folder holds a tuning."""
    return (folder / TUNING).exists()


def read_tuning(folder: Path, objects: Objects = Objects()) -> Tuning:  # noqa: B008
    """What is tuned in a folder."""
    if not is_tuning(folder):
        raise UsageError(
            f"{folder} holds no tuning: it has no {TUNING}; `plures tune METHOD ... --out {folder}` makes one"
        )
    about = read_toml(folder / TUNING)
    about["named"], about["config"] = tuple(about["named"]), make_config(about["config"])
    return Tuning(**about, objects=objects)


# Optuna


def import_optuna() -> Any:
    """Optuna, which is an optional extra."""
    try:
        import optuna  # here: an optional extra, which only tuning needs
    except ImportError:
        raise UsageError("tuning needs Optuna, which is not installed: pip install 'plures[tune]' brings it") from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


class Studies:
    """The studies of all methods of a tuning, in one SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.optuna = import_optuna()
        self.folder = folder
        with lock_in_turn(folder / "lock"):
            self.storage = self.optuna.storages.get_storage(f"sqlite:///{(folder / STORAGE).resolve()}")
        self._known: dict[str, Any] = {}

    def of(self, method: str) -> Any:
        """The study of a method; made if it is not there."""
        if method not in self._known:
            optuna = self.optuna
            self._known[method] = optuna.create_study(
                storage=self.storage,
                study_name=method,
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(seed=0),  # is not asked: see `draw`
            )
        return self._known[method]

    def trials(self, method: str) -> list[Any]:
        """The trials of a method by number."""
        return sorted(self.of(method).get_trials(deepcopy=False), key=lambda trial: trial.number)

    def distributions(self, space: Space) -> dict[str, Any]:
        return {name: self._distribution(one) for name, one in space.searched.items()}

    def _distribution(self, one: Dimension) -> Any:
        kinds = self.optuna.distributions
        if one.search.values:
            return kinds.CategoricalDistribution(one.search.values)
        low, high = one.search.low, one.search.high
        if isinstance(one.default, int):
            return kinds.IntDistribution(int(low), int(high), log=one.search.is_log and low >= 1)
        return kinds.FloatDistribution(float(low), float(high), log=one.search.is_log)

    def draw(self, space: Space, before: list[Any], seed: int) -> dict[str, Any]:
        """New values, from what earlier trials have shown: they depend on these trials and the seed alone."""
        optuna, wanted = self.optuna, self.distributions(space)
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=RANDOM, constant_liar=False)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in before:
            study.add_trial(trial)
        found = study.ask(wanted).params
        return {name: _inside(rounded(value), space.searched[name]) for name, value in found.items()}

    def add(self, method: str, space: Space, values: dict[str, Any], about: dict[str, Any]) -> None:
        optuna = self.optuna
        self.of(method).add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=values,
                distributions=self.distributions(space),
                user_attrs=about,
            )
        )

    def record(self, method: str, number: int, rung: int, value: float, about: dict[str, Any]) -> None:
        """What a trial has reached. The value is written last: without it, the rounds are played again."""
        trial = self._trial_id(method, number)
        with lock_in_turn(self.folder / "lock"):
            for key, one in about.items():
                self.storage.set_trial_user_attr(trial, key, one)
            self.storage.set_trial_intermediate_value(trial, rung, value)

    def end(self, method: str, number: int, value: float | None) -> None:
        """End a trial: with a value if it was played to the end, else as one that was given up."""
        states = self.optuna.trial.TrialState
        state, values = (states.PRUNED, None) if value is None else (states.COMPLETE, [value])
        self.storage.set_trial_state_values(self._trial_id(method, number), state, values)

    def _trial_id(self, method: str, number: int) -> int:
        study = self.storage.get_study_id_from_name(method)
        return int(self.storage.get_trial_id_from_study_id_trial_number(study, number))


def _inside(value: Any, one: Dimension) -> Any:
    """A number within its range, from which rounding may have taken it."""
    if one.search.values or isinstance(value, bool):
        return value
    return type(value)(min(max(value, one.search.low), one.search.high))


# The plan


class Job(NamedTuple):
    """A trial that is to be played until a rung."""

    method: str
    number: int
    rung: int


def batch_of(trial: Any) -> int:
    return int(trial.user_attrs["batch"])


def go_on(wanted: Tuning, trials: list[Any], batch: int, rung: int, total: float | None) -> set[int]:
    """The trials of a batch that go on after a rung: those in the better part of all trials so far, and the default.

    total: the budget in FLOPs or seconds, which what goes on must fit into; None where trials are counted.
    """
    reached = [t for t in trials if batch_of(t) <= batch and rung in t.intermediate_values]
    reached.sort(key=lambda t: (-t.intermediate_values[rung], t.number))
    better = [t for t in reached[: -(-len(reached) // KEPT)] if batch_of(t) == batch and "failed" not in t.user_attrs]
    if total is not None and rung < wanted.rungs[-1]:
        better = _affordable(wanted, trials, better, batch, rung, total)
    return {t.number for t in better} | ({0} if batch == 0 else set())


def _affordable(wanted: Tuning, trials: list[Any], better: list[Any], batch: int, rung: int, total: float) -> list[Any]:
    """The better trials, the best first, as far as the budget lasts for their rounds until the next rung."""
    budget, last = wanted.budget, wanted.rungs[-1]
    more = wanted.rungs[wanted.rungs.index(rung) + 1] - rung
    n_spent = sum(cost_until(t, last if batch_of(t) < batch else rung, budget) for t in trials if batch_of(t) <= batch)
    out = []
    for trial in better:
        cost = cost_until(trial, rung, budget) / rung * more
        if n_spent + cost <= total:
            n_spent += cost
            out.append(trial)
    return out


def cost_until(trial: Any, rung: int, budget: Budget) -> float:
    """What a trial has cost until a rung."""
    return max((cost[budget] for at, cost in trial.user_attrs.get("costs", {}).items() if int(at) <= rung), default=0.0)


def open_jobs(wanted: Tuning, method: str, trials: list[Any], total: float | None = None) -> list[Job]:
    """What is to be played next of the last batch; nothing when it is done."""
    if not trials:
        return []
    last = batch_of(trials[-1])
    members = {t.number for t in trials if batch_of(t) == last}
    for rung in wanted.rungs:
        jobs = [Job(method, n, rung) for n in sorted(members) if rung not in trials[n].intermediate_values]
        jobs = [job for job in jobs if "failed" not in trials[job.number].user_attrs]
        if jobs:
            return jobs
        members = go_on(wanted, trials, last, rung, total)
    return []


def spent(wanted: Tuning, trials: list[Any]) -> float:
    """What trials have cost, in the unit of the budget."""
    if wanted.budget == "trials":
        return float(len(trials))
    return float(sum(cost_until(t, wanted.rungs[-1], wanted.budget) for t in trials))


def allowed(wanted: Tuning, trials: list[Any], total: float | None) -> int:
    """How many trials may come in the next batch.

    total: what the first method has spent, in FLOPs or seconds; None where trials are counted.
    """
    if total is None:
        return min(BATCH, wanted.trials - len(trials))
    if not trials:
        return 1  # the default: what a trial costs is not known yet
    each = spent(wanted, trials) / len(trials)
    room = int((total - spent(wanted, trials)) / each) if each else BATCH
    return max(0, min(BATCH, room, MOST * wanted.trials - len(trials)))


class Plan(NamedTuple):
    """Where a tuning stands."""

    jobs: list[Job]
    done: bool


class Planner:
    """Decides what is to be done next. Who holds the lock plans; the plan depends on the study alone."""

    def __init__(self, wanted: Tuning, spaces: dict[str, Space], studies: Studies, say: Say) -> None:
        self.wanted, self.spaces, self.studies, self.say = wanted, spaces, studies, say
        self._done: dict[str, float] = {}  # method -> what it has spent

    def plan(self) -> Plan:
        """What can be done now; it draws new trials where a batch is done."""
        jobs: list[Job] = []
        with lock_in_turn(self.studies.folder / "lock"):
            for k, method in enumerate(self.wanted.methods):
                if method in self._done:
                    continue
                counted = self.wanted.budget == "trials" or k == 0
                if not counted and self.wanted.methods[0] not in self._done:
                    break  # the budget is what the first method spends
                total = None if counted else self._done[self.wanted.methods[0]]
                jobs += self._plan_method(method, total)
        return Plan(jobs, len(self._done) == len(self.wanted.methods))

    def _plan_method(self, method: str, total: float | None) -> list[Job]:
        trials = self.studies.trials(method)
        if trials and (size := trials[-1].user_attrs["size"]) > (n_there := _n_of_last(trials)):
            self._draw(method, trials[:-n_there], size, n_there)
            trials = self.studies.trials(method)
        jobs = open_jobs(self.wanted, method, trials, total)
        if jobs:
            return jobs
        self._end_batch(method, trials)
        trials = self.studies.trials(method)
        n = allowed(self.wanted, trials, total)
        if n > 0:
            if trials:
                self.say(_line(method, trials, self.wanted.rungs[-1]))
            self._draw(method, trials, n)
            trials = self.studies.trials(method)
            jobs = open_jobs(self.wanted, method, trials, total)
        if not jobs:
            self.say(_line(method, trials, self.wanted.rungs[-1]))
            self._done[method] = spent(self.wanted, trials)
        return jobs

    def _end_batch(self, method: str, trials: list[Any]) -> None:
        last = self.wanted.rungs[-1]
        for trial in trials:
            if not trial.state.is_finished():
                self.studies.end(method, trial.number, trial.intermediate_values.get(last))

    def _draw(self, method: str, trials: list[Any], n: int, n_there: int = 0) -> None:
        """A batch of new trials; fewer, or none, where all values have been tried.

        n_there: how many of them are there already, where a process was killed while it added them.
        """
        space, batch = self.spaces[method], batch_of(trials[-1]) + 1 if trials else 0
        drawn: list[dict[str, Any]] = []
        for number in range(len(trials), len(trials) + n):
            known = [*[trial.params for trial in trials], *drawn]
            values = space.default()
            for k in range(TRIES if number else 0):
                values = self.studies.draw(space, trials, seeds.key_of(self.wanted.config.seed, method, number, k))
                if values not in known:
                    break
            if values in known:
                break
            drawn.append(values)
        for values in drawn[n_there:]:
            self.studies.add(method, space, values, {"batch": batch, "size": len(drawn)})


def _n_of_last(trials: list[Any]) -> int:
    """How many trials the last batch has."""
    return sum(batch_of(trial) == batch_of(trials[-1]) for trial in trials)


def _line(method: str, trials: list[Any], last: int) -> str:
    """How far a method is, in a line."""
    whole = [t.intermediate_values[last] for t in trials if last in t.intermediate_values]
    metric = METRICS[trials[0].user_attrs["metric"]]
    first, best = (metric.text(metric.sign * value) for value in (whole[0], max(whole)))
    return f"{method}: {len(trials)} trials, {len(whole)} of them to the end; default {first}, best {best}"


# One trial


def without_test_rows(data: Dataset, split: Split, share: float, seed: int) -> Objects:
    """The data without any test row, and its split: validation rows are what clients are tested on."""
    train, validation = draw_validation(split.train, share, seed)
    if data.encode is not None:  # scales and categories come from the rows that trials train on
        data = data.encode(np.concatenate(train))
    rows = np.unique(np.concatenate([*train, *validation]))
    client, time = (None if one is None else one[rows] for one in (data.client, data.time))
    kept = data._replace(x=data.x[rows], y=data.y[rows], n_train=len(rows), client=client, time=time, encode=None)
    places = [[np.searchsorted(rows, own) for own in part] for part in (train, validation)]
    return Objects(data=kept, split=Split(places[0], places[1], split.labels))


class Trials:
    """Plays trials: data and splits are made once for each seed."""

    def __init__(self, wanted: Tuning, spaces: dict[str, Space], folder: Path) -> None:
        self.wanted, self.spaces, self.folder = wanted, spaces, folder
        config, objects = wanted.config, wanted.objects
        data = load_data(config) if objects.data is None else objects.data
        self.objects: dict[int, Objects] = {}
        for seed in wanted.seeds:
            plain = config.model_copy(update={"method": "fedavg", "settings": {}, "seed": seed, "validation": 0.0})
            split = make_scene(plain, objects=objects._replace(data=data)).split
            n = len(split.train) - config.new_clients  # those that are held out from training come last
            labels = None if split.labels is None else split.labels[:n]
            split = Split(split.train[:n], split.test[:n], labels)
            kept = without_test_rows(data, split, config.validation or VALIDATION, seed)
            self.objects[seed] = kept._replace(model=objects.model)

    def scene(self, method: str, values: dict[str, Any], seed: int) -> Scene:
        """What a trial starts from."""
        config = for_method(self.wanted.config, method)
        changes = {"method": self.spaces[method].spec(method, values), "seed": seed, "validation": 0.0}
        changes |= {"pool_rows": 0, "workers": 1, "new_clients": 0, "split": None}
        return make_scene(config.model_copy(update=changes), objects=self.objects[seed])

    def place(self, job: Job) -> Path:
        return self.folder / "trials" / folder_name(job.method) / f"{job.number:04d}"

    def play(self, job: Job, values: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """The mean score of a trial over its seeds after the rounds of a rung, and what it has cost so far."""
        found, flops, seconds, clients, metric = [], 0, 0.0, [], ""
        try:
            for seed in self.wanted.seeds:
                folder = self.place(job) / f"seed-{seed}"
                folder.mkdir(parents=True, exist_ok=True)
                evaluation, rows = play_until(self.scene(job.method, values, seed), folder, job.rung)
                found.append(score(evaluation, self.wanted.objective))
                clients += _of_clients(evaluation)
                metric = evaluation.metric.name
                flops += sum(row.flops for row in rows)
                seconds += sum(row.train_seconds for row in rows)
        except (RunFailed, UsageError) as failure:
            if job.number == 0:
                raise  # the default must run
            return -math.inf, {"failed": str(failure), "flops": flops, "seconds": seconds}
        about = {"flops": flops, "seconds": seconds, "clients": clients, "metric": metric}
        return float(np.mean(found)), about


def _of_clients(evaluation: Evaluation) -> list[float | None]:
    """How well each client is served, the more the better; None where the metric says nothing."""
    values = evaluation.values("personal")
    each = [] if values is None else (evaluation.metric.sign * values.each).tolist()
    return [None if math.isnan(value) else round(value, 6) for value in each]


def play_until(scene: Scene, folder: Path, n_rounds: int) -> tuple[Evaluation, list[Any]]:
    """Play a run from its newest checkpoint to a round, leave a checkpoint there, and score it."""
    every = scene.config.checkpoint_every
    with one_thread():
        simulation = Simulation(scene, folder, say_nothing)
        try:
            simulation.state.load()
            while simulation.state.round < n_rounds:
                simulation.play_round()
                if simulation.state.round % every == 0 or simulation.state.round == n_rounds:
                    simulation.state.save(simulation.manifest())
            return simulation.evaluate(is_last=True), simulation.state.rows
        finally:
            simulation.close()


def score(evaluation: Evaluation, objective: Objective) -> float:
    """The number that is searched for, of validation rows: the metric that the run goes by, the more the better."""
    sign = evaluation.metric.sign
    if objective == "generic":
        found = generic_scores(evaluation)
        if found is None:
            raise RunFailed("this method has no model for all to be tuned by; choose --objective personal")
        return sign * float(found["pooled"])
    return sign * personal_scores(evaluation)["mean" if objective == "personal" else "worst5"]


# The whole


def work(wanted: Tuning, spaces: dict[str, Space], folder: Path, say: Say) -> None:
    """Do what there is to do in a study until it is done; other processes may do the same."""
    studies, trials = Studies(folder), Trials(wanted, spaces, folder)
    planner = Planner(wanted, spaces, studies, say)
    (folder / "claims").mkdir(exist_ok=True)
    while not (now := planner.plan()).done:
        if not any(_take(job, studies, trials) for job in now.jobs):
            time.sleep(WAIT)


def _take(job: Job, studies: Studies, trials: Trials) -> bool:
    """Play a job, unless another process has it or has done it."""
    claim = studies.folder / "claims" / f"{folder_name(job.method)}-{job.number:04d}"
    with try_lock(claim) as is_mine:
        if not is_mine:
            return False
        trial = studies.trials(job.method)[job.number]
        if job.rung not in trial.intermediate_values and "failed" not in trial.user_attrs:
            value, about = trials.play(job, trial.params)
            cost = {name: about.pop(name) for name in ("flops", "seconds")}
            about["costs"] = trial.user_attrs.get("costs", {}) | {str(job.rung): cost}
            studies.record(job.method, job.number, job.rung, value, about)
    return True


@contextmanager
def _helpers(n: int, task: Callable[[], None]) -> Iterator[None]:
    """Forked processes that do the same task; they end with this one."""
    fork = multiprocessing.get_context("fork")
    theirs, mine = fork.Pipe(duplex=False)
    processes = [fork.Process(target=_help, args=(theirs, mine, task), daemon=True) for _ in range(n)]
    with undisturbed():
        for process in processes:
            process.start()
    try:
        yield
        for process in processes:
            process.join()
    finally:
        mine.close()
        theirs.close()


def _help(theirs: Connection, mine: Connection, task: Callable[[], None]) -> None:
    leave_to_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    mine.close()  # else this process would not notice that the main one has ended

    def watch() -> None:
        try:
            theirs.recv_bytes()
        except EOFError:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        task()
    except Exception:
        os._exit(1)  # the main process meets the same error, and tells it
    os._exit(0)


def tune_methods(wanted: Tuning, folder: Path, say: Say) -> None:
    """Search for better settings of every method. A study that was stopped goes on where it was."""
    import_optuna()
    spaces = check_tuning(wanted)
    n = wanted.config.workers
    with _helpers(n - 1, lambda: work(wanted, spaces, folder, say_nothing)):
        work(wanted, spaces, folder, say)
    for name in ("trials", "claims"):  # what is left of checkpoints; all numbers are in the study
        shutil.rmtree(folder / name, ignore_errors=True)


def refuse_same_seeds(wanted: Tuning, scored: Sequence[int]) -> None:
    """Methods are scored with other seeds than they were tuned with."""
    both = sorted(set(wanted.seeds) & set(scored))
    if both:
        words = f"seed {both[0]} was" if len(both) == 1 else f"seeds {', '.join(map(str, both))} were"
        free = [seed for seed in range(100) if seed not in wanted.seeds][:3]
        raise UsageError(
            f"{words} tuned on, and would flatter what was tuned; score with others, e.g. --seeds "
            + ",".join(map(str, free))
        )


def given_as_object(config: Config) -> bool:
    """Whether data or model of a config were objects, and not names."""
    return config.data.startswith(GIVEN) or str(config.model).startswith(GIVEN)
