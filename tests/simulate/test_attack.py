"""Attacks: what dishonest clients upload, and that only the honest ones are scored."""

import numpy as np
import pytest
import torch

import plures
from plures.methods.messages import Each, Same
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from plures.simulate import attack


def uploads_of(n=3):
    torch.manual_seed(0)
    return {"a.weight": torch.randn(n, 400), "norm.running_mean": torch.randn(n, 2), "ids": torch.arange(n)}


def changed(kind, message, uploads, evil):
    return attack.change_uploads(kind, message, uploads, torch.tensor(evil), [4, 7, 9], seed=0, round=2)


def test_replacement_multiplies_the_update_by_the_size_of_the_cohort():
    uploads, sent = uploads_of(), {"a.weight": torch.full((400,), 0.5), "norm.running_mean": torch.zeros(2)}
    new = changed("replace", Same(sent), uploads, [False, True, False])
    assert torch.equal(new["a.weight"][[0, 2]], uploads["a.weight"][[0, 2]])
    assert torch.allclose(new["a.weight"][1], 0.5 + 3 * (uploads["a.weight"][1] - 0.5))


def test_each_client_has_its_own_message_as_base():
    uploads, sent = uploads_of(), {"a.weight": torch.arange(3.0)[:, None].expand(3, 400)}
    new = changed("replace", Each(sent), uploads, [False, False, True])
    assert torch.allclose(new["a.weight"][2], 2 + 3 * (uploads["a.weight"][2] - 2))


def test_what_was_not_sent_is_itself_the_update():
    uploads = uploads_of()
    new = changed("replace", Same({"other": torch.ones(400)}), uploads, [True, False, False])
    assert torch.allclose(new["a.weight"][0], 3 * uploads["a.weight"][0])


def test_random_updates_have_the_spread_of_the_true_one_and_nothing_else_of_it():
    uploads, sent = uploads_of(), {"a.weight": torch.full((400,), 5.0)}
    new = changed("random", Same(sent), uploads, [False, True, False])
    noise, true = new["a.weight"][1] - 5, uploads["a.weight"][1] - 5
    assert abs(float(noise.mean())) < 0.2 and float(noise.std()) == pytest.approx(float(true.std()), rel=0.15)
    assert abs(float(torch.corrcoef(torch.stack([noise, true]))[0, 1])) < 0.2
    again = changed("random", Same(sent), uploads, [False, True, False])
    assert torch.equal(new["a.weight"], again["a.weight"])


@pytest.mark.parametrize("kind", ["random", "replace"])
def test_statistics_and_whole_numbers_are_left_alone(kind):
    uploads = uploads_of()
    new = changed(kind, Same({}), uploads, [True, True, True])
    assert torch.equal(new["norm.running_mean"], uploads["norm.running_mean"])
    assert torch.equal(new["ids"], uploads["ids"])


def test_no_attack_changes_nothing():
    uploads = uploads_of()
    assert changed("none", Same({}), uploads, [True, True, True]) is uploads
    assert changed("replace", Same({}), uploads, [False, False, False]) is uploads


def test_attackers_are_a_share_of_those_that_train():
    chosen = attack.draw_attackers([2, 3, 5, 7, 11, 13, 17, 19, 23, 29], 0.3, seed=1)
    assert len(chosen) == 3 and chosen == sorted(chosen) and set(chosen) <= {2, 3, 5, 7, 11, 13, 17, 19, 23, 29}
    assert chosen == attack.draw_attackers([2, 3, 5, 7, 11, 13, 17, 19, 23, 29], 0.3, seed=1)
    assert attack.draw_attackers([1, 2, 3], 0.0, seed=1) == []


def test_poisoned_labels_are_those_of_the_attackers_training_rows():
    clean = make_scene(make_config({"clients": 10, "partition": "iid"}))
    scene = make_scene(make_config({"clients": 10, "partition": "iid", "attack": "labels", "attackers": 0.3}))
    differs = (scene.population.y != clean.population.y).numpy()
    evil = np.concatenate([scene.population.train[i] for i in scene.attackers])
    assert len(scene.attackers) == 3 and set(np.flatnonzero(differs)) <= set(evil.tolist())
    assert differs[evil].mean() == pytest.approx(0.9, abs=0.07)  # one label in ten is right by chance


def test_only_honest_clients_are_scored():
    scene = make_scene(make_config({"clients": 10, "attack": "replace", "attackers": 0.2}))
    run = Simulation(scene, None, print)
    run.close()
    assert set(run.state.scored).isdisjoint(scene.attackers) and len(run.state.scored) + len(scene.attackers) == 10


@pytest.mark.parametrize("kind", ["labels", "random", "replace"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfedla", "fedfomo", "afml", "fedrod:head=hyper"])
def test_a_run_survives_an_attack_and_says_who_attacked(kind, name):
    options = {"clients": 8, "rounds": 2, "partition": "iid", "eval_every": 0}
    honest, attacked = plures.run(name, **options), plures.run(name, attack=kind, attackers=0.25, **options)
    assert attacked.summary["attack"]["kind"] == kind and len(attacked.summary["attack"]["attackers"]) == 2
    assert [row["role"] for row in attacked.clients].count("attacker") == 2
    assert attacked.summary["digest"] != honest.summary["digest"]


def test_attacks_hurt_fedavg_more_than_training_alone():
    options = {"clients": 10, "rounds": 6, "partition": "iid", "eval_every": 0, "lr": 0.1}
    calm = plures.run("fedavg", **options).summary["personal"]["mean"]
    hit = plures.run("fedavg", attack="replace", attackers=0.4, **options).summary["personal"]["mean"]
    alone = plures.run("local", attack="replace", attackers=0.4, **options).summary["personal"]["mean"]
    assert hit < calm - 0.1 and hit < alone
