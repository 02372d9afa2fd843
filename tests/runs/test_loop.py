"""A run as a whole: its folder, its numbers, and that nothing is lost however it ends."""

import csv
import errno
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import plures
from plures import tree
from plures.errors import DataError, Interrupted, RunFailed, UsageError
from plures.files import read_toml
from plures.runs import checkpoint
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.folders import new_folder
from plures.runs.scene import make_scene
from plures.runs.simulation import open_simulation, resume, simulate, start
from plures.simulate.client_store import ClientStore
from plures.simulate.sampling import draw_cohort
from tests.small import played, run_of

SUMMARY = """plures method settings data model partition clients participation rounds seed executor metric personal
generic harmed bytes flops personal_flops seconds peak_rss_mb refused_updates engine digest""".split()
SMALL = {"clients": 5, "partition": "dirichlet:0.5", "rounds": 6, "epochs": 1, "checkpoint_every": 2}


def quiet(line: str) -> None:
    pass


def in_another_process(config, folder: Path, callback: Callback) -> int:
    """Start a run in a child process and give its number; the child never returns."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            torch.set_num_threads(1)  # a forked process must not touch the threads of its parent
            start(make_scene(config), folder, quiet, callback)
            code = 0
        except plures.errors.PluresError as error:
            (folder / "said.txt").write_text(str(error))
            code = error.exit_code
        finally:
            os._exit(code)
    return child


class Slow(Callback):
    """Leaves time between rounds for what is done to the run."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds

    def played(self, state, row) -> None:
        time.sleep(self.seconds)


def n_rounds_written(folder: Path) -> int:
    path = folder / "rounds.csv"
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


def wait_for_rounds(folder: Path, n: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while n_rounds_written(folder) < n:
        assert time.monotonic() < end, "the run in the other process does not get on"
        time.sleep(0.005)


# One of every kind of state: none, of clients, of the server, of both, drawn numbers, several models.
@pytest.mark.parametrize("name", ["fedavg", "local", "fedala:cap=12", "pfedla", "scaffold", "afml", "apple"])
def test_killed_run_resumes_to_the_same_digest(name, tmp_path):
    config = make_config({"method": name, **SMALL, "workers": 2, "participation": 0.6})
    whole = start(make_scene(config), None, quiet, Callback())
    folder = tmp_path / "run"
    folder.mkdir()
    child = in_another_process(config, folder, Slow())
    wait_for_rounds(folder, random.Random(name).randrange(1, 6))
    time.sleep(random.Random(name).random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (folder / "summary.json").exists()
    again = resume(folder, quiet, Callback())
    assert again.summary["digest"] == whole.summary["digest"]
    assert [row["round"] for row in again.rounds] == [1, 2, 3, 4, 5, 6]
    assert n_rounds_written(folder) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_a_checkpoint_and_says_how_to_resume(number, tmp_path):
    config = make_config({"method": "ditto", **SMALL, "workers": 2, "checkpoint_every": 1000})
    whole = start(make_scene(config), None, quiet, Callback())
    folder = tmp_path / "run"
    folder.mkdir()
    child = in_another_process(config, folder, Slow(0.2))
    wait_for_rounds(folder, 2)
    os.killpg(child, number)  # as a terminal does: the workers get it too
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert f"plures resume {folder}" in (folder / "said.txt").read_text()
    with open_simulation(folder) as run:
        assert 2 <= run.state.round < 6
    assert resume(folder, quiet, Callback()).summary["digest"] == whole.summary["digest"]


def test_second_interrupt_stops_at_once_and_keeps_the_last_round(tmp_path):
    config = make_config({"method": "ditto", **SMALL, "checkpoint_every": 1000})
    whole = start(make_scene(config), None, quiet, Callback())
    folder = tmp_path / "run"
    folder.mkdir()
    child = in_another_process(config, folder, Slow(20))
    wait_for_rounds(folder, 1)
    began = time.monotonic()
    for _ in range(2):
        time.sleep(0.1)
        os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert time.monotonic() - began < 10
    assert resume(folder, quiet, Callback()).summary["digest"] == whole.summary["digest"]


@pytest.mark.parametrize("file", ["state.safetensors", "clients-00000.safetensors", "manifest.json"])
def test_torn_checkpoint_is_passed_over_for_the_one_before(file, tmp_path):
    config = make_config({"method": "ditto", **SMALL})
    whole = start(make_scene(config), tmp_path, quiet, Callback())
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["000004", "000006"]
    newest = tmp_path / "checkpoint" / "000006" / file
    newest.write_bytes(newest.read_bytes()[:-100])
    (tmp_path / "summary.json").unlink()
    said = []
    again = resume(tmp_path, said.append, Callback())
    assert "000006 cannot be read" in said[0] and "the one before" in said[0]
    assert again.summary["digest"] == whole.summary["digest"]


def test_clients_are_written_and_read_some_at_a_time(tmp_path, monkeypatch):
    run = played(run_of("ditto", folder=tmp_path), 2)
    a_client = tree.n_bytes(run.state.store.initial)
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 2 * a_client + 1)
    run.state.save(run.manifest())
    again = run_of("ditto", folder=tmp_path)
    again.state.load()
    assert again.state.digest() == run.state.digest()
    found, _ = checkpoint.read(tmp_path / "checkpoint")
    assert {len(ids) for ids, _ in found.blocks()} <= {1, 2}
    [(ids, rows)] = run.state.store.written_rows(100)
    torch.testing.assert_close(found.clients(), (ids, dict(zip(tree.names(rows), tree.leaves(rows), strict=True))))


def test_checkpoint_of_another_config_is_refused(tmp_path):
    start(make_scene(make_config({"method": "ditto", **SMALL})), tmp_path, quiet, Callback())
    text = (tmp_path / "config.toml").read_text().replace("lr = 0.05\n", "lr = 0.2\n")
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(DataError, match=r"config\.toml has changed since the run began"):
        resume(tmp_path, quiet, Callback())
    (tmp_path / "config.toml").write_text(text.partition("# check config.toml")[0])
    with pytest.raises(UsageError, match="another config"):
        resume(tmp_path, quiet, Callback())


def test_finished_run_resumes_to_itself(tmp_path):
    config = make_config({"method": "fedala:cap=12", **SMALL})
    whole = start(make_scene(config), tmp_path, quiet, Callback())
    again = resume(tmp_path, quiet, Callback())
    assert again.summary == whole.summary
    (tmp_path / "summary.json").unlink()
    again = resume(tmp_path, quiet, Callback())
    assert again.summary["digest"] == whole.summary["digest"]
    assert again.summary["personal"] == whole.summary["personal"]


def test_run_folder_holds_what_the_contract_names(tmp_path):
    result = plures.run("fedrod", out=tmp_path / "run", **SMALL)
    folder = tmp_path / "run"
    assert {"config.toml", "split.json", "rounds.csv", "clients.csv", "summary.json", "checkpoint"} <= {
        path.name for path in folder.iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == [*SUMMARY, "sha256", "check"]
    assert {key: summary[key] for key in SUMMARY} == json.loads(json.dumps(result.summary))
    named = {"mean", "pooled", "std", "worst5", "top5", "best_round", "best_mean", "model", "scored", "never_trained"}
    assert named <= set(summary["personal"])
    named = {
        "accuracy",
        "pooled",
        "on_clients",
        "worst5",
        "top5",
        "reweighted",
        "as_trained",
        "balanced",
        "is_mean_of_personal",
    }
    assert named == set(summary["generic"])
    assert list(summary["seconds"]) == ["train", "evaluate", "total"]
    rounds = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    assert [int(row["round"]) for row in rounds] == [1, 2, 3, 4, 5, 6]
    clients = list(csv.DictReader((folder / "clients.csv").read_text().splitlines()))
    assert len(clients) == 5
    mean = np.mean([float(row["personal_accuracy"]) for row in clients])
    assert abs(mean - summary["personal"]["mean"]) < 1e-9


def test_config_of_a_run_folder_runs_to_the_same_digest(tmp_path):
    first = plures.run("ditto", out=tmp_path / "a", settings={"lam": 0.7}, **SMALL)
    config = make_config(read_toml(tmp_path / "a" / "config.toml"))
    assert start(make_scene(config), None, quiet, Callback()).summary["digest"] == first.summary["digest"]


def test_split_file_replays_a_split(tmp_path):
    first = plures.run("ditto", out=tmp_path / "a", **SMALL)
    again = plures.run("ditto", **{**SMALL, "partition": "iid", "split": str(tmp_path / "a" / "split.json")})
    assert again.summary["digest"] == first.summary["digest"]
    assert again.summary["partition"] == "split file"


@pytest.mark.parametrize("eval_every", [2, 7, 0])
def test_how_often_is_evaluated_changes_no_digest(eval_every):
    reference = plures.run("fedala:cap=12", **SMALL)
    other = plures.run("fedala:cap=12", **SMALL, eval_every=eval_every)
    assert other.summary["digest"] == reference.summary["digest"]
    assert other.summary["personal"]["mean"] == reference.summary["personal"]["mean"]


def test_another_seed_gives_another_digest():
    digests = {plures.run("fedavg", **SMALL, seed=seed).summary["digest"] for seed in (0, 1)}
    assert len(digests) == 2


def test_executors_agree_on_accuracies_to_a_sample_or_two():
    stacked, alone = (plures.run("fedrod", **SMALL, executor=e) for e in ("vectorised", "one_by_one"))
    assert stacked.summary["digest"] != alone.summary["digest"]
    n_test = sum(row["n_test"] for row in stacked.clients)
    difference = abs(stacked.summary["personal"]["pooled"] - alone.summary["personal"]["pooled"])
    assert difference * n_test <= 2.01


def test_state_in_a_file_gives_the_same_digest_as_in_memory(tmp_path):
    in_memory = plures.run("ditto", out=tmp_path / "a", **SMALL)
    in_file = plures.run("ditto", out=tmp_path / "b", **SMALL, memory_limit_mb=0, workers=2)
    assert in_file.summary["digest"] == in_memory.summary["digest"]


def test_client_store_goes_to_a_file_past_the_limit(tmp_path):
    initial = {"model": torch.arange(1000.0)}
    store = ClientStore(initial, 300, 1 << 20, tmp_path)
    assert store.on_disk and not ClientStore(initial, 200, 1 << 20, tmp_path).on_disk
    store.put(torch.tensor([7, 299]), {"model": torch.ones(2, 1000)})
    rows = store.rows(torch.tensor([0, 7, 299]))["model"]
    assert torch.equal(rows[0], initial["model"]) and bool((rows[1:] == 1).all())


def test_loss_that_is_not_a_number_ends_the_run_and_names_round_and_client(tmp_path):
    config = make_config({"method": "fedavg", **SMALL, "lr": 1e12})
    with pytest.raises(RunFailed, match=r"round \d+: the loss of client \d+.* lower lr") as raised:
        start(make_scene(config), tmp_path, quiet, Callback())
    assert raised.value.exit_code == 4
    with open_simulation(tmp_path) as run:
        pass
    assert bool(tree.all_finite(tree.map(lambda x: x[None], run.state.server), 1))


def test_update_that_is_not_finite_is_refused_and_counted(monkeypatch):
    run = run_of("ditto")
    honest = run.executor.train

    def one_bad(round, message, ids):
        trained = honest(round, message, ids)
        trained.uploads["head.bias"][2, 0] = torch.nan
        return trained

    monkeypatch.setattr(run.executor, "train", one_bad)
    before = run.state.store.rows(torch.tensor([2]))
    played(run, 1)
    assert run.state.refused == 1 and run.state.rows[0].refused == 1
    after = run.state.store.rows(torch.tensor([2]))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True))
    assert bool(torch.isfinite(run.state.server["head.bias"]).all())


def test_run_fails_when_every_update_is_refused(monkeypatch):
    run = run_of("fedavg")
    honest = run.executor.train

    def all_bad(round, message, ids):
        trained = honest(round, message, ids)
        return trained._replace(uploads=tree.map(lambda x: x * torch.inf, trained.uploads))

    monkeypatch.setattr(run.executor, "train", all_bad)
    with pytest.raises(RunFailed, match="every client's update"):
        played(run, 1)


def test_full_disk_is_told_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    run = played(run_of("ditto", folder=tmp_path), 1)
    run.state.save(run.manifest())

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_flushed", full)
    run.state.round = 2
    with pytest.raises(RunFailed, match="the disk is full"):
        run.state.save(run.manifest())
    monkeypatch.undo()
    found, torn = checkpoint.read(tmp_path / "checkpoint")
    assert found is not None and found.manifest["round"] == 1 and torn == []


def test_worker_that_dies_ends_the_run_in_words():
    run = run_of("fedavg", workers=2)
    for process in run.executor._workers._processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with pytest.raises(RunFailed, match="a worker process ended"):
        played(run, 1)


def test_clients_without_rows_sit_out_and_are_listed(tmp_path):
    split = {"train": [[0, 1, 2, 3], [], [4, 5, 6, 7, 8], [9]], "test": [[20, 21], [22], [23], []]}
    (tmp_path / "split.json").write_text(json.dumps(split))
    result = plures.run("fedavg", split=str(tmp_path / "split.json"), rounds=2)
    assert [row["n_train"] for row in result.clients] == [4, 0, 5, 1]
    scored = [row["personal_accuracy"] is not None for row in result.clients]
    assert scored == [True, False, True, False]
    assert result.summary["clients"] == 4 and sorted(result.models) == [0, 2, 3]


def test_split_in_which_nobody_has_rows_is_refused(tmp_path):
    (tmp_path / "split.json").write_text(json.dumps({"train": [[], []], "test": [[], []]}))
    with pytest.raises(DataError, match="no client has a row"):
        plures.run("fedavg", split=str(tmp_path / "split.json"), rounds=1)


def test_folder_that_holds_a_run_is_not_taken_again(tmp_path):
    plures.run("fedavg", out=tmp_path / "run", **SMALL)
    with pytest.raises(UsageError, match=r"already holds this run.*plures resume"):
        plures.run("fedavg", out=tmp_path / "run", **SMALL)
    with pytest.raises(UsageError, match="a run of another config"):
        plures.run("fedavg", out=tmp_path / "run", **SMALL, lr=0.3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a run folder"):
        new_folder(make_config({}), tmp_path / "other")


def test_cohorts_are_drawn_from_seed_and_round_alone():
    eligible = list(range(0, 40, 2))
    once, again = ([draw_cohort(eligible, 0.3, 3, r, "random") for r in range(5)] for _ in range(2))
    assert once == again and all(len(ids) == 6 for ids in once)
    assert len({tuple(ids) for ids in once}) > 1


def test_interruption_without_a_folder_says_so():
    class Stop(Callback):
        def played(self, state, row):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="after round 1"):
        simulate(make_scene(make_config({"method": "fedavg", **SMALL})), None, quiet, Stop())
