"""A folder of a comparison is never taken for one with other options."""

import json

import pytest

import plures
from plures.errors import UsageError
from plures.runs.config import HOW_IT_IS_RUN, SCORING, Config, make_config

SMALL = {"clients": 4, "rounds": 2, "share": 0.2}

# For every option that may change a number: another value of it.
OTHER = {
    **{"data": "mnist", "model": "cnn", "share": 0.3, "partition": "iid", "min_rows": 5, "test_share": 0.5},
    **{"clients": 5, "participation": 0.5, "rounds": 3, "epochs": 2, "steps": 3, "batch": 7, "lr": 0.01},
    **{"lr_decay": 0.9, "lr_decay_every": 2, "schedule": "cosine", "momentum": 0.5, "nesterov": True},
    **{"weight_decay": 0.1, "clip": 1.0, "optimizer": "adam", "last_batch": "drop", "augment": "crop"},
    **{"server_optimizer": "adam", "server_lr": 0.5, "local_work": "uniform:1-2", "validation": 0.2},
    **{"new_clients": 1, "new_epochs": 2, "attack": "labels", "attackers": 0.5, "seed": 1, "executor": "one_by_one"},
    **{"engine": "eager", "precision": "float64", "eval_every": 2, "unchosen": "refresh", "pool_rows": 10},
    **{"client_column": "site", "target": "ill", "drop": "id", "time_column": "day", "text_column": "note"},
    **{"window": 3, "image_size": 8, "task": "number", "metric": "auc", "metrics": "all"},
    **{"pool_every": 1, "personal_epochs": 1, "goal": 0.5, "method": "ditto", "settings": {"lam": 0.5}},
    **{"freeze": "body", "train": "head", "stack": 3, "adapter": "lora", "features": "each", "device": "cuda"},
}
NEEDS = {"nesterov": {"momentum": 0.9}}


@pytest.mark.parametrize("option", [name for name in Config.model_fields if name not in HOW_IT_IS_RUN])
def test_every_option_that_changes_a_number_is_part_of_the_identity(option):
    base = make_config(NEEDS.get(option, {}))
    other = base.model_copy(update={option: OTHER[option]})
    assert getattr(base, option) != OTHER[option]
    assert base.record_identity() != other.record_identity()
    assert (base.identity() == other.identity()) == (option in SCORING)


@pytest.mark.parametrize("change", [{"unchosen": "refresh"}, {"eval_every": 2}, {"pool_rows": 5}, {"goal": 0.5}])
def test_a_comparison_into_a_folder_with_another_option_is_refused(change, tmp_path):
    plures.compare(["local", "fedavg"], out=tmp_path, **SMALL)
    [name] = change
    with pytest.raises(UsageError, match=f"holds a run with other options .*{name} is .* there and .* here"):
        plures.compare(["local", "fedavg"], out=tmp_path, **SMALL, **change)


def test_a_comparison_with_another_split_file_of_the_same_name_is_refused(tmp_path):
    split = {"train": [[0, 1, 2, 3], [4, 5, 6, 7]], "test": [[8, 9], [10, 11]]}
    (tmp_path / "split.json").write_text(json.dumps(split))
    options = {"split": str(tmp_path / "split.json"), "rounds": 1}
    plures.compare(["local", "fedavg"], out=tmp_path / "runs", **options)
    split["train"][0] = [12, 13, 14, 15]
    (tmp_path / "split.json").write_text(json.dumps(split))
    with pytest.raises(UsageError, match="another split"):
        plures.compare(["local", "fedavg"], out=tmp_path / "runs", **options)


def test_the_same_comparison_is_read_and_not_run_again(tmp_path):
    first = plures.compare(["local", "fedavg"], out=tmp_path, workers=1, **SMALL)
    again = plures.compare(["local", "fedavg"], out=tmp_path, workers=2, checkpoint_every=3, **SMALL)
    for key, result in first.items():
        assert again[key].summary["seconds"] == result.summary["seconds"]


def test_a_method_has_options_of_its_own_in_a_comparison(tmp_path):
    runs = plures.compare(["fedavg", "fedavg:lr=0.3,batch=5", "ditto:lr=0.01,lam=1"], **SMALL)
    alone = plures.run("fedavg", lr=0.3, batch=5, **SMALL)
    assert runs["fedavg:lr=0.3,batch=5", 0].summary["digest"] == alone.summary["digest"]
    assert runs["fedavg", 0].summary["digest"] != alone.summary["digest"]
    assert runs["ditto:lr=0.01,lam=1", 0].summary["settings"]["lam"] == 1
    plures.run("fedavg:lr=0.3", out=tmp_path / "run", **SMALL)
    assert "lr = 0.3\n" in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(UsageError, match="lr must be a number, got 'x'"):
        plures.run("fedavg:lr=x", **SMALL)
