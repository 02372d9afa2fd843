"""Timing: a few real steps before a run, to see that it can be run and how long it will take."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from plures import devices
from plures.data.batches import batches_per_epoch
from plures.data.population import Population
from plures.engine import cost_of
from plures.methods.base import Schedule
from plures.runs.callbacks import say_nothing
from plures.runs.config import Config
from plures.runs.scene import Scene, method_of
from plures.runs.simulation import Simulation, settle
from plures.simulate.workers import one_thread

BATCHES = 3  # of each client, in a round that is tried
TEST_ROWS = 64  # of each client
ROUNDS = 3  # that are tried; the first compiles, and FedALA's second has its long first stage
EPOCHS, STEPS = 3, 10  # most that a client trains in a round that is tried
SECONDS = 10.0  # of a round that is tried, by what its steps are estimated to cost; and after which no other one is
FEWEST = 2  # clients that are tried, however long their steps take


class TryOut(NamedTuple):
    """What a run will take, from a few steps of it."""

    start: float  # seconds until the first round
    round: float  # seconds of a round
    evaluation: float  # seconds of an evaluation

    def seconds(self, config: Config) -> float:
        """Of the whole run."""
        n_evaluations = 1 if config.eval_every == 0 else max(1, config.rounds // config.eval_every)
        return self.start + config.rounds * self.round + n_evaluations * self.evaluation


def try_out(scene: Scene) -> TryOut:
    """Play some rounds on a few rows of each client. Raises what the run would raise."""
    population, config = scene.population, scene.config
    scene = _shorter(scene)
    short = scene.config
    few = _few_rows(scene)
    began = time.perf_counter()
    scene = settle(scene)
    device = devices.find(config.device)
    with one_thread(), devices.here(device):
        simulation = Simulation(scene._replace(population=few, new_clients=None), None, say_nothing, device)
        try:
            start = time.perf_counter() - began
            first = time.perf_counter()
            for _ in range(ROUNDS):
                began = time.perf_counter()
                simulation.play_round()
                of_round = time.perf_counter() - began
                if time.perf_counter() - first > SECONDS:
                    break
            began = time.perf_counter()
            with torch.no_grad():
                simulation.evaluate()
            of_evaluation = time.perf_counter() - began
        finally:
            simulation.close()

    def steps(train: list[np.ndarray]) -> int:
        sizes = np.array([len(rows) for rows in train])
        return max(1, int(batches_per_epoch(sizes, config.batch, population.smallest, population.last_batch).sum()))

    def n_rows(test: list[np.ndarray]) -> int:
        return max(1, sum(map(len, test)))

    longer = 1.0 if config.steps is not None else steps(population.train) / steps(few.train)
    if population.work is not None and few.work is not None:
        longer *= sum(population.work) / sum(few.work)
    elif config.steps is not None and short.steps is not None:
        longer *= config.steps / short.steps
    else:
        longer *= max(1, config.epochs) / max(1, short.epochs)
    return TryOut(start, longer * of_round, n_rows(population.test) / n_rows(few.test) * of_evaluation)


def _few_rows(scene: Scene) -> Population:
    """A few rows of each client; if steps are long, only of some clients, the others have none."""
    population, config, task = scene.population, scene.config, scene.task
    affordable = SECONDS / max(cost_of(task.size, config.batch, 3, 1).step, 1e-9)  # steps of a round
    n_batches = min(BATCHES, max(1, int(affordable / FEWEST)))
    n_steps = config.steps if config.steps is not None else n_batches * max(1, config.epochs)
    n_cohort = max(FEWEST, int(affordable / n_steps))
    tested_first = sorted(population.eligible(), key=lambda i: len(population.test[i]) == 0)
    chosen = set(tested_first[: math.ceil(n_cohort / config.participation)])
    n_test = min(TEST_ROWS, max(1, int(affordable * 3 * config.batch / len(chosen))))

    def first(rows: Sequence[np.ndarray], n: int) -> list[np.ndarray]:
        return [own[:n] if i in chosen else own[:0] for i, own in enumerate(rows)]

    return population._replace(
        train=first(population.train, n_batches * config.batch),
        test=first(population.test, n_test),
        validation=first(population.validation, n_test),
        pool=np.zeros(0, np.int64),
    )


def _shorter(scene: Scene) -> Scene:
    """The scene with clients that train for a few epochs or steps, if they would for many."""
    config, population = scene.config, scene.population
    steps = None if config.steps is None else min(config.steps, STEPS)
    fewer = {"epochs": min(config.epochs, EPOCHS), "steps": steps, "new_epochs": min(config.new_epochs, EPOCHS)}
    config = config.model_copy(update=fewer)
    if population.work is not None:
        most = EPOCHS if steps is None else STEPS
        population = population._replace(work=(min(population.work[0], most), min(population.work[1], most)))
    schedule = Schedule(len(population.train), config.rounds, config.participation)
    return scene._replace(config=config, method=method_of(config).with_schedule(schedule), population=population)


def in_words(found: TryOut, config: Config) -> str:
    """A sentence about it."""
    return (
        f"a few steps were tried: a round takes about {duration(found.round)}, an evaluation about "
        f"{duration(found.evaluation)}, all {config.rounds} rounds about {duration(found.seconds(config))}"
    )


def duration(seconds: float) -> str:
    """Seconds in words, roughly."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
