"""`plures verify`: a run is run again and compared."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from plures.cli import main
from plures.errors import UsageError
from plures.runs import verify
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import start

OPTIONS = {"data": "digits", "clients": 5, "rounds": 2, "new_clients": 1, "executor": "one_by_one"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "run"
    folder.mkdir()
    start(make_scene(make_config({"method": "ditto", **OPTIONS})), folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def forget_checksums(folder):
    """As a forger would, or as in a folder of an earlier version: then only running it again finds a change."""
    config = folder / "config.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("# check")))
    summary = json.loads((folder / "summary.json").read_text())
    kept = {key: value for key, value in summary.items() if key not in ("check", "sha256")}
    (folder / "summary.json").write_text(json.dumps(kept))


def test_a_changed_file_is_told_by_its_checksum(run, capsys):
    change(run / "summary.json", '"refused_updates": 0', '"refused_updates": 1')
    assert main.call(["verify", str(run), "--quiet"]) == 3
    assert "summary.json of" in capsys.readouterr().err


def test_a_run_as_it_was_left_is_verified(run, capsys):
    assert main.call(["verify", str(run), "--quiet", "--workers", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "is verified: run again, it has the same digest" in out
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main.call(["verify", str(run), "--json", "--quiet"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["is_same"] and found["digest"] == found["recomputed"] and found["differences"] == []
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before  # nothing is written there


def test_a_changed_number_is_found(run, capsys):
    forget_checksums(run)
    summary = json.loads((run / "summary.json").read_text())
    summary["personal"]["mean"] += 0.01
    (run / "summary.json").write_text(json.dumps(summary))
    loss = (run / "rounds.csv").read_text().splitlines()[1].split(",")[2]
    change(run / "rounds.csv", loss, "0.5")
    assert main.call(["verify", str(run), "--quiet"]) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "summary.json: personal mean is" in said and "rounds.csv: row 1 loss is" in said and "digest of" not in said


def test_another_config_another_state_and_another_digest_are_found(run):
    forget_checksums(run)
    file = next((run / "checkpoint" / "000002").glob("clients-*.safetensors"))
    change(run / "config.toml", "lr = 0.", "lr = 0.0")
    found = verify.verify(run, workers=1)
    assert found.is_same is False and "the digest of the state is" in found.words
    assert any("from another config than its config.toml" in one for one in found.differences)
    change(run / "config.toml", "lr = 0.0", "lr = 0.")
    tensors = load_file(file)
    name = next(name for name in tensors if tensors[name].is_floating_point())
    tensors[name] = tensors[name] + 1
    save_file(tensors, file)
    found = verify.verify(run, workers=1)
    assert found.differences == ["its newest checkpoint is damaged"]
    change(run / "summary.json", found.digest, "0" * 64)
    assert "the digest of the state is" in verify.verify(run, workers=1).words


def test_another_split_is_found_before_anything_is_run(run, monkeypatch):
    forget_checksums(run)
    monkeypatch.setattr(verify, "start", None)
    text = json.loads((run / "split.json").read_text())
    train = text["train"]
    train[0], train[1] = train[1], train[0]
    (run / "split.json").write_text(json.dumps(text))
    found = verify.verify(run)
    assert found.is_same is False and "split" in found.words and found.recomputed is None


def test_an_unfinished_run_is_told_and_so_is_a_folder_without_one(run, tmp_path, capsys):
    (run / "summary.json").unlink()
    assert main.call(["verify", str(run)]) == 2
    assert "has not ended; finish it with: plures resume" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "empty").mkdir()
    assert main.call(["verify", str(tmp_path / "empty")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_version_that_is_not_out_yet_is_refused_and_another_one_is_told(run, monkeypatch):
    forget_checksums(run)
    monkeypatch.setattr(verify, "_version_of", lambda folder: "9.0.0")
    with pytest.raises(UsageError, match=r"made by version 9\.0\.0"):
        verify.verify(run)
    monkeypatch.setattr(verify, "_version_of", lambda folder: "0.1.5")
    change(run / "summary.json", '"digest": "', '"digest": "0')
    assert "It was made by Plures 0.1.5, and this is" in verify.verify(run, workers=1).words


def test_code_that_a_folder_names_is_not_run_without_trust(run, tmp_path, monkeypatch, capsys):
    forget_checksums(run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange_model.py").write_text("raise SystemExit('it was run')")
    change(run / "config.toml", 'model = "mlp"', 'model = "strange_model:Net"')
    assert main.call(["verify", str(run)]) == 2
    assert "names code that would be run" in capsys.readouterr().err


@pytest.mark.slow
def test_each_run_of_a_comparison_is_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--data", "digits", "--clients", "5", "--rounds", "2", "--out", "both", "--quiet"]
    assert main.call(["compare", "local", "fedavg", *words]) == 0
    capsys.readouterr()
    assert main.call(["verify", "both", "--json", "--quiet"]) == 0
    assert [one["folder"] for one in json.loads(capsys.readouterr().out)["runs"]] == ["both/fedavg", "both/local"]
    forget_checksums(tmp_path / "both" / "local")
    change(tmp_path / "both" / "local" / "clients.csv", "\n0,", "\n7,")
    assert main.call(["verify", "both", "--quiet"]) == 4
