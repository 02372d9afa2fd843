"""Timing: a few real steps before a run, to see that it can be run and how long it will take."""

import time
from typing import NamedTuple

import numpy as np
import torch

from plures import devices
from plures.data.batches import batches_per_epoch
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
    few = population._replace(
        train=[rows[: BATCHES * config.batch] for rows in population.train],
        test=[rows[:TEST_ROWS] for rows in population.test],
        validation=[rows[:TEST_ROWS] for rows in population.validation],
        pool=np.zeros(0, np.int64),
        work=scene.population.work,
    )
    began = time.perf_counter()
    scene = settle(scene)
    device = devices.find(config.device)
    with one_thread(), devices.here(device):
        simulation = Simulation(scene._replace(population=few, new_clients=None), None, say_nothing, device)
        try:
            start = time.perf_counter() - began
            for _ in range(ROUNDS):
                began = time.perf_counter()
                simulation.play_round()
                of_round = time.perf_counter() - began
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
