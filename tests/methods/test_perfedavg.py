import pytest
import torch
from torch.nn import functional as F

import plures
from plures.methods.addons.prox import Prox
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.perfedavg import PerFedAvg
from tests.methods.plain import (
    LR,
    Bowl,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    bowl_at,
    differs,
    module_of,
    moved,
    params_of,
    shard_for,
    solver_of,
    task_of,
    trained,
)
from tests.small import played, run_of, shard_of

ALPHA = 0.25


class Regression:
    """Least squares: the last column of a row is what the others are to give. A quadratic loss."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        each = (batch.x[:, :-1] @ params["w"] - batch.x[:, -1]).square() / 2
        return (each * batch.mask).sum() / batch.mask.sum()


class Plane:
    """A task with one gradient everywhere: the mean of the rows."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        return (params["w"] * batch.x * batch.mask.unsqueeze(1)).sum() / batch.mask.sum()


def per_of(
    order: str, alpha: float = ALPHA, delta: float = 1e-3, pm_epochs: int = 1, repeat: bool = False, **solver
) -> PerFedAvg:
    return PerFedAvg(solver_of(**solver), order=order, alpha=alpha, delta=delta, pm_epochs=pm_epochs, repeat=repeat)


def upload_of(method, task, received, shard):
    return method.train(task, received, (), shard)[1]


def gradients(make, params, x, y, along=None):
    """The gradient of a plain module, or with `along` its curvature times that; and the module after the pass."""
    module = module_of(make, params)
    named = dict(module.named_parameters())
    found = torch.autograd.grad(F.cross_entropy(module(x), y), list(named.values()), create_graph=along is not None)
    if along is not None:
        turned = sum((g * along[name]).sum() for name, g in zip(named, found, strict=True))
        found = torch.autograd.grad(turned, list(named.values()))
    return {name: g.detach() for name, g in zip(named, found, strict=True)}, params_of(module)


def by_hand(make, w, steps, n_parts, alpha, curved):
    """v = w - alpha g(w; D); d = g(v; D'); w <- w - lr (d - alpha H(w; D'') d). Statistics are those of D."""
    for x, y in steps:
        parts = [(x[k::n_parts], y[k::n_parts]) for k in range(n_parts)]
        first, passed = gradients(make, w, *parts[0])
        v = w | {name: w[name] - alpha * g for name, g in first.items()}
        d, _ = gradients(make, v, *parts[1])
        bent = gradients(make, w, *parts[2], along=d)[0] if curved else {name: 0.0 for name in d}
        w = passed | {name: w[name] - LR * (g - alpha * bent[name]) for name, g in d.items()}
    return w


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize(("order", "n_parts"), [("fo", 2), ("exact", 3)])
def test_perfedavg_equals_the_steps_written_out_with_plain_modules(make, order, n_parts):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task, n=36)
    steps = batches(shard, 2, batch=n_parts * 5)
    expected = by_hand(make, received, steps, n_parts, ALPHA, order == "exact")
    assert_close(upload_of(per_of(order, epochs=2), task, received, shard), expected)


@pytest.mark.parametrize(("order", "n_parts"), [("fo", 2), ("exact", 3)])
def test_with_repeat_rows_are_met_as_often_as_a_batch_has_parts(order, n_parts):
    """Two epochs are four passes over the rows, or six, each in an order of its own."""
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=36)
    steps = list(batches(shard, 2 * n_parts, batch=n_parts * 5))
    assert len(steps) == {"fo": 4 * 4, "exact": 6 * 3}[order]
    expected = by_hand(Dense, received, steps, n_parts, ALPHA, order == "exact")
    assert_close(upload_of(per_of(order, repeat=True, epochs=2), task, received, shard), expected)


def n_steps(method, task, shard, client=()) -> int:
    return int(method.train(task, task.initial, client, shard)[2]["steps"])


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("order", "n_parts"), [("fo", 2), ("hf", 3), ("exact", 3)])
def test_without_a_word_there_are_as_many_outer_steps_as_steps_of_fedavg(order, n_parts, epochs):
    """30 rows are 6 batches of 5, or 3 of 10 met twice, or 2 of 15 met three times."""
    task = task_of(Dense)
    shard, solver = shard_for(task, n=30), solver_of(epochs=epochs)
    fedavg = n_steps(FedAvg(solver), task, shard, FedAvgClient({}))
    assert n_steps(PerFedAvg(solver, order=order), task, shard) == fedavg == 6 * epochs
    assert n_steps(PerFedAvg(solver, order=order, repeat=False), task, shard) == 6 * epochs // n_parts


@pytest.mark.parametrize(("order", "n_parts"), [("fo", 2), ("hf", 3)])
@pytest.mark.parametrize("n", [1, 4, 11, 17, 36])
def test_where_rows_do_not_fill_batches_there_are_no_fewer_steps_and_less_than_a_batch_more(order, n_parts, n):
    task = task_of(Dense)
    shard = shard_for(task, n=n)
    more = n_steps(PerFedAvg(solver_of(), order=order), task, shard) - -(-n // 5)
    assert 0 <= more < n_parts


def test_a_given_number_of_steps_is_that_of_outer_steps():
    task = task_of(Dense)
    for repeat in (True, False):
        assert n_steps(per_of("fo", repeat=repeat, steps=7), task, shard_for(task)) == 7


@pytest.mark.parametrize("make", [Dense, Normed])
def test_hf_comes_near_the_exact_curvature_as_delta_falls(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task, n=15)
    expected = by_hand(make, received, batches(shard, batch=15), 3, ALPHA, True)
    near, nearer = (upload_of(per_of("hf", delta=delta), task, received, shard) for delta in (1e-3, 1e-4))
    torch.testing.assert_close(near, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(nearer, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["fo", "hf", "exact"])
def test_alpha_zero_is_fedavg_on_the_second_part_of_every_batch(order):
    task = task_of(Dense)
    n_parts = 2 if order == "fo" else 3
    received, shard = moved(task.initial, 1), shard_for(task, n=36)
    steps = [(x[1::n_parts], y[1::n_parts]) for x, y in batches(shard, 2, batch=5 * n_parts)]
    assert_close(upload_of(per_of(order, 0.0, epochs=2), task, received, shard), trained(Dense, received, steps))


@pytest.mark.parametrize(("order", "delta"), [("hf", 1e-3), ("hf", 0.1), ("hf", 10.0), ("exact", 1.0)])
def test_on_a_quadratic_hf_is_exact_for_any_delta(order, delta):
    """The gradient of least squares is A w - b, and its curvature A, on each of the three parts."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(12, 4, generator=rng, dtype=torch.float64)
    shard = shard_of(Regression(), x, torch.zeros(12, dtype=torch.long))
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    upload = upload_of(per_of(order, delta=delta, batch=4), Regression(), {"w": w}, shard)
    (rows, _), *_ = batches(shard, batch=12)
    thirds = [(rows[k::3, :3], rows[k::3, 3]) for k in range(3)]
    (a, b), (c, d), (e, _) = ((x.mT @ x / 4, x.mT @ t / 4) for x, t in thirds)
    outer = c @ (w - ALPHA * (a @ w - b)) - d
    expected = w - LR * (outer - ALPHA * e @ outer)
    torch.testing.assert_close(upload["w"], expected, rtol=0, atol=1e-11)
    assert float((ALPHA * e @ outer).norm()) > 0.05  # the curvature counts


def test_fo_is_hf_where_there_is_no_curvature_and_else_is_not():
    x = torch.tensor([[2.0, -1.0]] * 6, dtype=torch.float64)
    w = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    for task, same in ((Plane(), True), (Bowl(), False)):
        shard = shard_of(task, x, torch.zeros(6, dtype=torch.long))
        one, other = (upload_of(per_of(order, batch=2, steps=3), task, w, shard)["w"] for order in ("fo", "hf"))
        assert torch.allclose(one, other, rtol=0, atol=1e-11) == same


def test_perfedavg_steps_on_a_bowl_are_those_worked_by_hand():
    """From 0, centre 1, alpha 0.5, lr 1: v = 0.5, d = -0.5; fo goes to 0.5, with curvature (1 - alpha) 0.5 = 0.25."""
    for order, expected in (("fo", 0.5), ("hf", 0.25), ("exact", 0.25)):
        upload = upload_of(per_of(order, 0.5, lr=1.0), Bowl(), {"w": torch.zeros(1)}, bowl_at(1.0))
        assert float(upload["w"]) == pytest.approx(expected, abs=1e-4 if order == "hf" else 0)


def test_a_client_with_fewer_rows_than_parts_repeats_its_first_row():
    task = task_of(Dense)
    received = moved(task.initial, 1)
    for n in (1, 2):
        shard = shard_for(task, n=n)
        ((x, y),) = batches(shard, batch=15)
        first = (shard.x[:1], shard.y[:1])
        x, y = (torch.cat([part, *[repeated] * (3 - n)]) for part, repeated in zip((x, y), first, strict=True))
        expected = by_hand(Dense, received, [(x, y)], 3, ALPHA, True)
        assert_close(upload_of(per_of("exact"), task, received, shard), expected)


def test_the_personal_model_is_made_by_plain_steps_of_size_alpha():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = per_of("hf", pm_epochs=2, momentum=0.9, weight_decay=0.1)
    expected = trained(Normed, received, batches(shard, 2), lr=ALPHA)
    assert_close(method.personalize(task, received, (), shard), expected)
    assert_same(per_of("hf", pm_epochs=0).personalize(task, received, (), shard), received)
    assert_close(method.adapt(task, received, shard, 3), trained(Normed, received, batches(shard, 3), lr=ALPHA))


def test_evaluation_leaves_the_shared_model_untouched():
    run = run_of("perfedavg", "norm", executor="one_by_one")
    try:
        run.play_round()
        before = {name: x.clone() for name, x in run.state.server.items()}
        run.evaluate()
        own = run.personal_model(5)
    finally:
        run.close()
    assert_same(run.state.server, before)
    assert not torch.equal(own["head.weight"], before["head.weight"])


def test_perfedavg_takes_the_plain_mean():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    for weights, expected in (("uniform", 2.0), ("samples", 2.5)):
        merged = PerFedAvg(weights=weights).merge(None, {}, torch.arange(2), stacked, torch.tensor([1, 3]))
        assert float(merged["w"]) == expected
    assert PerFedAvg().weights == "uniform"


def test_the_penalty_of_an_add_on_is_added_to_the_outer_gradient():
    """From 0, centre 1, alpha 0, lr 0.5, mu 1: 0.5, and there the gradient -0.5 and the penalty's 0.5 cancel."""
    method = Prox(host=per_of("fo", 0.0, lr=0.5, steps=2), mu=1.0)
    assert float(upload_of(method, Bowl(), {"w": torch.zeros(1)}, bowl_at(1.0))["w"]) == 0.5


def test_orders_differ_on_a_model():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=36)
    assert differs(*(upload_of(per_of(order), task, received, shard) for order in ("fo", "exact")))


def test_perfedavg_can_take_scaffold():
    played(run_of("perfedavg+scaffold", executor="one_by_one"), 1)


def test_without_a_word_the_hessian_is_ignored():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=36)
    method = PerFedAvg(solver_of(), alpha=ALPHA)
    expected = by_hand(Dense, received, batches(shard, 2, batch=10), 2, ALPHA, False)
    assert_close(upload_of(method, task, received, shard), expected)


@pytest.mark.parametrize("partition", [None, "labels:4"])
def test_perfedavg_learns_digits_without_settings(partition):
    result = plures.run("perfedavg", data="digits", partition=partition, rounds=30, eval_every=0)
    assert result.summary["personal"]["mean"] > 0.8
    assert len(result.models) == 20
    assert all(bool(x.isfinite().all()) for model in result.models.values() for x in model.values())


def test_repeat_holds_where_clients_do_different_amounts_of_work():
    task = task_of(Dense)
    shard = shard_for(task, n=40)._replace(work=torch.tensor(2))
    solver = solver_of(varied=True)
    of_fedavg = FedAvg(solver).train(task, task.initial, FedAvgClient({}), shard)[2]["steps"]
    assert PerFedAvg(solver).train(task, task.initial, (), shard)[2]["steps"] == of_fedavg == 16
