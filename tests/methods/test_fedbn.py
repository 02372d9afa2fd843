import pytest
import torch
from torch import nn

from plures import tree
from plures.methods.addons.keep import KeepLocal, KeptClient
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedbn import fedbn
from plures.methods.local import Local
from plures.methods.messages import Same
from plures.simulate.stacking import one_by_one
from plures.simulate.work import train_function
from tests.methods.plain import (
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
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
NOTHING = FedAvgClient({})
KEPT = ["norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"]


def fedbn_of(**solver) -> KeepLocal:
    return KeepLocal(host=FedAvg(solver_of(**solver)), private="batch-norm")


def parts(task, params):
    """What travels and what stays."""
    return tree.drop(params, task.is_batch_norm), tree.keep(params, task.is_batch_norm)


class Tricky(nn.Module):
    """A BatchNorm with no hint in its name, and a LayerNorm and a linear layer whose names have one."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.bn = nn.LayerNorm(6)
        self.batch_norm = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.batch_norm(self.bn(self.downsample(x))))


@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedbn_without_batch_norm_is_fedavg_bit_for_bit(executor):
    one, other = (played(run_of(name, executor=executor), 3) for name in ("fedbn", "fedavg"))
    assert_same(one.state.server, other.state.server)
    for client in range(len(SIZES)):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_fedbn_of_a_model_that_is_all_batch_norm_is_local():
    task = task_of(Normed)
    task.is_batch_norm = lambda name: True
    method, local = fedbn_of(), Local(solver_of())
    client, alone = method.init_client(task, task.initial), local.init_client(task, task.initial)
    for round in range(3):
        shard = shard_for(task, round=round)
        client, upload, _ = method.train(task, {}, client, shard)
        alone, _, _ = local.train(task, {}, alone, shard)
        assert upload == {}
    assert_same(method.personalize(task, {}, client, shard), alone.model)


def test_fedbn_client_equals_a_module_with_its_own_batch_norm():
    task = task_of(Normed)
    model, shard = moved(task.initial, 1), shard_for(task)
    received, kept = parts(task, model)
    client, upload, _ = fedbn_of(epochs=2, momentum=0.5).train(task, received, KeptClient(NOTHING, kept), shard)
    assert_close(upload | client.kept, trained(Normed, model, batches(shard, 2), momentum=0.5))


def test_fedbn_goes_on_from_its_own_batch_norm_every_round():
    task = task_of(Normed)
    method = fedbn_of()
    client, kept = method.init_client(task, task.initial), parts(task, task.initial)[1]
    for round in range(2):
        received, shard = parts(task, moved(task.initial, 5 + round))[0], shard_for(task, round=round)
        client, _, _ = method.train(task, received, client, shard)
        kept = parts(task, trained(Normed, received | kept, batches(shard)))[1]
    assert_close(client.kept, kept)


def test_fedbn_uploads_no_tensor_of_batch_norm():
    task = task_of(Normed)
    received, kept = parts(task, task.initial)
    client, upload, _ = fedbn_of().train(task, received, KeptClient(NOTHING, kept), shard_for(task))
    assert sorted(upload) == ["head.bias", "head.weight", "hidden.bias", "hidden.weight"]
    assert sorted(client.kept) == KEPT


def test_fedbn_finds_batch_norm_by_type_and_not_by_name():
    task = task_of(Tricky)
    method = fedbn_of()
    shared = method.shared(task, task.initial)
    assert sorted(set(task.initial) - set(shared)) == sorted(
        f"downsample.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    )


def test_fedbn_moves_the_bytes_of_all_but_batch_norm():
    run = played(run_of("fedbn", "norm"), 1)
    size = 4 * (4 * 9 + 4 + 36 * 12 + 12 + 12 * 10 + 10)
    assert (run.state.rows[0].bytes_down, run.state.rows[0].bytes_up) == (6 * size, 6 * size)


def test_fedbn_keeps_weights_and_statistics_of_clients_that_sit_out():
    run = run_of("fedbn", "norm", participation=0.5, executor="one_by_one")
    try:
        run.play_round()
        before = run.state.store.rows(EVERYONE).kept
        chosen = run.state.cohort(run.state.round)
        run.play_round()
        after = run.state.store.rows(EVERYONE).kept
    finally:
        run.close()
    others = torch.tensor([i for i in range(len(SIZES)) if i not in chosen])
    assert len(others) == 3 and any("weight" in name for name in after) and any("running_var" in n for n in after)
    assert_same(tree.rows(before, others), tree.rows(after, others))
    largest = max(chosen)
    assert all(not torch.equal(before[name][largest], after[name][largest]) for name in after)


def test_fedbn_client_that_sat_out_has_the_new_weights_and_its_old_batch_norm():
    run = played(run_of("fedbn", "norm", participation=0.5, executor="one_by_one"), 3)
    for client in took_part(run):
        kept = tree.row(run.state.store.rows(torch.tensor([client])), 0).kept
        model = run.personal_model(client)
        assert_same(parts(run.state.scene.task, model), (run.state.server, kept))


def test_fedbn_clients_have_unlike_statistics_after_a_round():
    run = played(run_of("fedbn", "norm", executor="one_by_one"), 1)
    large = statistics(run.personal_model(4)), statistics(run.personal_model(5))
    assert differs(*large)


def test_fedbn_statistics_are_no_mean_of_clients():
    """A client's statistics depend on what it received and on its own rows alone."""
    split = small_split()
    fewer = type(split)([*split.train[:5], split.train[5][:6]], split.test)
    one, other = (played(run_of("fedbn", "norm", split=s, executor="one_by_one"), 1) for s in (split, fewer))
    kept = [parts(run.state.scene.task, run.personal_model(4))[1] for run in (one, other)]
    shared = [parts(run.state.scene.task, run.personal_model(4))[0] for run in (one, other)]
    assert_same(kept[0], kept[1])
    assert not torch.equal(shared[0]["head.weight"], shared[1]["head.weight"])


def test_fedbn_mean_of_a_cohort_is_weighted_by_rows():
    method = fedbn()
    stacked = {"head.weight": torch.tensor([[1.0], [5.0]])}
    merged = method.merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
    assert merged["head.weight"].tolist() == [2.0]


def test_fedbn_has_no_model_for_all_where_there_is_batch_norm():
    for make, nothing in ((Normed, True), (Dense, False)):
        task = task_of(make)
        server = fedbn().shared(task, task.initial)
        assert (fedbn().generic(task, server) is None) == nothing


def test_fedbn_clients_of_a_cohort_keep_apart():
    """Two clients with the same rows but unlike BatchNorm end with unlike BatchNorm."""
    task = task_of(Normed)
    received, _ = parts(task, task.initial)
    kept = tree.stack([parts(task, moved(task.initial, seed))[1] for seed in (1, 2)])
    shard = shard_for(task)
    shards = type(shard)(shard.x, shard.y, *[part.expand(2, *part.shape) for part in shard[2:]])
    train = train_function(fedbn_of(), task)
    clients, _, _ = one_by_one(train, Same(received), KeptClient(NOTHING, kept), shards)
    for i in range(2):
        alone, _, _ = fedbn_of().train(task, received, KeptClient(NOTHING, tree.row(kept, i)), shard)
        assert_same(tree.row(clients, i), alone)
    assert differs(tree.row(clients, 0).kept, tree.row(clients, 1).kept)


def test_fedbn_newcomer_has_the_statistics_of_its_own_rows_under_the_servers_weights():
    """Before, its statistics began at mean 0 and variance 1, which no row of its has."""
    run = played(run_of("fedbn", "norm", executor="one_by_one"), 2)
    scene = run.state.scene
    method, task = scene.method.with_solver(solver_of(lr=0.0)), scene.task
    shard = scene.population.shards([5], "train", "new", 0)
    message = Same(method.newcomer(task, run.state.server))
    model = tree.row(one_by_one(lambda got, rows: method.adapt(task, got, rows, 1), message, shard), 0)
    x = scene.population.x[torch.from_numpy(scene.population.train[5])]
    maps = torch.nn.functional.conv2d(x, model["conv.weight"], model["conv.bias"], stride=2)
    mean, variance = maps.mean((0, 2, 3)), maps.var((0, 2, 3))
    assert ((model["norm.running_mean"] - mean).abs() < 0.1 * variance.sqrt()).all()
    assert ((model["norm.running_var"] / variance - 1).abs() < 0.1).all() and (variance < 0.5).all()
    untouched = tree.row(one_by_one(lambda got, rows: method.adapt(task, got, rows, 0), message, shard), 0)
    assert torch.equal(untouched["norm.running_mean"], torch.zeros(4))
