"""Which updates are merged: those of clients that mean well, whatever their data, and no others."""

import math

import pytest
import torch

from plures import tree
from plures.errors import RunFailed
from plures.methods.messages import Each, Same
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation, start
from plures.runs.state import RunState
from plures.simulate import bounds
from plures.simulate.bounds import cap_weights, reasons_to_refuse, update_norms
from tests.small import run_of, scene_of

SENT = {"w": torch.tensor([3.0, 4.0])}


def uploads(*moves):
    """What clients upload that moved both weights by so much."""
    return {"w": torch.stack([SENT["w"] + move for move in moves])}


def test_an_update_is_the_distance_from_what_was_sent():
    moved, sent = update_norms(Same(SENT), uploads(0.0, 1.0, -2.0))
    torch.testing.assert_close(moved, torch.tensor([0.0, 2**0.5, 8**0.5], dtype=torch.float64))
    torch.testing.assert_close(sent, torch.full((3,), 5.0, dtype=torch.float64))
    each = Each({"w": torch.stack([SENT["w"], 2 * SENT["w"]])})
    assert update_norms(each, {"w": each.tree["w"]})[0].tolist() == [0.0, 0.0]


def test_what_was_not_sent_counts_as_it_is_and_whole_numbers_do_not_count():
    gradients = {"gradients": torch.tensor([[3.0, 4.0], [6.0, 8.0]]), "whose": torch.tensor([[10**9], [0]])}
    assert update_norms(Same(SENT), gradients)[0].tolist() == [5.0, 10.0]


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38, -3e38])
def test_an_update_that_is_far_larger_than_the_others_is_refused(size):
    whys = reasons_to_refuse(Same(SENT), (), uploads(0.1, 0.2, size, 0.1), 4)
    assert [bool(why) for why in whys] == [False, False, True, False]
    assert "times as large as the median" in whys[2]


def test_two_clients_are_enough_to_tell_and_one_is_not():
    assert [bool(why) for why in reasons_to_refuse(Same(SENT), (), uploads(1e6, 0.1), 2)] == [True, False]
    assert reasons_to_refuse(Same(SENT), (), uploads(1e6), 1) == [""]


def test_an_update_is_fine_if_it_is_small_beside_the_model_or_beside_the_others():
    assert not any(reasons_to_refuse(Same(SENT), (), uploads(1e-9, 1e-9, 5.0), 3))
    assert not any(reasons_to_refuse(Same(SENT), (), uploads(50.0, 50.0, 500.0), 3))
    assert not any(reasons_to_refuse(Same(SENT), (), uploads(0.0, 0.0, 1e6), 3))  # nobody else moved: nothing is known


def test_numbers_that_are_not_finite_are_refused_in_uploads_and_in_states():
    whys = reasons_to_refuse(Same(SENT), {"own": torch.tensor([0.0, math.nan])}, uploads(0.1, 0.1), 2)
    assert whys == ["", "it has numbers that are not finite"]
    assert reasons_to_refuse(Same(SENT), (), uploads(math.inf, 0.1), 2)[0] == "it has numbers that are not finite"
    assert not any(reasons_to_refuse(Same(SENT), (), uploads(1e30, 0.1), 2, times_median=math.inf))


def test_no_client_has_more_than_its_share_of_the_weight():
    sizes = torch.tensor([10, 20, 30, 10**7])
    for share in (0.3, 0.4, 0.5, 0.9):
        weights = cap_weights(sizes, share)
        assert float(weights.max() / weights.sum()) <= share + 1e-9
        assert weights[:2].tolist() == [10, 20]
    assert cap_weights(sizes, 1.0) is sizes and cap_weights(torch.tensor([10, 11]), 0.6).tolist() == [10, 11]
    assert cap_weights(sizes, 0.1).tolist() == [1, 1, 1, 1]
    half = cap_weights(sizes, 0.5)
    assert half.tolist() == [10, 20, 30, 60]


def test_a_simulated_client_with_a_huge_update_is_refused_by_number_and_the_run_goes_on(monkeypatch):
    said = []
    play = Simulation.play

    def with_a_huge_update(self, score=False):
        answers = play(self, score)
        trained = answers.trained
        huge = tree.map(lambda x: x.index_fill(0, torch.tensor([4]), 1e30), trained.uploads)
        return answers._replace(trained=trained._replace(uploads=huge))

    monkeypatch.setattr(Simulation, "play", with_a_huge_update)
    result = start(scene_of("fedavg", rounds=2), None, said.append, Callback())
    assert result.summary["refused_updates"] == 2
    assert [(one["round"], one["client"]) for one in result.summary["refusals"]] == [(1, 4), (2, 4)]
    assert sum("the update of 4 is refused: its update is" in line for line in said) == 2


def test_a_run_of_which_every_update_is_refused_ends_with_a_sentence(monkeypatch):
    monkeypatch.setattr(bounds, "reasons_to_refuse", lambda *_: ["no"] * 6)
    run = run_of("fedavg")
    with pytest.raises(RunFailed, match="every client's update"):
        run.play_round()
    run.close()


def test_where_attacks_are_studied_their_updates_are_merged():
    scene = make_scene(make_config({"attack": "replace", "clients": 4, "attackers": 0.5}))
    assert len(scene.attackers) == 2 and RunState(scene, None, print).limits.times_median == math.inf
    assert RunState(scene._replace(attackers=()), None, print).limits.times_median == bounds.TIMES_MEDIAN
