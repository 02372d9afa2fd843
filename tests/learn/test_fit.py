"""The training loop: what one client gets, what a stack of clients gets, and how long each one trains."""

import importlib

import numpy as np
import pytest
import torch

from plures import engine, seeds, tree
from plures.data.batches import LAST_BATCH, _sort_within, batches_per_epoch, plan_batches
from plures.data.shard import Shard
from plures.engine import Engine, Usage, steps
from plures.learn.fit import fit, measure
from plures.learn.solver import Plateau, Solver
from plures.methods.messages import Same
from plures.runs.config import make_config
from plures.simulate.stacking import one_by_one, vectorised

# A world without a model: rows are points, an objective pulls `p` to the mean of a batch.


def points(sizes, width=3, last_batch="keep", work=None):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), width)).astype(np.float32))
    ends = np.cumsum(sizes)
    rows = np.zeros((len(sizes), max(max(sizes), 1)), np.int64)
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows[i, :size] = np.arange(end - size, end)
    n = len(sizes)
    return Shard(
        x,
        torch.zeros(len(x), dtype=torch.int64),
        torch.from_numpy(rows),
        torch.tensor(sizes),
        torch.ones(n, 1),
        torch.tensor([seeds.key_of("test", i) for i in range(n)]),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.int64),
        torch.full((n,), LAST_BATCH.index(last_batch)),
        torch.tensor(work if work is not None else [0] * n),
    )


def one(shards, i):
    return Shard(shards.x, shards.y, *[part[i] for part in shards[2:]])


def to_mean(p, batch):
    each = 0.5 * (batch.x - p).square().sum(1)
    return (each * batch.mask).sum() / batch.mask.sum()


def run(shards, fn, *given):
    """`fn(shard, *rows)` over the stack and one by one."""
    call = lambda _, shard, *rows: fn(shard, *rows)  # noqa: E731
    with torch.no_grad():
        return [how(call, Same({}), shards, *given) for how in (vectorised, one_by_one)]


def test_fit_takes_plain_gradient_steps_over_whole_epochs():
    shards = points([4])
    fitted = fit(to_mean, torch.zeros(3), one(shards, 0), Solver(lr=0.5, batch=4, epochs=2))
    mean = shards.x.mean(0)
    torch.testing.assert_close(fitted.params, mean * 0.75)  # two half-way steps from zero
    assert int(fitted.steps) == 2


@pytest.mark.parametrize(
    ("solver", "reference"),
    [
        (Solver(lr=0.1, momentum=0.9, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
        (Solver(kind="adam", lr=0.05), lambda p: torch.optim.Adam(p, 0.05)),
        (Solver(kind="adam", lr=0.05, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.1)),
        (Solver(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    ],
    ids=["momentum", "adam", "adam-decay", "sgd"],
)
def test_solver_is_that_of_torch(solver, reference):
    shards = points([5])
    mine = fit(to_mean, torch.ones(3), one(shards, 0), Solver(**{**vars(solver), "batch": 5, "epochs": 7})).params
    theirs = torch.nn.Parameter(torch.ones(3))
    optimizer = reference([theirs])
    for _ in range(7):
        optimizer.zero_grad()
        (0.5 * (shards.x - theirs).square().sum(1)).mean().backward()
        optimizer.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_learning_rate_decays_with_the_round():
    shard = one(points([4]), 0)._replace(round=torch.tensor(3))
    fitted = fit(to_mean, torch.zeros(3), shard, Solver(lr=0.8, decay=0.5, batch=4))
    torch.testing.assert_close(fitted.params, shard.x.mean(0) * 0.1)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}])
@pytest.mark.parametrize("kind", [{}, {"momentum": 0.9}, {"kind": "adam"}])
def test_stack_of_unequal_clients_equals_each_alone(length, kind):
    shards = points([1, 12, 7, 30, 3])
    solver = Solver(lr=0.05, batch=4, **length, **kind)
    stacked, alone = run(shards, lambda shard: fit(to_mean, torch.zeros(3), shard, solver))
    for a, b in zip(tree.leaves(stacked), tree.leaves(alone), strict=True):
        torch.testing.assert_close(a, b)
    expected = [7] * 5 if "steps" in length else [3, 9, 6, 24, 3]
    assert stacked.steps.tolist() == expected


def test_client_without_rows_takes_no_step():
    shards = points([0, 5])
    stacked, alone = run(shards, lambda shard: fit(to_mean, torch.ones(3), shard, Solver(batch=2)))
    assert torch.equal(stacked.params[0], torch.ones(3)) and stacked.steps.tolist() == [0, 3]
    assert torch.equal(alone.params[0], torch.ones(3))


def test_every_epoch_meets_every_row_once():
    shards = points([7, 3])
    sizes, rows = shards.size.numpy(), shards.rows.numpy()
    batches = plan_batches(
        rows, sizes, shards.key.numpy(), 3 * batches_per_epoch(sizes, 3, 1, "keep"), 3, 1, True, "keep"
    )
    first = [batches.rows[batches.start[t]][batches.mask[batches.start[t]] > 0].tolist() for t in range(9)]
    for epoch in range(3):
        assert sorted(row for t in range(3) for row in first[3 * epoch + t]) == list(range(7))
    assert first[0] + first[1] + first[2] != first[3] + first[4] + first[5]


def test_order_depends_on_the_clients_key_and_not_on_its_neighbours():
    shards = points([7, 3, 9])
    keys = shards.key.numpy()
    alone = plan_batches(shards.rows[1:2].numpy(), np.array([3]), keys[1:2], np.array([2]), 2, 1, True, "keep")
    together = plan_batches(shards.rows.numpy(), shards.size.numpy(), keys, np.array([4, 2, 5]), 2, 1, True, "keep")
    place = together.sorted_clients.tolist().index(1)
    for t in range(2):
        assert torch.equal(alone.rows[alone.start[t]], together.rows[together.start[t] + place])


def test_padding_of_a_batch_repeats_the_clients_own_row():
    shards = points([3, 5])
    sizes = shards.size.numpy()
    batches = plan_batches(shards.rows.numpy(), sizes, shards.key.numpy(), np.array([1, 2]), 4, 1, True, "keep")
    owner = np.concatenate([batches.sorted_clients[:n] for n in batches.live])
    for row, client in zip(batches.rows, owner, strict=True):
        assert set(row.tolist()) <= set(shards.rows[client, : sizes[client]].tolist())


def test_last_batch_of_one_is_left_out_with_batch_norm_unless_it_is_the_only_one():
    assert batches_per_epoch(np.array([1, 2, 5, 6, 10, 11]), 5, 2, "keep").tolist() == [1, 1, 1, 1, 2, 2]
    assert batches_per_epoch(np.array([1, 2, 5, 6, 10, 11]), 5, 1, "keep").tolist() == [1, 1, 1, 2, 2, 3]


def test_number_of_epochs_may_differ_between_clients():
    shards = points([4, 4, 4])
    epochs = torch.tensor([0, 1, 3])
    stacked, alone = run(
        shards, lambda shard, n: fit(to_mean, torch.zeros(3), shard, Solver(batch=2), epochs=n), epochs
    )
    assert stacked.steps.tolist() == alone.steps.tolist() == [0, 2, 6]
    torch.testing.assert_close(stacked.params, alone.params)


def test_box_holds_after_every_step():
    shards = points([4])
    far = fit(lambda p, batch: -10 * p.sum(), torch.zeros(3), one(shards, 0), Solver(lr=1.0, box=(0.0, 1.0)))
    assert torch.equal(far.params, torch.ones(3))


def test_plateau_stops_each_client_when_its_own_loss_has_settled():
    shards = points([6, 6, 2])
    speed = torch.tensor([0.5, 0.02, 0.9])

    def objective(p, batch, speed):
        return speed * p.square().sum()

    stop = Plateau(threshold=1e-3)
    stacked, alone = run(
        shards,
        lambda shard, s: fit(
            objective, torch.ones(3), shard, Solver(lr=0.5, batch=6, stop=stop), (s,), epochs=torch.tensor(60)
        ),
        speed,
    )
    assert stacked.steps.tolist() == alone.steps.tolist()
    for value, n in zip(speed.tolist(), stacked.steps.tolist(), strict=True):
        losses, p = [], 1.0
        for _ in range(60):
            losses.append(3 * value * p * p)
            p -= 0.5 * 2 * value * p
            if len(losses) > 10 and np.std(losses[-10:]) < 1e-3:
                break
        assert n == len(losses)
    assert len(set(stacked.steps.tolist())) == 3
    torch.testing.assert_close(stacked.params, alone.params)


def test_statistics_take_the_step_of_their_gradient_and_no_learning_rate():
    def objective(params, batch):
        return (params["running_mean"] * 2.0).sum() + (params["weight"] * 2.0).sum()

    start = {"weight": torch.ones(2), "running_mean": torch.ones(2)}
    solver = Solver(lr=0.1, momentum=0.9, weight_decay=0.5, batch=4)
    fitted = fit(objective, start, one(points([4]), 0), solver).params
    torch.testing.assert_close(fitted["running_mean"], torch.full((2,), -1.0))
    torch.testing.assert_close(fitted["weight"], torch.full((2,), 1 - 0.1 * 2.5))


def test_objective_that_closes_over_a_tensor_is_refused_when_stacked():
    secret = torch.ones(3)
    with pytest.raises(TypeError, match="given"), torch.no_grad():
        vectorised(
            lambda _, shard: fit(lambda p, b: (p * secret).sum(), torch.zeros(3), shard, Solver()).params,
            Same({}),
            points([3, 4]),
        )


def test_no_gradient_is_taken_through_a_fit():
    shard = points([4])
    one = Shard(shard.x, shard.y, *[x[0] for x in shard[2:]])

    def after_training(p):
        return fit(lambda p, batch: p.square().sum(), p, one, Solver()).params.sum()

    with pytest.raises(TypeError, match="no gradient is taken through them"):
        torch.func.grad(after_training)(torch.ones(3))


def test_measure_sums_over_all_rows_in_batches():
    shards = points([5, 1, 8])

    def count(p, batch):
        return {"n": batch.mask.sum(), "sum": (batch.x * batch.mask[:, None]).sum(0) * p}

    stacked, alone = run(shards, lambda shard: measure(count, torch.tensor(2.0), shard, 3))
    assert stacked["n"].tolist() == alone["n"].tolist() == [5, 1, 8]
    ends = [0, 5, 6, 14]
    for i in range(3):
        torch.testing.assert_close(stacked["sum"][i], 2 * shards.x[ends[i] : ends[i + 1]].sum(0))


def test_batches_of_many_clients_are_measured_at_once_if_they_share_all_that_is_read(monkeypatch):
    fit_module = importlib.import_module("plures.learn.fit")
    monkeypatch.setattr(fit_module, "TOGETHER", 4)
    monkeypatch.setattr(fit_module, "TEST_BATCH", 20)
    shards = points([40, 3, 17])._replace(counts=torch.tensor([[2.0], [3.0], [5.0]]))
    calls = []

    def weighed(p, batch):
        calls.append(batch.mask.shape)
        return (batch.x[:, 0] * batch.mask).sum() * p * batch.counts[0]

    p, ends = torch.tensor(2.0), [0, 40, 43, 60]
    expected = [2 * n * shards.x[a:b, 0].sum() for n, a, b in zip((2, 3, 5), ends, ends[1:], strict=False)]
    # Six batches of 16, four in a call; or those of a step, of 20, or of as many rows as were asked for.
    for shared, batch, widths in ((True, None, [16, 16]), (False, None, [20, 20]), (True, 15, [15, 15, 15])):
        calls.clear()
        if shared:
            stacked = vectorised(lambda p, shard, b=batch: measure(weighed, p, shard, b), Same(p), shards)
        else:
            stacked = vectorised(lambda _, shard, p: measure(weighed, p, shard), Same({}), shards, p.repeat(3))
        torch.testing.assert_close(stacked, torch.stack(expected))
        assert calls == [(width,) for width in widths]


@pytest.mark.parametrize(("n", "largest"), [(0, 2), (1, 2), (500, 2**63), (500, 64)])
def test_lots_are_sorted_within_segments_also_where_they_are_nearly_equal(n, largest):
    rng = np.random.default_rng(0)
    segment, lot = np.sort(rng.integers(0, 40, n)), rng.integers(0, largest, n)
    assert _sort_within(segment, lot).tolist() == np.lexsort((lot, segment)).tolist()


def test_take_is_a_random_subset_that_changes_with_the_round():
    shard = one(points([10]), 0)
    some = shard.take(0.8, "ala")
    again = shard.take(0.8, "ala")
    other = shard._replace(key=torch.tensor(5)).take(0.8, "ala")
    chosen = some.rows[: int(some.size)].tolist()
    assert len(chosen) == 8 == len(set(chosen)) and set(chosen) <= set(range(10))
    assert chosen == again.rows[:8].tolist() and set(chosen) != set(other.rows[:8].tolist())


@pytest.mark.parametrize(("n", "fraction", "expected"), [(1, 0.8, 1), (5, 0.8, 4), (100, 0.29, 29), (3, 0.01, 1)])
def test_take_keeps_the_floor_but_at_least_one(n, fraction, expected):
    assert int(one(points([n]), 0).take(fraction, "x").size) == expected


def test_split_is_disjoint_and_a_single_row_is_in_both():
    first, rest = one(points([10]), 0).split(0.7, "x")
    a, b = first.rows[: int(first.size)].tolist(), rest.rows[: int(rest.size)].tolist()
    assert sorted(a + b) == list(range(10)) and len(a) == 7
    first, rest = one(points([1]), 0).split(0.7, "x")
    assert int(first.size) == int(rest.size) == 1 and first.rows[0] == rest.rows[0]


def test_traced_step_is_used_and_equals_the_untraced_one(monkeypatch):
    shards = points([4, 9, 2])
    solver = Solver(lr=0.1, batch=2, epochs=2)

    def objective(p, batch):
        return to_mean(p, batch) + p.sin().sum()

    def learn():
        with engine.metered() as meter, torch.no_grad():
            fitted = vectorised(lambda _, s: fit(objective, torch.ones(3), s, solver), Same({}), shards)
        return fitted, meter.usage

    traced, usage = learn()
    with engine.using(Engine("eager")):
        plain, eager_usage = learn()
    assert usage == Usage(10, 0, ()) and eager_usage == Usage(0, 10, ("the engine is eager",))
    torch.testing.assert_close(traced.params, plain.params)


def bowl(p, batch, body):
    """Pulls what the body makes of the rows to `p`."""
    each = (torch.tanh(batch.x @ body) - p).square().sum(1)
    return (each * batch.mask).sum() / batch.mask.sum()


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_batches_that_come_again_are_computed_once_and_give_the_same(monkeypatch, room):
    monkeypatch.setattr(steps, "MEMORY_BYTES", room)
    shards, bodies = points([4, 9, 2, 9]), torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    firsts = []
    original = engine.compile_step

    def watched(*args):
        step = original(*args)
        if step.repeat is None:  # one client by itself
            return step
        early = step.repeat.early
        repeat = step.repeat._replace(early=lambda tensors: firsts.append(len(tensors[1])) or early(tensors))
        return step._replace(repeat=repeat)

    monkeypatch.setattr(engine, "compile_step", watched)
    solver = Solver(lr=0.1, batch=2, epochs=6, stop=Plateau(window=2, threshold=0.02), shuffle=False)

    def learned(shard, body):
        return fit(bowl, torch.ones(3), shard, solver, (body,))

    stacked, alone = run(shards, learned, bodies)
    assert stacked.steps.tolist() == alone.steps.tolist() and len(set(alone.steps.tolist())) > 1
    torch.testing.assert_close(stacked.params, alone.params)
    assert firsts == [4] * (5 if room else 1)  # of the longest client's first epoch, or until it is known not to fit


@pytest.mark.parametrize("room", [1, 600, 1 << 20])
def test_steps_computed_ahead_give_the_same_however_many_they_are(monkeypatch, room):
    monkeypatch.setattr(steps, "AHEAD_BYTES", room)
    chunks = []
    original = steps._LookAhead._compute

    def watched(self, t, *sizes):
        original(self, t, *sizes)
        chunks.append(self.end - t)

    monkeypatch.setattr(steps._LookAhead, "_compute", watched)
    solver = Solver(lr=0.1, batch=2, epochs=3)
    bodies = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))

    def learned(shard, body):
        return fit(bowl, torch.ones(3), shard, solver, (body,))

    stacked, alone = run(points([4, 9, 2, 9]), learned, bodies)
    torch.testing.assert_close(stacked.params, alone.params)
    torch.testing.assert_close(stacked.loss, alone.loss)
    assert stacked.steps.tolist() == alone.steps.tolist()
    assert sum(chunks) == 15
    assert (max(chunks) == 1) if room == 1 else (chunks == [15]) if room == 1 << 20 else (1 < max(chunks) < 15)


@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_clients_that_stop_early_leave_steps_computed_ahead(threshold):
    solver = Solver(lr=0.1, batch=2, epochs=9, stop=Plateau(window=2, threshold=threshold))
    stacked, alone = run(points([4, 9, 2, 9]), lambda s: fit(to_mean, torch.ones(3), s, solver))
    torch.testing.assert_close(stacked.params, alone.params)
    torch.testing.assert_close(stacked.loss, alone.loss)
    assert stacked.steps.tolist() == alone.steps.tolist()
    assert stacked.steps.tolist() != [18, 45, 9, 45]


def test_without_shuffling_every_epoch_meets_the_rows_in_their_order():
    shards = points([5])

    def objective(p, batch):
        return (p * (batch.x[:, 0] * batch.mask).sum()).sum()  # its gradient is the sum of the batch

    seen = []
    for n_steps in range(1, 7):
        solver = Solver(lr=1.0, batch=2, steps=n_steps, shuffle=False)
        fitted = fit(objective, torch.zeros(1), one(shards, 0), solver)
        seen.append(float(fitted.params))
    sums = -np.diff([0, *seen])
    x = shards.x[:, 0].numpy()
    expected = [x[0] + x[1], x[2] + x[3], x[4]]
    np.testing.assert_allclose(sums, [*expected, *expected], rtol=1e-5)


# Rows that fill no batch


def batch_sizes(size, batch, last_batch, smallest=1):
    rows, sizes = np.arange(size)[None], np.array([size])
    n = batches_per_epoch(sizes, batch, smallest, last_batch)
    plan = plan_batches(rows, sizes, np.array([5]), n, batch, smallest, True, last_batch)
    used = plan.rows[plan.mask.bool()].tolist()
    assert len(set(used)) == len(used)
    return plan.mask.sum(1).int().tolist()


def test_even_deals_21_rows_into_three_batches_of_seven():
    assert batch_sizes(21, 10, "even") == [7, 7, 7]
    assert make_config({}).last_batch == "even"
    assert batch_sizes(21, 10, "keep") == [10, 10, 1]
    assert batch_sizes(21, 10, "drop") == [10, 10]


def test_even_loses_no_row_and_its_batches_differ_by_one_at_most():
    for size in range(1, 60):
        sizes = batch_sizes(size, 10, "even")
        assert sum(sizes) == size and max(sizes) - min(sizes) <= 1 and len(sizes) == -(-size // 10)


def test_a_client_with_less_than_a_batch_keeps_it():
    assert [batch_sizes(4, 10, how) for how in LAST_BATCH] == [[4]] * 3


def test_even_batches_are_large_enough_for_batch_norm_or_a_row_is_left_out():
    assert batch_sizes(11, 10, "even", smallest=2) == [6, 5]
    assert batch_sizes(3, 2, "even", smallest=2) == [2]
    assert batch_sizes(5, 2, "even", smallest=2) == [2, 2]
    assert batch_sizes(1, 2, "even", smallest=2) == [1]


def test_clients_of_a_stack_get_the_even_batches_that_they_get_alone():
    shards = points([21, 4, 11], last_batch="even")
    stacked = vectorised(
        lambda _, shard: fit(to_mean, torch.zeros(3), shard, Solver(lr=0.3, batch=10)), Same(()), shards
    )
    for i in range(3):
        alone = fit(to_mean, torch.zeros(3), one(shards, i), Solver(lr=0.3, batch=10))
        torch.testing.assert_close(stacked.params[i], alone.params)
        assert stacked.steps.tolist() == [3, 1, 2]


# Different amounts of work


def test_clients_train_as_many_epochs_or_steps_as_their_shards_say():
    shards = points([8, 8, 8], work=[0, 1, 3])
    for solver, n_steps in (
        (Solver(batch=4, varied=True), [0, 2, 6]),
        (Solver(batch=4, varied=True, steps=9), [0, 1, 3]),
    ):
        found = vectorised(
            lambda _, shard, solver=solver: fit(to_mean, torch.zeros(3), shard, solver), Same(()), shards
        )
        assert found.steps.tolist() == n_steps


def test_what_a_method_trains_for_a_number_of_epochs_of_its_own_is_not_varied():
    shards = points([8, 8], work=[1, 3])
    solver = Solver(batch=4, varied=True).for_epochs(2)
    found = vectorised(lambda _, shard: fit(to_mean, torch.zeros(3), shard, solver), Same(()), shards)
    assert found.steps.tolist() == [4, 4]
