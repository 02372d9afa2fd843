"""Metrics: how good predictions are, from the outputs of a model and what was to be predicted.

A metric is not a number where it says nothing: AUC of rows of one class, R2 of rows that are all equal.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plures.data.dataset import Target, TaskKind
from plures.errors import UsageError, unknown

N_BINS = 15  # of confidence, for the calibration error


class Metric(NamedTuple):
    """A number that says how good predictions are."""

    name: str
    title: str  # as axes and tables call it, with its unit
    kinds: tuple[TaskKind, ...]  # what is predicted where it makes sense
    of: Callable[[np.ndarray, np.ndarray, Target], float]  # from outputs [row, output], what was to be predicted
    is_higher_better: bool = True
    is_share: bool = True  # between 0 and 1, and shown in per cent
    needs_sklearn: bool = False

    def shown(self, value: float) -> float:
        """As it is shown to users."""
        return 100 * value if self.is_share else value

    @property
    def unit(self) -> str:
        """What follows a number of it."""
        return " %" if self.is_share else ""

    @property
    def word(self) -> str:
        """Its title without the unit."""
        return self.title.removesuffix(", %")

    def text(self, value: float | None) -> str:
        """As it is written in a line."""
        if value is None or math.isnan(value):
            return "-"
        return f"{100 * value:.2f} %" if self.is_share else f"{value:.4g}"

    @property
    def sign(self) -> int:
        """A difference of two values times this is positive where the first is the better one."""
        return 1 if self.is_higher_better else -1


def find_metric(name: str, kind: TaskKind) -> Metric:
    """The metric of this name, which must make sense for what is predicted."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    metric = METRICS[name]
    if kind not in metric.kinds:
        fitting = ", ".join(other.name for other in metrics_for(kind))
        raise UsageError(f"the metric {name} makes no sense where {WORDS[kind]} predicted; use one of: {fitting}")
    if metric.needs_sklearn and not has_sklearn():
        raise UsageError(f"the metric {name} needs scikit-learn: pip install 'plures[data]'")
    return metric


def has_sklearn() -> bool:
    """Whether the metrics that need scikit-learn can be had."""
    return importlib.util.find_spec("sklearn") is not None


def metrics_for(kind: TaskKind) -> list[Metric]:
    """The metrics that make sense for what is predicted; the first is the one that a run goes by if none is named."""
    found = [metric for metric in METRICS.values() if kind in metric.kinds]
    return sorted(found, key=lambda metric: metric.name != DEFAULT[kind])


# Of classes and labels


def _probabilities(outputs: np.ndarray) -> np.ndarray:
    shifted = np.exp(outputs - outputs.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _is_there(outputs: np.ndarray, y: np.ndarray, target: Target) -> list[tuple[np.ndarray, np.ndarray]]:
    """(whether it is there, how sure the model is) for every class or label of which some rows are, and some are not.

    Of two classes, only the second is looked at: the first says the same. Outputs that are not finite cannot be ranked:
    then there is none.
    """
    if not np.isfinite(outputs).all():
        return []
    if target.kind == "labels":
        pairs = [(y[:, k] > 0, outputs[:, k]) for k in range(y.shape[1])]
    elif outputs.shape[1] == 2:
        pairs = [(y == 1, outputs[:, 1] - outputs[:, 0])]
    else:
        sure = _probabilities(outputs)
        pairs = [(y == k, sure[:, k]) for k in range(outputs.shape[1])]
    return [(there, score) for there, score in pairs if there.any() and not there.all()]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def accuracy(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """The share of rows, or of labels, that are right."""
    right = (outputs > 0) == (y > 0) if target.kind == "labels" else outputs.argmax(-1) == y
    return float(right.mean())


def auc(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """The area under the ROC curve; of several classes or labels, the mean of each against the others."""
    from sklearn.metrics import roc_auc_score  # here, because it takes a second

    return _mean([float(roc_auc_score(there, score)) for there, score in _is_there(outputs, y, target)])


def average_precision(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """The area under precision over recall; of several classes or labels, the mean of each against the others."""
    from sklearn.metrics import average_precision_score  # here, because it takes a second

    return _mean([float(average_precision_score(there, score)) for there, score in _is_there(outputs, y, target)])


def f1(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """F1 of the second of two classes; of several classes or labels, the mean of those that are there."""
    from sklearn.metrics import f1_score  # here, because it takes a second

    if target.kind == "labels":
        return float(f1_score(y > 0, outputs > 0, average="macro", zero_division=0))
    if outputs.shape[1] == 2:
        return float(f1_score(y == 1, outputs.argmax(-1) == 1, zero_division=0)) if (y == 1).any() else math.nan
    return float(f1_score(y, outputs.argmax(-1), labels=np.unique(y), average="macro", zero_division=0))


def recalls(outputs: np.ndarray, y: np.ndarray, target: Target) -> list[float | None]:
    """Of each class or label, the share of its rows that are found; None where there are none."""
    if target.kind == "labels":
        pairs = [((outputs[:, k] > 0)[y[:, k] > 0]) for k in range(y.shape[1])]
    else:
        predicted = outputs.argmax(-1)
        pairs = [(predicted == k)[y == k] for k in range(outputs.shape[1])]
    return [float(found.mean()) if len(found) else None for found in pairs]


def balanced_accuracy(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """The mean recall of the classes that are there."""
    return _mean([value for value in recalls(outputs, y, target) if value is not None])


def calibration_error(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """How far the model's confidence is from how often it is right, in the mean over bins of confidence."""
    if not np.isfinite(outputs).all():
        return math.nan
    if target.kind == "labels":
        sure = 1 / (1 + np.exp(-np.abs(outputs.astype(np.float64)))).ravel()
        right = ((outputs > 0) == (y > 0)).ravel()
    else:
        sure, right = _probabilities(outputs.astype(np.float64)).max(-1), outputs.argmax(-1) == y
    at = np.minimum((sure * N_BINS).astype(np.int64), N_BINS - 1)
    gaps = np.bincount(at, right - sure, N_BINS)
    return float(np.abs(gaps).sum() / len(sure))


# Of numbers


def in_units(outputs: np.ndarray, y: np.ndarray, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and what was to be predicted, as the user has them."""
    return predictions(outputs, target), y.astype(np.float64) * target.scale + target.shift


def predictions(outputs: np.ndarray, target: Target) -> np.ndarray:
    """What a model predicts: a class, labels (0 or 1), or a number as the user has it."""
    if target.kind == "classes":
        return outputs.argmax(-1)
    if target.kind == "labels":
        return (outputs > 0).astype(np.int64)
    values = outputs[..., 0].astype(np.float64)
    return (np.exp(values) if target.kind == "count" else values) * target.scale + target.shift


def mae(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """Mean absolute error, in units of what is predicted."""
    predicted, true = in_units(outputs, y, target)
    return float(np.abs(predicted - true).mean())


def rmse(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """Root of the mean squared error, in units of what is predicted."""
    predicted, true = in_units(outputs, y, target)
    return float(np.sqrt(np.square(predicted - true).mean()))


def r2(outputs: np.ndarray, y: np.ndarray, target: Target) -> float:
    """The share of the variance that is explained."""
    predicted, true = in_units(outputs, y, target)
    total = np.square(true - true.mean()).sum()
    return float(1 - np.square(predicted - true).sum() / total) if total > 0 else math.nan


_CLASSES: tuple[TaskKind, ...] = ("classes", "labels")
_NUMBERS: tuple[TaskKind, ...] = ("number", "count")
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy, %", _CLASSES, accuracy),
        Metric("auc", "AUC, %", _CLASSES, auc, needs_sklearn=True),
        Metric("ap", "average precision, %", _CLASSES, average_precision, needs_sklearn=True),
        Metric("f1", "F1, %", _CLASSES, f1, needs_sklearn=True),
        Metric("balanced", "balanced accuracy, %", _CLASSES, balanced_accuracy),
        Metric("calibration", "calibration error, %", _CLASSES, calibration_error, is_higher_better=False),
        Metric("rmse", "root mean squared error", _NUMBERS, rmse, is_higher_better=False, is_share=False),
        Metric("mae", "mean absolute error", _NUMBERS, mae, is_higher_better=False, is_share=False),
        Metric("r2", "R2", _NUMBERS, r2, is_share=False),
    )
}
ACCURACY = METRICS["accuracy"]
DEFAULT: dict[TaskKind, str] = {"classes": "accuracy", "labels": "accuracy", "number": "rmse", "count": "mae"}
WORDS: dict[TaskKind, str] = {
    "classes": "classes are",
    "labels": "several labels are",
    "number": "a number is",
    "count": "a count is",
}
