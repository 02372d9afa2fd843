import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.base import Federation, Schedule
from plures.methods.mtl import Mtl, MtlClient, MtlServer
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
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))


def mtl_of(strength: float = 0.5, n: int = 3, coupled: bool = True, **solver) -> Mtl:
    return Mtl(solver_of(**solver), Schedule(n, 10, 1.0), strength=strength, coupled=coupled)


def weights(params):
    return {name: x for name, x in params.items() if "running" not in name}


def by_hand(make, own, others, steps, c):
    """Loss + c (|W|^2 + tr(W Omega W^T)), Omega the projection that takes out the mean, by autograd."""
    module = module_of(make, own)
    n = 1 + len(others)
    omega = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n
    fixed = [torch.cat([x.flatten() for x in weights(model).values()]) for model in others]
    solver = torch.optim.SGD(module.parameters(), lr=LR)
    for x, y in steps:
        solver.zero_grad()
        w = torch.stack([torch.cat([p.flatten() for p in module.parameters()]), *fixed], 1)
        term = w.square().sum() + torch.trace(w @ omega @ w.mT)
        (F.cross_entropy(module(x), y) + c * term).backward()
        solver.step()
    return params_of(module)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_uncoupled_mtl_is_local_bit_for_bit(model):
    one = played(run_of("mtl:coupled=false", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    assert_same(one.state.store.rows(EVERYONE).model, other.state.store.rows(EVERYONE).model)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradient_is_that_of_autograd_through_the_trace_while_the_others_stay(make, n):
    task = task_of(make)
    models = [moved(task.initial, seed) for seed in range(n)]
    received = {name: sum(model[name] for model in models) / n for name in task.initial}
    shard = shard_for(task)
    client, upload, _ = mtl_of(0.25, n, epochs=2).train(task, received, MtlClient(models[0]), shard)
    expected = by_hand(make, models[0], models[1:], batches(shard, 2), 0.25)
    assert_close(upload, {name: expected[name] for name in upload})
    assert_same(client.model, upload)


def test_the_projection_is_its_own_square():
    """Whose trace form is thus the sum of squared distances to the mean."""
    omega = torch.eye(4) - torch.ones(4, 4) / 4
    w = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(omega @ omega, omega)
    torch.testing.assert_close(torch.trace(w @ omega @ w.mT), (w - w.mean(1, keepdim=True)).square().sum())


def test_among_equal_models_the_first_step_has_no_coupling():
    """What is left is the loss and c |w|^2."""
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = mtl_of(0.25, 5, steps=1).train(task, model, MtlClient(model), shard)

    def size(module):
        return 0.25 * sum(p.square().sum() for p in module.parameters())

    assert_close(upload, trained(Dense, model, list(batches(shard))[:1], size))


def test_a_step_of_one_is_the_one_worked_by_hand():
    """w_i = 3, mean 1, c = 0.5, lr 0.1, no loss: 3 - 0.1 * (3 + (3 - 1)) = 2.5; then, with two clients, the mean is
    0.75, and 2.5 - 0.1 * (2.5 + 1.75) = 2.075."""

    class Flat:
        n_classes, smallest_batch = 1, 1

        def loss(self, params, batch):
            return 0 * params["w"].sum()

    shard = shard_for(task_of(Dense))
    start, mean = {"w": torch.tensor([3.0], dtype=torch.float64)}, {"w": torch.tensor([1.0], dtype=torch.float64)}
    for steps, expected in ((1, 2.5), (2, 2.075)):
        _, upload, _ = mtl_of(0.5, 2, lr=0.1, steps=steps).train(Flat(), mean, MtlClient(start), shard)
        assert float(upload["w"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "c"), [(9, 1e-2), (10, 1e-3), (99, 1e-3), (100, 1e-4), (51, 1e-3), (1_000_000, 1e-8)])
def test_with_strength_zero_it_is_the_power_of_ten_by_the_number_of_weights(n, c):
    """f = floor(log10 d + 1) + 1: one more than the number of digits of d."""
    params = {"w": torch.zeros(n), "running_mean": torch.zeros(10 * n)}
    assert Mtl(strength=0.0).weight(params) == pytest.approx(c, rel=1e-12)
    assert Mtl(strength=0.3).weight(params) == 0.3 and Mtl(coupled=False, strength=0.3).weight(params) == 0


def test_strength_zero_is_used_in_training_too():
    """The dense model has 4 * 6 + 6 + 6 * 3 + 3 = 51 weights."""
    task = task_of(Dense)
    own, received, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    one, other = (mtl_of(strength, 3).train(task, received, MtlClient(own), shard)[1] for strength in (0.0, 1e-3))
    assert_same(one, other)


def test_what_is_sent_is_the_plain_mean_of_all_models_as_last_known():
    server = MtlServer({"w": torch.tensor([1.0, 2.0, 6.0])}, torch.zeros(3))
    new = Mtl().merge(None, server, torch.tensor([2, 0]), {"w": torch.tensor([9.0, 4.0])}, torch.tensor([1, 50]))
    assert new.models["w"].tolist() == [4.0, 2.0, 9.0]
    assert float(Mtl().send(None, new, torch.tensor([1])).tree["w"]) == 5.0
    assert float(Mtl().newcomer(None, server)["w"]) == 3.0 and Mtl().generic(None, new) is None
    assert float(Mtl().newcomer(None, new)["w"]) == 6.5  # of those who have trained


def test_a_client_goes_on_from_its_own_model_and_never_from_the_mean():
    task = task_of(Normed)
    own, received, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, _, _ = mtl_of(lr=0.0).train(task, received, MtlClient(own), shard)
    assert_same(tree.trainable(client.model), tree.trainable(own))
    assert_close(statistics(client.model), statistics(trained(Normed, own, batches(shard), lr=0.0)))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_mtl_with_a_strength_that_counts_is_not_local(model):
    one = played(run_of("mtl", model, settings={"strength": 0.1}, executor="one_by_one"), 2)
    other = played(run_of("local", model, executor="one_by_one"), 2)
    weights = [tree.trainable(run.state.store.rows(EVERYONE[3:]).model) for run in (one, other)]
    for client in range(3):
        assert differs(*(tree.row(each, client) for each in weights))


def test_the_server_has_each_clients_last_model_which_is_its_personal_one():
    """One that never took part has the mean of those who did, before it trains."""
    run = run_of("mtl", "norm", participation=0.5, executor="one_by_one", new_epochs=0)
    took_part = {*run.state.cohort(0), *run.state.cohort(1)}
    played(run, 2)
    assert 0 < len(took_part) < 6
    for client in range(6):
        models = run.state.server.models
        mean = tree.map(lambda x: x[sorted(took_part)].mean(0), models)
        assert_close(run.personal_model(client), tree.row(models, client) if client in took_part else mean)
    first = run.state.scene.method.init_server(
        run.state.scene.task, run.state.scene.task.initial, Federation(torch.ones(6), torch.tensor(0))
    )
    assert_same(tree.row(first.models, 3), run.state.scene.task.initial)
    assert differs(*({"w": run.personal_model(c)["head.weight"]} for c in (4, 5)))


def test_a_strong_term_draws_models_together():
    far = []
    for c in (1e-6, 1.0):
        run = played(run_of("mtl", settings={"strength": c}, executor="one_by_one"), 2)
        flat = torch.cat([x.flatten(1) for x in run.state.server.models.values()], 1)
        far.append(float((flat - flat.mean(0)).norm()))
    assert far[1] < 0.9 * far[0]
