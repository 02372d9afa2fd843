"""How clients are run, where that is left open: what is measured, what is chosen, and that the choice is kept."""

import tomllib

import pytest
import torch
from torch import nn

import plures
from plures.errors import UsageError
from plures.runs.config import make_config
from plures.runs.scene import Objects, make_scene
from plures.runs.simulation import settle
from plures.simulate import choosing

SMALL = {"clients": 6, "rounds": 2, "share": 0.2}


class Deciding(nn.Module):
    """Cannot be stacked: what it does next depends on numbers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def scene_of(**options):
    return make_scene(make_config(SMALL | options))


def timed(monkeypatch, **seconds):
    """Pretend that steps take so long, by how they are run; returns what was asked for."""
    asked = []

    def take(work, ids):
        how = "alone" if work.style == "one_by_one" else f"stack{len(ids)}"
        asked.append(how)
        return seconds[how] * len(ids)

    monkeypatch.setattr(choosing, "_seconds", take)
    return asked


def test_a_small_model_of_ours_is_stacked_and_nothing_is_timed(monkeypatch):
    asked = timed(monkeypatch)
    config = settle(scene_of()).config
    assert (config.executor, config.stack, asked) == ("vectorised", None, [])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"stack6": 1.0, "stack4": 0.95, "stack1": 2.0, "alone": 3.0}, ("vectorised", None)),  # no more than a little
        ({"stack6": 1.0, "stack4": 0.5, "stack1": 2.0, "alone": 3.0}, ("vectorised", 4)),
        ({"stack6": 4.0, "stack4": 2.0, "stack1": 1.0, "alone": 3.0}, ("vectorised", 1)),
        ({"stack6": 4.0, "stack4": 3.0, "stack1": 2.0, "alone": 1.0}, ("one_by_one", None)),
    ],
)
def test_of_a_heavy_model_the_fastest_way_is_taken(seconds, chosen, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL_OF_OURS", 0)
    asked = timed(monkeypatch, **seconds)
    scene = settle(scene_of())
    assert (scene.config.executor, scene.config.stack) == chosen and asked == list(seconds)
    assert any("in full stacks" in note for note in scene.notes) == (chosen != ("vectorised", None))


def test_real_steps_are_timed_and_leave_no_trace(monkeypatch):
    monkeypatch.setattr(choosing, "SMALL_OF_OURS", 0)
    scene = scene_of(method="ditto")
    before = {name: x.clone() for name, x in scene.task.initial.items()}
    found = choosing.choose(scene.work(scene.method.init_client(scene.task, scene.task.initial)), 6, True)
    assert found.style in ("vectorised", "one_by_one")
    assert all(torch.equal(before[name], x) for name, x in scene.task.initial.items())


def test_a_model_that_cannot_be_stacked_runs_one_by_one_and_says_why(tmp_path):
    scene = settle(make_scene(make_config(SMALL | {"model": "object:Net"}), objects=Objects(model=Deciding)))
    assert scene.config.executor == "one_by_one" and any("cannot stack" in note for note in scene.notes)
    with pytest.raises(UsageError, match="cannot stack"):
        plures.run("fedavg", model=Deciding, executor="vectorised", **SMALL)
    assert plures.run("fedavg", model=Deciding, **SMALL).summary["executor"] == "one_by_one"


def test_the_choice_is_kept_and_a_resumed_run_ends_in_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL_OF_OURS", 0)
    timed(monkeypatch, stack6=1.0, stack4=0.5, stack1=2.0, alone=3.0)
    whole = plures.run("ditto", out=tmp_path / "whole", **SMALL)
    written = tomllib.loads((tmp_path / "whole" / "config.toml").read_text("utf-8"))
    assert written["executor"] == "vectorised" and written["stack"] == 4
    plures.run("ditto", out=tmp_path / "half", **(SMALL | {"rounds": 1}))
    timed(monkeypatch, stack6=1.0, stack4=2.0, stack1=2.0, alone=0.1)  # another day the clock says something else
    resumed = plures.resume(tmp_path / "half", rounds=2)
    assert resumed.summary["digest"] == whole.summary["digest"]
    again = plures.run("ditto", executor="vectorised", stack=4, **SMALL)
    assert again.summary["digest"] == whole.summary["digest"]


def test_a_comparison_goes_on_with_the_choice_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL_OF_OURS", 0)
    timed(monkeypatch, stack6=1.0, stack4=0.5, stack1=2.0, alone=3.0)
    first = plures.compare(["fedavg"], out=tmp_path, **SMALL)
    timed(monkeypatch, stack6=1.0, stack4=2.0, stack1=2.0, alone=0.1)
    second = plures.compare(["fedavg"], out=tmp_path, **SMALL)
    assert first["fedavg", 0].summary["digest"] == second["fedavg", 0].summary["digest"]
