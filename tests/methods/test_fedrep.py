import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.addons.keep import KeepLocal
from plures.methods.fedavg import FedAvg
from plures.methods.fedrep import FedRep, FedRepClient
from tests.methods.plain import (
    LR,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
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


def fedrep_of(head_epochs: int, pm_epochs: int = 0, **solver) -> FedRep:
    return FedRep(solver_of(**solver), head_epochs=head_epochs, pm_epochs=pm_epochs)


def parts(task, params):
    return tree.drop(params, task.is_head), tree.keep(params, task.is_head)


def two_phases(make, body, head, head_steps, body_steps, **options):
    """FedRep's round of a client with two optimizers: the head on a frozen body, then the body under a fixed head."""
    module = module_of(make, body | head)
    module.eval()  # the frozen body
    first = torch.optim.SGD(module.head.parameters(), **{"lr": LR, **options})
    for x, y in head_steps:
        with torch.no_grad():
            features = module.body(x)
        first.zero_grad()
        F.cross_entropy(module.head(features), y).backward()
        first.step()
    module.train()
    second = torch.optim.SGD([p for n, p in module.named_parameters() if "head" not in n], **{"lr": LR, **options})
    for x, y in body_steps:
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        second.step()
    return params_of(module)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedrep_round_equals_two_optimizers_one_after_the_other(make):
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task)
    body, head = parts(task, model)
    client, upload, _ = fedrep_of(3, epochs=2).train(task, body, FedRepClient(head), shard)
    expected = two_phases(make, body, head, batches(shard, 3), batches(shard, 2))
    assert_close(upload | client.head, expected)


def test_fedrep_momentum_is_fresh_in_the_second_phase():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    solver = {"momentum": 0.9, "weight_decay": 0.01}
    client, upload, _ = fedrep_of(2, epochs=2, **solver).train(task, body, FedRepClient(head), shard)
    expected = two_phases(Dense, body, head, batches(shard, 2), batches(shard, 2), **solver)
    assert_close(upload | client.head, expected)


def test_fedrep_head_goes_on_from_its_own_value_every_round():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    client, expected = FedRepClient(head), head
    for round in range(2):
        shard = shard_for(task, round=round)
        client, _, _ = fedrep_of(2).train(task, body, client, shard)
        expected = parts(task, two_phases(Dense, body, expected, batches(shard, 2), ()))[1]
    assert_close(client.head, expected)


def test_fedrep_fits_the_head_on_a_body_in_inference_mode():
    """The body's statistics are far from those of the data, so that the two modes give other features."""
    task = task_of(Normed)
    body, head = parts(task, moved(task.initial, 3, by=1.0))
    shard = shard_for(task)
    client, _, _ = fedrep_of(2, epochs=0).train(task, body, FedRepClient(head), shard)
    weight, bias = head["head.weight"].clone(), head["head.bias"].clone()
    for x, y in batches(shard, 2):
        hidden = F.linear(x, body["hidden.weight"], body["hidden.bias"])
        scaled = (hidden - body["norm.running_mean"]) / (body["norm.running_var"] + 1e-5).sqrt()
        features = torch.relu(scaled * body["norm.weight"] + body["norm.bias"])
        wrong = (F.linear(features, weight, bias).softmax(1) - F.one_hot(y, 3)) / len(y)
        weight, bias = weight - LR * wrong.T @ features, bias - LR * wrong.sum(0)
    assert_close(client.head, {"head.weight": weight, "head.bias": bias})


def test_fedrep_frozen_body_moves_no_statistic():
    task = task_of(Normed)
    body, head = parts(task, moved(task.initial, 1))
    _, upload, _ = fedrep_of(5, epochs=0).train(task, body, FedRepClient(head), shard_for(task))
    assert_same(upload, body)


def test_fedrep_body_phase_moves_statistics():
    task = task_of(Normed)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    _, upload, _ = fedrep_of(0, lr=0.0).train(task, body, FedRepClient(head), shard)
    expected = two_phases(Normed, body, head, (), batches(shard), lr=0.0)
    assert_close(statistics(upload), statistics(expected))
    assert differs(statistics(upload), statistics(body))


def test_fedrep_without_body_epochs_keeps_the_body():
    run = played(run_of("fedrep", epochs=0, settings={"head_epochs": 2}), 2)
    assert_close(run.state.server, tree.drop(run.state.scene.task.initial, run.state.scene.task.is_head))


def test_fedrep_without_body_epochs_trains_the_heads_down_the_convex_loss():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    losses = []
    for epochs in (0, 5, 25):
        method = fedrep_of(epochs, epochs=0, batch=17, lr=2.0)
        client, _, _ = method.train(task, body, FedRepClient(head), shard)
        losses.append(float(F.cross_entropy(task.logits(body | client.head, shard.x), shard.y)))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


def test_fedrep_without_head_epochs_never_changes_a_head():
    run = played(run_of("fedrep", settings={"head_epochs": 0}), 2)
    heads = run.state.store.rows(torch.arange(len(SIZES))).head
    initial = tree.keep(run.state.scene.task.initial, run.state.scene.task.is_head)
    for name, x in heads.items():
        assert torch.equal(x, initial[name].expand_as(x))


def test_fedrep_second_phase_leaves_the_head_alone():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    without, with_body = (
        fedrep_of(2, epochs=epochs).train(task, body, FedRepClient(head), shard_for(task))[0] for epochs in (0, 3)
    )
    assert_same(without, with_body)


def test_fedrep_is_not_joint_training_of_head_and_body():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    client, upload, _ = fedrep_of(1).train(task, body, FedRepClient(head), shard)
    joint = KeepLocal(host=FedAvg(solver_of()), private="head")
    kept = joint.init_client(task, body | head)
    kept, other, _ = joint.train(task, body, kept, shard)
    assert differs(upload, other) and differs(client.head, kept.kept)


def test_fedrep_fits_heads_for_epochs_where_the_body_is_given_steps():
    task = task_of(Dense)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    client, upload, _ = fedrep_of(2, steps=3).train(task, body, FedRepClient(head), shard)
    expected = two_phases(Dense, body, head, batches(shard, 2), batches(shard, steps=3))
    assert_close(upload | client.head, expected)


def test_fedrep_sends_the_body_only():
    run = played(run_of("fedrep"), 1)
    size = 4 * (64 * 8 + 8)
    assert (run.state.rows[0].bytes_down, run.state.rows[0].bytes_up) == (6 * size, 6 * size)
    assert sorted(run.state.server) == ["hidden.bias", "hidden.weight"]


def test_fedrep_personal_model_is_the_servers_body_with_its_own_head():
    """Of a client that never took part, before it trains, with the head that all start from."""
    run = run_of("fedrep", "norm", participation=0.5, executor="one_by_one", new_epochs=0)
    took_part = {*run.state.cohort(0), *run.state.cohort(1)}
    played(run, 2)
    assert 0 < len(took_part) < len(SIZES)
    for client in range(len(SIZES)):
        head = tree.row(run.state.store.rows(torch.tensor([client])), 0).head
        assert_same(run.personal_model(client), run.state.server | head)
        start = parts(run.state.scene.task, run.state.scene.task.initial)[1]
        assert differs(head, start) == (client in took_part)


def test_fedrep_head_of_a_client_that_sits_out_is_stale_while_its_body_is_new():
    run = run_of("fedrep", participation=0.5, executor="one_by_one")
    task = run.state.scene.task
    sat_out = {*run.state.cohort(0)} - {*run.state.cohort(1)}
    try:
        run.play_round()
        before = [run.personal_model(client) for client in range(len(SIZES))]
        run.play_round()
        after = [run.personal_model(client) for client in range(len(SIZES))]
    finally:
        run.close()
    assert sat_out
    for client in sat_out:
        assert_same(parts(task, before[client])[1], parts(task, after[client])[1])
        assert differs(parts(task, before[client])[0], parts(task, after[client])[0])


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedrep_with_pm_epochs_trains_the_head_alone_for_the_personal_model(make):
    task = task_of(make)
    body, head = parts(task, moved(task.initial, 1))
    shard = shard_for(task)
    personal = fedrep_of(2, pm_epochs=3).personalize(task, body, FedRepClient(head), shard)
    assert_same({name: personal[name] for name in body}, body)
    assert_close(personal, two_phases(make, body, head, batches(shard, 3), ()))
    assert differs({name: personal[name] for name in head}, head)


def test_fedrep_pm_epochs_change_nothing_of_training():
    one, other = (played(run_of(f"fedrep:pm_epochs={n}", executor="one_by_one"), 2) for n in (0, 3))
    assert_same(one.state.server, other.state.server)
    everyone = torch.arange(len(SIZES))
    assert_same(one.state.store.rows(everyone), other.state.store.rows(everyone))
    assert differs(*({"w": run.personal_model(5)["head.weight"]} for run in (one, other)))


def test_fedrep_has_no_model_for_all():
    task = task_of(Dense)
    assert FedRep().generic(task, parts(task, task.initial)[0]) is None


def test_fedrep_uniform_mean_does_not_see_rows():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    merged = FedRep(weights="uniform").merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([1, 9]))
    by_rows = FedRep().merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([1, 3]))
    assert (float(merged["w"]), float(by_rows["w"])) == (2.0, 2.5)
