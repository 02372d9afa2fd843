"""Optimizers of clients against torch's own, schedules by hand, and FedOpt's steps by hand."""

import math

import pytest
import torch
from torch import nn

from plures.data.batches import Batch
from plures.learn.fit import fit
from plures.learn.losses import cross_entropy
from plures.learn.optimizers import OptimizerState, adaptive
from plures.learn.solver import Solver
from plures.learn.task import build
from tests.small import shard_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def small_task():
    return build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), X[0], 3, 0)


CASES = {
    "adam": ({"kind": "adam", "lr": 0.01}, torch.optim.Adam, {}),
    "adam with decay": ({"kind": "adam", "lr": 0.01, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": ({"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "momentum": ({"momentum": 0.9, "lr": 0.1}, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": ({"momentum": 0.9, "nesterov": True, "lr": 0.1}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_client_trains_as_with_torchs_optimizer(case, clip):
    ours, theirs, options = CASES[case]
    task = small_task()
    found = fit(task.loss, task.initial, shard_of(task, X, Y), Solver(**ours, batch=6, epochs=5, clip=clip)).params
    params = {name: value.clone().requires_grad_() for name, value in task.initial.items()}
    optimizer = theirs(params.values(), lr=ours["lr"], **options)
    whole = Batch(X, Y, torch.ones(6), torch.ones(3), torch.tensor(0))
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(task.training_logits(params, whole), whole).backward()
        if clip:
            nn.utils.clip_grad_norm_(params.values(), clip)
        optimizer.step()
    for name, value in params.items():
        torch.testing.assert_close(found[name], value.detach(), atol=2e-6, rtol=1e-5)


def test_rates_of_the_schedules():
    def rates(**options):
        solver = Solver(lr=0.4, **options)
        found = [solver.rate_of(round) for round in (0, 1, 2, 5)]
        tensors = [float(solver.rate(torch.tensor(round))) for round in (0, 1, 2, 5)]
        assert tensors == pytest.approx(found, abs=1e-7)
        return found

    assert rates(schedule="constant", decay=0.5) == [0.4] * 4
    assert rates(decay=0.5) == [0.4, 0.2, 0.1, 0.4 / 32]
    assert rates(schedule="step", decay=0.5, decay_every=2) == [0.4, 0.4, 0.2, 0.1]
    cosine = rates(schedule="cosine", rounds=10)
    assert cosine == pytest.approx([0.4, 0.2 + 0.2 * math.cos(math.pi / 10), 0.2 + 0.2 * math.cos(math.pi / 5), 0.2])


def test_a_cosine_ends_at_zero():
    assert Solver(lr=1.0, schedule="cosine", rounds=7).rate_of(7) == pytest.approx(0)


@pytest.mark.parametrize("yogi", [False, True])
def test_a_step_of_the_servers_adam_and_yogi_by_hand(yogi):
    """g = 2, m = 1, v = 5, g^2 = 4 < v: m <- 0.9 + 0.2 = 1.1; adam v <- 4.95 + 0.04 = 4.99, yogi v <- 5 - 0.04."""
    state = OptimizerState({"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}, torch.tensor(3))
    moved, new = adaptive({"w": torch.tensor([7.0])}, {"w": torch.tensor([2.0])}, state, 0.5, 1e-3, yogi)
    v = 4.96 if yogi else 4.99
    assert float(new.first["w"]) == pytest.approx(1.1) and float(new.second["w"]) == pytest.approx(v)
    assert float(moved["w"]) == pytest.approx(7 - 0.5 * 1.1 / (math.sqrt(v) + 1e-3))
    assert int(new.steps) == 4


def test_yogi_grows_by_the_square_where_the_square_is_larger():
    state = OptimizerState({"w": torch.zeros(1)}, {"w": torch.tensor([1.0])}, torch.tensor(0))
    _, new = adaptive({"w": torch.zeros(1)}, {"w": torch.tensor([2.0])}, state, 0.1, 1e-3, True)
    assert float(new.second["w"]) == pytest.approx(1 + 0.01 * 4)
