import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.addons.prox import Prox
from plures.methods.apfl import APFL, APFLClient, mix
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
    statistics,
    task_of,
)
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))


def apfl_of(alpha: float = 0.75, adaptive: bool = False, alpha_lr: float = 0.1, pm: str = "local", **solver) -> APFL:
    return APFL(solver_of(**solver), alpha=alpha, adaptive=adaptive, alpha_lr=alpha_lr, pm=pm)


def client_of(own, shared, alpha: float) -> APFLClient:
    return APFLClient(own, shared, torch.tensor(alpha))


def gradients(make, params, x, y):
    """Of a plain module; and the module after the pass."""
    module = module_of(make, params)
    F.cross_entropy(module(x), y).backward()
    return {name: p.grad for name, p in module.named_parameters()}, params_of(module)


def mixed(v, w, alpha):
    return {name: alpha * x + (1 - alpha) * w[name] for name, x in v.items()}


def by_hand(make, v, w, steps, alpha):
    """Both step from their values before the step; v by alpha times the gradient at the mixture.

    Statistics of v take alpha of the step that those of the mixture would.
    """
    for x, y in steps:
        middle = mixed(v, w, alpha)
        at_w, new_w = gradients(make, w, x, y)
        at_middle, new_middle = gradients(make, middle, x, y)
        v = {
            name: p - LR * alpha * at_middle[name]
            if name in at_middle
            else p - alpha * (middle[name] - new_middle[name])
            for name, p in v.items()
        }
        w = {name: p - LR * at_w[name] if name in at_w else new_w[name] for name, p in w.items()}
    return v, w


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_alpha_zero_has_the_locally_trained_model_of_fedavg_as_personal_one_bit_for_bit(model):
    options = {"participation": 0.5, "executor": "one_by_one"}
    names = ("apfl:alpha=0,adaptive=false", "fedavg:pm=local")
    one, other = (played(run_of(name, model, **options), 3) for name in names)
    for client in range(6):
        assert_same(one.personal_model(client), other.personal_model(client))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_alpha_one_has_the_local_model_as_own_and_personal_one_bit_for_bit(model):
    one = played(run_of("apfl:alpha=1,adaptive=false", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    assert_same(one.state.store.rows(EVERYONE).own, other.state.store.rows(EVERYONE).model)
    assert_same(one.personal_model(5), other.personal_model(5))


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("spec", ["apfl", "apfl:alpha=0.3,adaptive=false"])
def test_the_shared_model_is_that_of_fedavg_for_any_alpha_bit_for_bit(model, spec):
    options = {"participation": 0.5, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 3) for name in (spec, "fedavg"))
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("alpha", [0.25, 0.75])
def test_apfl_equals_its_steps_written_out_with_plain_modules(make, alpha):
    """Over two rounds: the own model goes on, the shared one is the received one."""
    task = task_of(make)
    method = apfl_of(alpha)
    v = moved(task.initial, 1)
    client = client_of(v, task.initial, alpha)
    for round in range(2):
        received, shard = moved(task.initial, 10 + round), shard_for(task, round=round)
        client, upload, _ = method.train(task, received, client, shard)
        v, w = by_hand(make, v, received, batches(shard), alpha)
        assert_close(client.own, v)
        assert_close(upload, {name: w[name] for name in upload})
        assert_same(client.shared, upload)
        assert_close(method.personalize(task, received, client, shard), mixed(v, w, alpha))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_gradient_of_alpha_is_the_product_of_the_gradient_at_the_mixture_with_the_difference(make):
    """One step a round, on the first batch, before both models move. The steps of statistics are no part of it."""
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    method = apfl_of(adaptive=True, alpha_lr=0.25, epochs=2, momentum=0.5, weight_decay=0.1)
    client, _, _ = method.train(task, received, client_of(own, received, 0.5), shard)
    x, y = next(batches(shard))
    gradient, _ = gradients(make, mixed(own, received, 0.5), x, y)
    product = sum(((own[name] - received[name]) * g).sum() for name, g in gradient.items())
    assert float(client.alpha) == pytest.approx(0.5 - 0.25 * float(product), abs=1e-6)
    assert abs(float(product)) > 0.05


def test_the_models_of_a_round_use_the_alpha_that_it_just_learned():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, _, _ = apfl_of(adaptive=True, alpha_lr=0.5).train(task, received, client_of(own, received, 0.5), shard)
    v, _ = by_hand(Dense, own, received, batches(shard), float(client.alpha))
    assert abs(float(client.alpha) - 0.5) > 0.01
    torch.testing.assert_close(client.own, v, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("own", "shared", "expected"), [(1.0, 9.0, 1.0), (9.0, 1.0, 0.0)])
def test_alpha_stays_between_zero_and_one(own, shared, expected):
    """Centre 1: the better of the two models gets all the weight, and no more."""
    client = client_of({"w": torch.tensor([own])}, {"w": torch.tensor([shared])}, 0.5)
    method = apfl_of(adaptive=True, alpha_lr=1.0)
    client, _, _ = method.train(Bowl(), {"w": torch.tensor([shared])}, client, bowl_at(1.0))
    assert float(client.alpha) == expected


def test_steps_on_a_bowl_are_those_worked_by_hand():
    """v = 4, w = 0, centre 1, alpha 0.5, lr 0.5: the mixture is 2, gradient 1; v = 4 - 0.5 * 0.5 = 3.75, w = 0.5."""
    client = client_of({"w": torch.tensor([4.0])}, {"w": torch.zeros(1)}, 0.5)
    client, upload, _ = apfl_of(0.5, lr=0.5).train(Bowl(), {"w": torch.zeros(1)}, client, bowl_at(1.0))
    assert (float(client.own["w"]), float(upload["w"])) == (3.75, 0.5)


def test_a_fixed_alpha_stays():
    run = played(run_of("apfl:alpha=0.3,adaptive=false", executor="one_by_one"), 2)
    assert torch.equal(run.state.store.rows(EVERYONE).alpha, torch.full((6,), 0.3))
    moving = played(run_of("apfl:alpha=0.3", executor="one_by_one"), 3)
    assert len(set(moving.state.store.rows(EVERYONE).alpha.tolist())) > 4


def test_the_personal_model_is_the_mixture_with_the_trained_or_the_received_model():
    task = task_of(Normed)
    own, shared, received = (moved(task.initial, seed) for seed in (1, 2, 3))
    shard = shard_for(task)
    trained_one = apfl_of().personalize(task, received, client_of(own, shared, 0.75), shard)
    assert_close(trained_one, mixed(own, shared, 0.75))
    sent_one = apfl_of(pm="server").personalize(task, received, client_of(own, {}, 0.75), shard)
    assert_close(sent_one, mixed(own, received, 0.75))
    assert apfl_of(pm="server").init_client(task, task.initial).shared == {}
    assert set(statistics(trained_one)) == {"norm.running_mean", "norm.running_var"}


def test_a_mixture_at_its_ends_is_one_of_the_models_bit_for_bit():
    task = task_of(Dense)
    own, shared = moved(task.initial, 1), moved(task.initial, 2)
    assert_same(mix(own, shared, torch.tensor(1.0)), own)
    assert_same(mix(own, shared, torch.tensor(0.0)), shared)


def test_the_own_model_is_not_uploaded():
    task = task_of(Dense)
    own, received = moved(task.initial, 1), moved(task.initial, 2)
    client, upload, _ = apfl_of().train(task, received, client_of(own, received, 0.75), shard_for(task))
    assert set(upload) == set(task.initial) and differs(upload, client.own)
    merged = APFL().merge(None, {}, torch.arange(2), {"w": torch.tensor([1.0, 3.0])}, torch.tensor([1, 3]))
    assert float(merged["w"]) == 2.5
    assert tree.names(client.own) == tree.names(task.initial)


def test_a_worn_pull_acts_on_the_shared_model_only():
    """Two steps of w from 0 to 0.5, where the pull to 0 holds it; v sees mixtures only."""
    free, held = (
        method.train(Bowl(), {"w": torch.zeros(1)}, client_of({"w": torch.tensor([4.0])}, {}, 1.0), bowl_at(1.0))
        for method in (apfl_of(1.0, lr=0.5, steps=2), Prox(host=apfl_of(1.0, lr=0.5, steps=2), mu=1.0))
    )
    assert (float(free[1]["w"]), float(held[1]["w"])) == (0.75, 0.5)
    assert float(free[0].own["w"]) == float(held[0].own["w"]) == 1.75
