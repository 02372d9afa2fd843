"""What `plures doctor` prints: what will go wrong, before it does."""

import numpy as np

from plures import devices, tree
from plures.data.batches import batches_per_epoch
from plures.engine import Engine, cost_of
from plures.engine.private import why_not_traced
from plures.files import in_bytes
from plures.runs import timing
from plures.runs.describing import first_traffic
from plures.runs.scene import Scene
from plures.runs.simulation import settle
from plures.simulate import memory
from plures.simulate.features import estimate_seconds, rows_of
from plures.simulate.grouping import group_clients
from plures.simulate.sampling import draw_cohort
from plures.simulate.shapes import shapes_of


def diagnosis(scene: Scene) -> list[str]:
    """Sizes, memory, traffic, odd clients, the engine, and the parts of the model."""
    scene = settle(scene)
    config, task, method, population = scene.config, scene.task, scene.method, scene.population
    sizes = population.sizes().numpy()
    eligible = population.eligible()
    labels = population.y.numpy()
    present = [len(np.unique(labels[rows])) for rows in population.train]
    lines = [
        f"data       {config.data}: {len(labels)} rows of shape {tuple(population.x.shape[1:])}, "
        f"{population.n_classes} classes, {in_bytes(population.x.nbytes)} in memory",
        f"split      {len(sizes)} clients, {sizes.min()} to {sizes.max()} training rows "
        f"(median {int(np.median(sizes))}), {min(present)} to {max(present)} classes",
    ]
    n_weights = sum(x.numel() for name, x in task.initial.items() if not tree.is_statistic(name))
    lines += [f"model      {config.model}: {n_weights:,} weights, {in_bytes(tree.n_bytes(task.initial))}"]
    for layer, names in task.layers.items():
        mark = "  <- head" if layer == task.head or task.is_head(names[0]) else ""
        shapes = ", ".join("x".join(map(str, task.initial[name].shape)) for name in names)
        lines.append(f"           {layer}: {shapes}{mark}")
    if task.frozen:
        lines.append(f"frozen     {task.trained_in_words}; {in_bytes(tree.n_bytes(task.frozen))} are frozen")
    lines.append(f"device     {devices.in_words(devices.find(config.device))}")
    if scene.has_features:
        lines.append(f"features   {_features_in_words(scene)}")
    lines.append(f"engine     {_engine_in_words(scene)}")
    ids = draw_cohort(eligible, config.participation, config.seed, 0, method.sampling)
    known = shapes_of(method, task, population.sizes())
    needed = memory.forecast(known, len(sizes), len(ids))
    where = "in a file" if needed.clients > config.memory_limit_mb << 20 else "in memory"
    if needed.held > 0.9 * memory.available():
        free = f"{in_bytes(memory.available())} of memory are free"
        return [*lines, f"memory     {needed.in_words()}: it does not fit, {free}"]
    down, up = first_traffic(scene, known)
    lines += [
        f"traffic    {in_bytes(down)} down and {in_bytes(up)} up per client and round, "
        f"{in_bytes((down + up) * len(ids) * config.rounds)} in {config.rounds} rounds of {len(ids)} clients",
        f"memory     {needed.in_words()} ({where})",
    ]
    per_epoch = batches_per_epoch(sizes, config.batch, population.smallest, population.last_batch)
    n_steps = [int(config.steps or per_epoch[i] * config.epochs) for i in ids]
    stacks = group_clients(n_steps, cost_of(task.size, config.batch, 3, tree.n_bytes(task.initial) * 8))
    lines.append(
        f"round      {len(ids)} clients in {len(stacks)} groups, {sum(n_steps)} steps, "
        f"the longest client has {max(n_steps)}"
    )
    lines.append(f"time       {timing.in_words(timing.try_out(scene), config)}")
    odd = [*scene.notes, *_odd_clients(scene, sizes, present)]
    lines += [f"look at    {sentence}" for sentence in odd]
    return lines


def _features_in_words(scene: Scene) -> str:
    """What is computed once, and how long that takes."""
    task, population, config = scene.task, scene.population, scene.config
    assert task.lower is not None
    n = len(rows_of([population] if scene.new_clients is None else [population, scene.new_clients]))
    kept = task.lower.run(task.example.unsqueeze(0)).nbytes
    seconds = estimate_seconds(task, population.x, n, config.workers)
    where = "frozen layers" if task.lower.upper is None else f"frozen layers before {task.lower.upper.path}"
    return (
        f"{where} are run once for each of {n} rows, in about {timing.duration(seconds)} (or read from a file of an "
        f"earlier run); {in_bytes(n * kept)} are kept"
    )


def _engine_in_words(scene: Scene) -> str:
    """Which engine training steps will run on."""
    config = scene.config
    if config.style == "one_by_one":
        return "eager, because clients run one by one"
    if Engine.parse(config.engine).kind == "eager":
        return "eager, as asked for"
    if config.device != "cpu":
        return "eager, because the fast engine is for the CPU"
    if config.precision == "bf16":
        return "eager, because the fast engine is for float32 and float64"
    reason = why_not_traced()
    return f"eager, because {reason}" if reason else "traced"


def _odd_clients(scene: Scene, sizes: np.ndarray, present: list[int]) -> list[str]:
    config, population = scene.config, scene.population
    tested = np.array([len(rows) for rows in population.test])
    kinds = [
        ("have no rows: they sit out", sizes == 0),
        ("have one training row", sizes == 1),
        ("have one class: a constant answer is right for them", (np.array(present) == 1) & (sizes > 1)),
        (f"have fewer rows than a batch of {config.batch}", (sizes > 1) & (sizes < config.batch)),
        ("have no test rows: they are not scored", (tested == 0) & (sizes > 0)),
    ]
    return [
        f"{mask.sum()} of {len(sizes)} clients {words} (e.g. client {int(np.flatnonzero(mask)[0])})"
        for words, mask in kinds
        if mask.any()
    ]
