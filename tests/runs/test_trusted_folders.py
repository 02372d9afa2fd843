"""A run folder is not believed: what a digest depends on is checked before a run goes on."""

import json
import multiprocessing
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import plures
from plures.cli.main import call
from plures.errors import DataError, UsageError
from plures.files import lock, lock_holder, sum_of
from plures.runs import checkpoint
from plures.runs.folders import open_config, write_config
from plures.runs.simulation import resume


def rows_file(path, shift=0.0, roll=0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    x[7, 2] += shift
    np.savez(path, x=x, y=np.roll(np.arange(60) % 3, roll), client=np.arange(60) % 3)
    return path


@pytest.fixture
def run(tmp_path):
    """A run of four rounds whose checkpoints are there and whose results are not: it can be resumed."""
    data = rows_file(tmp_path / "rows.npz")
    plures.run("fedavg", data=str(data), partition="natural", rounds=4, checkpoint_every=1, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def manifests(folder):
    return sorted(folder.glob("checkpoint/*/manifest.json"))


@pytest.mark.parametrize(
    "text, other", [('"round": 4', '"round": 3'), ('"refused": 0', '"refused": 1'), ('"0.2.', '"0.1.')]
)
def test_a_changed_manifest_is_torn_and_the_one_before_it_is_taken(run, text, other, capsys):
    newest = manifests(run)[-1]
    assert text in newest.read_text()
    newest.write_text(newest.read_text().replace(text, other, 1))
    undisturbed = plures.run("fedavg", data=str(run.parent / "rows.npz"), partition="natural", rounds=4)
    said = []
    result = resume(run, said.append)
    assert any("has changed since it was written" in line for line in said)
    assert result.summary["rounds"] == 4 and result.summary["digest"] == undisturbed.summary["digest"]


def test_any_flipped_bit_of_a_manifest_is_noticed(run):
    newest = manifests(run)[-1]
    whole, known = newest.read_bytes(), checkpoint.whole_manifest(newest.parent)
    rng = np.random.default_rng(1)
    for at in rng.choice(len(whole), 60, replace=False):
        for bit in rng.choice(8, 2, replace=False):
            newest.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << int(bit))]) + whole[at + 1 :])
            found, torn = checkpoint.read(run / "checkpoint")
            assert found is not None
            is_same = found.manifest == known  # an E for an e in a number
            assert is_same or (found.manifest["round"] == 3 and len(torn) == 1), (at, bit)


@pytest.mark.parametrize("change", [{"shift": 1e-6}, {"roll": 1}])
def test_other_rows_are_refused(run, change):
    rows_file(run.parent / "rows.npz", **change)
    with pytest.raises(DataError, match=r"the rows of .* have changed since the run"):
        resume(run)


def test_another_split_is_refused(run):
    split = json.loads((run / "split.json").read_text())
    train = split["train"]
    train[0][0], train[1][0] = train[1][0], train[0][0]
    (run / "split.json").write_text(json.dumps(split))
    with pytest.raises(DataError, match=r"split\.json"):
        resume(run)


def test_a_checkpoint_of_a_newer_version_is_refused(run):
    for path in manifests(run):
        manifest = json.loads(path.read_text())
        manifest.pop("check")
        manifest["plures"] = "9.9.9"
        path.write_text(json.dumps(manifest | {"check": sum_of(manifest)}))
    with pytest.raises(UsageError, match=r"made by version 9\.9\.9"):
        resume(run)


def hold(path, ready):
    with lock(path, "the run"):
        ready.set()
        time.sleep(60)


def test_two_processes_do_not_write_one_folder(run, capsys):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=hold, args=(run / "pid", ready))
    other.start()
    try:
        assert ready.wait(20)
        assert call(["resume", str(run)]) == 2
        assert f"is running already, as process {other.pid}" in capsys.readouterr().err
        assert lock_holder(run / "pid") == other.pid
    finally:
        other.kill()
        other.join()
    assert call(["resume", str(run)]) == 0


def resume_when(start, run):
    start.wait()
    sys.exit(call(["resume", str(run), "--quiet", "--rounds", "300"]))


def test_of_two_resumes_at_once_one_works_and_the_other_says_who_has_the_folder(run, capfd):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    both = [context.Process(target=resume_when, args=(start, run)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert sorted(process.exitcode for process in both) == [0, 2]
    winner = next(process for process in both if process.exitcode == 0)
    assert f"is running already, as process {winner.pid}" in capfd.readouterr().err
    assert len((run / "rounds.csv").read_text().splitlines()) == 1 + 300


def test_a_config_that_another_process_replaces_is_read_as_it_was_or_as_it_is(run, monkeypatch):
    before = open_config(run)
    real = Path.read_text

    def read_and_replace(path, *args, **options):
        text = real(path, *args, **options)
        if path.name == "config.toml":
            write_config(run, before.model_copy(update={"rounds": before.rounds + 5}))
        return text

    monkeypatch.setattr(Path, "read_text", read_and_replace)
    assert open_config(run).rounds == before.rounds
    assert open_config(run).rounds == before.rounds + 5


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    with lock(tmp_path / "pid", "the run"):
        child = context.Process(target=stop.wait, args=(30,))
        child.start()
    try:
        assert lock_holder(tmp_path / "pid") is None
    finally:
        stop.set()
        child.join()


# Code of strangers

GIFT = """
import pathlib, torch
pathlib.Path(__file__).with_name("opened").write_text("the gift was opened")
class Net(torch.nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.head = torch.nn.Linear(shape[0], n_classes)
    def forward(self, x):
        return self.head(x)
"""


@pytest.fixture
def gift(run, tmp_path, monkeypatch):
    """A run folder whose config names a model in a module beside it."""
    (tmp_path / "gift_net.py").write_text(GIFT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "gift_net", raising=False)
    config = run / "config.toml"
    text = config.read_text().partition("# check")[0]  # a stranger can write any sum
    config.write_text(text.replace('model = "mlp"', 'model = "gift_net:Net"'))
    assert "gift_net" in config.read_text()
    return run


@pytest.mark.parametrize(
    "command",
    [["resume"], ["export", "--client", "0"], ["adapt", "--class-counts", "1,2,3"]],
    ids=lambda command: command[0],
)
def test_code_that_a_folder_names_is_not_run(gift, command, capsys):
    assert call([command[0], str(gift), *command[1:]]) == 2
    assert "names code that would be run: model 'gift_net:Net'" in capsys.readouterr().err
    assert not (gift.parent / "opened").exists()


def test_a_report_is_made_without_running_it(run, gift, tmp_path):
    other = tmp_path / "other"
    plures.run("fedavg", data=str(tmp_path / "rows.npz"), partition="natural", rounds=1, out=other)
    for name in ("summary.json", "rounds.csv", "clients.csv"):
        shutil.copy(other / name, gift / name)
    assert call(["report", str(gift), "-o", str(tmp_path / "page.html")]) == 0
    assert not (tmp_path / "opened").exists()
    assert "names code that would be run" in (tmp_path / "page.html").read_text()


def test_with_trust_it_is_run(gift):
    with pytest.raises(UsageError, match="names code"):
        plures.resume(gift)
    with pytest.raises(UsageError, match="another config"):  # the checkpoint is of the mlp
        plures.resume(gift, trust=True)
    assert (gift.parent / "opened").exists()


def test_an_address_that_a_folder_names_is_not_connected_to(run):
    config = run / "config.toml"
    text = config.read_text().partition("# check")[0]
    text = re.sub(r'executor = "\w+"', 'executor = "ray"\naddress = "ray://203.0.113.7:10001"', text)
    config.write_text(text)
    with pytest.raises(UsageError, match="Ray cluster that would be connected to"):
        resume(run)
