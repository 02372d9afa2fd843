import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.base import Federation, Schedule
from plures.methods.fedfomo import FedFomo, FedFomoClient, FedFomoServer
from plures.methods.local import Local, LocalClient
from tests.methods.plain import (
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    differs,
    module_of,
    moved,
    shard_for,
    solver_of,
    statistics,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))


def fomo_of(models: int = 2, aside: float = 0.2, explore: float = 0.3, pm: str = "local", **solver) -> FedFomo:
    return FedFomo(solver_of(**solver), Schedule(6, 10, 1.0), models=models, aside=aside, explore=explore, pm=pm)


def received_of(task, models, there=None):
    """Some models as a client is sent them."""
    stacked = tree.stack(models) if models else tree.map(lambda x: x[None][:0], task.initial)
    n = len(models)
    there = torch.ones(n) if there is None else torch.tensor(there)
    return {"models": stacked, "there": there, "whose": torch.arange(1, n + 1)}


def set_aside(shard, share: float = 0.2):
    """Rows that are set aside, and the others."""
    return [part.rows[: int(part.size)] for part in shard.fixed_split(share, "set aside")]


def loss_of(make, params, x, y):
    """Of a plain module in inference."""
    return F.cross_entropy(module_of(make, params).eval()(x), y).detach()


def weights_by_hand(make, models, before, x, y):
    helps = []
    for model in models:
        weights = [name for name in model if "running" not in name]
        far = sum((model[name] - before[name]).square().sum() for name in weights).sqrt() + 1e-5
        helps.append(((loss_of(make, before, x, y) - loss_of(make, model, x, y)) / far).clamp(min=0))
    total = sum(helps)
    return torch.stack([h / total if total > 0 else h for h in helps])


# The client


def test_without_models_of_others_fedfomo_is_local_on_the_rows_not_set_aside_bit_for_bit():
    task = task_of(Normed)
    method, local = fomo_of(0), Local(solver_of())
    client, alone = method.init_client(task, task.initial), LocalClient(task.initial)
    for round in range(3):
        shard = shard_for(task, n=31, round=round)
        before = client.model
        client, upload, _ = method.train(task, received_of(task, []), client, shard)
        alone, _, _ = local.train(task, {}, alone, shard.fixed_split(0.2, "set aside")[1])
        assert_same(upload["model"], alone.model)
        rest = shard.fixed_split(0.2, "set aside")[1]
        assert_close(upload["model"], trained(Normed, before, batches(rest)))
        assert int(rest.size) == 25


def test_rows_set_aside_are_never_trained_on_in_any_round():
    """Rubbish in these rows changes no trained model; they are the same rows in all rounds, and a fifth."""
    task = task_of(Dense)
    method = fomo_of(0)
    clean = rubbish = method.init_client(task, task.initial)
    found = []
    for round in range(4):
        shard = shard_for(task, n=31, round=round)
        aside, rest = set_aside(shard)
        found.append((aside.tolist(), sorted(rest.tolist())))
        spoilt = shard.x.clone()
        spoilt[aside] = 1e3
        clean, one, _ = method.train(task, received_of(task, []), clean, shard)
        rubbish, other, _ = method.train(task, received_of(task, []), rubbish, shard._replace(x=spoilt))
        assert_same(one["model"], other["model"])
    assert all(part == found[0] for part in found) and len(found[0][0]) == 6
    assert sorted(found[0][0] + found[0][1]) == list(range(31))


def test_rows_set_aside_are_the_same_in_training_and_for_the_personal_model():
    shard = shard_for(task_of(Dense), n=31)
    later = shard._replace(key=shard.key + 1, round=torch.tensor(5))
    assert torch.equal(set_aside(shard)[0], set_aside(later)[0])


@pytest.mark.parametrize("make", [Dense, Normed])
def test_weights_are_those_of_the_formula_over_the_rows_set_aside(make):
    """Models in inference; the own model is last and is not uploaded; training starts at the weighted mean."""
    task = task_of(make)
    before, shard = moved(task.initial, 1), shard_for(task, n=31)
    aside, _ = set_aside(shard)
    x, y = shard.x[aside], shard.y[aside]
    models = [*[moved(task.initial, seed) for seed in range(2, 6)], moved(task.initial, 6, 3.0)]
    own = trained(make, before, batches(shard))
    weights = weights_by_hand(make, [*models, own], before, x, y)
    assert 2 <= int((weights > 0).sum()) < 6  # some help, some do not
    client, upload, _ = fomo_of(5).train(task, received_of(task, models), FedFomoClient(own, before), shard)
    torch.testing.assert_close(upload["weights"], weights[:-1], rtol=1e-6, atol=1e-9)
    start = {name: sum(w * m[name] for w, m in zip(weights, [*models, own], strict=True)) for name in own}
    assert_close(client.before, start)
    rest = shard.fixed_split(0.2, "set aside")[1]
    assert_close(upload["model"], trained(make, start, batches(rest)))
    assert_same(client.model, upload["model"])
    assert upload["whose"].tolist() == [1, 2, 3, 4, 5]


def test_the_own_new_model_counts_by_what_its_training_gained():
    task = task_of(Dense)
    before, shard = moved(task.initial, 1), shard_for(task, n=31)
    own = trained(Dense, before, batches(shard, 5))
    _, weights = fomo_of(0).weigh(task, received_of(task, []), FedFomoClient(own, before), shard)
    _, backwards = fomo_of(0).weigh(task, received_of(task, []), FedFomoClient(before, own), shard)
    assert weights.tolist() == [1.0] and backwards.tolist() == [0.0]


def test_where_no_model_helps_the_client_goes_on_from_its_own():
    task = task_of(Dense)
    shard = shard_for(task, n=31)
    best = trained(Dense, task.initial, batches(shard, 20))
    own, worse = moved(best, 1, 0.1), [moved(best, seed, 3.0) for seed in (2, 3)]
    client, upload, _ = fomo_of().train(task, received_of(task, worse), FedFomoClient(own, best), shard)
    assert upload["weights"].tolist() == [0.0, 0.0]
    assert_same(client.before, own)
    assert_close(upload["model"], trained(Dense, own, batches(shard.fixed_split(0.2, "set aside")[1])))


def test_weights_sum_to_one_or_are_all_zero():
    task = task_of(Dense)
    sums = []
    for seed in range(12):
        shard, before = shard_for(task, n=31, seed=seed), moved(task.initial, seed)
        models = [moved(task.initial, 100 + seed), moved(before, 200 + seed, 3.0)]
        method, client = fomo_of(), FedFomoClient(before, before)
        _, weights = method.weigh(task, received_of(task, models), client, shard)
        assert bool((weights >= 0).all())
        sums.append(round(float(weights.sum()), 9))
    assert set(sums) == {0.0, 1.0}


def test_a_model_that_nobody_uploaded_weighs_nothing():
    task = task_of(Dense)
    shard, before = shard_for(task, n=31), moved(task.initial, 1)
    good = [trained(Dense, before, batches(shard, epochs)) for epochs in (10, 12)]
    client = FedFomoClient(before, before)
    for there in ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0]):
        _, weights = fomo_of().weigh(task, received_of(task, good, there), client, shard)
        assert [float(w) > 0 for w in weights] == [*map(bool, there), False]
        assert float(weights.sum()) == pytest.approx(float(any(there)))


def test_scoring_moves_no_statistic():
    """Without a step of training the client ends where it began, statistics too."""
    task = task_of(Normed)
    shard, before = shard_for(task, n=31), moved(task.initial, 1)
    own = trained(Normed, before, batches(shard, 5))
    client, upload, _ = fomo_of(0, epochs=0).train(task, received_of(task, []), FedFomoClient(own, before), shard)
    assert_same(upload["model"], own)
    assert_same(statistics(client.before), statistics(own))


@pytest.mark.parametrize(
    ("n", "n_aside", "n_rest"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (5, 1, 4), (9, 1, 8), (10, 2, 8)]
)
def test_a_client_with_few_rows_sets_one_aside_and_with_one_row_uses_it_for_both(n, n_aside, n_rest):
    task = task_of(Dense)
    shard = shard_for(task, n=n)
    aside, rest = set_aside(shard)
    assert (len(aside), len(rest)) == (n_aside, n_rest)
    assert set(aside.tolist()) & set(rest.tolist()) == ({0} if n == 1 else set())
    _, upload, metrics = fomo_of(0).train(task, received_of(task, []), FedFomoClient(task.initial, task.initial), shard)
    assert int(metrics["steps"]) == -(-n_rest // 5) and differs(upload["model"], task.initial)


def test_the_personal_model_is_the_trained_one_or_the_weighted_mean():
    task = task_of(Dense)
    shard, before = shard_for(task, n=31), moved(task.initial, 1)
    models = [trained(Dense, before, batches(shard, epochs)) for epochs in (2, 4)]
    client = FedFomoClient(before, before)
    assert_same(fomo_of().personalize(task, received_of(task, models), client, shard), before)
    aside, _ = set_aside(shard)
    weights = weights_by_hand(Dense, models, before, shard.x[aside], shard.y[aside])
    mean = {name: weights[0] * models[0][name] + weights[1] * models[1][name] for name in before}
    assert_close(fomo_of(pm="mean").personalize(task, received_of(task, models), client, shard), mean)


# The server


def server_of(affinity, seen=None, round: int = 10, key: int = 5) -> FedFomoServer:
    affinity = torch.tensor(affinity)
    n = len(affinity)
    seen = torch.ones(n) if seen is None else torch.tensor(seen)
    return FedFomoServer({"w": torch.arange(float(n))}, seen, affinity, torch.tensor(key), torch.tensor(round))


def test_in_the_end_those_are_sent_that_weighed_most():
    server = server_of([[9.0, 1.0, 3.0, 2.0, 0.0]] * 5)
    assert fomo_of(2).choose_models(server, torch.tensor([0])).tolist() == [[2, 3]]
    picked = fomo_of(3).choose_models(server, torch.tensor([2, 1])).tolist()
    assert [set(row) for row in picked] == [{0, 3, 1}, {0, 2, 3}]


def test_small_differences_of_weight_count_too():
    server = server_of([[0.0, 0.04, 0.0, 0.0, 0.05]] * 5)
    assert fomo_of(1).choose_models(server, torch.tensor([0])).tolist() == [[4]]


def test_nobody_is_sent_its_own_model_and_all_others_fit_at_most():
    for round in (0, 10):
        picked = fomo_of(9, explore=1.0).choose_models(server_of([[0.0] * 5] * 5, round=round), torch.arange(5))
        assert [sorted(row) for row in picked.tolist()] == [[j for j in range(5) if j != i] for i in range(5)]


def test_models_that_were_never_uploaded_come_last():
    for round in (0, 10):
        server = server_of([[0.0, 9.0, 0.0, 0.0, 0.0]] * 5, [1.0, 0.0, 1.0, 0.0, 1.0], round)
        picked = fomo_of(3, explore=1.0).choose_models(server, torch.tensor([0]))[0].tolist()
        assert set(picked) in ([{1, 2, 4}] if round else [{1, 2, 4}, {2, 3, 4}])


def test_random_models_are_sent_the_earlier_the_more_often():
    """explore = 1: always in round 0 of 10, half of the time in round 5, never in round 10."""
    odd = {}
    for round in (0, 5, 10):
        servers = [server_of([[0.0, 0.0, 0.0, 0.0, 8.0]] * 5, round=round, key=key) for key in range(200)]
        picked = [int(fomo_of(1, explore=1.0).choose_models(server, torch.tensor([0]))) for server in servers]
        odd[round] = sum(i != 4 for i in picked) / 200
        assert set(picked) == ({1, 2, 3, 4} if round < 10 else {4})
    assert odd[0] == pytest.approx(0.75, abs=0.1) and odd[5] == pytest.approx(0.375, abs=0.1) and odd[10] == 0


def test_each_place_is_explored_on_its_own():
    """Four places at 0.5: with 0, 1, ... 4 random models for 1, 4, 6, 4 and 1 of 16 clients.

    A random one of about 400 is hardly ever among the best.
    """
    server = server_of([[4.0, 3.0, 2.0, 1.0, *[0.0] * 400]] * 404, round=0)
    picked = fomo_of(4, explore=0.5).choose_models(server, torch.arange(4, 404))
    n_odd = (picked > 3).sum(1)
    shares = torch.bincount(n_odd, minlength=5) / 400
    assert shares.tolist() == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], abs=0.05)
    best = [{i for i in row if i < 4} == set(range(4 - int(k))) for row, k in zip(picked.tolist(), n_odd, strict=True)]
    assert sum(best) > 380  # the places that are left go to the largest sums
    assert all(len(set(row)) == 4 for row in picked.tolist())


def test_server_keeps_models_adds_weights_and_knows_who_uploaded():
    server = server_of([[0.5, 0.0, 0.0, 0.0]] * 4, [0.0] * 4, round=3)
    uploads = {
        "model": {"w": torch.tensor([20.0, 10.0])},
        "weights": torch.tensor([[0.25, 0.75], [0.0, 1.0]]),
        "whose": torch.tensor([[0, 3], [2, 0]]),
    }
    new = fomo_of().merge(None, server, torch.tensor([2, 1]), uploads, torch.tensor([1, 9]))
    assert new.models["w"].tolist() == [0.0, 10.0, 20.0, 3.0]
    assert new.seen.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert new.affinity.tolist() == [[0.5, 0, 0, 0], [1.5, 0, 0, 0], [0.75, 0, 0, 0.75], [0.5, 0, 0, 0]]
    assert int(new.round) == 4


def test_what_is_sent_are_the_models_of_those_picked():
    task = task_of(Dense)
    method = fomo_of(2)
    server = method.init_server(task, task.initial, Federation(torch.ones(4), torch.tensor(0)))
    assert server.seen.tolist() == [0.0] * 4
    models = tree.stack([moved(task.initial, seed) for seed in range(4)])
    server = server._replace(models=models, seen=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    message = method.send(task, server, torch.tensor([3, 0])).tree
    for row in range(2):
        for k, whose in enumerate(message["whose"][row].tolist()):
            assert_same(tree.row(tree.row(message["models"], row), k), tree.row(models, whose))
            assert float(message["there"][row, k]) == float(server.seen[whose])


def test_in_a_first_round_all_train_from_the_common_start_on_their_own():
    one = played(run_of("fedfomo:models=5", executor="one_by_one"), 1)
    other = played(run_of("fedfomo:models=0", executor="one_by_one"), 1)
    assert_same(one.state.store.rows(EVERYONE).model, other.state.store.rows(EVERYONE).model)
    assert one.state.server.seen.tolist() == [1.0] * 6
    assert_same(one.state.server.models, one.state.store.rows(EVERYONE).model)


def test_after_some_rounds_models_of_others_are_used():
    run = played(run_of("fedfomo:models=2", executor="one_by_one"), 3)
    assert float(run.state.server.affinity.sum()) > 1 and not run.state.server.affinity.diagonal().any()


def test_fedfomo_works_in_double_precision():
    played(run_of("fedfomo:models=2", "harsh", executor="one_by_one"), 2)
