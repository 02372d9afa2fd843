"""Tuned: what a tuning has found: for each method the default, the best, what they cost, and what mattered."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.errors import UsageError
from plures.files import read_toml, to_toml, write_text
from plures.learn.metrics import METRICS, Metric
from plures.runs.results import write_csv
from plures.studies.tune import Studies, Tuning, cost_until, read_tuning, spent

BEST = "best.toml"
FEWEST = 6  # trials from which it can be told which settings mattered


class Trial(NamedTuple):
    """A trial of a method."""

    number: int
    values: dict[str, Any]
    scores: dict[int, float]  # rounds -> what it was worth, the more the better: an error has a minus sign
    clients: list[float | None]  # of every client's own model on its validation rows, seed after seed
    flops: float
    seconds: float
    failed: str  # why it could not be run; else empty


class Tuned(NamedTuple):
    """What was found for a method."""

    method: str
    spec: str  # the method with what is to be used, as any command takes it
    trials: list[Trial]
    rounds: int  # of a whole run
    spent: float  # in the unit of the budget
    budget: float
    metric: Metric
    importance: dict[str, float]  # setting -> share of what settings explain; empty where there were too few trials

    @property
    def default(self) -> Trial:
        return self.trials[0]

    @property
    def whole(self) -> list[Trial]:
        """The trials that were played to the end."""
        return [trial for trial in self.trials if self.rounds in trial.scores]

    @property
    def best(self) -> Trial:
        """The one with the best score of those that were played to the end; of equal ones the first."""
        return max(self.whole, key=lambda trial: (trial.scores[self.rounds], -trial.number))

    @property
    def gain(self) -> float:
        """Of the best over the default."""
        return self.best.scores[self.rounds] - self.default.scores[self.rounds]

    @property
    def error(self) -> float:
        """The standard error of the mean difference between the best and the default, client by client."""
        both = zip(self.best.clients, self.default.clients, strict=True)
        each = [own - other for own, other in both if own is not None and other is not None]
        return float(np.std(each, ddof=1) / math.sqrt(len(each))) if len(each) > 1 else 0.0

    @property
    def is_kept(self) -> bool:
        """Whether the default is kept: nothing was better by more than the standard error."""
        return self.gain <= self.error

    def text(self, score: float) -> str:
        """A score as it is read."""
        return self.metric.text(self.metric.sign * score)

    def points(self, difference: float) -> str:
        """A difference of scores as it is read; more is better."""
        return f"{100 * difference:+.2f}" if self.metric.is_share else f"{difference:+.3g}"

    def curve(self) -> list[tuple[int, float]]:
        """(trials so far, the best score so far)."""
        best, out = -math.inf, []
        for trial in self.trials:
            best = max(best, trial.scores.get(self.rounds, -math.inf))
            out.append((trial.number + 1, best))
        return out


def read_tuned(folder: Path) -> tuple[Tuning, list[Tuned]]:
    """What a tuning has found; methods that have not been begun are left out."""
    wanted = read_tuning(folder)
    studies = Studies(folder)
    last, out = wanted.rungs[-1], []
    total = 0.0
    for k, method in enumerate(wanted.methods):
        raw = studies.trials(method)
        if not raw or last not in raw[0].intermediate_values:
            continue
        trials = [_trial(one, last) for one in raw]
        cost = spent(wanted, raw)
        if wanted.budget == "trials" or k == 0:
            total = float(wanted.trials) if wanted.budget == "trials" else cost
        metric = METRICS[raw[0].user_attrs["metric"]]
        importance = _importance(studies, raw, wanted.rungs[0])
        found = Tuned(method, method, trials, last, cost, total, metric, importance)
        values = found.default.values if found.is_kept else found.best.values
        out.append(found._replace(spec=wanted.space(method).spec(method, values)))
    return wanted, out


def _trial(one: Any, last: int) -> Trial:
    about = one.user_attrs
    cost = (cost_until(one, last, "flops"), cost_until(one, last, "seconds"))
    scores = dict(sorted(one.intermediate_values.items()))
    return Trial(one.number, one.params, scores, about.get("clients", []), *cost, about.get("failed", ""))


def _importance(studies: Studies, raw: list[Any], rung: int) -> dict[str, float]:
    """How much of the score after the first rounds, which all trials have, each setting explains (PED-ANOVA)."""
    optuna = studies.optuna
    study = optuna.create_study(direction="maximize")
    for one in raw:
        if rung in one.intermediate_values and "failed" not in one.user_attrs:
            value = one.intermediate_values[rung]
            study.add_trial(optuna.trial.create_trial(params=one.params, distributions=one.distributions, value=value))
    if len(study.trials) < FEWEST or len({trial.value for trial in study.trials}) < 2:
        return {}
    found = optuna.importance.get_param_importances(study)
    return {name: float(share) for name, share in sorted(found.items(), key=lambda pair: -pair[1])}


def write_tuned(folder: Path, found: list[Tuned]) -> None:
    """best.toml, what is to be used of each method; tuning.csv, a line for each method; trials.csv, every trial."""
    write_text(folder / BEST, to_toml({one.method: one.spec for one in found}))
    write_csv(folder / "tuning.csv", [row_of(one) for one in found])
    names = list(dict.fromkeys(name for one in found for name in one.default.values))
    rounds = sorted({rung for one in found for trial in one.trials for rung in trial.scores})
    lines = []
    for one in found:
        for trial in one.trials:
            line: dict[str, Any] = {"method": one.method, "trial": trial.number}
            line |= {name: trial.values.get(name) for name in names}
            line |= {f"after_{rung}": trial.scores.get(rung) for rung in rounds}
            lines.append(line | {"flops": trial.flops, "seconds": trial.seconds, "failed": trial.failed})
    write_csv(folder / "trials.csv", lines)


def row_of(one: Tuned) -> dict[str, Any]:
    """A method's line of the table."""
    return {
        "method": one.method,
        "metric": one.metric.name,
        "default": one.default.scores[one.rounds],
        "best": one.best.scores[one.rounds],
        "gain": one.gain,
        "standard_error": one.error,
        "kept_default": one.is_kept,
        "spec": one.spec,
        "best_spec_trial": one.best.number,
        "trials": len(one.trials),
        "to_the_end": len(one.whole),
        "failed": sum(bool(trial.failed) for trial in one.trials),
        "flops": sum(trial.flops for trial in one.trials),
        "seconds": sum(trial.seconds for trial in one.trials),
        "budget": one.budget,
        "spent": one.spent,
    }


def tuned_specs(folder: Path, methods: list[str]) -> list[str]:
    """The methods with what was found for them; all of the tuning if none is named."""
    if not (folder / BEST).exists():
        read_tuning(folder)  # raises, if it is no tuning at all
        raise UsageError(f"the tuning in {folder} has not ended; resume it with `plures resume {folder}`")
    best = read_toml(folder / BEST)
    for method in methods:
        if method not in best:
            raise UsageError(f"{method} was not tuned in {folder}; tuned are {', '.join(best)}")
    return [best[method] for method in methods or best]
