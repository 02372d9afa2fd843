"""Snapshots that a run keeps: few, small, the same after a resume, and of no weight for the result."""

import pytest
import torch

from plures.errors import Interrupted
from plures.runs import snapshots
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import resume, start
from tests.small import played, run_of

SMALL = {"clients": 4, "partition": "dirichlet:0.5", "rounds": 5, "checkpoint_every": 2}


def quiet(line: str) -> None:
    pass


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "pictures").iterdir()}


class StopsAfter(Callback):
    def __init__(self, n_rounds: int) -> None:
        self.n_rounds = n_rounds

    def played(self, state, row) -> None:
        if row.round == self.n_rounds:
            raise KeyboardInterrupt


def test_snapshots_change_no_digest_and_are_equal_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MOST", 3)  # so that some are dropped on the way
    config = make_config({"method": "pfedla", **SMALL})
    bare = start(make_scene(config), None, quiet, Callback())
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    assert start(make_scene(config), whole, quiet, Callback()).summary["digest"] == bare.summary["digest"]
    with pytest.raises(Interrupted):
        start(make_scene(config), stopped, quiet, StopsAfter(3))
    assert resume(stopped, quiet, Callback()).summary["digest"] == bare.summary["digest"]
    assert sorted(files(whole)) == ["000000.safetensors", "000002.safetensors", "000004.safetensors"]
    assert files(stopped) == files(whole)


def test_snapshots_are_kept_at_evaluated_rounds_only(tmp_path):
    start(make_scene(make_config({"method": "fedavg", **SMALL, "eval_every": 2})), tmp_path, quiet, Callback())
    assert sorted(snapshots.read(tmp_path)) == [0, 2, 4]


@pytest.mark.parametrize("allowed", [1, 2, 3, 7, 32])
def test_what_is_left_depends_on_the_last_round_alone(allowed):
    left: set[int] = set()
    for number in range(200):
        apart = snapshots.spacing(number, allowed)
        if number % apart == 0:
            left.add(number)
        left = {one for one in left if one % apart == 0}
        assert left == set(range(0, number + 1, apart)) and len(left) <= allowed
        assert apart == 1 or len(left) * 2 >= allowed - 1, "no more is dropped than must be"


def test_a_snapshot_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MOST_BYTES", 1000)
    run = run_of("fedavg", folder=tmp_path)
    snapshots.keep(run.state)
    run.close()
    assert not (tmp_path / "pictures").exists()


def test_shown_client_is_the_one_in_the_middle_by_rows():
    run = played(run_of("fedavg"), 0)
    assert snapshots.shown_client(run.state) == 3  # of 1, 4, 13, 20, 31 and 48 rows


def test_pfedla_shows_its_weights_and_most_methods_nothing():
    run = played(run_of("pfedla:mixer_lr=0.5"), 2)
    shown = run.state.scene.method.snapshot(run.state.scene.task, run.state.server)
    assert list(shown) == ["alpha/hidden", "alpha/head"]
    torch.testing.assert_close(shown["alpha/head"].sum(1), torch.ones(6))
    sent = run.state.scene.method.send(run.state.scene.task, run.state.server, torch.tensor([4])).tree["head.bias"]
    mixed = shown["alpha/head"][4] @ run.state.server.models["head.bias"]
    torch.testing.assert_close(sent[0], mixed)
    plain = played(run_of("ditto"), 0)
    assert plain.state.scene.method.snapshot(plain.state.scene.task, plain.state.server) == {}
