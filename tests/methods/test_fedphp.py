import math

import pytest
import torch
from torch.nn import functional as F

from plures.methods.base import NO_TERMS, Penalty, Schedule
from plures.methods.fedphp import FedPHP, FedPHPClient, distillation, mmd
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
ALL = torch.ones(4)


def php_of(
    lam: float = 0.5, mu_max: float = 0.9, schedule: Schedule | None = None, inherit: str = "mmd", **solver
) -> FedPHP:
    schedule = schedule or Schedule(3, 10, 1.0)
    return FedPHP(solver_of(**solver), schedule, lam=lam, mu_max=mu_max, inherit=inherit)


def client_of(model, rounds: int = 0) -> FedPHPClient:
    return FedPHPClient(model, torch.tensor(rounds))


def mmd_by_hand(a, b):
    """Mean likeness within each set, less twice that between them; the width is the mean squared distance."""
    rows = [*a, *b]
    width = sum(float((x - y).detach().square().sum()) for x in rows for y in rows) / len(rows) ** 2 + 1e-12

    def alike(one, other):
        each = [torch.exp(-(x - y).square().sum() / (f * width)) for x in one for y in other for f in (0.5, 1.0, 2.0)]
        return sum(each) / len(each)

    return alike(a, a) + alike(b, b) - 2 * alike(a, b)


def features(seed: int, n: int = 4, shift: float = 0.0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=rng, dtype=torch.float64) + shift


def test_mmd_of_a_set_and_itself_is_zero_and_of_unlike_sets_is_not():
    a = features(1)
    assert float(mmd(a, a, ALL)) == pytest.approx(0, abs=1e-15)
    assert float(mmd(a, a.flip(0), ALL)) == pytest.approx(0, abs=1e-15)
    assert float(mmd(a, features(2, shift=3.0), ALL)) > 0.5
    assert float(mmd(a[:1], a[:1], ALL[:1])) == 0


def test_mmd_at_equal_sets_has_no_gradient():
    a = features(1).requires_grad_()
    (gradient,) = torch.autograd.grad(mmd(a, features(1), ALL), [a])
    assert float(gradient.abs().max()) < 1e-15


@pytest.mark.parametrize("shift", [0.0, 0.4, 3.0])
def test_mmd_and_its_gradient_are_those_of_a_double_loop(shift):
    a, b = features(1).requires_grad_(), features(2, shift=shift)
    one, other = mmd(a, b, ALL), mmd_by_hand(a, b)
    torch.testing.assert_close(one, other)
    assert_close({"a": torch.autograd.grad(one, [a])[0]}, {"a": torch.autograd.grad(other, [a])[0]})


def test_rows_of_padding_count_for_nothing_in_mmd():
    a, b = features(1), features(2, shift=1.0)
    far = torch.full((3, 3), 1e3, dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    padded = mmd(torch.cat([a, far]), torch.cat([b, -far]), mask)
    torch.testing.assert_close(padded, mmd(a, b, ALL), rtol=1e-12, atol=0)


def test_distillation_is_the_divergence_worked_by_hand():
    """At temperature 2 predictions are (1/4, 3/4) and their teacher's (1/2, 1/2): 4 * (ln 2 + ln 2/3) / 2.

    The second row has its teacher's predictions, and the third one is padding: the mean is half of that.
    """
    logits = torch.tensor([[0.0, 2 * math.log(3)], [1.0, -1.0], [9.0, 0.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[5.0, 5.0], [3.0, 1.0], [0.0, 9.0]], dtype=torch.float64, requires_grad=True)
    found = distillation(logits, teacher, torch.tensor([1.0, 1.0, 0.0]))
    assert found.item() == pytest.approx(math.log(4 / 3), rel=1e-12)
    own, theirs = torch.autograd.grad(found, [logits, teacher], allow_unused=True)
    # temperature * (own predictions - the teacher's) / rows
    expected = torch.tensor([[-0.25, 0.25], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    assert theirs is None


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_lam_zero_uploads_what_fedavg_does_bit_for_bit(model):
    options = {"participation": 0.5, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 3) for name in ("fedphp:lam=0", "fedavg"))
    assert_same(one.state.server, other.state.server)


def inferred(module, x, stats):
    """The features of a module's weights in inference, with these statistics."""
    hidden = module.hidden(x)
    if stats:
        norm = module.norm
        hidden = F.batch_norm(hidden, stats["norm.running_mean"], stats["norm.running_var"], norm.weight, norm.bias)
    return torch.relu(hidden)


def by_hand(make, received, past, steps, lam, inherit):
    """Plain modules; likeness is judged in inference, with statistics as they were before the batch."""
    module, old = module_of(make, received), module_of(make, past).eval()
    solver = torch.optim.SGD(module.parameters(), lr=LR)
    for x, y in steps:
        solver.zero_grad()
        stats = statistics(params_of(module))
        loss = F.cross_entropy(module(x), y)
        seen = inferred(module, x, stats)
        if inherit == "mmd":
            unlike = mmd_by_hand(seen, old.body(x).detach())
        else:
            own, theirs = (module.head(seen) / 2).log_softmax(1), (old(x).detach() / 2).softmax(1)
            unlike = 4 * F.kl_div(own, theirs, reduction="batchmean")
        ((1 - lam) * loss + lam * unlike).backward()
        solver.step()
    return params_of(module)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("lam", [0.05, 0.75])
@pytest.mark.parametrize("inherit", ["mmd", "kd"])
def test_fedphp_equals_plain_modules_with_its_loss_written_out(make, lam, inherit):
    task = task_of(make)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    _, upload, _ = php_of(lam, inherit=inherit).train(task, received, client_of(past), shard)
    expected = by_hand(make, received, past, batches(shard), lam, inherit)
    assert_close(upload, {name: expected[name] for name in upload})


@pytest.mark.parametrize("inherit", ["mmd", "kd"])
def test_statistics_are_those_of_a_plain_pass_whatever_lam(inherit):
    task = task_of(Normed)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    _, upload, _ = php_of(0.9, lr=0.0, inherit=inherit).train(task, received, client_of(past), shard)
    assert_close(upload, trained(Normed, received, batches(shard), lr=0.0))


def test_without_a_past_the_personal_model_is_the_trained_one_bit_for_bit():
    task = task_of(Normed)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    for client, mu_max in ((client_of(past, 7), 0.0), (client_of(past, 0), 0.9)):
        client, upload, _ = php_of(mu_max=mu_max).train(task, received, client, shard)
        assert_same(client.model, upload)


def test_with_all_weight_on_the_past_the_personal_model_is_frozen_bit_for_bit():
    task = task_of(Normed)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, upload, _ = php_of(mu_max=1.0).train(task, received, client_of(past, 10), shard)
    assert_same(client.model, past)
    assert differs(upload, past) and int(client.rounds) == 11


@pytest.mark.parametrize(("rounds", "mu"), [(0, 0.0), (1, 0.18), (2, 0.36), (5, 0.9), (9, 0.9)])
def test_the_past_weighs_more_the_more_rounds_the_client_took_part_in(rounds, mu):
    """With half of the clients in each of ten rounds, five are expected: mu = 0.9 * rounds / 5, at most 0.9."""
    task = task_of(Normed)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, round=8)
    method = php_of(schedule=Schedule(4, 10, 0.5))
    client, v, _ = method.train(task, received, client_of(past, rounds), shard)
    expected = {name: mu * p + (1 - mu) * v[name] for name, p in past.items()}
    torch.testing.assert_close(client.model, expected, rtol=1e-6, atol=1e-6)
    assert int(client.rounds) == rounds + 1


def test_a_client_counts_the_rounds_that_it_took_part_in_and_not_all():
    run = run_of("fedphp", participation=0.5, executor="one_by_one")
    turns = torch.zeros(len(SIZES), dtype=torch.long)
    for round in range(3):
        turns[run.state.cohort(round)] += 1
    played(run, 3)
    assert run.state.store.rows(EVERYONE).rounds.tolist() == turns.tolist() and len(set(turns.tolist())) > 1


def test_the_moving_average_is_the_personal_model_and_is_not_uploaded():
    task = task_of(Dense)
    received, past, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, upload, _ = php_of().train(task, received, client_of(past, 5), shard)
    assert_same(php_of().personalize(task, received, client, shard), client.model)
    assert differs(client.model, upload) and differs(client.model, received)


def test_a_batch_of_one_row_stays_finite():
    task = task_of(Dense)
    _, upload, _ = php_of(0.5).train(task, task.initial, client_of(task.initial), shard_for(task, n=1))
    assert all(bool(x.isfinite().all()) for x in upload.values())


def test_fedphp_mean_is_weighted_by_rows():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    for weights, expected in (("samples", 2.5), ("uniform", 2.0)):
        merged = FedPHP(weights=weights).merge(None, {}, torch.arange(2), stacked, torch.tensor([1, 3]))
        assert float(merged["w"]) == expected


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_penalty_of_an_add_on_has_its_own_strength_whatever_lam(lam):
    """With one gradient everywhere and no other loss to speak of, a step is that gradient."""
    task = task_of(Dense)
    past, shard = moved(task.initial, 2), shard_for(task)
    gradient = {name: torch.full_like(x, 100.0) for name, x in task.initial.items()}
    terms = NO_TERMS.plus(Penalty(linear=gradient, weight=torch.zeros(()), anchor={}))
    penalized, free = (
        php_of(lam, steps=1).train(task, task.initial, client_of(past), shard, t)[1] for t in (terms, NO_TERMS)
    )
    for name, x in free.items():
        torch.testing.assert_close(x - penalized[name], LR * gradient[name])
