"""Rows: the numbers that a run leaves behind, and what is computed from them. Reports read only these."""

import csv
import dataclasses
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import __version__
from .checkpoint import disk_failure, write_text
from .config import Config
from .execute import Population
from .newcomers import Newcomers


class Evaluation(NamedTuple):
    """Sums over the test rows of each scored client."""

    ids: list[int]
    personal: dict[str, list[float]]  # hits, loss, n
    generic: dict[str, list[float]] | None
    seconds: float


@dataclass(frozen=True)
class Round:
    """One row of rounds.csv; empty cells where a round was not evaluated."""

    round: int
    clients: int
    loss: float
    bytes_down: int
    bytes_up: int
    refused: int
    train_seconds: float
    evaluate_seconds: float = 0.0
    personal_mean: float | None = None
    personal_pooled: float | None = None
    personal_worst5: float | None = None
    personal_loss: float | None = None
    generic_accuracy: float | None = None
    generic_on_clients: float | None = None

    def scored(self, evaluation: Evaluation) -> "Round":
        personal = personal_scores(evaluation)
        generic = generic_scores(evaluation)
        return dataclasses.replace(
            self,
            evaluate_seconds=evaluation.seconds,
            personal_mean=personal["mean"],
            personal_pooled=personal["pooled"],
            personal_worst5=personal["worst5"],
            personal_loss=_ratio(sum(evaluation.personal["loss"]), sum(evaluation.personal["n"])),
            generic_accuracy=generic["accuracy"] if generic else None,
            generic_on_clients=generic["on_clients"] if generic else None,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Round":
        return Round(**values)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def accuracies(scores: dict[str, list[float]]) -> np.ndarray:
    """The accuracy on every scored client."""
    return np.array(scores["hits"]) / np.array(scores["n"])


def tail(values: np.ndarray, share: float = 0.05) -> tuple[float, float]:
    """Mean of the worst and of the best ceil(share * n) clients."""
    ordered = np.sort(values)
    n = math.ceil(share * len(ordered) - 1e-9)
    return float(ordered[:n].mean()), float(ordered[-n:].mean())


def personal_scores(evaluation: Evaluation) -> dict[str, float]:
    """Mean over clients, mean over samples, spread over clients, and both tails."""
    if not evaluation.ids:
        return dict.fromkeys(("mean", "pooled", "std", "worst5", "top5"), math.nan)
    each = accuracies(evaluation.personal)
    worst, top = tail(each)
    pooled = _ratio(sum(evaluation.personal["hits"]), sum(evaluation.personal["n"]))
    return {"mean": float(each.mean()), "pooled": pooled, "std": float(each.std()), "worst5": worst, "top5": top}


def generic_scores(evaluation: Evaluation) -> dict[str, float] | None:
    """The one model for all: accuracy over all test rows, and the mean over clients."""
    if evaluation.generic is None or not evaluation.ids:
        return None
    accuracy = _ratio(sum(evaluation.generic["hits"]), sum(evaluation.generic["n"]))
    each = accuracies(evaluation.generic)
    worst, top = tail(each)
    return {"accuracy": accuracy, "on_clients": float(each.mean()), "worst5": worst, "top5": top}


def summary(rounds: list[Round], evaluation: Evaluation, config: Config, scored: str) -> dict[str, Any]:
    """The first part of summary.json; the rest is what the run alone knows."""
    personal: dict[str, Any] | None = None
    if evaluation.ids:
        personal = dict(personal_scores(evaluation))
        seen = [(row.personal_mean, row.round) for row in rounds if row.personal_mean is not None]
        seen = seen or [(personal["mean"], len(rounds))]
        best_mean, best_round = max(seen, key=lambda pair: (pair[0], -pair[1]))
        personal |= {"best_round": best_round, "best_mean": best_mean, "model": scored}
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
        "personal": personal,
        "generic": generic_scores(evaluation),
        "harmed": None,
        "bytes": {
            "down": sum(row.bytes_down for row in rounds),
            "up": sum(row.bytes_up for row in rounds),
        },
    }


def seconds(rounds: list[Round], evaluation: Evaluation, total: float) -> dict[str, float]:
    train = sum(row.train_seconds for row in rounds)
    evaluate = sum(row.evaluate_seconds for row in rounds) or evaluation.seconds
    return {"train": round(train, 3), "evaluate": round(evaluate, 3), "total": round(total, 3)}


def clients(
    train: list[np.ndarray], test: list[np.ndarray], labels: np.ndarray, evaluation: Evaluation, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One row for every client, also for those that have no rows or cannot be scored. There may be no names."""
    place = {client: i for i, client in enumerate(evaluation.ids)}
    personal = accuracies(evaluation.personal) if evaluation.ids else np.zeros(0)
    generic = accuracies(evaluation.generic) if evaluation.ids and evaluation.generic else None
    out = []
    for client, own in enumerate(train):
        at = place.get(client)
        out.append(
            {
                "client": client,
                "name": names[client] if names else "",
                "n_train": len(own),
                "n_test": len(test[client]),
                "n_classes": len(np.unique(labels[own])),
                "personal_accuracy": None if at is None else float(personal[at]),
                "generic_accuracy": None if at is None or generic is None else float(generic[at]),
            }
        )
    return out


def new_clients(population: Population, found: Newcomers, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for every client that was held out of training: its model after adaptation, and the generic one."""
    first, place = found.first, {client: i for i, client in enumerate(found.ids)}
    out = clients(population.train, population.test, population.y.numpy(), Evaluation([], {}, None, 0.0), ())
    for row in out:
        row["client"] += first
        row["name"] = names[row["client"]] if names else ""
        at = place.get(row["client"])
        row["personal_accuracy"] = None if at is None else found.curve[-1][at]
        row["generic_accuracy"] = None if at is None or found.generic is None else found.generic[at]
        row["role"] = "new"
    return out


# CSV files

_ROUND_FIELDS = [field.name for field in dataclasses.fields(Round)]


def _csv(fields: list[str], rows: list[dict[str, Any]], header: bool) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write_rounds(folder: Path, rounds: list[Round]) -> None:
    write_text(folder / "rounds.csv", _csv(_ROUND_FIELDS, [row.to_json() for row in rounds], header=True))


def append_round(folder: Path, row: Round) -> None:
    try:
        with open(folder / "rounds.csv", "a", encoding="utf-8") as file:
            file.write(_csv(_ROUND_FIELDS, [row.to_json()], header=False))
    except OSError as error:
        raise disk_failure(error, folder) from error


def write_clients(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_text(folder / "clients.csv", _csv(list(rows[0]), rows, header=True))


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
