import math

import pytest
import torch
from torch.nn import functional as F

from plures.data.batches import Batch
from plures.methods.ingredients.balance import LOSSES

BALANCED = ["ir", "ldam", "cdt", "bsm"]


def batch_of(y, counts, mask=None) -> Batch:
    """A batch with these labels, of a client with these numbers of rows of each class."""
    labels = torch.tensor(y)
    mask = torch.ones(len(y)) if mask is None else torch.tensor(mask)
    return Batch(torch.zeros(len(y), 1), labels, mask, torch.tensor(counts, dtype=torch.float32), torch.tensor(0))


def loss_of(name, logits, batch, gamma=1.0) -> float:
    return float(LOSSES[name](torch.tensor(logits), batch, gamma))


def gradient_of(name, logits, batch, gamma=1.0):
    logits = torch.tensor(logits, requires_grad=True)
    LOSSES[name](logits, batch, gamma).backward()
    return logits.grad


def some_logits(n_rows=6, n_classes=4):
    return (3 * torch.randn(n_rows, n_classes, generator=torch.Generator().manual_seed(0))).tolist()


def assert_is_cross_entropy(name, gamma, counts, y=(0, 1, 2, 3, 1, 0)):
    """Value and gradient are those of torch's own cross-entropy."""
    logits = torch.tensor(some_logits(), requires_grad=True)
    expected = F.cross_entropy(logits, torch.tensor(y))
    expected.backward()
    batch = batch_of(y, counts)
    assert loss_of(name, logits.tolist(), batch, gamma) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient_of(name, logits.tolist(), batch, gamma), logits.grad, rtol=1e-5, atol=1e-7)


# Where a balanced loss is plain cross-entropy


def test_ce_is_cross_entropy_whatever_the_counts():
    assert_is_cross_entropy("ce", 1.0, [5, 1, 9, 2])


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_bsm_with_equal_counts_is_cross_entropy(gamma):
    assert_is_cross_entropy("bsm", gamma, [7, 7, 7, 7])


def test_bsm_with_gamma_zero_is_cross_entropy():
    assert_is_cross_entropy("bsm", 0.0, [5, 1, 9, 2])


def test_bsm_with_gamma_zero_is_cross_entropy_over_all_classes_even_absent_ones():
    assert_is_cross_entropy("bsm", 0.0, [5, 1, 0, 0], y=(0, 1, 0, 1, 1, 0))


def test_ldam_with_gamma_zero_is_cross_entropy():
    assert_is_cross_entropy("ldam", 0.0, [5, 1, 9, 2])


def test_cdt_with_gamma_zero_is_cross_entropy():
    assert_is_cross_entropy("cdt", 0.0, [5, 1, 9, 2])


def test_cdt_with_gamma_zero_is_cross_entropy_even_with_absent_classes():
    assert_is_cross_entropy("cdt", 0.0, [5, 1, 0, 0], y=(0, 1, 0, 1, 1, 0))


@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_cdt_with_equal_counts_is_cross_entropy(gamma):
    assert_is_cross_entropy("cdt", gamma, [7, 7, 7, 7])


def test_ir_with_equal_counts_is_cross_entropy():
    assert_is_cross_entropy("ir", 1.0, [7, 7, 7, 7])


def test_ir_with_equal_counts_and_absent_classes_is_cross_entropy():
    assert_is_cross_entropy("ir", 1.0, [7, 7, 0, 0], y=(0, 1, 0, 1, 1, 0))


# Numbers worked by hand


@pytest.mark.parametrize(("y", "expected"), [(0, -math.log(3 / 4)), (1, -math.log(1 / 4))])
def test_bsm_of_equal_logits_is_minus_the_log_of_the_share(y, expected):
    assert loss_of("bsm", [[2.0, 2.0]], batch_of([y], [3, 1])) == pytest.approx(expected)


def test_bsm_raises_counts_to_the_power_gamma():
    """With gamma 2, counts of 3 and 1 act as 9 and 1."""
    assert loss_of("bsm", [[0.0, 0.0]], batch_of([1], [3, 1]), 2.0) == pytest.approx(math.log(10))


def test_bsm_does_not_change_when_all_counts_are_multiplied():
    y = (0, 1, 2, 3, 1, 0)
    few, many = (batch_of(y, [k * n for n in (5, 1, 9, 2)]) for k in (1, 50))
    assert loss_of("bsm", some_logits(), few) == pytest.approx(loss_of("bsm", some_logits(), many), rel=1e-6)


def test_bsm_adds_the_log_of_counts_and_nothing_else():
    """No log(N + 1): with logits 0 and counts 1, 1, 2 a row of class 2 costs log(4 / 2)."""
    assert loss_of("bsm", [[0.0, 0.0, 0.0]], batch_of([2], [1, 1, 2])) == pytest.approx(math.log(2))


@pytest.mark.parametrize(("y", "expected"), [(0, 2 / 3 * math.log(2)), (1, 2 * math.log(2))])
def test_ir_weighs_a_row_by_n_over_present_classes_times_its_count(y, expected):
    assert loss_of("ir", [[0.0, 0.0]], batch_of([y], [3, 1])) == pytest.approx(expected)


def test_ir_weights_have_mean_one_over_the_clients_rows():
    """Counts 3, 1, 0: all four rows at logits that cost 1 each cost 1 on average."""
    logits = [[0.0, 0.0, math.log(math.e - 2)]] * 4
    assert loss_of("ir", logits, batch_of([0, 0, 0, 1], [3, 1, 0])) == pytest.approx(1.0)


def test_ir_does_not_depend_on_gamma():
    batch = batch_of([0, 1], [3, 1])
    assert loss_of("ir", [[1.0, 0.0]] * 2, batch, 0.5) == loss_of("ir", [[1.0, 0.0]] * 2, batch, 2.0)


def test_ldam_lowers_the_true_logit_by_gamma_over_the_fourth_root_of_its_count():
    """A class with 16 rows is lowered by gamma / 2: from 0.75 to 0 with gamma 1.5."""
    assert loss_of("ldam", [[0.75, 0.0]], batch_of([0], [16, 3]), 1.5) == pytest.approx(math.log(2))


def test_ldam_leaves_other_logits_alone():
    """A row of class 1 (one row: lowered by 1): the logit of class 0 stays 0, whatever its count."""
    losses = [loss_of("ldam", [[0.0, 1.0]], batch_of([1], [n, 1])) for n in (0, 1, 16)]
    assert losses == pytest.approx([math.log(2)] * 3)


def test_cdt_multiplies_logits_by_the_power_of_their_share_of_the_largest():
    """Counts 4 and 1 with gamma 0.5: factors 1 and 0.5, so logits 1 and 2 become equal."""
    assert loss_of("cdt", [[1.0, 2.0]], batch_of([0], [4, 1]), 0.5) == pytest.approx(math.log(2))


def test_cdt_scales_all_logits_and_not_only_the_true_one():
    """Counts 4 and 1 with gamma 1: factors 1 and 1/4."""
    expected = math.log(math.exp(0.0) + math.exp(8.0 / 4))
    assert loss_of("cdt", [[0.0, 8.0]], batch_of([0], [4, 1]), 1.0) == pytest.approx(expected)


# Classes with no rows


def test_bsm_drops_absent_classes_from_the_denominator():
    assert loss_of("bsm", [[0.0, 0.0, 50.0]], batch_of([0], [1, 1, 0])) == pytest.approx(math.log(2))


def test_bsm_gives_absent_classes_no_gradient():
    gradient = gradient_of("bsm", [[0.0, 0.0, 50.0]], batch_of([0], [1, 1, 0]))
    assert gradient.tolist() == [[-0.5, 0.5, 0.0]]


def test_bsm_with_one_class_costs_exactly_nothing():
    batch = batch_of([1, 1], [0, 8, 0])
    assert loss_of("bsm", [[3.0, -1.7, 0.3], [0.2, 5.1, -9.0]], batch) == 0.0
    assert torch.equal(gradient_of("bsm", [[3.0, -1.7, 0.3], [0.2, 5.1, -9.0]], batch), torch.zeros(2, 3))


def test_bsm_of_a_class_that_the_client_does_not_have_is_not_finite():
    """It cannot happen in training; where it does, it must not pass for a number."""
    assert loss_of("bsm", [[0.0, 0.0]], batch_of([1], [4, 0])) == math.inf


def test_cdt_keeps_absent_classes_in_the_denominator_at_zero():
    assert loss_of("cdt", [[0.0, 5.0]], batch_of([0], [1, 0])) == pytest.approx(math.log(2))


def test_cdt_gives_absent_classes_no_gradient():
    gradient = gradient_of("cdt", [[0.0, 5.0]], batch_of([0], [1, 0]))
    assert gradient.tolist() == [[-0.5, 0.0]]


def test_ir_counts_present_classes_only():
    """Counts 3, 1 and two empty classes: a row of class 1 weighs 4 / (2 * 1), as without the empty ones."""
    with_empty = loss_of("ir", [[0.0, 0.0, 0.0, 0.0]], batch_of([1], [3, 1, 0, 0]))
    assert with_empty == pytest.approx(2 * math.log(4))


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_absent_classes_make_no_gradient_that_is_not_finite(name, gamma):
    gradient = gradient_of(name, [[0.3, -2.0, 4.0, 0.0]] * 2, batch_of([0, 1], [6, 1, 0, 0]), gamma)
    assert bool(gradient.isfinite().all()) and float(gradient.abs().sum()) > 0


@pytest.mark.parametrize("name", ["ce", *BALANCED])
def test_padded_rows_count_for_nothing(name):
    logits = some_logits()
    y, counts = [0, 1, 1, 3, 0, 0], [5, 2, 0, 1]
    padded = batch_of(y, counts, mask=[1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    short = batch_of(y[:4], counts)
    assert loss_of(name, logits, padded, 0.5) == pytest.approx(loss_of(name, logits[:4], short, 0.5), rel=1e-6)
    gradients = gradient_of(name, logits, padded, 0.5)
    assert torch.equal(gradients[4:], torch.zeros(2, 4))
    torch.testing.assert_close(gradients[:4], gradient_of(name, logits[:4], short, 0.5))


@pytest.mark.parametrize("name", BALANCED)
def test_balanced_losses_raise_the_cost_of_a_rare_class(name):
    """At equal logits a row of the rare class costs more than one of the common class, relative to plain cost."""
    logits = [[1.0, 1.0]]
    rare, common = (loss_of(name, logits, batch_of([y], [40, 2])) for y in (1, 0))
    assert rare > common
