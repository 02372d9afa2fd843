"""A short version of the campaign of faults: a few trials of each kind, and what it found is mended for good."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plures
from plures.cli.main import call
from plures.errors import DataError, RunFailed
from plures.federate import audit
from plures.files import lock, write_text
from plures.runs import snapshots
from plures.runs.folders import read_values, write_config
from plures.runs.loop import read_result
from plures.runs.simulation import open_simulation, resume

ROOT = Path(__file__).resolve().parent.parent


def campaign(tmp_path, *kinds, most=2):
    command = [sys.executable, "scripts/faults.py", "run", *kinds, "--most", str(most), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for kind in kinds for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
    assert len(lines) == most * len(kinds)
    return lines


def test_a_few_trials_of_each_kind_lose_nothing_and_hide_nothing(tmp_path):
    found = campaign(tmp_path, "kills", "bits", "writes", "configs")
    assert [one for one in found if one["outcome"] not in ("survived", "told")] == []


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended") / "run"
    options = {"clients": 3, "rounds": 2, "batch": 50, "share": 0.2, "executor": "vectorised"}
    plures.run("fedala", **options, checkpoint_every=1, out=folder)
    return folder


@pytest.fixture
def run(ended, tmp_path):
    """A run that has ended, in a folder of its own."""
    subprocess.run(["cp", "-r", ended, tmp_path / "run"], check=True)
    return tmp_path / "run"


def change_digit(path, after=""):
    """Another digit in a file, the first after some words."""
    text = path.read_text()
    at = next(i for i in range(text.index(after) + len(after), len(text)) if text[i].isdigit())
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


@pytest.mark.parametrize("name", ["rounds.csv", "clients.csv", "summary.json"])
def test_a_changed_digit_in_the_results_is_told_and_resume_writes_them_anew(run, name, capsys, tmp_path):
    whole = read_result(run)
    change_digit(run / name, "0.")
    with pytest.raises(DataError, match=f"{name} of .* has changed since the run wrote it"):
        read_result(run)
    assert call(["report", str(run), "-o", str(tmp_path / "page.html")]) == 3
    assert call(["resume", str(run)]) == 3
    assert "Delete summary.json there" in capsys.readouterr().err
    (run / "summary.json").unlink()
    again = resume(run)
    assert again.summary["digest"] == whole.summary["digest"] and again.clients == whole.clients
    assert read_result(run).clients == whole.clients


@pytest.mark.parametrize("name, after", [("config.toml", "goal = 0."), ("config.toml", "seed = "), ("split.json", "")])
def test_what_a_run_began_with_is_known_again_before_the_first_checkpoint(run, name, after):
    write_config(run, plures.runs.folders.read_config(run).model_copy(update={"goal": 0.25}))
    (run / "summary.json").unlink()
    subprocess.run(["rm", "-r", run / "checkpoint"], check=True)
    change_digit(run / name, after)
    with pytest.raises(DataError, match=rf"{name} has changed since the run began"):
        resume(run)


def test_how_a_run_is_run_may_be_changed_by_hand(run):
    config = run / "config.toml"
    text = config.read_text().replace("workers = 1", "workers = 2")
    config.write_text(text.replace('executor = "vectorised"', 'executor = "ray"'))
    assert read_values(run)["workers"] == 2 and read_values(run)["executor"] == "ray"


def test_a_summary_that_is_not_json_is_told(run, capsys):
    (run / "summary.json").write_text("{")
    assert call(["resume", str(run)]) == 3
    assert "has changed since the run wrote it" in capsys.readouterr().err


def test_a_changed_snapshot_is_told(run):
    path = sorted((run / "pictures").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"snapshot .* has changed since it was written"):
        snapshots.read(run)


def test_without_a_whole_checkpoint_no_untrained_model_is_given(run):
    for path in run.glob("checkpoint/*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(RunFailed, match=r"no checkpoint in .* can be read"), open_simulation(run):
        pass


def test_a_run_given_more_rounds_never_says_that_it_has_ended_before(run, monkeypatch):
    def full(*_):
        raise RunFailed("the disk is full")

    monkeypatch.setattr("plures.runs.simulation.write_config", full)
    with pytest.raises(RunFailed):
        resume(run, rounds=3)
    monkeypatch.undo()
    assert resume(run).summary["rounds"] == 2  # as if nothing had been asked for
    assert resume(run, rounds=3).summary["rounds"] == 3


class FullFile:
    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def truncate(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_under_a_lock_is_told_in_words(tmp_path, monkeypatch):
    real = open
    monkeypatch.setattr("builtins.open", lambda *args, **more: FullFile(real(*args, **more)))
    with pytest.raises(RunFailed, match="the disk is full"), lock(tmp_path / "pid", "the run"):
        pass


def test_an_error_of_a_disk_that_nobody_expected_is_a_sentence(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error", "somewhere")

    monkeypatch.setattr("plures.cli.listing.print_list", broken)
    assert call(["list", "methods"]) == 4
    assert "somewhere: Input/output error" in capsys.readouterr().err


def test_a_folder_has_a_config_only_when_it_can_be_resumed(tmp_path, monkeypatch):
    written = []

    def write(path, text):
        written.append(path.name)
        write_text(path, text)

    monkeypatch.setattr("plures.runs.folders.write_text", write)
    plures.run("fedavg", clients=2, rounds=0, share=0.1, out=tmp_path / "run")
    assert written[-1] == "config.toml" and "split.json" in written


def test_a_dry_run_of_very_many_epochs_takes_a_few_steps(capsys):
    words = ["run", "fedavg", "--clients", "2", "--batch", "50", "--share", "0.1", "--workers", "1", "--dry-run"]
    assert call([*words, "--epochs", "100000"]) == 0
    assert call([*words, "--local-work", "uniform:1-90000"]) == 0
    assert capsys.readouterr().out.count("a few steps were tried: a round takes about") == 2


def test_tables_are_written_between_their_marks_and_nothing_else_is_lost(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import faults  # here: it is a script, not a part of the package

    page = tmp_path / "page.md"
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    page.write_text(text)
    monkeypatch.setattr(faults, "PAGE", page)
    assert faults.write_page() == 0
    assert page.read_text() == text, "run `python scripts/faults.py write`"


def test_a_soak_over_flower_counts_the_last_answer_of_a_round_that_was_asked_twice(tmp_path, monkeypatch):
    """As when `start` is killed in a round. Requests that train nobody do not count, nor do rounds without an end."""
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.fault_kinds import soak_flower  # here: it is of a script, not a part of the package

    asked = "round 0, experiment x, ditto, train"
    for who, words, answered in (
        ("a", asked, "80 bytes"),
        ("b", asked, "refused: its loss is nan"),
        ("a", asked, "nothing"),
        ("b", asked, "81 bytes"),
        ("a", "round 1, experiment x, ditto, score, last", "9 bytes"),
        ("a", "round 1, experiment x, ditto, train", "82 bytes"),
        ("a", "hello", "30 and 10 rows"),
    ):
        audit.write(tmp_path / "audit.jsonl", who, words, answered)
    found = soak_flower._last_answers(tmp_path / "audit.jsonl", done=1)
    assert found == {(1, "a"): "nothing", (1, "b"): "81 bytes"}
    assert [soak_flower._is_update(answer) for answer in found.values()] == [False, True]
