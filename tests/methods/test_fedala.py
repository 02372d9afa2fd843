import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plures import tree
from plures.errors import UsageError
from plures.learn.fit import fit
from plures.learn.solver import Plateau
from plures.methods.addons.ala import Ala, AlaClient
from plures.methods.addons.c import C
from plures.methods.addons.prox import Prox
from plures.methods.ditto import Ditto, DittoClient
from plures.methods.fedala import fedala
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedrep import FedRep, FedRepClient
from plures.methods.local import Local
from tests.methods.plain import (
    BATCH,
    Bowl,
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
from tests.small import SIZES, played, run_of, shard_of, small_split, took_part

NOTHING = FedAvgClient({})
EVERYONE = torch.arange(len(SIZES))
HEAD = ("head.weight", "head.bias")


def ala_of(solver=None, **settings) -> Ala:
    solver = solver or solver_of()
    return Ala(solver=solver, host=FedAvg(solver), **{"s": 100.0, **settings})


def client_of(own, blend, rounds: int) -> AlaClient:
    return AlaClient(NOTHING, own, blend, torch.tensor(rounds))


def filled(params, names, value):
    return {name: torch.full_like(params[name], value) for name in names}


def two_models(task):
    """A received model and the client's own."""
    return moved(task.initial, 1), moved(task.initial, 2)


def mixed(received, own, blend):
    return received | {name: own[name] + (received[name] - own[name]) * weight for name, weight in blend.items()}


def steps_of(shard, epochs=1, share=1.0, batch=BATCH):
    """The batches that the blend is learned on, of a random share of the rows: the same in every epoch."""
    some = shard.take(share, "ala")
    rows = some.rows[: int(some.size)].split(batch)
    return [(shard.x[here], shard.y[here]) for here in rows] * epochs


def papers_blend(make, received, own, blend, steps, eta):
    """W <- clip(W - eta (received - own) * gradient of the loss at the blended model, 0, 1), batch by batch."""
    blend, losses = dict(blend), []
    for x, y in steps:
        module = module_of(make, mixed(received, own, blend))
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        for name in blend:
            blend[name] = (blend[name] - eta * (received[name] - own[name]) * gradients[name]).clamp(0, 1)
        losses.append(float(loss.detach()))
    return blend, losses


# The blend


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("eta", [0.5, 8.0])
def test_fedala_blend_gradient_is_the_papers_product(make, eta):
    task = task_of(make)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    client, _, _ = ala_of(eta=eta).train(task, received, client_of(own, blend, 2), shard)
    expected, _ = papers_blend(make, received, own, blend, steps_of(shard), eta)
    assert_close(client.blend, expected)
    assert differs(client.blend, blend)


def test_fedala_blend_of_all_layers_follows_the_papers_product():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, received, 0.5)
    client, _, _ = ala_of(eta=0.5, p=2).train(task, received, client_of(own, blend, 2), shard)
    expected, _ = papers_blend(Dense, received, own, blend, steps_of(shard), 0.5)
    assert_close(client.blend, expected)


def test_fedala_blend_goes_on_from_its_old_value():
    task = task_of(Dense)
    (received, own), blend = two_models(task), filled(task.initial, HEAD, 0.75)
    method, client = ala_of(eta=0.25), client_of(own, blend, 2)
    for round in range(2):
        shard = shard_for(task, round=round)
        blend, _ = papers_blend(Dense, received, client.model, blend, steps_of(shard), 0.25)
        client, _, _ = method.train(task, received, client, shard)
    assert_close(client.blend, blend)


@pytest.mark.parametrize("eta", [1.0, 100.0])
def test_fedala_blend_stays_in_unit_interval(eta):
    run = played(run_of("fedala", settings={"eta": eta, "cap": 3}, executor="one_by_one"), 3)
    blends = run.state.store.rows(EVERYONE).blend
    assert min(float(x.min()) for x in blends.values()) >= 0
    assert max(float(x.max()) for x in blends.values()) == 1
    assert min(float(x.min()) for x in blends.values()) < 1


def test_fedala_blend_is_clipped_after_every_batch():
    """The second batch goes on from the clipped value."""
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, n=10)
    steps = steps_of(shard)
    assert len(steps) == 2
    blend = filled(received, HEAD, 1.0)
    client, _, _ = ala_of(eta=20.0).train(task, received, client_of(own, blend, 2), shard)
    expected, _ = papers_blend(Dense, received, own, blend, steps, 20.0)
    assert_close(client.blend, expected)
    first, _ = papers_blend(Dense, received, own, blend, steps[:1], 20.0)
    assert any(float(x.min()) == 0 for x in first.values())


def test_fedala_start_lies_between_own_and_received():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    start = ala_of(eta=8.0).personalize(task, received, client_of(own, blend, 2), shard)
    for name in HEAD:
        low, high = torch.minimum(own[name], received[name]), torch.maximum(own[name], received[name])
        assert bool(((start[name] >= low) & (start[name] <= high)).all())
        assert not torch.equal(start[name], own[name]) and not torch.equal(start[name], received[name])


def test_fedala_keeps_the_blend_where_own_and_received_are_equal():
    task = task_of(Dense)
    model, _ = two_models(task)
    blend = filled(model, HEAD, 0.25)
    client, _, _ = ala_of(eta=8.0).train(task, model, client_of(model, blend, 1), shard_for(task))
    assert_same(client.blend, blend)


def test_fedala_starts_from_the_received_model_where_it_equals_its_own():
    task = task_of(Dense)
    model, _ = two_models(task)
    blend = filled(model, HEAD, 0.3)
    assert_same(ala_of().personalize(task, model, client_of(model, blend, 2), shard_for(task)), model)


def test_fedala_takes_lower_layers_as_received():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    start = ala_of().personalize(task, received, client_of(own, filled(received, HEAD, 0.5), 2), shard)
    for name in ("hidden.weight", "hidden.bias"):
        assert torch.equal(start[name], received[name])


@pytest.mark.parametrize(
    ("p", "layers"), [(0, set()), (1, {"head"}), (2, {"head", "norm"}), (9, {"head", "norm", "hidden"})]
)
def test_fedala_counts_upper_layers_as_modules(p, layers):
    task = task_of(Normed)
    blend = ala_of(p=p).init_client(task, task.initial).blend
    assert set(blend) == {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}


def test_fedala_blend_starts_at_the_received_model():
    blend = fedala().init_client(task_of(Dense), task_of(Dense).initial).blend
    assert sorted(blend) == sorted(HEAD) and all(bool((x == 1).all()) for x in blend.values())


def test_fedala_blend_step_is_plain_sgd_whatever_the_solver():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, round=3)
    blend = filled(received, HEAD, 0.5)
    plain, rich = solver_of(), solver_of(momentum=0.9, weight_decay=0.5, decay=0.5, epochs=4)
    one, other = (
        ala_of(solver, eta=0.5).train(task, received, client_of(own, blend, 2), shard)[0] for solver in (plain, rich)
    )
    assert_same(one.blend, other.blend)


# How long it is learned, and on what


def test_fedala_learns_in_a_second_round_until_the_cap():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 1.0)
    method = ala_of(eta=0.125, cap=3, threshold=0.0)
    client, _, _ = method.train(task, received, client_of(own, blend, 1), shard)
    assert_close(client.blend, papers_blend(Dense, received, own, blend, steps_of(shard, 3), 0.125)[0])


def test_fedala_learns_in_a_second_round_until_the_loss_settles():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, n=15)
    blend = filled(received, HEAD, 0.5)
    method = ala_of(solver_of(batch=15), eta=0.125, cap=30, threshold=0.03)
    client, _, _ = method.train(task, received, client_of(own, blend, 1), shard)
    steps = steps_of(shard, 30, batch=15)
    _, losses = papers_blend(Dense, received, own, blend, steps, 0.125)
    stops = next(n for n in range(11, 31) if np.std(losses[n - 10 : n]) < 0.03)
    assert 11 < stops < 25
    assert_close(client.blend, papers_blend(Dense, received, own, blend, steps[:stops], 0.125)[0])


@pytest.mark.parametrize("rounds", [2, 7])
def test_fedala_learns_one_epoch_in_later_rounds(rounds):
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    client, _, _ = ala_of(eta=0.125, cap=9).train(task, received, client_of(own, blend, rounds), shard)
    assert_close(client.blend, papers_blend(Dense, received, own, blend, steps_of(shard, 1), 0.125)[0])


def test_fedala_counts_the_rounds_that_a_client_took_part_in():
    run = played(run_of("fedala", participation=0.5, executor="one_by_one", settings={"cap": 2}), 3)
    times = [0] * len(SIZES)
    for round in range(3):
        for client in run.state.cohort(round):
            times[client] += 1
    assert run.state.store.rows(EVERYONE).rounds.tolist() == times and len(set(times)) > 1


@pytest.mark.parametrize(("s", "n_rows"), [(100.0, 17), (80.0, 13), (50.0, 8), (1.0, 1), (0.0, 1)])
def test_fedala_learns_on_s_percent_of_the_rows_and_at_least_one(s, n_rows, monkeypatch):
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, n=17)
    seen = []
    monkeypatch.setattr(
        "plures.methods.addons.ala.fit", lambda *args, **named: seen.append(args[2]) or fit(*args, **named)
    )
    ala_of(s=s).train(task, received, client_of(own, filled(received, HEAD, 0.5), 2), shard)
    (some,) = seen
    rows = some.rows[: int(some.size)].tolist()
    assert len(rows) == len(set(rows)) == n_rows
    assert set(rows) <= set(range(17))


def test_fedala_blend_does_not_see_the_rows_that_are_left_out():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, n=17)
    blend = filled(received, HEAD, 0.5)
    client, _, _ = ala_of(s=50.0, eta=0.5).train(task, received, client_of(own, blend, 2), shard)
    assert_close(client.blend, papers_blend(Dense, received, own, blend, steps_of(shard, share=0.5), 0.5)[0])


def test_fedala_draws_other_rows_in_another_round():
    task = task_of(Dense)
    rows = [shard_for(task, n=17, seed=seed).take(0.5, "ala").rows[:8].tolist() for seed in (0, 1)]
    assert sorted(rows[0]) != sorted(rows[1])
    drawn = played(run_of("fedala"), 1).state.scene.population
    first, second = (drawn.shards([5], "train", "train", round) for round in (0, 1))
    some = [
        type(s)(s.x, s.y, *[part[0] for part in s[2:]]).take(0.5, "ala").rows[: SIZES[5] // 2] for s in (first, second)
    ]
    assert sorted(some[0].tolist()) != sorted(some[1].tolist())


# The rule that ends the first stage


def counting(losses):
    """An objective whose t-th loss is given: its only number falls by one a step."""

    def objective(params, batch, losses):
        t = (-params["t"]).detach().long()
        return params["t"] - params["t"].detach() + losses[t]

    shard = shard_of(Bowl(), torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    return objective, {"t": torch.zeros(())}, shard, torch.as_tensor(losses)


def n_epochs(losses, cap=50, batch=2, **rule) -> int:
    objective, params, shard, losses = counting(losses)
    solver = solver_of(lr=1.0, batch=batch, stop=Plateau(**rule))
    fitted = fit(objective, params, shard, solver, (losses,), torch.tensor(cap))
    per_epoch = 2 // batch
    assert int(fitted.steps) % per_epoch == 0
    return int(fitted.steps) // per_epoch


def test_plateau_needs_more_than_ten_epochs():
    assert n_epochs(torch.zeros(50)) == 11


def test_plateau_never_stops_later_than_the_cap():
    assert n_epochs(torch.arange(50.0), cap=23) == 23
    assert n_epochs(torch.zeros(50), cap=7) == 7


def test_plateau_looks_at_the_last_ten_epochs():
    """A jump at epoch 5 (the sixth) is out of the last ten after epoch 15 (the sixteenth)."""
    losses = torch.zeros(50)
    losses[5] = 1.0
    assert n_epochs(losses) == 16


def test_plateau_measures_the_population_standard_deviation():
    """Ten losses d apart have one of d * sqrt(99 / 12) = 2.872 d; with n - 1 it would be 3.028 d."""
    assert n_epochs(0.0034 * torch.arange(50), threshold=0.01) == 11
    assert n_epochs(0.0036 * torch.arange(50), threshold=0.01) == 50


def test_plateau_of_last_batches_does_not_see_the_others():
    losses = torch.zeros(200)
    losses[::2] = torch.arange(100.0)  # first batches of two
    assert n_epochs(losses, batch=1, loss_of="last_batch") == 11
    assert n_epochs(losses, batch=1, loss_of="epoch_mean") == 50


def test_plateau_of_epoch_means_sees_all_batches():
    losses = torch.arange(200.0)
    losses[1::2] = -losses[::2]  # each epoch's two losses add up to nothing
    assert n_epochs(losses, batch=1, loss_of="epoch_mean") == 11
    assert n_epochs(losses, batch=1, loss_of="last_batch") == 50


def test_plateau_stops_every_client_of_a_stack_by_its_own_losses():
    late = torch.zeros(50)
    late[5] = 1.0
    table = torch.stack([torch.arange(50.0), torch.zeros(50), late])
    objective, params, shard, _ = counting(table[0])

    def steps(losses):
        solver = solver_of(lr=1.0, batch=2, stop=Plateau())
        fitted = fit(objective, params, shard, solver, (losses,), torch.tensor(30))
        return fitted.steps, fitted.params["t"]

    taken, last = torch.vmap(steps)(table)
    assert taken.tolist() == [30, 11, 16]
    assert last.tolist() == [-30.0, -11.0, -16.0]


# Where it is another method


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedala_with_eta_zero_is_fedavg_bit_for_bit(model):
    one = played(run_of("fedala", model, settings={"eta": 0.0, "cap": 2}, executor="one_by_one"), 3)
    other = played(run_of("fedavg", model, executor="one_by_one"), 3)
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedala_with_p_zero_is_fedavg_bit_for_bit(model):
    one = played(run_of("fedala", model, settings={"p": 0}, executor="one_by_one"), 3)
    other = played(run_of("fedavg", model, executor="one_by_one"), 3)
    assert_same(one.state.server, other.state.server)
    assert_same(one.personal_model(4), other.personal_model(4))


def test_fedala_that_learns_is_not_fedavg():
    one = played(run_of("fedala", executor="one_by_one", settings={"cap": 3}), 2)
    other = played(run_of("fedavg", executor="one_by_one"), 2)
    assert not torch.equal(one.state.server["head.weight"], other.state.server["head.weight"])


def test_fedala_with_blend_zero_in_all_layers_is_local():
    task = task_of(Dense)
    method, local = ala_of(eta=0.0, p=2), Local(solver_of())
    client = client_of(task.initial, filled(task.initial, task.initial, 0.0), 2)
    alone = local.init_client(task, task.initial)
    for round in range(3):
        shard = shard_for(task, round=round)
        client, _, _ = method.train(task, moved(task.initial, round), client, shard)
        alone, _, _ = local.train(task, {}, alone, shard)
    assert_same(client.model, alone.model)


@pytest.mark.parametrize("round", [0, 6])
@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedala_first_time_of_a_client_equals_fedavg(make, round):
    """Also in a late round: it is counted for each client."""
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task, round=round)
    method = ala_of()
    client, upload, _ = method.train(task, received, method.init_client(task, task.initial), shard)
    _, expected, _ = FedAvg(solver_of()).train(task, received, NOTHING, shard)
    assert_same(upload, expected)
    assert int(client.rounds) == 1 and all(bool((x == 1).all()) for x in client.blend.values())


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedala_with_one_client_is_local(model):
    split = small_split((31,))
    one = played(run_of("fedala", model, split=split, executor="one_by_one", settings={"cap": 3}), 3)
    other = played(run_of("local", model, split=split, executor="one_by_one"), 3)
    assert_same(one.state.server, other.personal_model(0))


# Local training and the personal model


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedala_trains_from_the_blended_model(make):
    """Statistics included: those of the start are the received ones."""
    task = task_of(make)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    client, upload, _ = ala_of(solver_of(epochs=2)).train(task, received, client_of(own, blend, 2), shard)
    learned, _ = papers_blend(make, received, own, blend, steps_of(shard), 1.0)
    assert_close(upload, trained(make, mixed(received, own, learned), batches(shard, 2)))
    assert_same(client.model, upload)


def test_fedala_learning_moves_no_statistic():
    task = task_of(Normed)
    (received, own), shard = two_models(task), shard_for(task)
    method = ala_of(p=3)
    blend = filled(received, tree.trainable(received), 0.5)
    start = method.personalize(task, received, client_of(own, blend, 1), shard)
    assert_same(statistics(start), statistics(received))
    assert not torch.equal(start["norm.weight"], received["norm.weight"])


def test_fedala_blends_no_statistic():
    blend = ala_of(p=3).init_client(task_of(Normed), task_of(Normed).initial).blend
    assert statistics(blend) == {} and len(blend) == 6


def test_fedala_personal_model_is_the_start_of_the_next_round():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    start = ala_of().personalize(task, received, client_of(own, blend, 2), shard)
    learned, _ = papers_blend(Dense, received, own, blend, steps_of(shard), 1.0)
    assert_close(start, mixed(received, own, learned))


def test_fedala_with_ala_pm_trained_scores_the_clients_trained_model():
    run = played(
        run_of("fedala", participation=0.5, settings={"ala_pm": "trained", "cap": 3}, executor="one_by_one"), 2
    )
    for client in took_part(run):
        assert_same(run.personal_model(client), tree.row(run.state.store.rows(torch.tensor([client])), 0).model)


def test_fedala_blends_with_the_stale_model_of_a_client_that_sat_out():
    run = run_of("fedala", participation=0.5, executor="one_by_one", settings={"eta": 0.0, "cap": 3})
    try:
        run.play_round()
        run.play_round()
        chosen = run.state.cohort(run.state.round)
        sat_out = next(i for i in range(len(SIZES)) if i not in chosen and run.state.store.written[i])
        before = tree.row(run.state.store.rows(torch.tensor([sat_out])), 0)
        run.play_round()
        after = tree.row(run.state.store.rows(torch.tensor([sat_out])), 0)
    finally:
        run.close()
    assert_same(before, after)
    assert differs(after.model, run.state.server)


# ALA that begins late, and a blend that is learned once


def test_fedala_takes_the_received_model_before_from_round():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task, round=4)
    client = client_of(own, filled(received, HEAD, 1.0), 1)
    method = ala_of(from_round=5, cap=3)
    after, upload, _ = method.train(task, received, client, shard)
    _, expected, _ = FedAvg(solver_of()).train(task, received, NOTHING, shard)
    assert_same(upload, expected)
    assert_same(after.blend, client.blend)
    assert_same(method.personalize(task, received, client, shard), received)


def test_fedala_learns_until_the_cap_in_from_round():
    """After 5 rounds without ALA the sixth, whose number is 5, is the first stage, and the next is a later round."""
    task = task_of(Dense)
    received, method = moved(task.initial, 1), ala_of(eta=0.125, cap=3, threshold=0.0, from_round=5)
    client = method.init_client(task, task.initial)
    for round in range(5):
        client, _, _ = method.train(task, moved(task.initial, 3 + round), client, shard_for(task, round=round))
    blend = filled(received, HEAD, 1.0)
    for round, epochs in ((5, 3), (6, 1)):
        shard = shard_for(task, round=round)
        blend, _ = papers_blend(Dense, received, client.model, blend, steps_of(shard, epochs), 0.125)
        client, _, _ = method.train(task, received, client, shard)
        assert_close(client.blend, blend)


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedala_before_from_round_is_fedavg_bit_for_bit(model, executor):
    one = played(run_of("fedala", model, settings={"from_round": 3, "cap": 2}, executor=executor), 2)
    other = played(run_of("fedavg", model, executor=executor), 2)
    assert_same(one.state.server, other.state.server)
    assert_same(one.personal_model(4), other.personal_model(4))
    assert one.state.store.rows(EVERYONE).rounds.tolist() == [1] * len(SIZES)


@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedala_from_round_on_is_not_fedavg(executor):
    one = played(run_of("fedala", settings={"from_round": 2, "cap": 2}, executor=executor), 4)
    other = played(run_of("fedavg", executor=executor), 4)
    assert differs(one.state.server, other.state.server)
    assert one.state.store.rows(EVERYONE).rounds.tolist() == [3] * len(SIZES)


def test_fedala_scores_the_blend_as_soon_as_the_next_round_has_ala():
    """After two rounds the personal model is the start of the third, in which ALA is active."""
    run = played(run_of("fedala", settings={"from_round": 2, "cap": 2}, executor="one_by_one"), 2)
    assert not torch.equal(run.personal_model(4)["head.weight"], run.state.server["head.weight"])


@pytest.mark.parametrize("round", [4, 5])
def test_fedala_new_clients_adapt_as_those_of_fedavg_before_from_round(round):
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, round=round)
    adapted = ala_of(from_round=5, cap=2).adapt(task, received, shard, 2)
    method = FedAvg(solver_of()) if round < 5 else ala_of(cap=2)
    assert_same(adapted, method.adapt(task, received, shard, 2))


@pytest.mark.parametrize("rounds", [2, 7])
def test_fedala_frozen_blend_is_used_and_not_learned(rounds):
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    client, upload, _ = ala_of(freeze=True).train(task, received, client_of(own, blend, rounds), shard)
    assert_same(client.blend, blend)
    assert_close(upload, trained(Dense, mixed(received, own, blend), batches(shard)))


@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedala_freeze_keeps_the_blend_of_the_first_stage(executor):
    """It is learned in the second round, as without `freeze`, and stays in the third, in which it moves without."""
    after = {
        (freeze, n): played(
            run_of("fedala", settings={"cap": 3, "freeze": freeze}, executor=executor), n
        ).state.store.rows(EVERYONE)
        for freeze in (True, False)
        for n in (2, 3)
    }
    assert_same(after[True, 2].blend, after[False, 2].blend)
    assert min(float(x.min()) for x in after[True, 2].blend.values()) < 1
    assert_same(after[True, 3].blend, after[True, 2].blend)
    assert differs(after[False, 3].blend, after[False, 2].blend)
    assert differs(after[True, 3].model, after[True, 2].model)


# Around other methods


def test_ala_around_ditto_leaves_the_own_model_alone():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    plain = Ditto(solver_of())
    around = Ala(solver=solver_of(), host=plain)
    held = DittoClient(moved(task.initial, 3))
    state = AlaClient(held, own, filled(received, HEAD, 0.5), torch.tensor(2))
    client, upload, _ = around.train(task, received, state, shard)
    alone, other, _ = plain.train(task, received, held, shard)
    assert_same(client.host, alone)
    assert differs(upload, other)


def test_ala_around_fedrep_blends_the_top_layer_of_the_body():
    task = task_of(Normed)
    method = Ala(host=FedRep(), p=1)
    assert sorted(method.init_client(task, task.initial).blend) == ["norm.bias", "norm.weight"]


def test_ala_around_fedrep_learns_under_the_clients_own_head():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    body, old, head = tree.drop(received, task.is_head), tree.drop(own, task.is_head), tree.keep(own, task.is_head)
    blend = filled(body, body, 0.5)
    method = Ala(solver=solver_of(), host=FedRep(solver_of()), s=100.0, eta=0.5)
    client, _, _ = method.train(task, body, AlaClient(FedRepClient(head), old, blend, torch.tensor(2)), shard)
    expected, _ = papers_blend(Dense, body | head, own, blend, steps_of(shard), 0.5)
    assert_close(client.blend, expected)


def test_ala_around_fedprox_starts_blended_and_is_pulled_to_the_received_model():
    task = task_of(Dense)
    (received, own), shard = two_models(task), shard_for(task)
    blend = filled(received, HEAD, 0.5)
    method = Ala(solver=solver_of(), host=Prox(host=FedAvg(solver_of()), mu=0.75), eta=0.0)
    _, upload, _ = method.train(task, received, client_of(own, blend, 2), shard)

    def pull(module):
        return 0.75 / 2 * sum((p - received[name]).square().sum() for name, p in module.named_parameters())

    assert_close(upload, trained(Dense, mixed(received, own, blend), batches(shard), pull))


@pytest.mark.parametrize("host", ["ditto", "fedrod"])
def test_ala_pm_trained_keeps_what_the_host_adds_to_a_personal_model(host):
    """Ditto's own model, Fed-RoD's personal head: without ALA they are part of what is scored."""
    settings = {"ala_pm": "trained", "cap": 2}
    run = played(run_of(f"{host}+ala", executor="one_by_one", settings=settings), 2)
    client = tree.row(run.state.store.rows(torch.tensor([4])), 0)
    plain = run.state.scene.method.host.personalize(run.state.scene.task, client.model, client.host, None)
    assert_same(run.personal_model(4), plain)


def test_ala_takes_the_head_for_the_top_layer_wherever_the_model_declares_it():
    class HeadFirst(Dense):
        head_name = "head"

        def __init__(self):
            nn.Module.__init__(self)
            self.head = nn.Linear(6, 3)
            self.hidden = nn.Linear(4, 6)

    task = task_of(HeadFirst)
    assert set(ala_of(p=1).init_client(task, task.initial).blend) == set(HEAD)


def test_fedala_moves_as_many_bytes_as_fedavg():
    one, other = (played(run_of(name), 1).state.rows[0] for name in ("fedala", "fedavg"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)


@pytest.mark.parametrize("addon", [C, Ala])
def test_ala_refuses_add_ons_around_it_that_would_move_the_start_too(addon):
    with pytest.raises(UsageError):
        addon(solver_of(), host=ala_of())
