"""The loop of a run: rounds are played, scored, told and saved, whoever the clients are.

Simulation and federation differ in how clients are reached, which is behind `Clients`; everything else is here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from plures.engine import Usage
from plures.errors import Interrupted, RunFailed, UsageError
from plures.runs import results
from plures.runs.callbacks import Callback
from plures.runs.predict import client_number, module_of, predict
from plures.runs.scene import Scene
from plures.runs.signals import StopRequest, undisturbed
from plures.runs.state import Answers, RunState
from plures.simulate.evaluate import Evaluation
from plures.tree import Tree


class Result(NamedTuple):
    """What a run gives: numbers, and every client's own model."""

    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    models: Mapping[int, Tree]  # each client's own; of a run with a folder, read from there when they are asked for
    folder: Path | None

    def model(self, client: int | str) -> "nn.Module":
        """A client's own model, by its number or name, as a plain module that reads inputs of the model."""
        scene = self._scene()
        return module_of(scene, self.models[client_number(scene, client)])

    def predict(self, client: int | str, rows: Any) -> np.ndarray:
        """What a client's own model predicts of rows: a data frame as the run's table, or an array of inputs."""
        scene = self._scene()
        return predict(scene, self.models[client_number(scene, client)], rows)

    def _scene(self) -> Scene:
        scene = getattr(self.models, "scene", None)
        if scene is None:
            raise UsageError("this result has numbers alone; for models, resume its folder or run it again")
        return scene

    def __repr__(self) -> str:
        personal = self.summary["personal"]
        metric = results.metric_of(self.summary)
        score = "" if personal is None else f"personal {metric.text(personal['mean'])}, "
        where = "" if self.folder is None else f", folder {str(self.folder)!r}"
        size = f"{len(self.clients)} clients, {len(self.rounds)} rounds"
        return f"<Result of {self.summary['method']}: {score}{size}{where}>"


class Clients(Protocol):
    """The clients of a run, simulated here or reached over a network."""

    state: RunState
    scores_late: bool  # whether the scores of a round come with the answers of the next one
    how_to_resume: str  # the command for it

    def play(self, score: bool) -> Answers:
        """Send, let the cohort of the next round train, and collect. With `score`, ask for scores of the state, too."""

    def evaluate(self, is_last: bool) -> Evaluation:
        """Scores of the state; at the end of the run, of more."""

    def usage(self) -> Usage:
        """How the engine ran the steps of this process."""

    def manifest(self) -> dict[str, Any]:
        """What a checkpoint says of the run, besides its tensors."""

    def results(self, evaluation: Evaluation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the summary says besides what every run's does, and a row for each client."""

    def models(self) -> Mapping[int, Tree]:
        """Every client's own model, where it can be had."""

    def close(self) -> None:
        """Let go of what was held."""


def play_run(clients: Clients, callback: Callback) -> Result:
    """Play all rounds that are left, evaluate, and write the run folder."""
    state = clients.state
    try:
        telling = _Telling(state, callback)
        with StopRequest(state.say) as request:
            try:
                evaluation = _play_rounds(clients, telling, request)
                callback.ended()
                more, rows = clients.results(evaluation)
            except KeyboardInterrupt:
                state.save(clients.manifest())
                raise Interrupted(_how_to_resume(clients)) from None
            except RunFailed as failure:
                state.save(clients.manifest())
                if state.folder is None:
                    raise
                words = f"the state after round {state.round} is in {state.folder}; {clients.how_to_resume}"
                raise RunFailed(f"{failure}; {words}") from None
            summary = state.summary(evaluation, clients.usage()) | more
            if state.folder is not None:
                with undisturbed():
                    write_results(state.folder, summary, rows)
        return Result(summary, [row.to_json() for row in state.rows], rows, clients.models(), state.folder)
    finally:
        with undisturbed():
            callback.ended()
            clients.close()


def _play_rounds(clients: Clients, telling: "_Telling", request: StopRequest) -> Evaluation:
    """All rounds that are left; returns the last evaluation."""
    state, config = clients.state, clients.state.scene.config
    evaluation: Evaluation | None = None
    while state.round < config.rounds:
        answers = clients.play(score=state.lacks_scores)
        if answers.scores is not None:
            state.add_scores(answers.scores)
        telling.tell()
        state.merge(answers)
        if state.lacks_scores and not clients.scores_late:
            evaluation = clients.evaluate(is_last=state.round == config.rounds)
            state.add_scores(evaluation)
        telling.tell(clients.usage())
        if state.round % config.checkpoint_every == 0 or state.round == config.rounds or request.is_asked:
            state.save(clients.manifest())
        if request.is_asked and state.round < config.rounds:
            raise KeyboardInterrupt
    if evaluation is None or not state.is_due(state.round):
        evaluation = clients.evaluate(is_last=True)
        if state.lacks_scores:
            state.add_scores(evaluation)
            state.save(clients.manifest())
    telling.tell()
    return evaluation


class _Telling:
    """Tells the callback and rounds.csv of every row once, when nothing will be added to it any more."""

    def __init__(self, state: RunState, callback: Callback) -> None:
        self.state, self.callback = state, callback
        rows = state.complete_rows()
        self.n_told, self.n_reasons = len(rows), len(state.usage.why)
        if state.folder is not None:
            results.write_rounds(state.folder, rows)
        callback.started(state)

    def tell(self, usage: Usage | None = None) -> None:
        """Rows that are complete now; and why the engine is eager, each reason once."""
        for row in self.state.complete_rows()[self.n_told :]:
            if self.state.folder is not None:
                results.append_round(self.state.folder, row)
            self.n_told += 1
            self.callback.played(self.state, row)
        if usage is not None:
            why = self.state.usage.plus(usage).why
            for reason in why[self.n_reasons :]:
                self.state.say(f"engine: some steps are not run in the fastest way: {reason}")
            self.n_reasons = len(why)


def _how_to_resume(clients: Clients) -> str:
    words = f"interrupted after round {clients.state.round}"
    return words if clients.state.folder is None else f"{words}; {clients.how_to_resume}"


def write_results(folder: Path, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What a run folder has when the run has ended."""
    results.write_clients(folder, rows)
    results.write_summary(folder, summary)


def read_result(folder: Path) -> Result:
    """The numbers of a run that has ended, from its folder."""
    if not (folder / "summary.json").exists():
        raise UsageError(f"{folder} has no summary.json: is it a run folder, and has the run ended?")
    summary, rounds, clients = results.read_ended(folder)
    return Result(summary, rounds, clients, {}, folder)
