"""What methods show of their models: the numbers behind each picture, and pictures of methods of the user's own."""

import importlib
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import plures
from plures import report
from plures.errors import UsageError
from plures.methods import METHODS
from plures.report import gather, records
from plures.report.figure import Choice, make_figure, to_plain
from plures.report.insides import ala, fedrod, landscape, pfedla, plgu_lf
from plures.runs import snapshots
from tests.small import played, run_of
from tests.written_runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


# pFedLA


def test_alpha_is_uniform_at_the_start_of_pfedla(tmp_path):
    found = pfedla.collect_alpha(played(run_of("pfedla", folder=tmp_path), 0).state)
    assert found is not None and found.rounds == [0] and list(found.layers) == ["hidden", "head"]
    assert found.own("head") == pytest.approx([1 / 6])
    assert pfedla.collect_alpha(played(run_of("fedavg", folder=tmp_path), 0).state) is None


# ALA


def test_blends_are_those_of_the_clients():
    state = played(run_of("ditto+ala:cap=2,p=2"), 3).state
    found = ala.collect_blends(state)
    assert found is not None and found.clients == [0, 1, 2, 3, 4, 5] and found.sizes == [1, 4, 13, 20, 31, 48]
    assert set(found.layers) == {"hidden", "head"}
    blend = state.store.rows(torch.arange(6)).blend
    ones = (blend["head.weight"] >= 0.95).sum() + (blend["head.bias"] >= 0.95).sum()
    n = blend["head.weight"].numel() + blend["head.bias"].numel()
    assert found.layers["head"][-1] == pytest.approx(float(ones) / n)
    assert found.layers["head"].sum() == pytest.approx(1)
    assert ala.collect_blends(played(run_of("fedala"), 1).state) is None  # after one round nobody has blended


def test_a_replayed_round_is_the_round_that_was_played(tmp_path, monkeypatch):
    monkeypatch.setattr(landscape, "GRID", 3)
    run = run_of("fedala:cap=2", folder=tmp_path, rounds=4)
    for _ in range(3):
        snapshots.keep(run.state)
        run.play_round()
    run.close()
    way = ala.replay_way(run.state)
    assert way is not None and way.rounds == [0, 1, 2]
    own = run.state.store.rows(torch.tensor([3])).model  # as the client left it after the last of these rounds
    for name, x in way.ends[-1].items():
        torch.testing.assert_close(x, own[name][0])
    torch.testing.assert_close(way.starts[0]["head.bias"], run.state.scene.task.initial["head.bias"])
    found = ala.project_ways(run.state, [way, way])
    assert found.ways[0].shape == (6, 2) and np.allclose(found.ways[0], found.ways[1])
    assert found.loss.shape == (3, 3) and np.isfinite(found.loss).all()
    assert 0 < found.explained <= 1 + 1e-6


def test_snapshots_of_another_version_show_no_way(tmp_path, monkeypatch):
    run = run_of("fedala:cap=2", folder=tmp_path, rounds=4)
    for _ in range(2):
        snapshots.keep(run.state)
        run.play_round()
    run.close()
    monkeypatch.setattr(snapshots, "below", lambda tensors, prefix: {"another": torch.zeros(1)})
    assert ala.replay_way(run.state) is None


def test_principal_plane_holds_ways_that_lie_in_a_plane(monkeypatch):
    monkeypatch.setattr(landscape, "GRID", 3)
    state = played(run_of("fedavg"), 0).state
    start = state.scene.task.initial
    steps = [landscape.make_direction(state.scene.task, start, k) for k in (0, 1)]

    def at(a, b):
        return {name: x + a * steps[0][name] + b * steps[1][name] for name, x in start.items()}

    way = ala.Way([0, 1], [at(0, 0), at(1, 0)], [at(0, 1), at(1, 1)])
    found = ala.project_ways(state, [way])
    assert found.explained == pytest.approx(1, abs=1e-5)
    true = torch.dist(ala.flatten_weights(at(0, 0)), ala.flatten_weights(at(0, 1)))
    assert np.linalg.norm(found.ways[0][0] - found.ways[0][1]) == pytest.approx(float(true), rel=1e-4)


# Fed-RoD


def test_two_heads_are_scored_on_every_client():
    run = played(run_of("fedrod+prox"), 2)
    found = fedrod.score_heads(run.state)
    evaluation = run.evaluate()
    assert found is not None and found.clients == evaluation.ids
    hits = np.array(evaluation.personal["hits"]) / np.array(evaluation.personal["n"])
    assert found.personal == pytest.approx(hits.tolist())
    generic = np.array(evaluation.generic["hits"]) / np.array(evaluation.generic["n"])
    assert found.server == pytest.approx(generic.tolist())
    assert found.generic != found.personal


# PLGU-LF


def test_kept_layers_are_as_many_as_the_setting_says():
    found = plgu_lf.count_kept(played(run_of("plgu-lf:personal=1"), 2).state)
    assert found is not None and found.layers == ["hidden", "head"] and sum(found.n_kept) == found.n_clients == 6


def test_directions_have_the_length_of_each_filter_and_leave_biases():
    task = played(run_of("fedavg"), 0).state.scene.task
    params = task.initial
    step = landscape.make_direction(task, params, 0)
    torch.testing.assert_close(step["hidden.weight"].norm(dim=1), params["hidden.weight"].norm(dim=1))
    assert not step["hidden.bias"].any()
    other = landscape.make_direction(task, params, 1)
    assert not torch.equal(step["head.weight"], other["head.weight"])


def test_landscape_passes_through_the_model(monkeypatch):
    monkeypatch.setattr(landscape, "GRID", 3)
    monkeypatch.setattr(plgu_lf, "N_DIRECTIONS", 2)
    run = played(run_of("plgu-lf:personal=1"), 1)
    profiles, surfaces = plgu_lf.measure_landscape(run)
    scene = run.state.scene
    everybody = np.sort(np.concatenate(scene.population.train))
    loss = landscape.measure_loss(scene, scene.method.generic(scene.task, run.state.server), everybody)
    assert profiles[0].words == "global, all rows" and profiles[0].mean[10] == pytest.approx(loss, rel=1e-5)
    assert profiles[0].std[10] == pytest.approx(0, abs=1e-6) and surfaces[0].loss[1, 1] == pytest.approx(loss, rel=1e-5)
    assert profiles[1].words == "personal, own rows of 6 clients" and surfaces[1].words == "personal, client 3"


def test_rows_of_a_loss_are_bounded_by_its_cost(monkeypatch):
    task = played(run_of("fedavg"), 0).state.scene.task
    monkeypatch.setattr(landscape, "FLOPS", 100 * task.flops * 10)
    some = landscape.few_rows(task, np.arange(1000), 10)
    assert len(some) == 100 and some[0] == 0 and some[-1] == 999


# Who shows what


@pytest.mark.parametrize(
    "method, wanted",
    [
        ("fedavg", []),
        ("fedala", ["ala"]),
        ("ditto+ala", ["ala"]),
        ("fedrod+ala", ["ala", "fedrod"]),
        ("pfedla", ["pfedla"]),
        ("heurpfedla", ["pfedla"]),
        ("plgu-lf", ["plgu_lf"]),
        ("plgu-grep", []),
    ],
)
def test_a_method_and_its_addons_bring_their_own_pictures(tmp_path, method, wanted):
    run = records.read_record(write_run(tmp_path / "r", method))
    assert gather.find_insides(run) == [f"plures.report.insides.{name}:pictures" for name in wanted]


def test_only_insides_know_any_method():
    """The rest of the report must not have to change for a new method."""
    names = "|".join(re.escape(METHODS.path(name).partition(":")[0]) for name in METHODS)
    for path in Path(report.__file__).parent.glob("*.py"):
        assert not re.search(rf"\b({names})\b|plures\.methods\.addons", path.read_text("utf-8")), path


# Figures from what was drawn


def test_numbers_that_are_not_finite_are_left_out_of_a_figure():
    found = to_plain({"z": np.array([[1.0, math.nan]]), "y": (math.inf, np.float32(0.5), True, None, "words")})
    assert found == {"z": [[1.0, None]], "y": [None, 0.5, True, None, "words"]}


def test_a_figure_has_a_view_for_every_combination_of_choices():
    choices = [Choice("layer", "list", [("a", "A"), ("b", "B")]), Choice("round", "slider", [("1", "1"), ("2", "2")])]
    drawn = {f"{layer}|{at}": {"data": [], "layout": {}} for layer in "ab" for at in "12"}
    assert list(make_figure("id", "", "", "", choices, drawn).views) == ["a|1", "a|2", "b|1", "b|2"]
    del drawn["b|1"]
    with pytest.raises(UsageError, match=r"nothing was drawn for the choice 'b\|1'"):
        make_figure("id", "", "", "", choices, drawn)
    with pytest.raises(UsageError, match="has no options"):
        make_figure("id", "", "", "", [Choice("layer", "list", [])], {})


# Methods of the user's own

OWN = '''
from dataclasses import dataclass

import plotly.graph_objects as go
from matplotlib.figure import Figure
from plures import Addon, Method
from plures.report.insides.base import Picture


@dataclass(frozen=True)
class FedHalf(Method):
    """As FedAvg, with a picture."""

    insides = "MODULE:pictures"


@dataclass(frozen=True)
class Shown(Addon):
    """Changes nothing, and has a picture."""

    insides = "MODULE:pictures"


def pictures(opened):
    norms = [float(x.norm()) for x in opened.simulation.personal_model(0).values()]
    beside = "alone" if opened.fedavg is None else f"beside {opened.fedavg.label}"

    def draw_good():
        return go.Figure(go.Bar(y=norms))

    def draw():
        DRAW
        return draw_good()

    def draw_for_paper():
        PRINT
        figure = Figure()
        figure.add_subplot().bar(range(len(norms)), norms)
        return figure

    MAKE
    good = Picture("good", "How long it is", f"A bar for each tensor, {beside}.", "Some bars.", draw_good)
    return [Picture("NAME", "Half of it", "Read it so.", "Some bars.", draw, draw_for_paper=draw_for_paper), good]
'''


@pytest.fixture
def write_own(tmp_path, monkeypatch):
    """Writes a module with a method of the user's own into the current folder, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written: list[str] = []

    def write(name: str, **changes: str) -> str:
        text = OWN.replace("MODULE", name)
        for mark in ("DRAW", "PRINT", "MAKE"):
            text = re.sub(rf"(?m)^( +){mark}$", lambda found, mark=mark: found[1] + changes.get(mark, "pass"), text)
        Path(f"{name}.py").write_text(text.replace('"NAME"', repr(changes.get("NAME", "half"))))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


SMALL = {"data": "digits", "clients": 4, "rounds": 1}


def words_of(page: Path) -> str:
    return page.read_text("utf-8").partition("<script>")[0]


def test_a_method_outside_the_package_brings_its_picture(write_own):
    name = write_own("my_pictured_methods")  # a name of its own: modules of other tests may still be imported
    for method in (f"{name}:FedHalf", "fedavg"):
        plures.run(method, out=f"runs/{method.partition(':')[2] or method}", **SMALL)
    text = words_of(report.write([Path("runs")], Path("page.html"), Path("figures")))
    assert f"Inside {name}:FedHalf" in text and "not shown" not in text
    assert '<figure id="half-1">' in text and "Half of it" in text and 'aria-label="Some bars."' in text
    assert "A bar for each tensor, beside fedavg." in text  # the twin was opened too
    made = {path.name for path in Path("figures").glob(f"*{name}*")}
    assert made == {f"half-{name}-FedHalf.{kind}" for kind in ("svg", "pdf", "png")}


def test_an_addon_outside_the_package_brings_its_picture(write_own):
    name = write_own("my_addons")
    plures.run(f"fedrod+{name}:Shown", out="r", **SMALL)
    text = words_of(report.write([Path("r")], Path("page.html")))
    assert re.findall(r'<figure id="([a-z-]+)-0">', text.partition("Inside")[2]) == ["half", "good", "heads"]
    assert "A bar for each tensor, alone." in text


@pytest.mark.parametrize(
    "changes, note, shown",
    [
        ({"MAKE": "1 / 0"}, "ZeroDivisionError: division by zero", []),
        ({"MAKE": "raise SystemError('no bars')"}, "SystemError: no bars", []),
        ({"MAKE": "return 3"}, "TypeError: 'int' object is not iterable", []),
        ({"MAKE": "return ['good']"}, "AttributeError: 'str' object has no attribute 'name'", []),
        ({"NAME": "../half"}, "small letters, digits and hyphens, got '../half'", []),
        ({"NAME": "good"}, "two pictures are named 'good'", []),
        ({"DRAW": "1 / 0"}, "the picture 'half': ZeroDivisionError: division by zero", ["good"]),
        ({"DRAW": "return None"}, "the picture 'half': TypeError", ["good"]),
        ({"DRAW": "return {'data': [{'y': {1}}], 'layout': {}}"}, "'half': a view cannot show a set", ["good"]),
        ({"PRINT": "1 / 0"}, "the picture 'half': ZeroDivisionError: division by zero", ["half", "good"]),
    ],
)
def test_a_picture_that_fails_becomes_a_note(write_own, changes, note, shown):
    name = write_own("my_broken_methods", **changes)
    plures.run(f"{name}:FedHalf", out="r", **SMALL)
    text = words_of(report.write([Path("r")], Path("page.html"), Path("figures")))
    told = re.findall(r'<p class="note">(.*?)</p>', text)
    assert told and all(one.startswith(f"What is inside {name}:FedHalf is not shown: ") for one in told)
    assert note.replace("'", "&#39;") in told[0]
    assert re.findall(r'<figure id="([a-z-]+)-0">', text.partition("Inside")[2]) == shown
    assert "Accuracy over time" in text and Path("figures/clients.svg").exists()


def test_an_addon_whose_picture_fails_leaves_those_of_its_host(write_own):
    name = write_own("my_broken_addons", MAKE="1 / 0")
    plures.run(f"fedrod+{name}:Shown", out="r", **SMALL)
    text = words_of(report.write([Path("r")], Path("page.html")))
    assert "is not shown: ZeroDivisionError: division by zero" in text and '<figure id="heads-0">' in text


def test_a_method_that_cannot_be_imported_again_becomes_a_note(write_own):
    name = write_own("my_lost_methods")
    plures.run(f"{name}:FedHalf", out="r", **SMALL)
    Path(f"{name}.py").unlink()
    del sys.modules[name]
    importlib.invalidate_caches()
    text = words_of(report.write([Path("r")], Path("page.html")))
    assert f"What is inside {name}:FedHalf is not shown: method" in text and "Accuracy over time" in text
