"""Trying a run before it: on how many rows, and for how long."""

import pytest

from plures.runs import timing
from plures.runs.config import make_config
from plures.runs.scene import make_scene

QUICK = {"data": "digits", "model": "mlp", "clients": 8, "partition": "iid", "epochs": 1}


def sizes(rows):
    return [len(own) for own in rows]


def test_with_short_steps_all_clients_are_tried():
    scene = make_scene(make_config({"method": "fedavg", **QUICK}))
    few = timing._few_rows(scene)
    assert sizes(few.train) == [timing.BATCHES * scene.config.batch] * 8
    assert sizes(few.test) == [min(timing.TEST_ROWS, len(own)) for own in scene.population.test]


@pytest.mark.parametrize(("participation", "n_tried"), [(1.0, 2), (0.5, 4)])
def test_with_long_steps_few_clients_are_tried_and_the_estimate_is_of_all(participation, n_tried, monkeypatch):
    """As many as two of them take part in a round."""
    scene = make_scene(make_config({"method": "fedavg", "participation": participation, **QUICK}))
    monkeypatch.setattr(timing, "SECONDS", 1e-9)
    few = timing._few_rows(scene)
    assert sizes(few.train) == [scene.config.batch] * n_tried + [0] * (8 - n_tried)
    assert sizes(few.test) == [1] * n_tried + [0] * (8 - n_tried)
    rounds = []
    monkeypatch.setattr(timing.Simulation, "play_round", counted(timing.Simulation.play_round, rounds))
    found = timing.try_out(scene)
    (seconds,) = rounds  # the first one took so long that there is no other one
    n_steps = sum(-(-len(own) // scene.config.batch) for own in scene.population.train)
    assert found.round == pytest.approx(seconds * n_steps / n_tried, rel=0.2)


def counted(play, seconds):
    def wrapped(self):
        began = timing.time.perf_counter()
        found = play(self)
        seconds.append(timing.time.perf_counter() - began)
        return found

    return wrapped
