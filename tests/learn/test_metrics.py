"""Metrics by numbers worked by hand, and losses of every kind of target."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from plures.data.dataset import Target
from plures.errors import UsageError
from plures.learn import metrics
from plures.learn.losses import ROW_LOSSES
from plures.learn.metrics import METRICS, find_metric, metrics_for
from plures.runs import results
from plures.simulate.evaluate import Values, values_of

TWO = np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])  # how sure of class 1: -2, 1, -1, 3
Y = np.array([0, 0, 1, 1])
LABELS = Target("labels")
NUMBER = Target("number", shift=10.0, scale=2.0)


def test_auc_is_the_share_of_pairs_in_the_right_order():
    """Pairs of one row of each class: -1 > -2, 3 > -2 and 3 > 1 are right, -1 > 1 is not."""
    assert metrics.auc(TWO, Y, Target()) == 0.75
    assert math.isnan(metrics.auc(TWO[:2], Y[:2], Target()))


def test_average_precision_by_hand():
    """By falling certainty the rows are 3 (right), 1 (wrong), 2 (right), 0: precision 1 and 2/3 at the right ones."""
    assert metrics.average_precision(TWO, Y, Target()) == pytest.approx((1 + 2 / 3) / 2)


def test_f1_of_the_second_class_by_hand():
    """Predicted 0, 1, 0, 1: one of two is found, and one of two that are predicted is right."""
    assert metrics.f1(TWO, Y, Target()) == pytest.approx(0.5)


def test_several_classes_are_taken_one_against_the_others():
    outputs = np.eye(3)[[0, 1, 2, 0]] * 5
    assert metrics.auc(outputs, np.array([0, 1, 2, 0]), Target()) == 1
    assert metrics.accuracy(outputs, np.array([0, 1, 2, 1]), Target()) == 0.75
    # Recalls 1, 1/2 and 1; the last class of y is not there
    assert metrics.recalls(outputs, np.array([0, 1, 2, 1]), Target()) == [1, 0.5, 1]
    assert metrics.balanced_accuracy(outputs, np.array([0, 1, 0, 1]), Target()) == 0.5
    assert metrics.recalls(outputs, np.array([0, 1, 0, 1]), Target())[2] is None


def test_labels_are_right_one_by_one():
    outputs, y = np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    assert metrics.accuracy(outputs, y, LABELS) == 0.75
    assert metrics.recalls(outputs, y, LABELS) == [1, 1]


def test_calibration_error_by_hand():
    """All rows are 0.75 sure, and half of them are right."""
    outputs = np.array([[math.log(3), 0.0]] * 4)
    assert metrics.calibration_error(outputs, np.array([0, 0, 1, 1]), Target()) == pytest.approx(0.25)
    assert metrics.calibration_error(outputs, np.array([0, 0, 0, 1]), Target()) == pytest.approx(0)


def test_errors_are_in_the_units_of_what_is_predicted():
    """Predictions 10 and 14 for 12 and 10: errors of 2 and 4."""
    outputs, y = np.array([[0.0], [2.0]]), np.array([1.0, 0.0])
    assert metrics.mae(outputs, y, NUMBER) == 3
    assert metrics.rmse(outputs, y, NUMBER) == pytest.approx(math.sqrt(10))
    assert metrics.r2(outputs, y, NUMBER) == pytest.approx(1 - 20 / 2)
    assert math.isnan(metrics.r2(outputs, np.array([1.0, 1.0]), NUMBER))
    counts = Target("count", scale=3.0)
    assert metrics.predictions(np.array([[math.log(2)]]), counts)[0] == pytest.approx(6)


def test_losses_of_all_kinds_are_torchs_own():
    generator = torch.Generator().manual_seed(1)
    logits, numbers = torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator)
    labels, counts = (torch.rand(6, 3, generator=generator) > 0.5).float(), torch.arange(6.0)
    expected = {
        "labels": F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1),
        "number": F.mse_loss(numbers[:, 0], counts, reduction="none") / 8,
        "count": F.poisson_nll_loss(numbers[:, 0], counts, reduction="none"),
    }
    for kind, y in (("labels", labels), ("number", counts), ("count", counts)):
        outputs = logits if kind == "labels" else numbers
        torch.testing.assert_close(ROW_LOSSES[kind](outputs, y), expected[kind])


def test_metric_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="auc makes no sense where a number is predicted; use one of: rmse"):
        find_metric("auc", "number")
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        find_metric("acuracy", "classes")
    assert metrics_for("count")[0].name == "mae"


def test_worst_clients_are_those_with_the_largest_error():
    values = Values(np.array([1.0, 5.0, math.nan, 3.0]), 2.0)
    found = results.scores_of(values, METRICS["rmse"])
    assert (found["mean"], found["worst5"], found["top5"]) == (3, 5, 1)
    assert results.are_harmed(
        np.array([1.1, 0.9]), np.array([1.0, 1.0]), np.array([9, 9]), METRICS["rmse"]
    ).tolist() == [
        True,
        False,
    ]
    assert results.gains(np.array([1.0]), np.array([3.0]), np.array([9]), METRICS["rmse"])["mean"] == 2


def test_pooled_is_over_all_rows_and_not_a_mean_of_clients():
    outputs, y = [TWO[:2], TWO[2:]], [Y[:2], Y[2:]]
    found = values_of(METRICS["auc"], outputs, y, Target())
    assert np.isnan(found.each).all() and found.pooled == 0.75


def test_fairness_by_hand():
    """Of 1 and 3: Gini 1/4, Jain 16 / (2 * 10), range 2."""
    found = results.fairness(np.array([3.0, 1.0, math.nan]))
    assert found == {"gini": pytest.approx(0.25), "jain": pytest.approx(0.8), "range": 2.0}
    assert results.fairness(np.array([2.0, 2.0]))["gini"] == pytest.approx(0)
    assert results.fairness(np.array([-1.0, 2.0]))["gini"] is None


def test_interval_holds_the_mean_and_shrinks_with_the_number_of_clients():
    rng = np.random.default_rng(0)
    wide, narrow = (results.interval(rng.normal(0.5, 0.1, n), 0) for n in (10, 1000))
    assert wide[0] < 0.55 and wide[1] > 0.45 and wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])
    assert 4 * 0.1 / math.sqrt(1000) * 0.85 < narrow[1] - narrow[0] < 4 * 0.1 / math.sqrt(1000) * 1.15
    assert results.interval(np.array([0.5]), 0) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["auc", "ap", "calibration"])
def test_outputs_that_are_not_finite_are_not_measured(name, bad):
    outputs = TWO.copy()
    outputs[1, 0] = bad
    assert math.isnan(METRICS[name].of(outputs, Y, Target()))
