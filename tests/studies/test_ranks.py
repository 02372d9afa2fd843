"""Methods over many data sets: ranks, Friedman, Nemenyi, the diagram, and the command."""

import csv
import json
import math

import numpy as np
import pytest

from plures.cli.main import call
from plures.errors import UsageError
from plures.learn.metrics import ACCURACY, METRICS
from plures.report import numbers
from plures.report.records import find_run_folders, group_runs, read_record
from plures.runs.config import make_config
from plures.studies import ranks
from plures.studies.compare import data_sets

stats = pytest.importorskip("scipy.stats", reason="tests over data sets need scipy")
TABLE = {
    "a": {"x": 0.9, "y": 0.8, "z": 0.7},
    "b": {"x": 0.9, "y": 0.8, "z": 0.8},
    "c": {"x": 0.6, "y": 0.7, "z": 0.5},
    "d": {"x": 0.8, "y": 0.7, "z": 0.6},
}


def test_equal_methods_share_the_mean_of_their_places():
    assert ranks.rank_row(np.array([0.5, 0.9, 0.5, 0.1])).tolist() == [2.5, 1, 2.5, 4]
    assert ranks.rank_row(np.array([1.0, 1.0, 1.0])).tolist() == [2, 2, 2]


def test_mean_ranks_put_the_best_first():
    found = ranks.make_ranks({name: dict(reversed(row.items())) for name, row in TABLE.items()})
    assert found.methods == ["x", "y", "z"]
    assert found.mean.tolist() == [1.25, (2 + 2.5 + 1 + 2) / 4, (3 + 2.5 + 3 + 3) / 4]
    assert found.scores[2].tolist() == [0.6, 0.7, 0.5]


def test_where_less_is_better_the_smallest_error_is_first():
    errors = {name: {"x": 3.0, "y": 1.0} for name in "ab"}
    found = ranks.make_ranks(errors, {name: METRICS["rmse"] for name in "ab"})
    assert found.methods == ["y", "x"] and found.text(0, 0) == "1"


def test_friedman_is_scipys_with_iman_and_davenports_correction():
    found = ranks.make_ranks(TABLE)
    chi2 = stats.friedmanchisquare(*found.scores.T).statistic
    n, k = 4, 3
    f = (n - 1) * chi2 / (n * (k - 1) - chi2)
    assert found.p == pytest.approx(stats.f.sf(f, k - 1, (k - 1) * (n - 1)))
    same = ranks.make_ranks({name: {"x": 3, "y": 2, "z": 1} for name in "abc"})
    assert same.p == 0 and ranks.make_ranks({name: {"x": 1, "y": 1, "z": 1} for name in "abc"}).p == 1
    assert ranks.make_ranks({name: {"x": 2, "y": 1} for name in "abc"}).p is None


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_differences_are_those_of_the_published_table(k, q):
    assert ranks.critical_difference(k, 12) == pytest.approx(q * math.sqrt(k * (k + 1) / 72), abs=2e-3)


def of_means(mean, critical):
    names, scores = [f"m{i}" for i in range(len(mean))], np.zeros((2, len(mean)))
    return ranks.Ranks(names, ["a", "b"], scores, np.array([mean] * 2), 0.5, critical, [ACCURACY] * 2)


def test_bars_join_the_longest_rows_of_methods_that_do_not_differ():
    assert of_means([1, 2, 3, 4], 1.5).alike() == [(0, 1), (1, 2), (2, 3)]
    assert of_means([1, 1.2, 3, 3.1], 1).alike() == [(0, 1), (2, 3)]
    assert of_means([1, 2, 3, 4], 9).alike() == [(0, 3)]
    assert of_means([1, 3, 5], 1).alike() == []


def test_names_stand_so_that_lines_do_not_cross():
    placed = ranks.place_methods(of_means([1, 2, 3, 4, 5], 1))
    assert [(one.is_left, one.row) for one in placed] == [(True, 0), (True, 1), (True, 2), (False, 1), (False, 0)]
    assert ranks.Placed("ditto:lr=0.123,lam=0.0123,epochs=3", 2.0, 0, True).short == "ditto:lr=0.123,lam=0.01…, 2.00"


def test_fewer_than_two_data_sets_or_methods_have_no_ranks():
    assert ranks.make_ranks({"a": {"x": 1, "y": 2}}) is None
    assert ranks.make_ranks({"a": {"x": 1, "y": 2}, "b": {"x": 1}}) is None
    assert ranks.make_ranks({}) is None


def test_words_say_what_differs_and_that_data_sets_are_few():
    words = " ".join(ranks.in_words(of_means([1, 2, 3], 1.5)))
    assert "m0 above m2" in words and "m0 above m1" not in words and "2 data sets are few" in words


def test_names_with_commas_are_data_sets_and_paths_are_not(tmp_path):
    assert data_sets(make_config({"data": "digits, mnist"})) == ["digits", "mnist"]
    path = tmp_path / "a,b.npz"
    path.write_bytes(b"")
    assert data_sets(make_config({"data": str(path)})) == [str(path)]
    for wrong in ("digits,", "digits,digits"):
        with pytest.raises(UsageError, match="each once"):
            data_sets(make_config({"data": wrong}))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison over two data sets of the user's own."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        y = rng.integers(0, 3, 90)
        x = (rng.normal(size=(90, 5)) + y[:, None]).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=y, client=np.arange(90) % 4)
    data = f"{folder / 'one.npz'},{folder / 'two.npz'}"
    words = ["compare", "local", "fedavg", "ditto", "--data", data, "--rounds", "2", "--quiet", "--workers", "1"]
    assert call([*words, "--seeds", "0,1", "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_a_comparison_over_data_sets_ranks_methods_by_their_mean_over_seeds(compared):
    rows = list(csv.DictReader((compared / "ranks.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"local", "fedavg", "ditto"}
    runs = [
        json.loads((compared / "one" / f"seed-{s}" / rows[0]["method"] / "summary.json").read_text()) for s in (0, 1)
    ]
    assert float(rows[0]["one"]) == pytest.approx(np.mean([run["personal"]["mean"] for run in runs]))
    text = (compared / "ranks.tex").read_text()
    assert r"\begin{picture}" in text and "CD = " in text and text.count("{") == text.count("}")


def test_it_is_resumed_as_a_whole_and_its_report_shows_the_diagram(compared, capsys):
    assert call(["resume", str(compared), "--json", "--workers", "1"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    page = (compared / "report.html").read_text("utf-8")
    assert "Over data sets" in page and "critical-difference" in page and "2 data sets are few" in page
    records = [read_record(folder) for folder in find_run_folders([compared])]
    assert len(records) == 12 and numbers.rank_methods(group_runs(records)).blocks == ["one", "two"]
    alone = [record for record in records if record.folder.parts[-3] == "one"]
    assert numbers.rank_methods(group_runs(alone)) is None


def test_the_printed_diagram_has_every_name():
    pytest.importorskip("matplotlib", reason="figures for papers are drawn with matplotlib")
    from plures.report.matplotlib_kit import same_bytes
    from plures.report.printed import draw_ranks

    with same_bytes():
        drawn = draw_ranks(ranks.make_ranks(TABLE))
    words = " ".join(text.get_text() for text in drawn.axes[0].texts)
    assert all(f"{name}, " in words for name in "xyz") and "CD = " in words
