"""The numbers behind a report's tables and figures, and its words; no browser is needed here."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plures import report
from plures.errors import DataError, UsageError
from plures.report import looks, numbers, page, records, splits, tables
from tests.small import played, run_of
from tests.written_runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")


def groups_of(*folders: Path):
    return records.group_runs([records.read_record(folder) for folder in folders])


def write_report(folders, to):
    return report.write(list(folders), to).read_text("utf-8")


# Folders, names and groups


def test_seeds_of_a_method_are_one_group_and_other_options_are_in_its_name(tmp_path):
    found = groups_of(
        write_run(tmp_path / "a", seed=0),
        write_run(tmp_path / "b", seed=1),
        write_run(tmp_path / "c", "ditto", settings={"lam": 0.1}, partition="iid"),
        write_run(tmp_path / "d", "ditto", settings={"lam": 0.5}, partition="iid"),
    )
    names = {group.label: [run.summary["seed"] for run in group.runs] for group in found}
    assert names == {"fedavg, dirichlet:0.1": [0, 1], "ditto, iid, lam=0.1": [0], "ditto, iid, lam=0.5": [0]}
    assert [group.look for group in found] == [0, 1, 2]


def test_a_folder_of_runs_stands_for_its_runs_local_and_fedavg_first(tmp_path):
    for name, method in (("x", "fedala"), ("y", "fedavg"), ("z", "local")):
        write_run(tmp_path / "all" / name, method)
    found = records.find_run_folders([tmp_path / "all", tmp_path / "all" / "x"])
    assert [folder.name for folder in found] == ["z", "y", "x"]


def test_a_run_that_has_not_ended_is_told_so(tmp_path):
    folder = write_run(tmp_path / "r", curve=(0.1, 0.2, 0.3))
    (folder / "summary.json").unlink()
    with pytest.raises(UsageError, match=r"has not ended \(it is after round 3, of 3\); resume it with `plures resume"):
        report.write([folder], tmp_path / "page.html")
    with pytest.raises(UsageError, match="it is not a run folder"):
        report.write([tmp_path / "nothing"], tmp_path / "page.html")


def test_a_broken_folder_is_told_so(tmp_path):
    folder = write_run(tmp_path / "r")
    (folder / "clients.csv").unlink()
    with pytest.raises(DataError, match=r"clients\.csv cannot be read"):
        report.write([folder], tmp_path / "page.html")


# Numbers


def test_results_are_mean_and_standard_deviation_over_seeds(tmp_path):
    found = groups_of(
        write_run(tmp_path / "a", seed=0, accuracies=(0.5, 0.7)),
        write_run(tmp_path / "b", seed=1, accuracies=(0.7, 0.9)),
        write_run(tmp_path / "c", "ditto", accuracies=(0.6, 0.6)),
    )
    columns = {column.head: column.cells for column in tables.tabulate_results(found)}
    first, second = columns["personal"]
    assert (first.text, first.spread, first.best) == ("70.00", "± 14.14", True)
    assert (second.text, second.spread, second.best) == ("60.00", "", False)
    assert "harmed" not in columns  # Local is not there


def test_curves_go_over_rounds_bytes_and_seconds_with_a_band_over_seeds(tmp_path):
    found = groups_of(
        write_run(tmp_path / "a", seed=0, curve=(0.1, None, 0.3), n_bytes=100),
        write_run(tmp_path / "b", seed=1, curve=(0.3, 0.4, 0.5), n_bytes=200),
    )
    (over,) = numbers.make_curves(found, "rounds", "personal_mean")
    assert over.x == [1, 3] and over.n_seeds == 2  # the round that one seed did not evaluate is left out
    assert over.mean == pytest.approx([0.2, 0.4]) and over.std == pytest.approx([math.sqrt(0.02)] * 2)
    (spent,) = numbers.make_curves(found, "bytes", "personal_mean")
    assert spent.x == [450, 1350]  # 300 and 600 in each round, also those that were not evaluated
    assert numbers.make_curves(found, "seconds", "personal_mean")[0].x == [2, 6]
    assert numbers.make_curves(found, "flops", "personal_mean") == []  # old folders have no such column


def test_long_curves_are_thinned_and_keep_their_end(tmp_path):
    found = groups_of(write_run(tmp_path / "a", curve=tuple(k / 1000 for k in range(1000))))
    (curve,) = numbers.make_curves(found, "rounds", "personal_mean")
    assert len(curve.x) <= numbers.MOST_POINTS + 1 and curve.x[-1] == 1000 and curve.mean[-1] == 0.999


def test_clients_are_compared_with_local_on_the_same_split_and_seed(tmp_path):
    found = groups_of(
        write_run(tmp_path / "l0", "local", 0, (0.5, 0.9, None), split="zero"),
        write_run(tmp_path / "l1", "local", 1, (0.8, 0.8, 0.8), split="one"),
        write_run(tmp_path / "f0", "fedavg", 0, (0.6, 0.9, None), split="zero"),
        write_run(tmp_path / "f1", "fedavg", 1, (0.6, 0.9, 0.7), split="one"),
    )
    (one,) = numbers.compare_with_local(found)
    assert (one.label, one.harmed, len(one.points)) == ("fedavg", 2, 5)
    assert [(p.seed, p.client, p.n_train, p.local, p.own) for p in one.points[:2]] == [
        (0, "0", 10, 0.5, 0.6),
        (0, "1", 11, 0.9, 0.9),
    ]
    harmed = next(column for column in tables.tabulate_results(found) if column.head == "harmed")
    assert [cell.text for cell in harmed.cells] == ["–", "1"] and harmed.cells[1].spread == "± 1.4"


def test_no_client_is_compared_across_splits(tmp_path):
    found = groups_of(
        write_run(tmp_path / "l", "local", split="zero"), write_run(tmp_path / "f", "fedavg", split="one")
    )
    assert numbers.compare_with_local(found) == []


def test_worst_five_percent_are_the_mean_of_the_ceiling(tmp_path):
    values = tuple(k / 100 for k in range(41))  # 5 % of 41 is 2.05: three clients
    (one,) = numbers.rank_clients(groups_of(write_run(tmp_path / "a", accuracies=values)))
    assert sum(one.worst) == 3 and one.worst[:4] == [True, True, True, False]
    assert one.worst_mean == pytest.approx(0.01) and one.mean == pytest.approx(0.2)


def test_the_marked_worst_come_first_among_equals(tmp_path):
    (one,) = numbers.rank_clients(groups_of(write_run(tmp_path / "a", accuracies=(0.7, 0.5, 0.5, 0.9))))
    assert one.values == [0.5, 0.5, 0.7, 0.9] and one.worst == [True, False, False, False]


def test_new_clients_over_epochs_and_over_seeds(tmp_path):
    new = [{"curve": [0.1, 0.5], "generic": 0.2}, {"curve": [0.3, 0.7], "generic": None}]
    found = groups_of(*[write_run(tmp_path / str(k), seed=k, new_clients=new[k]) for k in (0, 1)])
    (curve,) = numbers.make_epoch_curves(found, "new_clients")
    assert curve.x == [0, 1] and curve.mean == pytest.approx([0.2, 0.6]) and curve.generic == 0.2


def test_accuracy_over_zeta_needs_two_zetas(tmp_path):
    folders = [
        write_run(tmp_path / f"{m}{z}", m, accuracies=(z, z), partition=f"relabel:{z}")
        for m in ("local", "afml")
        for z in (0.9, 0.1)
    ]
    first, second = numbers.make_zeta_curves(groups_of(*folders))
    assert (first.label, first.x, second.label) == ("local", [0.1, 0.9], "afml")
    assert second.mean == pytest.approx([0.1, 0.9])
    assert numbers.make_zeta_curves(groups_of(folders[0])) == []


def test_ledger_has_what_a_run_cost(tmp_path):
    found = groups_of(
        write_run(tmp_path / "a", n_bytes=2_000_000), write_run(tmp_path / "b", "local", n_bytes=0, seconds=9.0)
    )
    cells = {column.head: [cell.text for cell in column.cells] for column in tables.tabulate_costs(found)}
    assert cells["down"] == ["2.0 MB", "0 B"] and cells["training"] == ["2.0 s", "9.0 s"]
    assert cells["memory"] == ["10 MB", "10 MB"] and cells["refused"] == ["0", "0"]
    assert list(cells) == ["down", "up", "FLOPs", "training", "evaluation", "in all", "memory", "refused"]


# The split


def test_the_split_is_counted_by_client_and_class():
    table = splits.count_rows(played(run_of("fedavg"), 0).state.scene)
    assert table.counts.sum(1).tolist() == [1, 4, 13, 20, 31, 48] and table.n_clients == 6
    assert (table.counts[2] > 0).tolist() == [label == 3 for label in range(10)]


# The page


def test_words_of_a_page_tell_what_was_run(tmp_path):
    folders = [write_run(tmp_path / f"f{k}", seed=k) for k in (0, 1)]
    text = write_report([*folders, write_run(tmp_path / "l", "local")], tmp_path / "p.html")
    words = " ".join(re.sub(r"<[^>]+>", " ", text.partition("<script>")[0]).split())
    assert "Two methods on digits" in words and "2 clients have the rows of digits, dealt by dirichlet:0.1" in words
    assert "Seeds 0, 1; ± is one standard deviation over them" in words
    assert "all clients take part in each, with 1 epoch of batches of 10 rows, at learning rate 0.05" in words


def test_attackers_are_told(tmp_path):
    attack = {"kind": "replace", "attackers": [0, 3]}
    text = write_report([write_run(tmp_path / "a", attack=attack)], tmp_path / "p.html")
    assert "2 clients attack: they enlarge their updates." in text


def test_names_cannot_become_markup_or_end_a_script(tmp_path):
    evil = "</script><script>alert(1)</script>"
    folders = [write_run(tmp_path / str(k), data=evil, partition=f"{evil}{k}") for k in (0, 1)]
    text = write_report(folders, tmp_path / "p.html")
    assert evil not in text


def test_a_run_that_cannot_be_opened_still_has_a_page(tmp_path):
    """Folders written by hand have no checkpoint, and a split that fits no data."""
    folders = [write_run(tmp_path / name, name, split=name) for name in ("fedala", "pfedla")]
    text = write_report(folders, tmp_path / "p.html")
    assert "is not shown" in text and "Who has which classes" not in text and "Accuracy over time" in text


def test_without_plotly_the_page_has_words_tables_and_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    text = write_report([write_run(tmp_path / "a"), write_run(tmp_path / "l", "local")], tmp_path / "p.html")
    assert "pip install" in text and "plures[plots]" in text and "<table>" in text
    assert "<script" not in text and "<figure" not in text and len(text) < 30_000


def test_every_colour_has_one_for_a_dark_page_and_looks_are_told_apart():
    dark = looks.for_dark()
    assert {*looks.COLOURS, *looks.SHADES, looks.INK, looks.SOFT, looks.GRID, looks.PAPER, looks.WARN} <= set(dark)
    assert len(dark) == len(set(dark)) and len(set(looks.COLOURS)) == len(looks.COLOURS)
    seen = {(looks.colour(k), looks.dash(k), looks.marker(k)) for k in range(40)}
    assert len(seen) == 40


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_words_stand_out_from_the_page(theme):
    dark = looks.for_dark()

    def shown(colour):
        return colour if theme == "light" else dark[colour]

    def contrast(a, b):
        high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    paper = shown(looks.PAPER)
    assert all(contrast(shown(c), paper) >= 3 for c in looks.COLOURS)
    assert all(contrast(shown(c), paper) >= 4.5 for c in (looks.INK, looks.SOFT, looks.WARN))


def test_figures_for_papers_are_the_same_bytes_each_time(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(numbers, "AXES", {"bytes": "bytes"})
    folders = [write_run(tmp_path / f"f{k}", seed=k) for k in (0, 1)] + [write_run(tmp_path / "l", "local")]
    for where in ("one", "two"):
        report.write(folders, tmp_path / "p.html", tmp_path / where)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / w).iterdir()} for w in ("one", "two"))
    assert first == second
    names = {Path(name).stem for name in first}
    assert names == {"personal-mean-over-bytes", "against-local", "clients"}
    assert {Path(name).suffix for name in first} == {".svg", ".pdf", ".png"} and len(first) == 3 * len(names)


def test_plotting_packages_are_not_imported_with_the_command_line():
    for module, heavy in (("main", {"plotly", "matplotlib", "jinja2"}), ("commands", {"plotly", "matplotlib"})):
        code = f"import sys, plures.cli.{module}; print(sorted({heavy} & set(sys.modules)))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert json.loads(out.replace("'", '"')) == []


def test_methods_that_share_a_place_are_all_counted():
    assert page.join_labels(["ditto"]) == "ditto"
    assert page.join_labels(["ditto", "fedala"]) == "ditto and fedala"
    assert page.join_labels(["ditto", "fedala", "fedrod"]) == "ditto, fedala and fedrod"
    assert page.join_labels(["local", "ditto", "fedala", "fedrod", "afml"]) == "local, ditto and 3 others"
