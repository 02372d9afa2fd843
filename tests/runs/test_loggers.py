"""Loggers for other tools: files that hold the numbers of every round."""

import pytest

from plures.cli import main
from plures.runs.callbacks import Callback
from plures.runs.loggers import makers, with_loggers
from tests.small import run_of

QUICK = ["--clients", "4", "--rounds", "2", "--partition", "dirichlet:0.5", "--workers", "1", "--quiet"]


class Hears(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def started(self, state) -> None:
        self.heard.append("started")

    def played(self, state, row) -> None:
        self.heard.append(f"round {row.round}")

    def ended(self) -> None:
        self.heard.append("ended")


def test_all_callbacks_hear_everything():
    first, second = Hears(), Hears()
    together = with_loggers(first, [lambda name: second], "a run")
    run = run_of("fedavg")
    together.started(run.state)
    together.played(run.state, run.play_round())
    together.ended()
    run.close()
    assert first.heard == second.heard == ["started", "round 1", "ended"]
    assert with_loggers(first, makers(None), "a run") is first


@pytest.mark.parametrize(
    ("asked", "words"),
    [("tensorbord:x", "did you mean 'tensorboard'?"), ("mlflow", "has no folder; write --log mlflow:DIR")],
)
def test_a_mistake_is_told_before_anything_runs(asked, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.call(["run", "fedavg", *QUICK, "--log", asked]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_tensorboard_has_every_round_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert main.call(["run", "fedavg", *QUICK, "--out", "r", "--log", "tensorboard:t"]) == 0
    events = EventAccumulator(str(tmp_path / "t" / "r"))
    events.Reload()
    assert [event.step for event in events.Scalars("personal_mean")] == [1, 2]


def test_mlflow_has_every_round_of_a_comparison(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    assert main.call(["compare", "local", "fedavg", *QUICK, "--out", "c", "--log", "mlflow:m"]) == 0
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "m").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "plures"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"local-seed0", "fedavg-seed0"} and runs["local-seed0"].data.params["rounds"] == "2"
    history = client.get_metric_history(runs["fedavg-seed0"].info.run_id, "personal_mean")
    assert [one.step for one in history] == [1, 2] and runs["fedavg-seed0"].info.status == "FINISHED"
