import pytest
import torch

from plures.methods.ditto import Ditto, DittoClient
from tests.methods.plain import (
    Bowl,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    bowl_at,
    differs,
    moved,
    shard_for,
    solver_of,
    statistics,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of, small_split, took_part

EVERYONE = torch.arange(len(SIZES))


def ditto_of(lam: float, **solver) -> Ditto:
    return Ditto(solver_of(**solver), lam=lam)


def near(anchor, lam):
    return lambda module: lam / 2 * sum((p - anchor[name]).square().sum() for name, p in module.named_parameters())


@pytest.mark.parametrize("make", [Dense, Normed])
def test_ditto_own_model_equals_torch_optim_held_near_the_received_one(make):
    """Over two rounds: the own model is never reset, its anchor is what was received in that round."""
    task = task_of(make)
    method = ditto_of(0.75, epochs=2)
    client, own = DittoClient(moved(task.initial, 1)), moved(task.initial, 1)
    for round in range(2):
        received, shard = moved(task.initial, 10 + round), shard_for(task, round=round)
        client, _, _ = method.train(task, received, client, shard)
        own = trained(make, own, batches(shard, 2), near(received, 0.75))
    assert_close(client.model, own)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_ditto_upload_equals_torch_optim_from_the_received_model(make):
    task = task_of(make)
    received, shard = moved(task.initial, 2), shard_for(task)
    _, upload, _ = ditto_of(0.75, epochs=2).train(task, received, DittoClient(moved(task.initial, 1)), shard)
    assert_close(upload, trained(make, received, batches(shard, 2)))


def test_ditto_anchor_is_the_received_model_and_not_the_trained_copy():
    """Own model 2, received 0, centre 1, lr 0.5, lam 1: 2 -> 2 - 0.5 (1 + 2) = 0.5 -> 0.5 - 0.5 (-0.5 + 0.5) = 0.5."""
    client = DittoClient({"w": torch.tensor([2.0])})
    client, upload, _ = ditto_of(1.0, lr=0.5, steps=2).train(Bowl(), {"w": torch.zeros(1)}, client, bowl_at(1.0))
    assert (float(client.model["w"]), float(upload["w"])) == (0.5, 0.75)


def test_ditto_own_model_settles_between_its_best_and_the_received_one():
    """The minimum of (v - 5)^2/2 + 3/2 (v - 1)^2 is (5 + 3) / 4."""
    client = DittoClient({"w": torch.tensor([9.0])})
    client, _, _ = ditto_of(3.0, lr=0.2, steps=100).train(Bowl(), {"w": torch.ones(1)}, client, bowl_at(5.0))
    torch.testing.assert_close(client.model["w"], torch.tensor([2.0]))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_ditto_upload_does_not_depend_on_lam(model):
    weak, strong = (
        played(run_of("ditto", model, settings={"lam": lam}, executor="one_by_one"), 2) for lam in (0.0, 2.0)
    )
    assert_same(weak.state.server, strong.state.server)


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_ditto_shared_model_is_that_of_fedavg_bit_for_bit(model, participation):
    options = {"participation": participation, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 2) for name in ("ditto", "fedavg"))
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_ditto_with_lam_zero_is_local(model):
    one = played(run_of("ditto", model, settings={"lam": 0.0}, executor="one_by_one"), 2)
    other = played(run_of("local", model, executor="one_by_one"), 2)
    assert_same(one.state.store.rows(EVERYONE).model, other.state.store.rows(EVERYONE).model)


def test_ditto_with_a_strong_pull_has_the_received_model_as_own():
    task = task_of(Dense)
    received, shard = moved(task.initial, 2), shard_for(task)
    client = DittoClient(moved(task.initial, 1))
    client, _, _ = ditto_of(1e4, lr=1e-4, epochs=3).train(task, received, client, shard)  # lr * lam = 1
    torch.testing.assert_close(client.model, received, rtol=0, atol=1e-3)


def test_ditto_with_one_client_has_the_local_model_as_shared_one():
    split = small_split((31,))
    one, other = (played(run_of(name, split=split, executor="one_by_one"), 3) for name in ("ditto", "local"))
    assert_same(one.state.server, other.personal_model(0))


def test_ditto_own_model_of_a_client_that_sits_out_stays_as_it_was():
    run = run_of("ditto", "norm", participation=0.5, executor="one_by_one")
    try:
        for _ in range(2):
            run.play_round()
        known = took_part(run)
        before = [run.personal_model(client) for client in range(len(SIZES))]
        chosen = run.state.cohort(run.state.round)
        run.play_round()
        after = [run.personal_model(client) for client in range(len(SIZES))]
    finally:
        run.close()
    assert set(known) - set(chosen)
    for client in set(known) - set(chosen):
        assert_same(before[client], after[client])
    assert not torch.equal(before[chosen[-1]]["head.weight"], after[chosen[-1]]["head.weight"])


def test_ditto_leaves_statistics_out_of_the_pull():
    task = task_of(Normed)
    received, own, shard = moved(task.initial, 2), moved(task.initial, 1), shard_for(task)
    held, free = (ditto_of(lam, lr=0.0).train(task, received, DittoClient(own), shard)[0] for lam in (0.9, 0.0))
    assert_same(held, free)
    assert differs(statistics(held.model), statistics(own))


def test_ditto_own_statistics_are_those_of_its_own_model():
    """Each of the two models has its own features, so each has its own statistics."""
    task = task_of(Normed)
    received, own, shard = moved(task.initial, 2), moved(task.initial, 1), shard_for(task)
    client, upload, _ = ditto_of(0.5, lr=0.0).train(task, received, DittoClient(own), shard)
    assert_close(statistics(client.model), statistics(trained(Normed, own, batches(shard), lr=0.0)))
    assert_close(statistics(upload), statistics(trained(Normed, received, batches(shard), lr=0.0)))


def test_ditto_personal_model_is_its_own_and_not_the_shared_one():
    task = task_of(Dense)
    own = moved(task.initial, 1)
    assert_same(ditto_of(0.1).personalize(task, moved(task.initial, 2), DittoClient(own), shard_for(task)), own)


def test_ditto_uniform_mean_does_not_see_rows():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    merged = Ditto(weights="uniform").merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([1, 9]))
    by_rows = Ditto().merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([1, 3]))
    assert (float(merged["w"]), float(by_rows["w"])) == (2.0, 2.5)


def test_ditto_moves_as_many_bytes_as_fedavg():
    one, other = (played(run_of(name), 1).state.rows[0] for name in ("ditto", "fedavg"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)
