"""Results: the numbers that a run leaves behind, and what is computed from them. Reports read only these."""

import csv
import dataclasses
import hashlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plures import seeds, tree
from plures._version import __version__
from plures.data.population import Population
from plures.errors import DataError
from plures.files import sum_of, telling_disk_failures, write_text
from plures.learn.metrics import ACCURACY, METRICS, Metric
from plures.learn.task import Task
from plures.runs.config import Config
from plures.simulate.evaluate import Evaluation, Pool, Values
from plures.simulate.new_clients import NewClients
from plures.tree import Tree


@dataclass(frozen=True)
class Round:
    """One row of rounds.csv; empty cells where a round was not evaluated."""

    round: int
    clients: int
    loss: float
    bytes_down: int
    bytes_up: int
    refused: int
    flops: int  # of training, clients' and server's
    update_norm: float | None  # mean distance of uploaded models to those that were sent
    update_variance: float | None  # mean squared distance of uploaded models to their mean
    train_seconds: float
    evaluate_seconds: float = 0.0
    personal_mean: float | None = None
    personal_pooled: float | None = None
    personal_worst5: float | None = None
    personal_loss: float | None = None
    generic_accuracy: float | None = None
    generic_on_clients: float | None = None
    validation_mean: float | None = None
    personal_on_pool: float | None = None  # what personal models know of everybody's test rows
    generic_pooled: float | None = None  # the metric that the run goes by, of the one model for all, over all rows

    def with_scores(self, evaluation: Evaluation) -> "Round":
        """The row with the scores of an evaluation."""
        personal = personal_scores(evaluation)
        generic = generic_scores(evaluation) or {}
        validation = evaluation.values("validation")
        return dataclasses.replace(
            self,
            evaluate_seconds=evaluation.seconds,
            personal_mean=personal["mean"],
            personal_pooled=personal["pooled"],
            personal_worst5=personal["worst5"],
            personal_loss=_ratio(sum(evaluation.personal["loss"]), sum(evaluation.personal["n"])),
            generic_accuracy=generic.get("accuracy"),
            generic_on_clients=generic.get("on_clients"),
            validation_mean=None if validation is None else _known(_mean(validation.each)),
            personal_on_pool=pool_scores(evaluation.pool)[0]["on_pool"] if evaluation.pool else None,
            generic_pooled=generic.get("pooled"),
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Round":
        return Round(**values)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _mean(each: np.ndarray) -> float:
    """Over the clients for which the metric says something."""
    known = each[np.isfinite(each)]
    return float(known.mean()) if len(known) else math.nan


def tail(values: np.ndarray, share: float = 0.05, metric: Metric = ACCURACY) -> tuple[float, float]:
    """Mean of the worst and of the best ceil(share * n) clients."""
    ordered = np.sort(values[np.isfinite(values)])
    if not metric.is_higher_better:
        ordered = ordered[::-1]
    n = math.ceil(share * len(ordered) - 1e-9)
    return (float(ordered[:n].mean()), float(ordered[-n:].mean())) if n else (math.nan, math.nan)


def scores_of(values: Values, metric: Metric) -> dict[str, float]:
    """Mean over clients, over all rows together, spread over clients, and both tails."""
    worst, top = tail(values.each, metric=metric)
    known = values.each[np.isfinite(values.each)]
    std = float(known.std()) if len(known) else math.nan
    return {"mean": _mean(values.each), "pooled": values.pooled, "std": std, "worst5": worst, "top5": top}


def personal_scores(evaluation: Evaluation) -> dict[str, float]:
    """Of the personal models, by the metric that the run goes by."""
    values = evaluation.values("personal") if evaluation.ids else None
    if values is None:
        return dict.fromkeys(("mean", "pooled", "std", "worst5", "top5"), math.nan)
    return scores_of(values, evaluation.metric)


def generic_scores(evaluation: Evaluation) -> dict[str, Any] | None:
    """The one model for all: the metric over all test rows, and the mean over clients."""
    values = evaluation.values("generic") if evaluation.ids else None
    if values is None:
        return None
    found = scores_of(values, evaluation.metric)
    out = {"accuracy": found["pooled"]} if evaluation.metric is ACCURACY else {}
    more = {"on_clients": found["mean"], "worst5": found["worst5"], "top5": found["top5"], "pooled": found["pooled"]}
    return out | more


def fairness(each: np.ndarray) -> dict[str, float | None]:
    """How equally clients are served: Gini (0 is equal), Jain (1 is equal), and the best less the worst."""
    known = np.sort(each[np.isfinite(each)])
    n, total = len(known), known.sum()
    if n == 0:
        return {"gini": None, "jain": None, "range": None}
    if total <= 0 or known[0] < 0:  # shares of a sum make no sense
        return {"gini": None, "jain": None, "range": float(known[-1] - known[0])}
    gini = float(2 * (np.arange(1, n + 1) * known).sum() / (n * total) - (n + 1) / n)
    return {"gini": gini, "jain": float(total**2 / (n * (known**2).sum())), "range": float(known[-1] - known[0])}


N_RESAMPLES = 1000
MOST_RESAMPLED = 5000  # clients; of more the interval is that of a normal distribution, which is the same then


def interval(each: np.ndarray, seed: int) -> list[float] | None:
    """The 95 % interval of the mean over clients, by drawing clients anew, with repetition."""
    known = each[np.isfinite(each)]
    if len(known) < 2:
        return None
    if len(known) > MOST_RESAMPLED:
        half = 1.96 * float(known.std()) / math.sqrt(len(known))
        return [float(known.mean()) - half, float(known.mean()) + half]
    drawn = seeds.generator(seed, "bootstrap").integers(0, len(known), (N_RESAMPLES, len(known)))
    low, high = np.quantile(known[drawn].mean(1), (0.025, 0.975))
    return [float(low), float(high)]


def reweighted(hits: np.ndarray, n: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Accuracy of each client's model if classes were as frequent as in its training rows: Fed-RoD's eq. 20.

    `hits` and `counts` are [client, class], `n` is [class]. Not a number for a client none of whose classes is in n.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    weight = (shares * n).sum(1)
    return np.divide((shares * hits).sum(1), weight, out=np.full(len(hits), np.nan), where=weight > 0)


def _known(value: float) -> float | None:
    """The number, or None where there is none: JSON has no word for it."""
    return float(value) if np.isfinite(value) else None


def _mean_of_known(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def pool_scores(pool: Pool) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """What the pool tells of the personal models, and of the one for all."""
    personal: dict[str, float | None] = {
        "reweighted": _mean_of_known(reweighted(pool.personal, pool.n, pool.counts)),
        "on_pool": _known((pool.personal.sum(1) / pool.n.sum()).mean()),
    }
    if pool.generic is None:
        return personal, {}
    same = np.broadcast_to(pool.generic, pool.personal.shape)
    all_rows = reweighted(pool.generic[None], pool.n, pool.counts.sum(0)[None])  # classes as frequent as in training
    return personal, {
        "reweighted": _mean_of_known(reweighted(same, pool.n, pool.counts)),
        "as_trained": _known(all_rows[0]),
        "balanced": float(np.mean(pool.generic[pool.n > 0] / pool.n[pool.n > 0])),
    }


def to_goal(rounds: list[Round], goal: float, metric: Metric = ACCURACY) -> dict[str, Any] | None:
    """What it cost until personal models reached the goal in the mean; None if they did not."""
    for i, row in enumerate(rounds):
        if row.personal_mean is not None and metric.sign * (row.personal_mean - goal) >= 0:
            so_far = rounds[: i + 1]
            return {
                "round": row.round,
                "bytes": sum(r.bytes_down + r.bytes_up for r in so_far),
                "flops": sum(r.flops for r in so_far),
                "seconds": sum(r.train_seconds for r in so_far),
            }
    return None


HARM = 0.01  # that a client must lose, at least, to be called harmed: a point, or a hundredth of an error


def are_harmed(own: np.ndarray, others: np.ndarray, n_test: np.ndarray, metric: Metric = ACCURACY) -> np.ndarray:
    """Which clients lose more than one of their test rows, and more than a point, against another model of theirs.

    Of a metric that is no share: that lose more than a hundredth.
    """
    margin = np.full(len(own), HARM) if metric.is_share else HARM * np.abs(others)
    if metric is ACCURACY:
        margin = np.maximum(margin, 1 / np.maximum(n_test, 1))
    return metric.sign * (others - own) > margin + 1e-9


def harm_in_words(metric: Metric) -> str:
    """What a client must lose to be called harmed."""
    if metric is ACCURACY:
        return "more than one test row, and more than a point"
    return "more than a point" if metric.is_share else "more than a hundredth"


def gains(own: np.ndarray, others: np.ndarray, n_test: np.ndarray, metric: Metric = ACCURACY) -> dict[str, float]:
    """What each client gains over its model of another method: mean, share that gains, lowest decile, harmed."""
    gain = metric.sign * (own - others)
    worst = np.sort(gain)[: math.ceil(0.1 * len(gain) - 1e-9)]
    return {
        "mean": float(gain.mean()),
        "share_gaining": float((gain > 1e-12).mean()),
        "lowest_decile": float(worst.mean()),
        "harmed": int(are_harmed(own, others, n_test, metric).sum()),
        "below": int((gain < -1e-12).sum()),
    }


def _chosen(rounds: list[Round], scores: dict[str, float], metric: Metric) -> dict[str, Any]:
    """The best round on test rows, on rows kept apart for the choice, and the mean of the last ten."""
    seen = [row for row in rounds if row.personal_mean is not None]
    if not seen:
        best = {"best_round": len(rounds), "best_mean": scores["mean"], "best_pooled": scores["pooled"]}
        return best | {"mean_last10": scores["mean"], "validated": None}
    means = [float(row.personal_mean) for row in seen if row.personal_mean is not None]
    best_row = seen[int(np.argmax([metric.sign * mean for mean in means]))]
    out: dict[str, Any] = {
        "best_round": best_row.round,
        "best_mean": best_row.personal_mean,
        "best_pooled": best_row.personal_pooled,
        "mean_last10": float(np.mean(means[-10:])),
        "validated": None,
    }
    valid = [row for row in seen if row.validation_mean is not None]
    if valid:
        row = max(valid, key=lambda row: (metric.sign * float(row.validation_mean or 0), -row.round))
        out["validated"] = {"round": row.round, "validation_mean": row.validation_mean, "mean": row.personal_mean}
    return out


def summary(rounds: list[Round], evaluation: Evaluation, config: Config, model_name: str) -> dict[str, Any]:
    """The first part of summary.json; the rest is what the run alone knows."""
    personal: dict[str, Any] | None = None
    if evaluation.ids:
        scores = personal_scores(evaluation)
        personal = scores | _chosen(rounds, scores, evaluation.metric)
        personal |= {"model": model_name, "unchosen": config.unchosen}
        personal |= {"scored": len(evaluation.ids), "never_trained": len(evaluation.never_trained)}
        values = evaluation.values("personal")
        if values is not None:
            personal |= {"interval": interval(values.each, config.seed)} | fairness(values.each)
            personal["unmeasured"] = int((~np.isfinite(values.each)).sum())
        personal = {key: _clean(value) for key, value in personal.items()}
    generic = generic_scores(evaluation)
    if generic is not None:
        generic = {key: _clean(value) for key, value in generic.items()}
        generic["is_mean_of_personal"] = evaluation.generic_is_mean
    if evaluation.pool is not None and personal is not None:
        of_personal, of_generic = pool_scores(evaluation.pool)
        personal |= of_personal
        generic = None if generic is None else generic | of_generic
    return {
        "plures": __version__,
        "method": config.method,
        "settings": config.settings,
        "data": config.data,
        "model": config.model,
        "partition": "split file" if config.split else config.partition,
        "clients": config.clients,
        "participation": config.participation,
        "rounds": config.rounds,
        "seed": config.seed,
        "executor": config.executor,
        "metric": evaluation.metric.name,
        "personal": personal,
        "generic": generic,
        "harmed": None,
        "bytes": {
            "down": sum(row.bytes_down for row in rounds),
            "up": sum(row.bytes_up for row in rounds),
        },
    }


def metrics(evaluation: Evaluation, seed: int) -> dict[str, Any]:
    """All metrics of a run's end, each with the fields of `personal`: of personal models, and of the one for all."""
    out: dict[str, Any] = {}
    if not evaluation.measured:
        return out
    known = [METRICS[name] for name in evaluation.measured]
    has_hits = bool(set(ACCURACY.kinds) & set(evaluation.metric.kinds))
    for metric in ([ACCURACY] if has_hits else []) + known:
        parts = {}
        for part in ("personal", "generic"):
            values = evaluation.values(part, metric)
            if values is not None:
                found = scores_of(values, metric) | {"interval": interval(values.each, seed)}
                parts[part] = {key: _clean(value) for key, value in found.items()}
        out[metric.name] = parts
    if evaluation.recalls:
        out["recall of each class"] = evaluation.recalls
    return out


def _clean(value: Any) -> Any:
    return _known(value) if isinstance(value, float) else value


def bytes_by_group(task: Task, message: Tree) -> dict[str, int]:
    """Bytes of a message, or an upload, of one client: body, head, statistics, and what is no part of the model."""
    out: dict[str, int] = {}
    for path, x in zip(tree.names(message), tree.leaves(message), strict=True):
        name = path.rpartition("/")[2]
        group = path.partition("/")[0]
        if name in task.initial:
            group = "statistics" if tree.is_statistic(name) else "head" if task.is_head(name) else "body"
        if x.is_floating_point():
            out[group] = out.get(group, 0) + x.numel() * x.element_size()
    return out


def seconds(rounds: list[Round], evaluation: Evaluation, total: float) -> dict[str, float]:
    """What training, evaluation and the whole run took."""
    train = sum(row.train_seconds for row in rounds)
    evaluate = sum(row.evaluate_seconds for row in rounds) or evaluation.seconds
    return {"train": round(train, 3), "evaluate": round(evaluate, 3), "total": round(total, 3)}


def clients(
    train: list[np.ndarray], test: list[np.ndarray], labels: np.ndarray, evaluation: Evaluation, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One row for every client, also for those that have no rows or cannot be scored. There may be no names."""
    place = {client: i for i, client in enumerate(evaluation.ids)}
    pool = evaluation.pool
    on_pool = {} if pool is None else dict(zip(pool.ids, pool.personal.sum(1) / pool.n.sum(), strict=True))
    by_classes = {}
    if pool is not None:
        by_classes = dict(zip(pool.ids, reweighted(pool.personal, pool.n, pool.counts), strict=True))
    out = []
    for client, own in enumerate(train):
        at = place.get(client)
        out.append(
            {
                "client": client,
                "name": names[client] if names else "",
                "n_train": len(own),
                "n_test": len(test[client]),
                "n_classes": None if labels.dtype.kind == "f" else len(np.unique(labels[own])),
                **columns_of(evaluation, at),
                "pool_accuracy": float(on_pool[client]) if client in on_pool else None,
                "reweighted_accuracy": float(by_classes[client]) if client in by_classes else None,
            }
        )
    return out


def columns_of(evaluation: Evaluation, at: int | None) -> dict[str, float | None]:
    """Every metric of one client: of its personal model, and of the one for all."""
    out: dict[str, float | None] = {}
    found = {evaluation.metric.name: evaluation.metric} | {name: METRICS[name] for name in evaluation.measured}
    for name, metric in found.items():
        for part in ("personal", "generic"):
            values = evaluation.values(part, metric) if evaluation.ids else None
            out[score_column(name, part)] = None if at is None or values is None else _known(values.each[at])
    return out


def metric_of(summary: dict[str, Any]) -> Metric:
    """What a run goes by; earlier versions knew accuracy alone."""
    return METRICS[summary.get("metric", "accuracy")]


def generic_of(summary: dict[str, Any]) -> float | None:
    """The metric of the one model for all over all test rows."""
    generic = summary["generic"] or {}
    return generic.get("pooled", generic.get("accuracy"))


def score_column(metric: str, part: str = "personal") -> str:
    """The column of clients.csv with this metric of the personal models, or of the generic one."""
    return f"{part}_{metric}"


def new_clients(population: Population, found: NewClients, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for every client that was held out of training: its model after adaptation, and the generic one."""
    first, place = found.first, {client: i for i, client in enumerate(found.ids)}
    nothing = Evaluation([], {}, None, 0.0, metric=found.metric)
    out = clients(population.train, population.test, population.y.numpy(), nothing, ())
    for row in out:
        row["client"] += first
        row["name"] = names[row["client"]] if names else ""
        at = place.get(row["client"])
        row[score_column(found.metric.name)] = None if at is None else _known(found.curve[-1][at])
        generic = None if at is None or found.generic is None else _known(found.generic[at])
        row[score_column(found.metric.name, "generic")] = generic
        row["role"] = "new"
    return out


# summary.json


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, with the SHA-256 of itself and of the tables beside it, by which they are known again."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in TABLES}
    whole = summary | {"sha256": sums}
    write_text(folder / "summary.json", json.dumps(whole | {"check": sum_of(whole)}, indent=2) + "\n")


def read_ended(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Summary, rounds and clients of a run that has ended; raises if any of them is not what was written."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
        known = summary.pop("check", None)  # runs of earlier versions have none
        if known is not None and known != sum_of(summary):
            raise _damaged(folder, "summary.json")
        for name, expected in summary.pop("sha256", {}).items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                raise _damaged(folder, name)
        return summary, read_csv(folder / "rounds.csv"), read_csv(folder / "clients.csv")
    except (ValueError, AttributeError, TypeError):  # not JSON, or not a table
        raise _damaged(folder, "summary.json, or a table beside it,") from None
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def _damaged(folder: Path, what: str) -> DataError:
    return DataError(
        f"{what} of {folder} has changed since the run wrote it. Delete summary.json there; then `plures resume "
        f"{folder}` writes it and its tables anew, from the last checkpoint"
    )


TABLES = ("rounds.csv", "clients.csv")


# CSV files

_ROUND_FIELDS = [field.name for field in dataclasses.fields(Round)]


def _csv(fields: list[str], rows: list[dict[str, Any]], header: bool) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows([{key: _as_plain_text(value) for key, value in row.items()} for row in rows])
    return out.getvalue()


FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # with which a cell begins that a spreadsheet would compute


def _as_plain_text(value: Any) -> Any:
    """A cell; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def write_rounds(folder: Path, rounds: list[Round]) -> None:
    """Write rounds.csv anew."""
    write_text(folder / "rounds.csv", _csv(_ROUND_FIELDS, [row.to_json() for row in rounds], header=True))


def append_round(folder: Path, row: Round) -> None:
    """Add a line to rounds.csv."""
    with telling_disk_failures(folder), open(folder / "rounds.csv", "a", encoding="utf-8") as file:
        file.write(_csv(_ROUND_FIELDS, [row.to_json()], header=False))


def write_clients(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write clients.csv."""
    write_csv(folder / "clients.csv", rows)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with the columns of the first one, which has them all."""
    write_text(path, _csv(list(rows[0]), rows, header=True))


TEXTS = ("name", "role", "method", "other")  # columns that are not numbers, whatever stands in them


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that was written here; numbers are numbers again, and an empty cell is None."""

    def value(column: str, cell: str) -> Any:
        if column in TEXTS:
            return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULAS) else cell
        if cell == "":
            return None
        return float(cell) if not cell.lstrip("-").isdigit() else int(cell)

    with open(path, encoding="utf-8", newline="") as file:
        return [{column: value(column, cell) for column, cell in row.items()} for row in csv.DictReader(file)]
