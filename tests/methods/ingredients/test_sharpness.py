import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plures import tree
from plures.errors import UsageError
from plures.learn.fit import fit
from plures.methods.addons.brm import Brm
from plures.methods.addons.sam import Sam
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedsam import fedsam
from plures.methods.ingredients import layer_scores
from plures.methods.ingredients.sharpness import perturb, perturbation, sam_loss, two_step_loss
from tests.methods.plain import (
    LR,
    N_CLASSES,
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
from tests.small import played, run_of

NOTHING = FedAvgClient({})
GRADIENTS = {"a": torch.tensor([3.0, 0.0], dtype=torch.float64), "b": torch.tensor([[-4.0]], dtype=torch.float64)}


def gradients_of(seed: int, by: float = 1.0):
    rng = torch.Generator().manual_seed(seed)
    return {name: by * torch.randn(4, generator=rng, dtype=torch.float64) for name in "abc"}


def scores_of(*values: float):
    return dict(zip("abc", torch.tensor(values, dtype=torch.float64), strict=False))


def length(params, norm: float = 2.0) -> float:
    return float(torch.cat([x.flatten() for x in params.values()]).abs().pow(norm).sum() ** (1 / norm))


# The perturbation


def test_perturbation_is_rho_times_the_unit_gradient_with_one_norm_for_the_whole_model():
    """Gradients (3, 0) and -4 have length 5."""
    eps = perturbation(GRADIENTS, 0.5)
    torch.testing.assert_close(eps["a"], torch.tensor([0.3, 0.0], dtype=torch.float64))
    torch.testing.assert_close(eps["b"], torch.tensor([[-0.4]], dtype=torch.float64))


def test_scores_multiply_layers_after_the_norm_is_taken():
    eps = perturbation(GRADIENTS, 0.5, scores_of(2.0, 0.5))
    torch.testing.assert_close(eps["a"], torch.tensor([0.6, 0.0], dtype=torch.float64))
    torch.testing.assert_close(eps["b"], torch.tensor([[-0.2]], dtype=torch.float64))


@pytest.mark.parametrize("rho", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("by", [1e-3, 1.0, 1e3])
def test_perturbation_of_sam_has_length_rho(rho, by):
    assert length(perturbation(gradients_of(1, by), rho)) == pytest.approx(rho, rel=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_perturbation_is_never_longer_than_rho_times_the_largest_score(seed):
    scores = {name: x.abs().sum() for name, x in gradients_of(100 + seed).items()}
    longest = 0.05 * float(max(scores.values()))
    assert 0.1 * longest < length(perturbation(gradients_of(seed), 0.05, scores)) < longest


def test_perturbation_has_length_rho_times_the_largest_score_where_the_whole_gradient_is_in_that_layer():
    gradients = {name: x * (name == "b") for name, x in gradients_of(1).items()}
    assert length(perturbation(gradients, 0.05, scores_of(1.0, 2.5, 0.5))) == pytest.approx(0.05 * 2.5, rel=1e-9)


@pytest.mark.parametrize("q", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("factor", [1e-2, 7.0])
def test_perturbation_does_not_change_when_the_loss_is_multiplied(q, factor):
    scores = scores_of(1.0, 2.5, 0.5)
    one, other = (perturbation(gradients_of(1, by), 0.05, scores, q) for by in (1.0, factor))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=0)


@pytest.mark.parametrize("q", [1.25, 1.5, 2.0, 3.0, 6.0])
def test_perturbation_is_the_papers_formula_with_the_exponent_of_the_dual_norm(q):
    gradients, scores = gradients_of(1), scores_of(1.0, 2.5, 0.5)
    total = sum(abs(g) ** q for x in gradients.values() for g in x.tolist())
    for name, eps in perturbation(gradients, 0.05, scores, q).items():
        for found, g in zip(eps.tolist(), gradients[name].tolist(), strict=True):
            expected = 0.05 * float(scores[name]) * math.copysign(abs(g) ** (q - 1), g) / total ** (1 - 1 / q)
            assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("q", [1.25, 1.5, 2.0, 3.0, 6.0])
def test_perturbation_of_equal_scores_is_the_highest_point_of_the_ball_of_the_dual_norm(q):
    """Its p-norm is rho and its product with the gradients rho times their q-norm, which is Hoelder's bound."""
    gradients = gradients_of(1)
    eps = perturbation(gradients, 0.05, q=q)
    assert length(eps, q / (q - 1)) == pytest.approx(0.05, rel=1e-9)
    assert float(tree.dot(gradients, eps)) == pytest.approx(0.05 * length(gradients, q), rel=1e-9)


def test_perturbation_of_norm_one_is_the_sign_of_the_gradients():
    gradients = gradients_of(1) | {"b": torch.tensor([2.0, -3.0, 0.0, 1e-9], dtype=torch.float64)}
    eps = perturbation(gradients, 0.5, scores_of(1.0, 2.0, 0.25), q=1.0)
    torch.testing.assert_close(eps["b"], torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(eps["c"], 0.125 * gradients["c"].sign())


def test_perturbation_of_norm_two_is_the_limit_of_the_general_formula():
    gradients, scores = gradients_of(1), scores_of(1.0, 2.5, 0.5)
    near = perturbation(gradients, 0.05, scores, q=math.nextafter(2.0, 3.0))
    torch.testing.assert_close(perturbation(gradients, 0.05, scores, q=2.0), near, rtol=1e-12, atol=0)


@pytest.mark.parametrize("q", [1.0, 1.5, 2.0, 3.0])
def test_a_gradient_of_zero_gives_no_perturbation(q):
    eps = perturbation(tree.zeros_like(gradients_of(1)), 0.05, q=q)
    assert all(bool((x == 0).all()) for x in eps.values())


def test_statistics_are_not_perturbed_and_do_not_weigh_in_the_norm():
    stat = {"norm.running_mean": torch.tensor([100.0], dtype=torch.float64)}
    eps = perturbation(GRADIENTS, 0.5)
    assert_same(perturbation(GRADIENTS | stat, 0.5), eps)
    assert_same(perturb(GRADIENTS | stat, eps)["norm.running_mean"], stat["norm.running_mean"])


# The loss of SAM


CURVE = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, -0.25], [0.0, -0.25, 3.0]], dtype=torch.float64)
PULL = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def bowl(params):
    flat = torch.cat([params["a"], params["b"]])
    return flat @ CURVE @ flat / 2 - PULL @ flat


def test_sam_gradient_on_a_quadratic_is_the_gradient_at_the_perturbed_point():
    """A(v + eps) - b, with eps a constant: no gradient passes through it."""
    v = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    g = CURVE @ v - PULL
    eps = 0.4 * g / g.norm()
    eps_scored = torch.cat([3 * eps[:1], 0.5 * eps[1:]])
    params = {"a": v[:1], "b": v[1:]}
    for scores, expected in ((None, eps), (scores_of(3.0, 0.5), eps_scored)):
        found = torch.func.grad(lambda p, scores=scores: sam_loss(bowl, p, 0.4, scores))(params)
        torch.testing.assert_close(torch.cat([found["a"], found["b"]]), CURVE @ (v + expected) - PULL)


def test_a_step_along_the_sam_gradient_starts_from_the_unperturbed_point():
    v = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    g = CURVE @ v - PULL
    shard = shard_for(task_of(Dense), n=5)

    def objective(params, batch):
        return sam_loss(bowl, params, 0.4)

    moved_to = fit(objective, {"a": v[:1], "b": v[1:]}, shard, solver_of()).params
    expected = v - LR * (CURVE @ (v + 0.4 * g / g.norm()) - PULL)
    torch.testing.assert_close(torch.cat([moved_to["a"], moved_to["b"]]), expected)


def test_two_step_loss_on_a_quadratic_is_a_plain_step_and_then_a_sam_step():
    v = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    scores = scores_of(3.0, 0.5)
    lr = torch.tensor(LR)
    gradients = torch.func.grad(lambda p: two_step_loss(bowl, p, lr, 0.4, scores))({"a": v[:1], "b": v[1:]})
    half = v - LR * (CURVE @ v - PULL)
    g = CURVE @ half - PULL
    eps = 0.4 * g / g.norm() * torch.tensor([3.0, 0.5, 0.5], dtype=torch.float64)
    expected = half - LR * (CURVE @ (half + eps) - PULL)
    torch.testing.assert_close(v - LR * torch.cat([gradients["a"], gradients["b"]]), expected)


# SAM around FedAvg


def papers_sam(make, params, steps, rho, loss=F.cross_entropy):
    """Climb, take the gradient, climb back, step; the second pass moves no statistic."""
    module = module_of(make, params)
    weights = list(module.parameters())
    solver = torch.optim.SGD(weights, lr=LR)
    for x, y in steps:
        module.zero_grad()
        loss(module(x), y).backward()
        long = torch.cat([p.grad.flatten() for p in weights]).norm()
        before = [p.detach().clone() for p in weights]
        kept = {name: b.clone() for name, b in module.named_buffers()}
        with torch.no_grad():
            for p in weights:
                p += rho * p.grad / long
        module.zero_grad()
        loss(module(x), y).backward()
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)
        solver.step()
        for name, b in module.named_buffers():
            b.copy_(kept[name])
    return params_of(module)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_fedsam_local_training_is_sam_step_by_step(make, rho):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = Sam(solver_of(epochs=2), host=FedAvg(solver_of(epochs=2)), rho=rho)
    _, upload, _ = method.train(task, received, NOTHING, shard)
    assert_close(upload, papers_sam(make, received, batches(shard, 2), rho))
    _, plain, _ = FedAvg(solver_of(epochs=2)).train(task, received, NOTHING, shard)
    assert differs(tree.keep(upload, task.is_head), tree.keep(plain, task.is_head))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_sam_with_rho_zero_trains_as_fedavg_bit_for_bit(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = Sam(solver_of(), host=FedAvg(solver_of()), rho=0.0).train(task, received, NOTHING, shard)
    _, plain, _ = FedAvg(solver_of()).train(task, received, NOTHING, shard)
    assert_same(upload, plain)


@pytest.mark.parametrize(
    ("sharp_one", "plain_one"), [("fedsam:rho=0", "fedavg:weights=uniform"), ("fedavg+sam:rho=0", "fedavg")]
)
def test_runs_with_rho_zero_are_fedavg_bit_for_bit(sharp_one, plain_one):
    one, other = (played(run_of(name, "norm", executor="one_by_one"), 2) for name in (sharp_one, plain_one))
    assert_same(one.state.server, other.state.server)


def test_statistics_move_by_the_unperturbed_pass_alone():
    """At rate zero weights stay, and statistics are those of FedAvg to the last bit, however far uphill a pass is."""
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = Sam(solver_of(lr=0.0), host=FedAvg(solver_of(lr=0.0)), rho=2.0)
    _, upload, _ = method.train(task, received, NOTHING, shard)
    _, plain, _ = FedAvg(solver_of(lr=0.0)).train(task, received, NOTHING, shard)
    assert_same(upload, plain)
    assert differs(statistics(upload), statistics(received))


def test_fedsam_takes_the_uniform_mean_and_the_add_on_sam_that_of_its_host():
    stacked = {"w": torch.tensor([[1.0], [5.0]])}
    for method, expected in ((fedsam(), 3.0), (Sam(host=FedAvg()), 2.0)):
        merged = method.merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
        assert merged["w"].tolist() == [expected]


def test_fedsam_climbs_by_five_hundredths():
    assert fedsam().rho == 0.05 and isinstance(fedsam().host, FedAvg)


def test_sam_around_a_balanced_loss_climbs_that_loss():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    solver = solver_of()
    method = Brm(solver, host=Sam(solver, host=FedAvg(solver), rho=0.5))
    _, upload, _ = method.train(task, received, NOTHING, shard)
    prior = torch.bincount(shard.y, minlength=N_CLASSES).log()
    expected = papers_sam(Dense, received, batches(shard), 0.5, lambda logits, y: F.cross_entropy(logits + prior, y))
    torch.testing.assert_close(upload, expected, rtol=1e-5, atol=1e-6)


def test_sam_around_brm_is_refused_since_the_balanced_loss_would_take_its_place():
    with pytest.raises(UsageError):
        Sam(solver_of(), host=Brm(solver_of(), host=FedAvg(solver_of())))


# Scores of layers


OFF = {"hidden.weight": 3.0, "hidden.bias": 4.0, "head.bias": 2.1}


def off_by(params, off):
    """The model with the first number of some tensors off by so much."""
    params = {name: x.clone() for name, x in params.items()}
    for name, by in off.items():
        params[name].view(-1)[0] += by
    return params


def scores_by_layer(task, own, reference, norm_layers=False, measure="mean", scale="mean1", trained=True):
    layer_of = layer_scores.scored_layers(task, own, norm_layers)
    return layer_scores.scores(task, own, reference, layer_of, measure, scale, torch.tensor(trained))


@pytest.mark.parametrize(
    ("measure", "scale", "expected"),
    [
        ("mean", "raw", [5 / 30, 2.1 / 21]),
        ("mean", "sum1", [0.625, 0.375]),
        ("mean", "mean1", [1.25, 0.75]),
        ("rms", "raw", [5 / 30**0.5, 2.1 / 21**0.5]),
    ],
)
def test_score_of_a_layer_is_its_length_by_its_number_of_weights_as_a_share(measure, scale, expected):
    """Hidden layer: 24 + 6 weights, off by (3, 4); head: 18 + 3 weights, off by 2.1."""
    task = task_of(Dense)
    found = scores_by_layer(task, off_by(task.initial, OFF), task.initial, measure=measure, scale=scale)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("measure", ["mean", "rms"])
@pytest.mark.parametrize(("scale", "total"), [("mean1", 3.0), ("sum1", 1.0)])
def test_scores_sum_to_their_scale(measure, scale, total):
    task = task_of(Normed)
    for seed in range(3):
        each = scores_by_layer(task, moved(task.initial, seed), task.initial, True, measure, scale)
        assert each.shape == (3,) and float(each.min()) > 0
        assert float(each.sum()) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("scale", ["mean1", "sum1"])
def test_scores_do_not_change_when_all_distances_are_multiplied(scale):
    task = task_of(Dense)
    own = moved(task.initial, 1)
    further = {name: task.initial[name] + 37.0 * (x - task.initial[name]) for name, x in own.items()}
    one, other = (scores_by_layer(task, model, task.initial, scale=scale) for model in (own, further))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("scale", "expected"), [("mean1", 1.0), ("sum1", 0.5), ("raw", 1.0)])
def test_equal_models_have_equal_scores(scale, expected):
    task = task_of(Dense)
    assert scores_by_layer(task, task.initial, task.initial, scale=scale).tolist() == [expected] * 2


@pytest.mark.parametrize(("scale", "expected"), [("mean1", 1.0), ("sum1", 0.5), ("raw", 1.0)])
def test_a_model_that_was_never_trained_has_equal_scores(scale, expected):
    task = task_of(Dense)
    own = moved(task.initial, 1)
    assert scores_by_layer(task, own, task.initial, scale=scale, trained=False).tolist() == [expected] * 2


def test_a_norm_layer_has_the_score_of_the_layer_before_and_does_not_weigh_in_it():
    task = task_of(Normed)
    off = OFF | {"norm.weight": 50.0, "norm.running_mean": 80.0}
    layer_of = layer_scores.scored_layers(task, task.initial, False)
    assert {name: layer for name, layer in layer_of.items() if "norm" in name} == {
        f"norm.{name}": "hidden" for name in ("weight", "bias", "running_mean", "running_var")
    }
    found = scores_by_layer(task, off_by(task.initial, off), task.initial)
    torch.testing.assert_close(found, torch.tensor([1.25, 0.75], dtype=torch.float64), rtol=1e-9, atol=0)


def test_a_norm_layer_may_have_a_score_of_its_own_in_which_statistics_do_not_weigh():
    """Its 12 weights are off by 1.2: 1/6 + 1/10 + 1/10."""
    task = task_of(Normed)
    own = off_by(task.initial, OFF | {"norm.weight": 1.2, "norm.running_var": 80.0})
    found = scores_by_layer(task, own, task.initial, norm_layers=True, scale="raw")
    torch.testing.assert_close(found, torch.tensor([5 / 30, 0.1, 0.1], dtype=torch.float64), rtol=1e-9, atol=0)


def test_a_norm_layer_before_all_others_has_the_score_of_the_first():
    class NormFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, N_CLASSES)

        def forward(self, x):
            return self.head(self.norm(x))

    task = task_of(NormFirst)
    assert set(layer_scores.scored_layers(task, task.initial, False).values()) == {"head"}


@pytest.mark.parametrize(
    ("each", "n", "expected"),
    [
        ([0.2, 0.5, 0.3], 1, [0.0, 1.0, 0.0]),
        ([0.2, 0.5, 0.3], 2, [0.0, 1.0, 1.0]),
        ([0.2, 0.5, 0.3], 0, [0.0, 0.0, 0.0]),
        ([0.2, 0.5, 0.3], 9, [1.0, 1.0, 1.0]),
        ([0.5, 0.5, 0.5], 1, [1.0, 0.0, 0.0]),
        ([0.2, 0.5, 0.5], 1, [0.0, 1.0, 0.0]),
    ],
)
def test_the_most_personal_layers_have_the_largest_scores_and_of_equals_the_lower_is_taken(each, n, expected):
    assert layer_scores.mark_highest(torch.tensor(each), n).tolist() == expected


def test_every_tensor_has_the_number_of_its_layer():
    task = task_of(Normed)
    layer_of = layer_scores.scored_layers(task, task.initial, False)
    numbers = layer_scores.expand_to_tensors(torch.tensor([1.25, 0.75]), layer_of)
    assert {name: float(x) for name, x in numbers.items()} == {
        name: 0.75 if "head" in name else 1.25 for name in task.initial
    }
