import dataclasses

import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.addons.prox import Prox
from plures.methods.pfedme import PFedMe, PFedMeClient
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
from tests.small import played, run_of, shard_of

LAM, INNER_LR = 1.5, 0.0625


class Regression:
    """Least squares: the last column of a row is what the others are to give. A quadratic loss."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        each = (batch.x[:, :-1] @ params["w"] - batch.x[:, -1]).square() / 2
        return (each * batch.mask).sum() / batch.mask.sum()


def pfedme_of(lam=LAM, inner_steps=3, inner_lr=INNER_LR, beta=1.0, warm=False, **solver) -> PFedMe:
    return PFedMe(solver_of(**solver), lam=lam, inner_steps=inner_steps, inner_lr=inner_lr, beta=beta, warm=warm)


def by_hand(make, w, theta, steps, warm, inner_steps=3):
    """Plain modules: theta by steps on loss + lam/2 |theta - w|^2, then w <- w - lr lam (w - theta).

    Only the last look at a batch moves statistics, and w has those of theta.
    """
    for x, y in steps:
        start = theta if warm else w
        module = module_of(make, start)
        solver = torch.optim.SGD(module.parameters(), lr=INNER_LR)
        for _ in range(inner_steps):
            solver.zero_grad()
            near = sum((p - w[name]).square().sum() for name, p in module.named_parameters())
            (F.cross_entropy(module(x), y) + LAM / 2 * near).backward()
            solver.step()
        module = module_of(make, params_of(module) | statistics(start))
        module(x)
        theta = params_of(module)
        w = statistics(theta) | {name: p - LR * LAM * (p - theta[name]) for name, p in tree.trainable(w).items()}
    return theta, w


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("warm", [False, True])
def test_pfedme_equals_its_steps_written_out_with_plain_modules(make, warm):
    """Over two rounds: a warm start goes on from the last personal model, across batches and rounds."""
    task = task_of(make)
    method = pfedme_of(warm=warm)
    client, theta = PFedMeClient(moved(task.initial, 1)), moved(task.initial, 1)
    for round in range(2):
        received, shard = moved(task.initial, 10 + round), shard_for(task, round=round)
        client, upload, _ = method.train(task, received, client, shard)
        theta, w = by_hand(make, received, theta, batches(shard), warm)
        assert_close(client.model, {name: theta[name] for name in client.model})
        assert_close(upload, {name: w[name] for name in upload})


def test_warm_and_cold_starts_differ():
    task = task_of(Dense)
    received, shard, client = moved(task.initial, 2), shard_for(task), PFedMeClient(moved(task.initial, 1))
    assert differs(*(pfedme_of(warm=w).train(task, received, client, shard)[1] for w in (False, True)))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_lam_zero_never_moves_the_shared_weights(model):
    run = played(run_of("pfedme:inner_steps=2", model, settings={"lam": 0.0}, executor="one_by_one"), 2)
    weights = tree.trainable(run.state.server)
    torch.testing.assert_close(weights, tree.trainable(run.state.scene.task.initial), rtol=1e-6, atol=1e-7)
    assert differs({"w": run.personal_model(5)["head.weight"]}, {"w": weights["head.weight"]})


def test_lam_zero_uploads_what_was_received_bit_for_bit():
    task = task_of(Dense)
    received, shard = moved(task.initial, 2), shard_for(task)
    _, upload, _ = pfedme_of(lam=0.0).train(task, received, PFedMeClient(task.initial), shard)
    assert_same(upload, received)


def test_many_inner_steps_on_a_quadratic_end_at_the_envelopes_point():
    """The minimum of (A theta - b)'s loss and lam/2 |theta - w|^2 is (A + lam I)^-1 (b + lam w)."""
    rng = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    shard = shard_of(Regression(), rows, torch.zeros(6, dtype=torch.long))
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    method = pfedme_of(lam=2.0, inner_steps=120, inner_lr=0.2, batch=6, lr=0.125)
    client, upload, _ = method.train(Regression(), {"w": w}, PFedMeClient({"w": w}), shard)
    x, t = rows[:, :3], rows[:, 3]
    theta = torch.linalg.solve(x.mT @ x / 6 + 2 * torch.eye(3), x.mT @ t / 6 + 2 * w)
    torch.testing.assert_close(client.model["w"], theta, rtol=0, atol=1e-10)
    torch.testing.assert_close(upload["w"], w - 0.25 * (w - theta), rtol=0, atol=1e-10)


def test_lr_of_one_over_lam_makes_the_shared_model_the_personal_one():
    task = task_of(Dense)
    received, shard = moved(task.initial, 2), shard_for(task)
    client, upload, _ = pfedme_of(lam=8.0, lr=0.125).train(task, received, PFedMeClient(task.initial), shard)
    torch.testing.assert_close(upload, client.model, rtol=0, atol=1e-14)
    assert differs(upload, received)


def test_pfedme_steps_on_a_bowl_are_those_worked_by_hand():
    """Centre 1, lam 1, one inner step of 0.5, lr 0.5: theta = 0.5, w = 0.25; then theta = 0.625, w = 0.4375."""
    zero = {"w": torch.zeros(1)}
    client, upload, _ = pfedme_of(1.0, 1, 0.5, lr=0.5, steps=2).train(Bowl(), zero, PFedMeClient(zero), bowl_at(1.0))
    assert (float(client.model["w"]), float(upload["w"])) == (0.625, 0.4375)


def test_beta_is_the_share_of_the_way_to_the_mean():
    server, uploads = {"w": torch.tensor(1.0)}, {"w": torch.tensor([2.0, 4.0])}
    for beta, expected in ((1.0, 3.5), (0.0, 1.0), (0.5, 2.25), (2.0, 6.0)):
        merged = pfedme_of(beta=beta).merge(None, server, torch.arange(2), uploads, torch.tensor([1, 3]))
        assert float(merged["w"]) == expected
    plain = PFedMe(weights="uniform").merge(None, server, torch.arange(2), uploads, torch.tensor([1, 3]))
    assert float(plain["w"]) == 3.0


def test_beta_zero_freezes_the_shared_weights_bit_for_bit_and_no_statistic():
    run = played(run_of("pfedme:beta=0,inner_steps=1", "norm", executor="one_by_one"), 2)
    initial = run.state.scene.task.initial
    assert_same(tree.trainable(run.state.server), tree.trainable(initial))
    assert differs(statistics(run.state.server), statistics(initial))


@pytest.mark.parametrize("beta", [0.0, 0.5, 3.0])
def test_statistics_of_the_server_are_the_mean_whatever_beta(beta):
    """Three times the way from 1 to 0.35 would be a variance of -0.95."""
    server = {"w": torch.tensor(1.0), "norm.running_var": torch.tensor(1.0)}
    uploads = {"w": torch.tensor([2.0, 4.0]), "norm.running_var": torch.tensor([0.2, 0.4])}
    merged = pfedme_of(beta=beta).merge(None, server, torch.arange(2), uploads, torch.tensor([1, 3]))
    assert float(merged["norm.running_var"]) == pytest.approx(0.35)
    assert float(merged["w"]) == 1 + beta * 2.5


def test_no_variance_is_negative_with_a_server_that_goes_beyond_the_mean():
    run = played(run_of("pfedme:beta=8,inner_steps=1", "norm", executor="one_by_one"), 3)
    assert min(float(run.state.server[name].min()) for name in ("norm.running_var", "second.running_var")) > 0


def test_outer_lr_is_the_rate_of_the_shared_model_and_zero_is_that_of_clients():
    """On the bowl above 0.5 gives w = 0.4375; 0.125 gives w = 0.0625, theta = 0.53125, w = 0.12109375."""
    zero = {"w": torch.zeros(1)}
    found = []
    for lr, outer_lr in ((0.125, 0.5), (0.5, 0.0), (0.125, 0.0)):
        method = dataclasses.replace(pfedme_of(1.0, 1, 0.5, lr=lr, steps=2), outer_lr=outer_lr)
        client, upload, _ = method.train(Bowl(), zero, PFedMeClient(zero), bowl_at(1.0))
        found.append((float(client.model["w"]), float(upload["w"])))
    assert found == [(0.625, 0.4375), (0.625, 0.4375), (0.53125, 0.12109375)]


def test_outer_lr_moves_no_statistic():
    """With lam at zero the shared weights stay, and statistics are those of the same personal models."""
    task = task_of(Normed)
    received, shard = moved(task.initial, 2), shard_for(task)
    uploads = [
        dataclasses.replace(pfedme_of(lam=0.0), outer_lr=outer_lr).train(
            task, received, PFedMeClient(task.initial), shard
        )[1]
        for outer_lr in (0.0, 2.0)
    ]
    assert_same(*uploads)
    assert differs(statistics(uploads[0]), statistics(received))


def test_by_name_the_server_moves_all_the_way_to_the_mean():
    """Some public code has a default that freezes the shared model."""
    assert PFedMe().beta == 1


def test_the_personal_model_is_theta_and_neither_the_clients_copy_nor_the_shared_model():
    task = task_of(Dense)
    received, shard = moved(task.initial, 2), shard_for(task)
    method = pfedme_of()
    client, upload, _ = method.train(task, received, PFedMeClient(task.initial), shard)
    theta, w = by_hand(Dense, received, task.initial, batches(shard), False)
    own = method.personalize(task, received, client, shard)
    assert_close(own, theta)
    assert differs(own, w) and differs(own, received) and differs(own, upload)


def test_statistics_are_in_no_pull():
    """With lr and inner_lr at zero both models keep their weights, and have the statistics of a plain pass."""
    task = task_of(Normed)
    received, shard = moved(task.initial, 2), shard_for(task)
    client, upload, _ = pfedme_of(lam=5.0, inner_lr=0.0, lr=0.0).train(
        task, received, PFedMeClient(task.initial), shard
    )
    module = module_of(Normed, received)
    for x, _ in batches(shard):
        module(x)
    assert_close(upload, {name: params_of(module)[name] for name in upload})
    assert_same(client.model, upload)


def test_the_penalty_of_an_add_on_acts_on_the_shared_model_and_not_on_theta():
    """w 0.25 after a step; the pull to 0 takes 0.5 * 0.25 off the second, 0.4375 - 0.125."""
    zero = {"w": torch.zeros(1)}
    method = Prox(host=pfedme_of(1.0, 1, 0.5, lr=0.5, steps=2), mu=1.0)
    client, upload, _ = method.train(Bowl(), zero, PFedMeClient(zero), bowl_at(1.0))
    assert (float(client.model["w"]), float(upload["w"])) == (0.625, 0.3125)


def test_pfedme_can_take_scaffold():
    played(run_of("pfedme:inner_steps=1+scaffold", executor="one_by_one"), 1)
