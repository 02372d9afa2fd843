"""New clients: held out of training, served by each method's own way in; and `plures adapt`."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import plures
from plures import tree
from plures.cli.main import call
from plures.engine import Engine
from plures.errors import UsageError
from plures.methods import METHODS
from plures.methods.messages import Same
from plures.runs.config import make_config
from plures.runs.folders import open_scene
from plures.runs.scene import make_scene
from plures.simulate.new_clients import score_new_clients
from plures.simulate.stacking import one_by_one
from tests.small import played, run_of

NAMES = [*METHODS, "fedrod:head=hyper", "fedavg+ala:cap=12", "fedavg+ft", "fedrod:head=hyper+feddyn"]
QUICK = {"fedala": "fedala:cap=12", "pfedme": "pfedme:inner_steps=2"}
every_method = pytest.mark.parametrize("name", [QUICK.get(name, name) for name in NAMES])


def adapted(run, client, epochs, counts_of=None):
    """The model of one of the run's clients as if it were new."""
    method, task = run.state.scene.method, run.state.scene.task
    with torch.no_grad():
        message = Same(method.newcomer(task, run.state.server))
        shards = run.state.scene.population.shards([client], "train", "new", 0)
        if counts_of is not None:
            shards = shards._replace(counts=counts_of)
        return tree.row(
            one_by_one(lambda received, shard: method.adapt(task, received, shard, epochs), message, shards), 0
        )


@every_method
def test_a_new_client_gets_a_whole_model_and_training_moves_it(name):
    run = played(run_of(name, "norm", executor="one_by_one"), 1)
    before, after = (adapted(run, 4, epochs) for epochs in (0, 2))
    for model in (before, after):
        assert set(model) == set(run.state.scene.task.initial)
        assert all(torch.isfinite(x).all() for x in model.values())
    assert any(not torch.equal(before[k], after[k]) for k in before)


@every_method
def test_before_any_epoch_no_row_is_looked_at(name):
    """Two clients with other rows but equal class counts get the same model."""
    run = played(run_of(name, "norm", executor="one_by_one"), 1)
    counts = torch.arange(10.0)[None]
    one, other = (adapted(run, client, 0, counts) for client in (3, 5))
    assert all(torch.equal(one[k], other[k]) for k in one)


@every_method
def test_new_clients_are_served_alike_by_every_executor_and_engine(name):
    run = played(run_of(name), 1)
    server, work = run.state.server, run.executor.work
    ways = [("vectorised", "traced"), ("one_by_one", "traced"), ("vectorised", "eager")]
    found = [
        score_new_clients(work._replace(style=style, engine=Engine.parse(engine)), server, 0, 1, 1)
        for style, engine in ways
    ]
    for other in found[1:]:
        assert other.ids == found[0].ids
        np.testing.assert_allclose(other.curve, found[0].curve, atol=0.2 + 1e-6)  # one of five test rows
    assert np.isfinite([one.curve for one in found]).all()


def test_the_hyper_head_of_a_new_client_comes_from_its_class_counts():
    run = played(run_of("fedrod:head=hyper", "norm", executor="one_by_one"), 2)
    few, many = torch.eye(10)[:1] * 5, torch.ones(1, 10)
    head = run.state.scene.task.head + ".weight"
    one, other, again = (adapted(run, 4, 0, counts) for counts in (few, many, few * 3))
    assert not torch.equal(one[head], other[head])
    assert torch.allclose(one[head], again[head])  # proportions, not numbers
    rest = [k for k in one if k != head]
    assert all(torch.equal(one[k], run.state.server[k]) for k in rest)


def test_new_clients_never_train_and_come_last():
    scene = make_scene(make_config({"method": "fedavg", "clients": 12, "new_clients": 4, "partition": "iid"}))
    whole = make_scene(make_config({"method": "fedavg", "clients": 12, "partition": "iid"}))
    assert len(scene.population.train) == 8 and len(scene.new_clients.train) == 4
    assert scene.config.clients == 12 and scene.method.schedule.n_clients == 8
    known = [rows.tolist() for rows in whole.population.train]
    places = [known.index(rows.tolist()) for rows in scene.split.train]
    assert places[:8] == sorted(places[:8]) and places[8:] == sorted(places[8:])
    assert places != list(range(12))  # drawn, not just the last ones
    assert scene.new_clients.train[0].tolist() == scene.split.train[8].tolist()


def test_holding_out_everybody_is_refused():
    with pytest.raises(UsageError, match="leave no client to train"):
        make_scene(make_config({"clients": 5, "new_clients": 5}))


def test_summary_and_clients_tell_of_new_clients(tmp_path):
    options = {"clients": 10, "new_clients": 3, "new_epochs": 2, "rounds": 3, "partition": "iid", "lr": 0.1}
    result = plures.run("fedavg", out=tmp_path / "run", **options)
    new = result.summary["new_clients"]
    assert new["n"] == 3 and len(new["curve"]) == 3
    assert new["before"] == new["curve"][0] == pytest.approx(new["generic"]) and new["after"] == new["curve"][-1]
    assert [row["role"] for row in result.clients] == ["client"] * 7 + ["new"] * 3
    assert [row["client"] for row in result.clients] == list(range(10))
    assert np.mean([row["personal_accuracy"] for row in result.clients[7:]]) == pytest.approx(new["after"])
    again = open_scene(tmp_path / "run")
    assert [rows.tolist() for rows in again.new_clients.train] == [
        rows.tolist() for rows in make_scene(make_config({"method": "fedavg"} | options)).new_clients.train
    ]


def test_new_clients_are_scored_on_test_rows_and_train_on_training_rows(tmp_path):
    """Training rows of the new clients have labels that their test rows contradict: learnt well, tests go wrong."""
    rng = np.random.default_rng(0)
    n_clients, n = 6, 40
    y = rng.integers(0, 2, n_clients * n)
    x = (np.eye(2)[y] + 0.01 * rng.normal(size=(len(y), 2))).astype(np.float32)
    client, is_test = np.tile(np.arange(n_clients), n), np.arange(len(y)) >= 3 * len(y) // 4
    file = tmp_path / "rows.npz"
    options = {"data": str(file), "partition": "natural", "new_clients": 2, "rounds": 3, "lr": 0.5, "new_epochs": 40}
    np.savez(file, x=x, y=y, client=client, is_test=is_test)
    scene = make_scene(make_config({"method": "fedavg"} | options))
    train = np.concatenate(scene.new_clients.train)
    assert not is_test[train].any()
    turned = y.copy()
    turned[train] = 1 - turned[train]
    np.savez(file, x=x, y=turned, client=client, is_test=is_test)
    new = plures.run("fedavg", **options).summary["new_clients"]
    assert new["before"] > 0.9 and new["after"] < 0.1


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_new_clients_and_fine_tuning_take_the_learning_rate_of_the_round(name):
    """With a rate that falls to a millionth nothing moves any more, neither in new clients nor by +ft."""
    options = {
        "clients": 8,
        "new_clients": 3,
        "new_epochs": 3,
        "rounds": 2,
        "partition": "iid",
        "lr": 0.1,
        "share": 0.3,
    }
    falling = plures.run(name, **options, lr_decay=1e-6).summary["new_clients"]
    steady = plures.run(name, **options).summary["new_clients"]
    assert falling["curve"] == pytest.approx([falling["before"]] * 4)
    assert steady["after"] > steady["before"] + 0.05
    tuned = plures.run("fedavg+ft", **options, lr_decay=1e-6).summary
    assert tuned["personal"]["mean"] == pytest.approx(tuned["generic"]["on_clients"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    plures.run("fedrod:head=hyper", out=folder, rounds=3, clients=6, partition="dirichlet:0.3", lr=0.1)
    return folder


def client_file(path, n=40, marked=True):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(n, 1, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, n)}
    if marked:
        arrays["is_test"] = (np.arange(n) % 4 == 0).astype(np.int64)
    np.savez(path, **arrays)
    return path


def test_adapt_makes_a_model_for_a_file(finished, tmp_path, capsys):
    out = tmp_path / "model.safetensors"
    file = client_file(tmp_path / "hospital.npz")
    assert call(["adapt", str(finished), "--client-data", str(file), "--epochs", "2", "-o", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["n_train"] == 30 and summary["n_test"] == 10 and len(summary["curve"]) == 3
    assert set(load_file(out)) == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}


def test_adapt_sets_test_rows_aside_when_none_are_marked(finished, tmp_path, capsys):
    out, file = tmp_path / "model.safetensors", client_file(tmp_path / "bank.npz", marked=False)
    assert call(["adapt", str(finished), "--client-data", str(file), "-o", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["n_train"] + summary["n_test"] == 40 and summary["n_test"] >= 5


def test_adapt_from_class_counts_alone(finished, tmp_path, capsys):
    models = []
    for k, counts in enumerate(("5,5,0,0,0,0,0,0,0,0", "0,0,0,0,0,0,0,0,5,5")):
        out = tmp_path / f"model{k}.safetensors"
        assert call(["adapt", str(finished), "--class-counts", counts, "-o", str(out)]) == 0
        models.append(load_file(out))
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert torch.equal(models[0]["hidden.weight"], models[1]["hidden.weight"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give the new client's rows"),
        (["--class-counts", "1,2"], 2, "10 numbers of rows"),
        (["--class-counts", "a,b"], 2, "whole numbers"),
        (["--client-data", "missing.npz"], 3, "does not exist"),
    ],
)
def test_adapt_tells_what_is_wrong(finished, arguments, code, words, capsys):
    assert call(["adapt", str(finished), *arguments]) == code
    assert words in capsys.readouterr().err


def test_adapt_refuses_rows_of_another_shape(finished, tmp_path, capsys):
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4))
    assert call(["adapt", str(finished), "--client-data", str(tmp_path / "wide.npz")]) == 3
    assert "shape" in capsys.readouterr().err
