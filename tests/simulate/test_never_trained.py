"""Clients that are never drawn are served as new clients, and counted."""

import json

import pytest
import torch

import plures
from plures import tree
from plures.methods.messages import Same
from plures.simulate.stacking import one_by_one
from plures.studies.compare import Runs
from plures.studies.tables import footnotes, latex, lines
from tests.small import SIZES, played, run_of, took_part

STATEFUL = ["ditto", "fedper", "fedala:cap=6", "fedrod", "plgu-lf", "apfl", "local", "fedper+ft:ft_epochs=1"]
ONE_OF_SIX = {"participation": 0.17}


def as_new(run, client, epochs):
    """What the method would give a client that it does not know, by the keys of a personal model."""
    scene, server = run.state.scene, run.state.server
    shards = scene.population.shards([client], "train", "personalize", run.state.round)
    with torch.no_grad():
        message = Same(scene.method.newcomer(scene.task, server))
        models = one_by_one(lambda got, shard: scene.method.adapt(scene.task, got, shard, epochs), message, shards)
    return tree.row(models, 0)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_a_client_that_was_never_drawn_is_scored_with_the_model_of_a_new_one(name, executor):
    run = played(run_of(name, executor=executor, new_epochs=2, **ONE_OF_SIX), 2)
    known = took_part(run)
    never = sorted(set(range(len(SIZES))) - set(known))
    assert never and known
    scene = run.state.scene
    found = run.evaluator.evaluate(run.state.server, run.state.round, False, False, run.state.store.written)
    assert sorted(found.never_trained) == [i for i in found.ids if i in never]
    for client in never:
        model = as_new(run, client, 2)
        torch.testing.assert_close(run.personal_model(client), model, rtol=1e-4, atol=1e-5)
        rows = torch.from_numpy(scene.population.test[client])
        guesses = scene.task.logits(model, scene.population.x[rows]).argmax(1)
        hits = (guesses == scene.population.y[rows]).sum().item()
        assert found.personal["hits"][found.ids.index(client)] == hits
    untouched = scene.task.initial
    assert any(not torch.equal(model[k], untouched[k]) for k in untouched)


@pytest.mark.parametrize("name", ["fedavg", "feddyn", "scaffold"])
def test_one_model_for_all_serves_a_client_that_was_never_drawn_as_any_other(name):
    run = played(run_of(name, executor="one_by_one", **ONE_OF_SIX), 2)
    never = min(set(range(len(SIZES))) - set(took_part(run)))
    known = took_part(run)[0]
    one, other = run.personal_model(never), run.personal_model(known)
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_before_the_first_round_everybody_is_as_at_the_start():
    run = run_of("ditto", executor="one_by_one")
    try:
        assert run.evaluator.served_as_new(0, run.state.store.written) == set()
        model = run.personal_model(0)
    finally:
        run.close()
    assert all(torch.equal(x, run.state.scene.task.initial[k]) for k, x in model.items())


def test_summary_and_tables_tell_how_many_were_scored_and_how_many_never_took_part(tmp_path):
    options = {"clients": 50, "participation": 0.04, "rounds": 3, "share": 0.3, "partition": "iid"}
    result = plures.run("ditto", out=tmp_path / "run", **options)
    personal = json.loads((tmp_path / "run" / "summary.json").read_text())["personal"]
    drawn = personal["scored"] - personal["never_trained"]
    assert personal["scored"] == len(result.clients) == 50
    assert 3 <= drawn <= 6  # two of fifty in each of three rounds
    found = lines(Runs({("ditto", 0): result}))
    assert footnotes(found) == [f"{50 - drawn} clients never took part and are scored as new"]
    assert footnotes(found)[0] in latex(found)
    assert footnotes(lines(Runs({("ditto", 0): plures.run("ditto", clients=3, rounds=1, share=0.2)}))) == []


def test_a_client_without_a_test_row_is_not_among_the_scored():
    result = plures.run("fedavg", partition="dirichlet-class:0.05", clients=60, rounds=1, share=0.4, seed=1)
    without = [row for row in result.clients if not row["n_test"]]
    assert without, "this split was chosen because it has such clients"
    assert result.summary["personal"]["scored"] == 60 - len(without)
