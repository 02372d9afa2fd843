"""What users meet in the terminal: output, exit codes, and the words of errors."""

import json
import re

import numpy as np
import pytest
from safetensors import safe_open

from plures.cli import main
from plures.methods import METHODS
from plures.runs.loop import read_result

QUICK = ["--clients", "4", "--rounds", "2", "--partition", "dirichlet:0.5", "--workers", "1"]


@pytest.fixture
def plures(tmp_path, monkeypatch, capsys):
    """Call the command line in an empty folder: gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main.call([str(item) for item in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_run_with_json_prints_the_summary_and_nothing_else(plures, tmp_path):
    code, out, err = plures("run", "fedavg", *QUICK, "--json", "--out", "here")
    assert code == 0
    assert json.loads(out) == read_result(tmp_path / "here").summary
    assert "round 2/2" in err and "round 2/2" in (tmp_path / "here" / "log.txt").read_text()


def test_run_prints_a_table_and_the_folder(plures):
    code, out, _ = plures("run", "fedavg", *QUICK)
    assert code == 0 and "personal" in out and "runs/fedavg-digits-0001" in out


def test_run_with_settings_and_parts(plures):
    code, out, _ = plures("run", "ditto:lam=0.5+ala", *QUICK, "--set", "cap=3", "--set", "p=2", "--json", "--quiet")
    settings = json.loads(out)["settings"]
    assert code == 0 and (settings["lam"], settings["cap"], settings["p"]) == (0.5, 3, 2)


def test_compare_gives_table_report_and_harmed_clients(plures, tmp_path):
    code, out, _ = plures("compare", "local", "fedavg", *QUICK, "--out", "c")
    assert code == 0 and "report: c/report.html" in out
    page = (tmp_path / "c" / "report.html").read_text()
    assert "fedavg" in page and 'id="rounds"' in page and not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    summary = json.loads((tmp_path / "c" / "fedavg" / "summary.json").read_text())
    assert summary["harmed"] is not None
    splits = {(tmp_path / "c" / name / "split.json").read_text() for name in ("local", "fedavg")}
    assert len(splits) == 1


def test_resume_of_a_finished_run_prints_its_summary(plures):
    _, first, _ = plures("run", "fedavg", *QUICK, "--json", "--out", "r")
    code, again, _ = plures("resume", "r", "--json")
    assert code == 0 and json.loads(again)["digest"] == json.loads(first)["digest"]


def test_export_writes_the_personal_model(plures, tmp_path):
    plures("run", "fedrep", *QUICK, "--out", "r")
    code, out, _ = plures("export", "r", "--client", 2, "-o", "m.safetensors")
    assert code == 0 and "4 tensors" in out
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        assert set(file.keys()) == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}
        assert file.metadata()["client"] == "2" and np.isfinite(file.get_tensor("head.weight")).all()


def test_export_of_a_client_that_is_not_there_is_refused(plures):
    plures("run", "fedavg", *QUICK, "--out", "r")
    code, _, err = plures("export", "r", "--client", 9)
    assert code == 2 and "clients are 0 to 3" in err


@pytest.mark.parametrize("what", ["methods", "data", "models", "partitions"])
def test_list_names_everything(plures, what):
    code, out, _ = plures("list", what)
    expected = {"methods": list(METHODS), "data": ["digits", "cifar100"], "models": ["mlp", "hncnn-bn"]}
    assert code == 0 and all(name in out for name in expected.get(what, ["dirichlet-class", "labels"]))


@pytest.mark.parametrize("name", list(METHODS))
def test_show_tells_idea_settings_and_what_travels(plures, name):
    code, out, _ = plures("show", name)
    assert code == 0 and "Differs from the paper" in out and "Settings" in out
    assert "kept by a client, never sent" in out and "down, per client and round" in out


def test_doctor_shows_head_layers_and_odd_clients(plures, tmp_path):
    rows = {"train": [[0], [1, 2, 3], list(range(10, 60))], "test": [[], [4], [5, 6]]}
    (tmp_path / "split.json").write_text(json.dumps(rows))
    code, out, _ = plures("doctor", "fedala", "--split", "split.json")
    assert code == 0 and "head: 10x64, 10  <- head" in out
    assert "1 of 3 clients have one training row" in out
    assert "1 of 3 clients have fewer rows than a batch of 10" in out
    assert "1 of 3 clients have no test rows" in out


def test_dry_run_writes_nothing(plures, tmp_path):
    code, out, _ = plures("run", "fedala", *QUICK, "--dry-run")
    assert code == 0 and 'method = "fedala"' in out and not list(tmp_path.iterdir())


def test_config_file_is_read_and_the_command_line_wins(plures, tmp_path):
    (tmp_path / "c.toml").write_text("clients = 4\nrounds = 5\nlr = 0.05\n[settings]\nlam = 0.3\n")
    code, out, _ = plures("run", "ditto", "--config", "c.toml", "--rounds", "1", "--json", "--quiet")
    summary = json.loads(out)
    assert code == 0 and (summary["clients"], summary["rounds"], summary["settings"]["lam"]) == (4, 1, 0.3)


def test_own_model_by_module_and_class(plures, tmp_path, monkeypatch):
    (tmp_path / "mine_for_a_test.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, n_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, n_classes))\n"
    )
    code, out, _ = plures("doctor", "fedavg", "--model", "mine_for_a_test:Net")
    assert code == 0 and "3: 10x7, 10  <- head" in out


def test_own_data_as_npz(plures, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 5)).astype("float32"), y=rng.integers(0, 3, 60))
    code, out, _ = plures("run", "fedavg", "--data", "d.npz", *QUICK, "--json", "--quiet")
    assert code == 0 and json.loads(out)["data"] == "d.npz"


WRONG = [
    (["run", "fedalla"], 2, "unknown method 'fedalla'; did you mean 'fedala'?"),
    (["run", "ditto+alla"], 2, "unknown add-on 'alla'; did you mean 'ala'?"),
    (["run", "local+ala"], 2, "Local cannot take the add-on ala"),
    (["run", "ditto", "--set", "lamb=1"], 2, "did you mean 'lam'?"),
    (["run", "ditto", "--set", "lam"], 2, "--set takes key=value"),
    (["run", "ditto", "--set", "lam=-1"], 2, "Ditto.lam must be 0 or more, got -1.0"),
    (["run", "ditto", "--set", "lam=much"], 2, "Ditto.lam must be a number, got 'much'"),
    (["run", "fedala", "--set", "p=1.5"], 2, "Ala.p must be a whole number"),
    (["run", "fedrod", "--set", "loss=bsmm"], 2, "FedRoD.loss must be one of ce, ir, ldam, cdt, bsm"),
    (["run", "fedavg", "--data", "digit"], 2, "did you mean 'digits'?"),
    (["run", "fedavg", "--data", "nowhere.npz"], 3, "nowhere.npz"),
    (["run", "fedavg", "--data", "mnist", "--data-dir", "empty"], 3, "mnist"),
    (["run", "fedavg", "--model", "mpl"], 2, "did you mean 'mlp'?"),
    (["run", "fedavg", "--model", "nowhere:Net"], 2, "cannot import 'nowhere'"),
    (["run", "fedavg", "--model", "cnn4"], 2, "needs images of at least 16x16"),
    (["run", "fedavg", "--partition", "dirichlet"], 2, "dirichlet"),
    (["run", "fedavg", "--partition", "dirichlett:1"], 2, "did you mean 'dirichlet'?"),
    (["run", "fedavg", "--partition", "pathological:11"], 2, "11"),
    (["run", "fedavg", "--clients", "5000"], 2, "5000"),
    (["run", "fedavg", "--participation", "2"], 2, "participation"),
    (["run", "fedavg", "--rounds", "many"], 2, "many"),
    (["run", "fedavg", "--epochs", "1", "--steps", "2"], 2, "give one of them"),
    (["run", "fedavg", "--optimizer", "adamm"], 2, "optimizer"),
    (["run", "fedavg", "--optimizer", "adam", "--momentum", "0.9"], 2, "momentum is for sgd"),
    (["run", "fedavg", "--executor", "stacked"], 2, "executor"),
    (["run", "fedavg", "--config", "nowhere.toml"], 2, "nowhere.toml"),
    (["run", "fedavg", "--split", "nowhere.json"], 3, "nowhere.json"),
    (["run", "fedavg", "--lr", "1e12", "--quiet"], 4, "is not a finite number"),
    (["resume", "nowhere"], 2, "not a run folder"),
    (["report", "nowhere"], 2, "summary.json"),
    (["list", "method"], 2, "did you mean 'methods'?"),
    (["compare", "fedavg", "fedavg"], 2, "named twice"),
    (["compare", "fedavg", "--seeds", "one"], 2, "--seeds takes whole numbers"),
    (["runn"], 2, "No such command"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG, ids=[" ".join(a) for a, _, _ in WRONG])
def test_mistake_gets_a_sentence_and_its_exit_code(plures, arguments, code, words):
    got, out, err = plures(*arguments)
    assert got == code
    assert words in err
    assert "Traceback" not in err and out == ""


def test_debug_shows_the_traceback(plures):
    from plures.errors import UsageError

    with pytest.raises(UsageError):
        plures("run", "fedalla", "--debug")
