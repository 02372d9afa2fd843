"""Every hostile request is refused by the client, and every hostile answer by the server: in words, without a trace."""

import pytest
import torch

from plures.runs import checkpoint
from tests.federate.hostile import ANSWERS, REQUESTS, honest_sides, try_answers, try_requests

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_all_refused(outcomes):
    assert [one.name for one in outcomes if not one.refused] == []
    assert [one.name for one in outcomes if "Traceback" in one.words or not one.words.strip()] == []
    assert [one.name for one in outcomes if not one.words.replace("\n", " ").isprintable()] == []


def test_an_honest_request_and_an_honest_answer_pass(tmp_path):
    sides = honest_sides(tmp_path)
    asked = sides.run._request(0, train=True, score=False, is_last=False)
    assert sides.run.check_answer(asked, sides.answer).fields.n == 60


def test_every_hostile_request_is_refused_and_costs_the_client_nothing(tmp_path):
    place = tmp_path / "own" / "a" / "state"
    outcomes = try_requests(tmp_path)
    assert len(outcomes) == len(REQUESTS) >= 30
    assert_all_refused(outcomes)
    (experiment,) = place.iterdir()  # no other was begun
    versions = checkpoint.folders(experiment)
    assert [path.name for path in versions] == ["000001", "000002"]
    assert all(torch.isfinite(x).all() for x in checkpoint.read_state(versions[-1]).values())


def test_every_hostile_answer_is_refused_and_the_other_clients_go_on(tmp_path):
    outcomes = try_answers(tmp_path)
    assert len(outcomes) == len(ANSWERS) >= 50
    assert_all_refused(outcomes)
