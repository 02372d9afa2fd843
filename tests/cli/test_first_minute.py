"""What new users met: small things that must be there, and traps that must say something."""

import json
import re

import numpy as np
import pytest
from torch import nn

import plures
from plures.cli.main import call
from plures.errors import DataError, UsageError
from plures.runs.loop import read_result

SMALL = ["--clients", "4", "--rounds", "2", "--share", "0.2"]
OPTIONS = {"clients": 4, "rounds": 2, "share": 0.2}


def test_the_version_is_printed(capsys):
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"plures {plures.__version__}\n"


def test_help_shows_the_choices_of_an_option(capsys):
    assert call(["run", "--help"]) == 0
    found = capsys.readouterr().out
    for words in ("(sgd|adam|adamw;default:sgd)", "(none|labels|random|replace;default:none)", "(default:0.05)"):
        assert words in re.sub(r"[\s│]", "", found)


def test_shell_completion_is_there(capsys):
    assert call(["--help"]) == 0
    assert "--install-completion" in capsys.readouterr().out


def test_a_hint_is_given_once(capsys):
    assert call(["rn"]) == 2
    assert capsys.readouterr().err.count("Did you mean 'run'?") == 1


def test_an_unknown_value_of_equal_is_told_in_the_words_of_the_option(capsys):
    assert call(["compare", "local", "fedavg", "--equal", "money", *SMALL]) == 2
    assert "unknown value of --equal 'money'" in capsys.readouterr().err


def test_a_dry_run_takes_real_steps_and_tells_the_time(capsys):
    assert call(["run", "fedavg", "--dry-run", *SMALL]) == 0
    assert "a few steps were tried: a round takes about" in capsys.readouterr().out


class Deciding(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.head = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))  # by numbers: such clients cannot be stacked


@pytest.mark.parametrize("command", [["doctor"], ["run", "--dry-run"]])
def test_a_model_that_the_executor_refuses_is_refused_before_the_run(command, capsys):
    model = f"{__name__}:Deciding"
    assert call([command[0], "fedavg", *command[1:], "--model", model, "--executor", "vectorised", *SMALL]) == 2
    assert "one_by_one" in capsys.readouterr().err
    assert call([command[0], "fedavg", *command[1:], "--model", model, *SMALL]) == 0


def test_a_dry_comparison_and_a_dry_reproduction_tell_the_time(capsys):
    assert call(["compare", "local", "fedavg", "--dry-run", *SMALL]) == 0
    assert "2 methods, seeds [0]: all can be run, in about" in capsys.readouterr().out
    assert call(["reproduce", "fedala-table2-mnist", "--scale", "smoke", "--dry-run"]) == 0
    assert "all can be run, in about" in capsys.readouterr().out


# Resume


def test_a_run_is_extended_to_what_a_longer_one_gives(tmp_path, capsys):
    longer = plures.run("fedala:cap=3", clients=4, rounds=5, share=0.2)
    plures.run("fedala:cap=3", clients=4, rounds=2, share=0.2, out=tmp_path / "run")
    found = plures.resume(tmp_path / "run", rounds=5)
    assert found.summary["digest"] == longer.summary["digest"] and found.summary["rounds"] == 5
    assert [row["round"] for row in found.rounds] == [1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="has 5 rounds already"):
        plures.resume(tmp_path / "run", rounds=3)


@pytest.mark.parametrize("method, options", [("fedphp", {}), ("fedavg", {"schedule": "cosine"})])
def test_what_depends_on_the_number_of_rounds_is_not_extended(method, options, tmp_path):
    plures.run(method, out=tmp_path / "run", **OPTIONS, **options)
    with pytest.raises(UsageError, match="start a new run"):
        plures.resume(tmp_path / "run", rounds=5)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_that_has_ended_is_read_and_its_seconds_stay(tmp_path):
    first = plures.run("fedavg", out=tmp_path / "run", **OPTIONS)
    again = plures.resume(tmp_path / "run")
    assert again.summary == read_result(tmp_path / "run").summary == first.summary


def test_seconds_of_a_resumed_run_are_those_of_all_its_processes(tmp_path):
    whole = plures.run("fedavg", out=tmp_path / "run", **OPTIONS)
    longer = plures.resume(tmp_path / "run", rounds=3)
    assert longer.summary["seconds"]["total"] > whole.summary["seconds"]["total"]


def test_a_comparison_is_resumed_by_its_folder(tmp_path, capsys):
    assert call(["compare", "local", "fedavg", "--out", str(tmp_path / "both"), "--quiet", *SMALL]) == 0
    (tmp_path / "both" / "fedavg" / "summary.json").unlink()
    capsys.readouterr()
    assert call(["resume", str(tmp_path / "both"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"local", "fedavg"}
    assert (tmp_path / "both" / "fedavg" / "summary.json").exists()


# Results


def test_a_result_prints_in_one_line(tmp_path):
    found = plures.run("fedavg", out=tmp_path / "run", **OPTIONS)
    assert len(repr(found)) < 300 and "fedavg" in repr(found) and "2 rounds" in repr(found)


def test_models_of_a_run_with_a_folder_are_those_of_one_without(tmp_path):
    kept, written = plures.run("ditto", **OPTIONS), plures.run("ditto", out=tmp_path / "run", **OPTIONS)
    assert list(written.models) == list(kept.models) and len(written.models) == 4
    for client, model in kept.models.items():
        for name, x in model.items():
            assert x.equal(written.models[client][name])
    with pytest.raises(KeyError):
        written.models[17]


def test_models_are_there_also_where_data_was_given_as_an_object(tmp_path):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(40, 3)), "y": rng.integers(0, 2, 40), "client": np.repeat([0, 1], 20)}
    found = plures.run("fedavg", data=data, rounds=1, out=tmp_path / "run")
    assert set(found.models[0]) == set(found.models[1])


def test_new_clients_are_told_in_the_terminal(capsys, tmp_path):
    assert call(["run", "fedavg", "--new-clients", "1", "--out", str(tmp_path / "run"), "--quiet", *SMALL]) == 0
    assert "1 new clients: " in capsys.readouterr().out


# Files


def csv_of(path, labels, seed=0):
    rng = np.random.default_rng(seed)
    lines = ["age,size,label", *[f"{rng.normal():.3f},{rng.normal():.3f},{label}" for label in labels]]
    path.write_text("\n".join(lines) + "\n")


def test_adapt_reads_a_csv_file_with_the_labels_of_the_run(tmp_path, capsys):
    (tmp_path / "sites").mkdir()
    for i, name in enumerate(("north", "south")):
        csv_of(tmp_path / "sites" / f"{name}.csv", ["ill", "well", "dead"] * 8, i)
    run = str(tmp_path / "run")
    assert call(["run", "fedavg", "--data", str(tmp_path / "sites"), "--rounds", "1", "--out", run, "--quiet"]) == 0
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == ["dead", "ill", "well"]
    csv_of(tmp_path / "new.csv", ["well", "ill"] * 6, 7)  # numbered by itself, well would be 1
    model = str(tmp_path / "new.safetensors")
    words = ["adapt", run, "--client-data", str(tmp_path / "new.csv"), "-o", model, "--epochs", "0", "--json"]
    capsys.readouterr()
    assert call(words) == 0
    assert json.loads(capsys.readouterr().out)["n_train"] == 9
    csv_of(tmp_path / "odd.csv", ["cured", "ill"] * 6)
    assert call(["adapt", run, "--client-data", str(tmp_path / "odd.csv"), "-o", model]) == 3
    assert "has the label 'cured'; the run's labels are dead, ill, well" in capsys.readouterr().err


def test_a_model_is_exported_by_the_name_of_a_client(tmp_path, capsys):
    (tmp_path / "sites").mkdir()
    for i, name in enumerate(("north", "south")):
        csv_of(tmp_path / "sites" / f"{name}.csv", ["a", "b"] * 10, i)
    run = str(tmp_path / "run")
    assert call(["run", "local", "--data", str(tmp_path / "sites"), "--rounds", "1", "--out", run, "--quiet"]) == 0
    files = [tmp_path / "name.safetensors", tmp_path / "number.safetensors"]
    assert call(["export", run, "--client", "south", "-o", str(files[0])]) == 0
    assert call(["export", run, "--client", "1", "-o", str(files[1])]) == 0
    capsys.readouterr()
    assert call(["export", run, "--client", "soth", "-o", str(files[0])]) == 2
    assert "did you mean 'south'?" in capsys.readouterr().err


def test_a_file_of_another_format_is_refused(tmp_path, capsys):
    assert call(["export", str(tmp_path), "--client", "0", "-o", "b.bin"]) == 2
    assert "models are written as .safetensors, .pt, .onnx; got b.bin" in capsys.readouterr().err


def test_a_report_of_many_runs_leaves_out_one_that_has_not_ended(tmp_path, capsys):
    for name in ("a", "b"):
        plures.run("fedavg", out=tmp_path / name, seed=1 if name == "a" else 0, **OPTIONS)
    (tmp_path / "b" / "summary.json").unlink()
    assert call(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert "its run has not ended" in (tmp_path / "page.html").read_text()


# Traps


def test_an_array_with_nearly_the_right_name_is_refused(tmp_path):
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1] * 3)
    np.savez(tmp_path / "data.npz", x=x, y=y, clients=np.array([0, 0, 0, 1, 1, 1]))
    with pytest.raises(DataError, match="holds an array 'clients'; did you mean 'client'"):
        plures.run("fedavg", data=tmp_path / "data.npz", rounds=1)
    with pytest.raises(DataError, match="did you mean 'is_test'"):
        plures.run("fedavg", data={"x": x, "y": y, "istest": y}, rounds=1)


def test_large_columns_are_pointed_out(capsys, tmp_path):
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(0, 1, 60), rng.normal(120, 15, 60)], 1)
    np.savez(tmp_path / "data.npz", x=x, y=rng.integers(0, 2, 60), client=np.repeat([0, 1, 2], 20))
    assert call(["run", "fedavg", "--data", str(tmp_path / "data.npz"), "--rounds", "1", "--dry-run"]) == 0
    assert "1 of 2 columns hold large numbers (column 1: mean 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "method, words",
    [
        ("fedbn", "the model has no part that is private=batch-norm: this is FedAvg"),
        ("plgu-lf:personal=5", "layers of the model are personal (personal=5): clients train alone"),
    ],
)
def test_a_method_that_is_another_one_with_this_model_says_so(method, words, capsys, tmp_path):
    assert call(["run", method, "--out", str(tmp_path / "run"), *SMALL]) == 0
    assert words in capsys.readouterr().out
