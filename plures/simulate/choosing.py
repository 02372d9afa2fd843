"""Choosing: how the clients of a run are best run, by a few steps of them that are timed and forgotten.

Stacking pays where a step of one client costs little arithmetic and many calls. Where its arithmetic is heavy, or its
weights fill the cache, small stacks, or none, may be faster. What is chosen is written into the config, so that a run
that is resumed, or run again from its config, computes the same bits whatever a clock says.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from plures import engine, tree
from plures.engine import cost_of
from plures.learn.task import Task
from plures.methods.base import Federation, Method
from plures.methods.messages import Message
from plures.simulate.executor import CannotStack, warm_up
from plures.simulate.stacking import Style
from plures.simulate.work import Work, train_function

SMALL, SMALL_OF_OURS = 2e8, 1e9  # FLOPs of a step below which nothing is timed (guesses); of models of this package
FEW = 4  # clients in a small stack
STEPS = 2  # of each client, in what is timed
BETTER = 0.9  # another way must take at most this share of the time of full stacks


class Choice(NamedTuple):
    """How clients are run."""

    style: Style = "vectorised"
    stack: int | None = None  # most clients in a stack; None: as many as the engine's estimate allows
    why: str = ""  # in words, if it is not what is usual


def choose(work: Work, n_cohort: int, is_of_ours: bool) -> Choice:
    """The fastest way; `is_of_ours` says whether the model is one of this package, which can all be stacked."""
    task, batch = work.task, work.method.solver.batch
    is_small = is_small_step(task, batch, is_of_ours)
    if is_small and is_of_ours:
        return Choice()
    eligible = work.population.eligible()
    stacked = work._replace(style="vectorised", stack=None)
    try:
        warm_up(stacked, _message(work, work.method, eligible[:1]))
    except CannotStack:
        return Choice("one_by_one", None, "clients run one by one, because torch cannot stack this model")
    if is_small:
        return Choice()
    most = cost_of(task.size, batch, 3, 8 * tree.n_bytes(task.initial) + 3 * batch * task.row_bytes).most
    ids = eligible[: min(n_cohort, most)]
    ways = [Choice(), Choice(stack=FEW), Choice(stack=1), Choice("one_by_one")]
    seconds = {}
    for way in ways if len(ids) > FEW else [ways[0], *ways[2:]]:
        some = ids[: way.stack] if way.style == "vectorised" else ids[:1]
        seconds[way] = _seconds(stacked._replace(style=way.style), some) / len(some)
    best = min(seconds, key=lambda way: seconds[way])
    if seconds[best] > BETTER * seconds[Choice()]:
        return Choice()
    of_best, of_full = (1e3 * seconds[way] / STEPS for way in (best, Choice()))
    gain = f"a step takes {of_best:.3g} ms, and {of_full:.3g} in full stacks"
    how = "run one by one" if best.style == "one_by_one" else f"are stacked {best.stack} at a time"
    return best._replace(why=f"clients {how}: {gain}")


def is_small_step(task: Task, batch: int, is_of_ours: bool) -> bool:
    """Whether a step of one client is so little arithmetic that nothing is timed."""
    return 3 * task.flops * batch < (SMALL_OF_OURS if is_of_ours else SMALL)


def _message(work: Work, method: Method, ids: list[int]) -> Message:
    """What these clients are sent in the first round."""
    with torch.no_grad():
        federation = Federation(work.population.sizes(), torch.tensor(0))
        return method.send(work.task, method.init_server(work.task, work.task.initial, federation), torch.tensor(ids))


def _seconds(work: Work, ids: list[int]) -> float:
    """What some steps of these clients take; the first time, which compiles, is not counted."""
    method, task, population = work.method, work.task, work.population
    rows = [population.train[i] for i in ids]
    widest = min(method.solver.batch, max(len(own) for own in rows))  # a batch may be wider than all rows
    enough = [np.resize(own, STEPS * widest) for own in rows]  # the same number of steps for all
    short = method.with_solver(method.solver.for_steps(STEPS))
    few = population._replace(train=enough, test=[], validation=[], work=None)
    places, message = list(range(len(ids))), _message(work, short, ids)
    clients = tree.repeat(work.initial, len(ids))
    found = []
    for _ in range(3):
        began = time.thread_time()  # which does not count what others do on a busy machine
        with engine.using(work.engine):
            work.run(train_function(short, task), message, clients, few.shards(places, "train", "probe", 0))
        found.append(time.thread_time() - began)
    return min(found[1:])
