import math

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import plures
from plures import tree
from plures.methods.apple import Apple, AppleClient, AppleServer
from plures.methods.base import Federation, Schedule
from tests.methods.plain import (
    LR,
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
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))
SIZES_OF_FOUR = (10, 20, 30, 40)


def apple_of(n: int = 4, rounds: int = 100, solver=None, **settings) -> Apple:
    return Apple(solver_of(**(solver or {})), Schedule(n, rounds, 1.0), **settings)


def received_of(cores, whose, me: int = 1, sizes=SIZES_OF_FOUR):
    stacked = tree.map(lambda x: x[list(whose)], cores)
    return {"cores": stacked, "whose": torch.tensor(whose), "sizes": torch.tensor(sizes), "me": torch.tensor(me)}


def cores_of(task, n: int = 4):
    return tree.stack([moved(task.initial, seed) for seed in range(n)])


def client_of(core, weights=(0.0, 0.0, 0.0, 0.0), rounds: int = 1, kept=None) -> AppleClient:
    return AppleClient(core, torch.as_tensor(weights), core, torch.tensor(rounds), kept or {}, torch.zeros(4))


def by_hand(make, cores, p, steps, rates, start, pull, whose=(0, 2, 3), me=1, momentum=0.0):
    """SGD on the own core and the weights, with a rate for each, on the sum of cores; autograd finds the gradients."""
    module = make().double()
    others = {name: x[list(whose)] for name, x in cores.items()}
    core = {name: x[me].clone().requires_grad_("running" not in name) for name, x in cores.items()}
    stats = {name: x for name, x in core.items() if not x.requires_grad}
    p, start = p.double().requires_grad_(), torch.tensor(start, dtype=torch.float64)
    learned = [x for x in core.values() if x.requires_grad]
    solver = torch.optim.SGD([{"params": learned, "lr": rates[0]}, {"params": [p], "lr": rates[1]}], momentum=momentum)

    def summed():
        return {
            name: p[me] * x + torch.tensordot(p[list(whose)], others[name], 1)
            for name, x in core.items()
            if x.requires_grad
        }

    for x, y in steps:
        solver.zero_grad()
        logits = functional_call(module, summed() | stats, (x,))  # moves the statistics in place
        (F.cross_entropy(logits, y) + pull * (p - start).square().sum()).backward()
        solver.step()
    return {n: x.detach() for n, x in core.items()}, p.detach(), {n: x.detach() for n, x in (summed() | stats).items()}


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_with_all_weight_on_the_own_core_and_none_learned_apple_is_local_bit_for_bit(model):
    one = played(run_of("apple:one_hot=true,weights_lr=0", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    assert_same(one.state.store.rows(EVERYONE).core, other.state.store.rows(EVERYONE).model)
    assert_same(one.state.store.rows(EVERYONE).model, other.state.store.rows(EVERYONE).model)
    assert torch.equal(one.state.store.rows(EVERYONE).weights, torch.eye(6))


def test_with_equal_shares_that_are_not_learned_the_model_is_the_mean_of_cores():
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    method = apple_of(solver={"steps": 1}, weights_lr=0.0)
    received = received_of(cores, (0, 2, 3), sizes=(25, 25, 25, 25))
    client, upload, _ = method.train(task, received, client_of(tree.row(cores, 1), rounds=0), shard)
    new = {name: torch.stack([x[0], upload["core"][name], x[2], x[3]]) for name, x in cores.items()}
    assert_close(client.model, tree.map(lambda x: x.mean(0), new))
    assert client.weights.tolist() == [0.25] * 4
    begun = trained(Dense, tree.map(lambda x: x.mean(0), cores), list(batches(shard))[:1])
    gradient = {name: (x.mean(0) - begun[name]) / LR for name, x in cores.items()}
    assert_close(upload["core"], {name: x[1] - LR * gradient[name] for name, x in cores.items()})  # 4 * a quarter


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_core_and_weights_equal_torch_optim_and_autograd(make, momentum):
    task = task_of(make)
    cores, shard = cores_of(task), shard_for(task)
    weights = (0.2, 0.5, -0.1, 0.3)
    method = apple_of(solver={"epochs": 2, "momentum": momentum}, weights_lr=0.05, mu=0.4, core_speed=1.0)
    client, upload, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), weights), shard)
    core, p, model = by_hand(
        make, cores, torch.tensor(weights), batches(shard, 2), (LR, 0.05), (0.1, 0.2, 0.3, 0.4), 0.4, momentum=momentum
    )
    torch.testing.assert_close(client.weights.double(), p, rtol=0, atol=1e-5)
    for found, expected in ((client.core, core), (client.model, model)):
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-4, atol=1e-5)
    assert_same(upload["core"], client.core)
    assert float((p - torch.tensor(weights)).abs().min()) > 1e-3


def test_gradient_of_a_weight_is_the_product_of_the_models_gradient_with_its_core():
    """One step: p_j falls by weights_lr * <gradient at the sum, core_j>."""
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    weights = torch.tensor([0.2, 0.5, -0.1, 0.3])
    method = apple_of(solver={"steps": 1}, weights_lr=0.01, mu=0.0)
    client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), weights), shard)
    summed = {name: torch.tensordot(weights.double(), x, 1) for name, x in cores.items()}
    after = trained(Dense, summed, list(batches(shard))[:1])
    gradient = {name: (summed[name] - after[name]) / LR for name in summed}
    product = torch.stack([sum((gradient[name] * x[j]).sum() for name, x in cores.items()) for j in range(4)])
    torch.testing.assert_close((weights - client.weights).double() / 0.01, product, rtol=1e-3, atol=1e-3)
    assert float(product.abs().min()) > 0.05


@pytest.mark.parametrize(
    ("speed", "one_hot", "factor"), [(3.0, False, 3), (3.0, True, 3), (0.0, False, 4), (0.0, True, 1)]
)
def test_core_speed_is_a_factor_of_the_cores_rate_only(speed, one_hot, factor):
    """By default it is the number of clients, or one where all weight is on the own core at the start."""
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    weights = (0.2, 0.5, -0.1, 0.3)
    method = apple_of(weights_lr=0.05, mu=0.0, core_speed=speed, one_hot=one_hot)
    client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), weights), shard)
    core, p, _ = by_hand(Dense, cores, torch.tensor(weights), batches(shard), (factor * LR, 0.05), weights, 0.0)
    torch.testing.assert_close(client.core, core, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(client.weights.double(), p, rtol=0, atol=1e-5)


def test_a_core_that_is_not_sent_is_the_one_that_was_fetched_last():
    """Round by round one other core is sent; the sum has it and, of the two others, what was kept of them."""
    task = task_of(Dense)
    known, weights = cores_of(task), (0.2, 0.5, -0.1, 0.3)
    method = apple_of(weights_lr=0.05, mu=0.0, models=1, core_speed=1.0)
    client = client_of(tree.row(known, 1), weights, kept=tree.map(torch.clone, known))
    for round, whose in enumerate((3, 0)):
        shard = shard_for(task, round=round)
        now = tree.stack([moved(task.initial, 10 * round + seed) for seed in range(10, 14)])
        known = {name: x.index_copy(0, torch.tensor([whose]), now[name][[whose]]) for name, x in known.items()}
        begun = {name: x.index_copy(0, torch.tensor([1]), client.core[name][None]) for name, x in known.items()}
        core, p, model = by_hand(Dense, begun, client.weights, batches(shard), (LR, 0.05), weights, 0.0)
        client, _, _ = method.train(task, received_of(now, (whose,)), client, shard)
        torch.testing.assert_close(client.core, core, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(client.model, model, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(client.weights.double(), p, rtol=0, atol=1e-5)
        assert_same(tree.rows(client.kept, torch.tensor([0, 2, 3])), tree.rows(known, torch.tensor([0, 2, 3])))
    assert client.got.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_weight_of_a_core_that_is_not_sent_has_the_gradient_of_the_kept_one_and_not_of_the_own():
    """One step: p_j falls by weights_lr * <gradient at the sum, kept core_j>; only core 3 is sent."""
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    weights = torch.tensor([0.2, 0.5, -0.1, 0.3])
    method = apple_of(solver={"steps": 1}, weights_lr=0.01, mu=0.0, models=1)
    client = client_of(tree.row(cores, 1), weights, kept=tree.map(torch.clone, cores))
    client, _, _ = method.train(task, received_of(cores, (3,)), client, shard)
    summed = {name: torch.tensordot(weights.double(), x, 1) for name, x in cores.items()}
    after = trained(Dense, summed, list(batches(shard))[:1])
    gradient = {name: (summed[name] - after[name]) / LR for name in summed}
    product = torch.stack([sum((gradient[name] * x[j]).sum() for name, x in cores.items()) for j in range(4)])
    torch.testing.assert_close((weights - client.weights).double() / 0.01, product, rtol=1e-3, atol=1e-3)
    assert float((product - product[1])[[0, 2, 3]].abs().min()) > 0.05


def test_cores_are_kept_only_where_some_are_not_sent():
    task = task_of(Dense)
    assert all(apple_of(models=models).init_client(task, task.initial).kept == {} for models in (0, 3, 9))
    kept = apple_of(models=2).init_client(task, task.initial).kept
    assert_same(kept, tree.repeat(task.initial, 4))


def test_in_a_run_every_kept_core_is_the_one_of_the_round_in_which_it_was_sent():
    run = run_of("apple:models=2", executor="one_by_one")
    expected = run.state.server.cores["head.weight"].repeat(6, 1, 1, 1)
    for _ in range(3):
        cores, wanted = run.state.server.cores["head.weight"].clone(), run.state.server.wanted.clone()
        for client in range(6):
            expected[client, wanted[client]] = cores[wanted[client]]
        run.play_round()
    run.close()
    assert torch.equal(run.state.store.rows(EVERYONE).kept["head.weight"], expected)
    old = (expected != cores).flatten(2).any(2)
    assert old.any(1).all() and not old.all()  # some, but not all, are older than the last round's


def test_in_a_run_a_client_gets_every_core_before_it_gets_one_again():
    """One of five others in each of five rounds."""
    run = run_of("apple:models=1", executor="one_by_one", rounds=5)
    for round in range(5):
        run.play_round()
        assert run.state.store.rows(EVERYONE).got.sum(1).tolist() == [round + 1.0] * 6
    run.close()
    assert torch.equal(run.state.store.rows(EVERYONE).got, 1 - torch.eye(6))


def test_clients_that_exchange_cores_do_better_than_those_that_do_not():
    """Clients with 4 of 10 digits: with all weight on the own core for good, each is alone."""
    means = []
    for settings in ({}, {"one_hot": True, "weights_lr": 0.0}):
        result = plures.run(
            "apple", data="digits", share=0.5, partition="labels:4", rounds=20, eval_every=0, settings=settings
        )
        means.append(result.summary["personal"]["mean"])
    assert means[0] > means[1] + 0.01


def test_cores_of_others_do_not_change_by_a_clients_training():
    task = task_of(Normed)
    cores, shard = cores_of(task), shard_for(task)
    received = received_of(cores, (0, 2, 3))
    copy = tree.map(torch.clone, received)
    _, upload, _ = apple_of(weights_lr=0.1).train(task, received, client_of(tree.row(cores, 1), rounds=0), shard)
    assert_same(received, copy)
    server = AppleServer(cores, torch.zeros(4, 3, dtype=torch.long), torch.tensor(SIZES_OF_FOUR), torch.zeros(4))
    new = apple_of().merge(task, server, torch.tensor([1]), tree.stack([upload]), torch.tensor([20]))
    for j in (0, 2, 3):
        assert_same(tree.row(new.cores, j), tree.row(cores, j))
    assert_same(tree.row(new.cores, 1), upload["core"])
    assert new.wanted[1].tolist() == upload["wanted"].tolist() and not new.wanted[[0, 2, 3]].any()


def test_the_upload_is_the_core_and_not_the_sum_and_holds_no_weights():
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    method = apple_of(weights_lr=0.0)
    client, upload, _ = method.train(
        task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), rounds=0), shard
    )
    assert set(upload) == {"core", "wanted"}
    assert differs(upload["core"], client.model)
    assert_same(method.personalize(task, received_of(cores, (0, 2, 3)), client, shard), client.model)


def test_weights_begin_with_the_shares_of_rows_and_then_go_on():
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    method, received = apple_of(weights_lr=0.0), received_of(cores, (0, 2, 3))
    client, _, _ = method.train(task, received, method.init_client(task, task.initial), shard)
    assert client.weights.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4]) and int(client.rounds) == 1
    client, _, _ = method.train(task, received, client._replace(weights=torch.tensor([3.0, 1.0, 0.0, 0.0])), shard)
    assert client.weights.tolist() == [3.0, 1.0, 0.0, 0.0] and int(client.rounds) == 2


def test_the_pull_of_the_weights_goes_to_the_shares_and_has_no_half():
    """One step from p: p - weights_lr * 2 mu (p - p0), and what the loss adds, which lr_w for mu = 0 shows."""
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    weights = (1.0, 0.0, 0.0, 0.0)
    found = []
    for mu in (0.0, 0.5):
        method = apple_of(solver={"steps": 1}, weights_lr=0.125, mu=mu)
        client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), weights), shard)
        found.append(client.weights)
    expected = [-0.125 * (p - q) for p, q in zip(weights, (0.1, 0.2, 0.3, 0.4), strict=True)]
    assert (found[1] - found[0]).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("fall", ["cos", "exp"])
def test_the_pull_falls_from_mu_to_zero_over_the_first_rounds(fall):
    """A tenth of 100 rounds: rounds 0 to 9."""
    method = apple_of(rounds=100, mu=0.3, calm=0.1, fall=fall)
    found = [float(method.pull_strength(torch.tensor(r))) for r in (0, 5, 9, 10, 50)]
    shape = {"cos": lambda r: (math.cos(math.pi * r / 10) + 1) / 2, "exp": lambda r: 1e-3 ** (r / 10)}[fall]
    assert found == pytest.approx([0.3, 0.3 * shape(5), 0.3 * shape(9), 0.0, 0.0], rel=1e-5, abs=1e-9)


def test_a_client_trains_with_the_pull_of_its_round():
    task = task_of(Dense)
    cores = cores_of(task)
    found = []
    for round in (0, 10):
        shard = shard_for(task, round=round)._replace(key=torch.tensor(5))
        method = apple_of(solver={"steps": 1}, weights_lr=0.125, mu=0.5, calm=0.1)
        core = client_of(tree.row(cores, 1), (1.0, 0.0, 0.0, 0.0))
        found.append(method.train(task, received_of(cores, (0, 2, 3)), core, shard)[0].weights)
    assert (found[0] - found[1]).tolist() == pytest.approx([-0.125 * x for x in (0.9, -0.2, -0.3, -0.4)], abs=1e-6)


def test_statistics_are_the_clients_own():
    task = task_of(Normed)
    cores, shard = cores_of(task), shard_for(task)
    method = apple_of(solver={"lr": 0.0}, weights_lr=0.0)
    client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), (0.25,) * 4), shard)
    summed = {n: x[1] if "running" in n else x.mean(0) for n, x in cores.items()}
    assert_close(statistics(client.core), statistics(trained(Normed, summed, batches(shard), lr=0.0)))
    assert_same(statistics(client.model), statistics(client.core))


def test_a_client_asks_for_the_largest_weights_of_others_and_a_random_one():
    weights, shard = torch.tensor([0.1, 9.0, -0.9, 0.2, 0.0, 0.3]), shard_for(task_of(Dense))
    me, got = torch.tensor(1), torch.ones(6)
    for models in (5, 0):
        expected = [2, 5, 3, 0, 4]
        assert apple_of(6, models=models).choose_wanted(weights, got, me, shard).tolist() == expected
    seen, alone = set(), set()
    for key in range(60):
        drawn = shard._replace(key=torch.tensor(key))
        alone |= set(apple_of(6, models=1).choose_wanted(weights, got, me, drawn).tolist())
        first, second, third = apple_of(6, models=3).choose_wanted(weights, got, me, drawn).tolist()
        assert (first, second) == (2, 5)
        seen.add(third)
    assert seen == {0, 3, 4} and alone == {0, 2, 3, 4, 5}  # so no core that it keeps is old for good


def test_cores_that_a_client_never_got_come_before_those_with_large_weights():
    """It got those of 2 and 5, which have the largest weights."""
    weights, shard = torch.tensor([0.1, 9.0, -0.9, 0.2, 0.0, 0.3]), shard_for(task_of(Dense))
    me, got = torch.tensor(1), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    assert apple_of(6, models=1).choose_wanted(weights, got, me, shard).tolist() == [3]
    assert apple_of(6, models=4).choose_wanted(weights, got, me, shard).tolist()[:3] == [3, 0, 4]
    close = torch.tensor([0.01, 0.5, 0.02, 0.015, 0.005, 0.018])
    assert apple_of(6, models=1).choose_wanted(close, torch.zeros(6), me, shard).tolist() == [2]


def test_at_first_a_client_is_sent_the_cores_that_follow_its_own_and_then_those_it_asked_for():
    task = task_of(Dense)
    method = apple_of(models=2)
    server = method.init_server(task, task.initial, Federation(torch.tensor(SIZES_OF_FOUR), torch.tensor(0)))
    assert server.wanted.tolist() == [[1, 2], [2, 3], [3, 0], [0, 1]]
    server = server._replace(cores=cores_of(task), wanted=torch.tensor([[3, 1], [2, 3], [3, 0], [0, 1]]))
    message = method.send(task, server, torch.tensor([2, 0])).tree
    assert message["whose"].tolist() == [[3, 0], [3, 1]] and message["me"].tolist() == [2, 0]
    assert message["sizes"].tolist() == [list(SIZES_OF_FOUR)] * 2
    assert_same(tree.map(lambda x: x[1][1], message["cores"]), tree.row(server.cores, 1))
    assert method.generic(task, server) is None


def test_core_speed_leaves_statistics_alone():
    task = task_of(Normed)
    cores, shard = cores_of(task), shard_for(task)
    found = []
    for speed in (1.0, 3.0):
        method = apple_of(solver={"lr": 0.0}, core_speed=speed)
        core = client_of(tree.row(cores, 1), (0.25,) * 4)
        found.append(method.train(task, received_of(cores, (0, 2, 3)), core, shard)[0].core)
    assert_same(statistics(found[0]), statistics(found[1]))


def test_weights_with_a_rate_of_zero_stay_under_weight_decay():
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    method = apple_of(solver={"weight_decay": 0.1}, weights_lr=0.0)
    client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), (0.25,) * 4), shard)
    assert client.weights.tolist() == [0.25] * 4


def test_the_rate_of_the_weights_is_their_own_with_adam_too():
    task = task_of(Dense)
    cores, shard = cores_of(task), shard_for(task)
    method = apple_of(solver={"kind": "adam", "lr": 0.1, "steps": 1}, weights_lr=1e-3)
    client, _, _ = method.train(task, received_of(cores, (0, 2, 3)), client_of(tree.row(cores, 1), (0.25,) * 4), shard)
    assert float((client.weights - 0.25).abs().max()) < 2e-3
