import pytest
import torch
from torch.nn import functional as F

from plures.data.population import Population
from plures.methods.fedavg import FedAvg, FedAvgClient
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
    trained,
)
from tests.small import SIZES, TinyMlp, played, run_of, small_split, took_part


def digits_mlp():
    return TinyMlp((1, 8, 8), 10)


def shard_of_client(population: Population, client: int, round: int):
    stacked = population.shards([client], "train", "train", round)
    return type(stacked)(stacked.x, stacked.y, *[part[0] for part in stacked[2:]])


def slow_fedavg(run, n_rounds: int, weights=None, **options):
    """FedAvg as one would write it with modules and torch.optim."""
    scene = run.state.scene
    server = dict(scene.task.initial)
    for round in range(n_rounds):
        ids = run.state.cohort(round)
        sizes = [len(scene.population.train[i]) if weights is None else 1 for i in ids]
        models = []
        for client in ids:
            steps = batches(shard_of_client(scene.population, client, round), scene.config.epochs)
            models.append(trained(digits_mlp, server, steps, **{"lr": 0.1, **options}))
        server = {
            name: sum(n * model[name] for n, model in zip(sizes, models, strict=True)) / sum(sizes) for name in server
        }
    return server


@pytest.mark.parametrize("executor", ["vectorised", "one_by_one"])
def test_fedavg_equals_a_loop_with_torch_optim(executor):
    run = played(run_of("fedavg", epochs=2, executor=executor), 2)
    assert_close(run.state.server, slow_fedavg(run, 2))


def test_fedavg_with_momentum_and_weight_decay_equals_a_loop_with_torch_optim():
    run = played(run_of("fedavg", momentum=0.9, weight_decay=0.01, lr=0.05), 2)
    assert_close(run.state.server, slow_fedavg(run, 2, lr=0.05, momentum=0.9, weight_decay=0.01))


def test_fedavg_with_partial_participation_takes_the_mean_of_those_who_took_part():
    run = played(run_of("fedavg", participation=0.5), 3)
    assert_close(run.state.server, slow_fedavg(run, 3))


def test_fedavg_with_uniform_weights_takes_the_plain_mean():
    run = played(run_of("fedavg", settings={"weights": "uniform"}), 1)
    assert_close(run.state.server, slow_fedavg(run, 1, weights="uniform"))


def test_fedavg_client_with_batch_norm_equals_a_module_in_training_mode():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task, n=17)
    _, upload, _ = FedAvg(solver_of(epochs=3)).train(task, received, FedAvgClient({}), shard)
    assert_close(upload, trained(Normed, received, batches(shard, 3)))


def test_fedavg_averages_statistics_with_the_weights_of_the_others():
    stacked = {"norm.weight": torch.tensor([[1.0], [5.0]]), "norm.running_mean": torch.tensor([[1.0], [5.0]])}
    merged = FedAvg().merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
    assert merged["norm.running_mean"].tolist() == merged["norm.weight"].tolist() == [2.0]


def test_fedavg_on_one_full_batch_of_equal_data_is_a_step_of_gradient_descent():
    split = small_split((20,))
    same = type(split)([split.train[0]] * 3, [split.test[0]] * 3)
    run = played(run_of("fedavg", split=same, batch=20, epochs=1), 1)
    x, y = run.state.scene.population.x[split.train[0]], run.state.scene.population.y[split.train[0]]
    module = module_of(digits_mlp, run.state.scene.task.initial)
    F.cross_entropy(module(x), y).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in module.named_parameters()}
    assert_close(run.state.server, expected)


def test_fedavg_with_lr_zero_keeps_the_model():
    run = played(run_of("fedavg", lr=0.0), 3)
    assert_close(run.state.server, run.state.scene.task.initial)


def test_fedavg_mean_is_weighted_by_rows():
    merged = FedAvg().merge(
        None, {}, torch.tensor([0, 1, 2]), {"w": torch.tensor([1.0, 2.0, 4.0])}, torch.tensor([1, 1, 2])
    )
    assert float(merged["w"]) == 2.75


def test_fedavg_uniform_mean_does_not_see_rows():
    method = FedAvg(weights="uniform")
    merged = method.merge(
        None, {}, torch.tensor([0, 1, 2]), {"w": torch.tensor([1.0, 3.0, 5.0])}, torch.tensor([1, 1, 9])
    )
    torch.testing.assert_close(merged["w"], torch.tensor(3.0))


def test_fedavg_weights_sum_to_one():
    ones = {"w": torch.ones(len(SIZES), 3)}
    merged = FedAvg().merge(None, {}, torch.arange(len(SIZES)), ones, torch.tensor(SIZES))
    torch.testing.assert_close(merged["w"], torch.ones(3), rtol=1e-6, atol=0)


def test_fedavg_moves_one_model_each_way_for_every_client():
    run = played(run_of("fedavg", participation=0.5), 1)
    size = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert (run.state.rows[0].bytes_down, run.state.rows[0].bytes_up) == (3 * size, 3 * size)


def test_fedavg_solver_is_fresh_every_round():
    """Momentum does not outlive a round: two rounds of a client are two separate runs of SGD."""
    split = small_split((31,))
    run = played(run_of("fedavg", split=split, momentum=0.9), 2)
    assert_close(run.state.server, slow_fedavg(run, 2, momentum=0.9))
    one_go = trained(
        digits_mlp,
        run.state.scene.task.initial,
        [step for round in range(2) for step in batches(shard_of_client(run.state.scene.population, 0, round))],
        lr=0.1,
        momentum=0.9,
    )
    assert differs(run.state.server, one_go)


def test_fedavg_with_adam_equals_torch_optim():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    solver = solver_of(kind="adam", lr=0.0625, weight_decay=0.25, epochs=3)
    _, upload, _ = FedAvg(solver).train(task, received, FedAvgClient({}), shard)
    module = module_of(Dense, received)
    adam = torch.optim.Adam(module.parameters(), lr=0.0625, weight_decay=0.25)
    for x, y in batches(shard, 3):
        adam.zero_grad()
        F.cross_entropy(module(x), y).backward()
        adam.step()
    assert_close(upload, params_of(module))


def test_fedavg_learning_rate_decays_by_the_round():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, round=3)
    _, upload, _ = FedAvg(solver_of(decay=0.5)).train(task, received, FedAvgClient({}), shard)
    assert_close(upload, trained(Dense, received, batches(shard), lr=LR / 8))


def test_fedavg_personal_model_is_the_mean():
    run = played(run_of("fedavg", participation=0.5), 2)
    for client in range(len(SIZES)):
        assert_same(run.personal_model(client), run.state.server)


def test_fedavg_with_pm_local_scores_the_model_of_the_last_round_that_a_client_trained():
    run = run_of("fedavg", participation=0.5, executor="one_by_one", settings={"pm": "local"})
    expected = {client: run.state.scene.task.initial for client in range(len(SIZES))}
    try:
        for round in range(3):
            for client in run.state.cohort(round):
                shard = shard_of_client(run.state.scene.population, client, round)
                expected[client] = trained(digits_mlp, run.state.server, batches(shard), lr=0.1)
            run.play_round()
    finally:
        run.close()
    for client in took_part(run):
        assert_close(run.personal_model(client), expected[client])


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedavg_with_pm_local_trains_the_same_shared_model(model):
    one = played(run_of("fedavg", model, executor="one_by_one"), 2)
    other = played(run_of("fedavg", model, settings={"pm": "local"}, executor="one_by_one"), 2)
    assert_same(one.state.server, other.state.server)


def test_fedavg_leaves_out_a_last_batch_of_one_where_there_is_batch_norm():
    task = task_of(Normed)
    shard = shard_for(task, n=16)  # batches of 5, 5, 5 and one row
    assert [len(y) for _, y in batches(shard)] == [5, 5, 5]
    _, upload, _ = FedAvg(solver_of()).train(task, task.initial, FedAvgClient({}), shard)
    assert_close(upload, trained(Normed, task.initial, batches(shard)))


def test_fedavg_statistics_follow_the_data():
    task = task_of(Normed)
    shard = shard_for(task, n=5)
    _, upload, _ = FedAvg(solver_of(lr=0.0)).train(task, task.initial, FedAvgClient({}), shard)
    hidden = F.linear(shard.x, task.initial["hidden.weight"], task.initial["hidden.bias"])
    expected = {"norm.running_mean": 0.1 * hidden.mean(0), "norm.running_var": 0.9 + 0.1 * hidden.var(0)}
    assert_close(statistics(upload), expected)


def test_fedavg_has_no_part_for_clients_without_rows():
    split = small_split((20, 31))
    with_nobody = type(split)([*split.train, split.train[0][:0]], [*split.test, split.test[0]])
    one, other = played(run_of("fedavg", split=split), 2), played(run_of("fedavg", split=with_nobody), 2)
    assert other.state.eligible == [0, 1]
    assert_same(one.state.server, other.state.server)


def test_fedavg_model_for_all_is_the_server_model():
    task = task_of(Dense)
    assert_same(FedAvg().generic(task, moved(task.initial, 1)), moved(task.initial, 1))
