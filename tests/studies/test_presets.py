"""Tables of the papers: every preset can be run, its numbers are the published ones, and ours are judged rightly."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from plures.cli import main, view
from plures.data import partition, sources
from plures.data.dataset import Dataset
from plures.errors import UsageError
from plures.methods.spec import make_method
from plures.models.names import MODELS
from plures.runs.callbacks import Callback
from plures.runs.loop import Result
from plures.runs.results import pool_scores
from plures.simulate.evaluate import Pool
from plures.studies import preset as preset_file
from plures.studies import reproduce
from plures.studies.compare import Runs, compare_methods
from plures.studies.preset import Preset, Scale
from plures.studies.reproduce import comparison_of

ROOT = Path(__file__).parent.parent.parent
PRESETS = preset_file.load()
SCALES: tuple[Scale, ...] = ("smoke", "small", "full")
DITTO = "fedrod-table13-fmnist-dir0.3"  # two methods


@pytest.mark.parametrize("name", PRESETS)
def test_preset_can_be_built_at_every_scale(name):
    preset = PRESETS[name]
    for scale in SCALES:
        wanted = comparison_of(preset, scale, None, 1)
        assert wanted.config.data in sources.DATA and wanted.config.model in MODELS
        partition.parse(wanted.config.partition)
        assert len(wanted.methods) == len(set(wanted.methods)) == len(preset.published)
        for method in wanted.methods:
            make_method(method, {}, wanted.config.solver())
        assert scale != "smoke" or wanted.config.data == "digits"  # which needs no data folder
    assert set(preset.own) <= set(preset.published) and set(preset.small_methods) <= set(preset.published)
    assert set(preset.units) <= set(preset.columns)


@pytest.mark.parametrize("name", PRESETS)
def test_published_numbers_are_per_cent_of_known_columns(name):
    for columns in PRESETS[name].published.values():
        assert set(columns) <= set(PRESETS[name].columns) - set(PRESETS[name].units)
        for number in columns.values():
            mean, std = number if isinstance(number, list) else (number, 0.0)
            assert 0 < mean < 100 and 0 <= std < 10


def test_small_size_is_smaller_than_full_size():
    for name, preset in PRESETS.items():
        small, full = (comparison_of(preset, scale, None, 1).config for scale in ("small", "full"))
        assert small.share * small.rounds < full.share * full.rounds, name
        assert small.data == full.data and small.partition == full.partition, name


def options_of(paper: str, scale: Scale) -> dict[str, dict]:
    """The options of all presets of a paper."""
    return {name: preset.options_at(scale) for name, preset in PRESETS.items() if name.startswith(f"{paper}-")}


def test_fedala_has_the_papers_learning_rate_at_small_size_unless_another_is_told():
    small, full = options_of("fedala", "small"), options_of("fedala", "full")
    rates = {("cnn4", False): 0.005, ("cnn4", True): 0.1, ("fasttext", False): 0.1, ("resnet18-small", False): 0.1}
    for name, options in full.items():
        assert options["lr"] == rates[options["model"], options["data"] == "mnist"], name
        told = any("learning rate" in sentence for sentence in PRESETS[name].unknown)
        assert small[name]["lr"] == options["lr"] or told, name


@pytest.mark.parametrize("scale", ["small", "full"])
def test_fedala_leaves_out_rows_that_fill_no_batch_and_the_other_papers_do_not(scale):
    for name, preset in PRESETS.items():
        drops = comparison_of(preset, scale, None, 1).config.last_batch == "drop"
        assert drops == name.startswith("fedala-"), name


def test_fedrod_crops_and_flips_images_of_cifar_and_no_others():
    for scale in SCALES:
        for name, options in options_of("fedrod", scale).items():
            augmented = options.get("augment", "none") == "crop,flip"
            assert augmented == options["data"].startswith("cifar"), (name, scale)


def test_long_tails_of_table_10_have_the_papers_alpha():
    found = {name: options["partition"] for name, options in options_of("fedrod", "full").items() if "table10" in name}
    assert found == {
        "fedrod-table10-fmnist-im10": "longtail:10,0.3",
        "fedrod-table10-fmnist-im100": "longtail:100,0.3",
        "fedrod-table10-cifar10-im10": "longtail:10,0.6",
        "fedrod-table10-cifar10-im100": "longtail:100,0.6",
    }


def test_one_client_has_all_rows_in_centralized_training():
    options = PRESETS["fedrod-table2-centralized"].options_at("full")
    y = np.arange(200) % 10
    data = Dataset("invented", np.zeros((200, 1, 1, 1), np.float32), y, 10, 160, None)
    split = partition.make_split(data, options["partition"], options["clients"], 0)
    assert [rows.tolist() for rows in split.train] == [list(range(160))]
    assert [rows.tolist() for rows in split.test] == [list(range(160, 200))]


def test_fig11_takes_balanced_fedavg_for_the_generic_head_which_it_is():
    """The personal head changes nothing of the model under it, so that both have the same generic model."""
    wanted = comparison_of(PRESETS["fedrod-fig11"], "smoke", None, 1)
    runs = compare_methods(wanted, None, lambda line: None, lambda method, seed, folder: Callback())
    heads, both = (runs[method, 0].summary["generic"] for method in ("fedavg:pm=local+brm", "fedrod:pm_base=local"))
    assert heads == pytest.approx(both, abs=1e-6)


GOLDEN = [
    ("fedrod-table1-fmnist-dir0.3", "fedrod:head=hyper", "G-FL GM", [86.3, 0.17]),
    ("fedrod-table1-fmnist-dir0.3", "fedavg:pm=local", "P-FL PM", [90.5, 0.21]),
    ("fedrod-table1-cifar10-dir0.1", "fedrod", "G-FL GM", 68.5),
    ("fedrod-table1-cifar100-dir0.3", "ditto", "P-FL PM", [58.8, 0.38]),
    ("fedrod-table4-fmnist", "fedrod:head=hyper", "before", 88.9),
    ("fedrod-table12-cifar10-dir0.3", "fedrod:head=hyper,width=32,loss=meta-bsm", "G-FL GM", 80.1),
    ("fedrod-table14-replace", "ditto", "GM", 42.2),
    ("fedala-table2-mnist", "fedala", "accuracy", [99.88, 0.01]),
    ("fedala-table2-cifar10-dir0.1", "fedala", "accuracy", [90.67, 0.03]),
    ("fedala-table2-cifar10-path", "fedavg", "accuracy", [55.09, 0.83]),
    ("fedala-table4-ala-cifar100", "ditto+ala", "accuracy", [56.33, 0.07]),
    ("pfedla-table1-emnist", "heurpfedla", "accuracy", [94.11, 0.13]),
    ("pfedla-table2-cifar100-100", "pfedla", "accuracy", [48.79, 1.6]),
    ("plgu-table1-cifar10", "plgu-lf", "lowest 5 %", 67.34),
    ("plgu-table2-cifar10-c100", "plgu-grep:head_epochs=5", "top 5 %", 77.61),
]


@pytest.mark.parametrize(("name", "method", "column", "number"), GOLDEN)
def test_published_number_is_in_the_preset(name, method, column, number):
    assert PRESETS[name].published[method][column] == number


def test_what_cannot_be_read_is_left_out():
    assert "G-FL GM" not in PRESETS["fedrod-table1-fmnist-dir0.1"].published["fedavg:pm=local"]
    assert PRESETS["fedrod-table4-cifar10"].published["feddyn"] == {}
    assert "P lowest 5 %" not in PRESETS["plgu-table3-k10"].published["plgu-ghn"]
    assert PRESETS["afml-fig3"].published["afml"] == {}


# Every preset runs


DONE: set[tuple[str, str]] = set()  # (method, options) of the runs so far, in this process


@pytest.mark.xdist_group("presets")
@pytest.mark.parametrize("name", PRESETS)
def test_preset_runs_as_a_smoke_test(name, tmp_path):
    """Its own methods, and those that no preset with the same options, but for who has which rows, has run yet."""
    preset = PRESETS[name]
    wanted = comparison_of(preset, "smoke", None, 1)
    alike = wanted.config.model_copy(update={"partition": None, "clients": None, "participation": 1.0}).identity()
    must = preset.own or preset.methods()[:1]
    chosen = [method for method in preset.methods() if method in must or (method, alike) not in DONE]
    DONE.update((method, alike) for method in chosen)
    wanted = comparison_of(preset, "smoke", None, 1, only=chosen)
    eager = wanted._replace(
        config=wanted.config.model_copy(update={"engine": "eager"})
    )  # two rounds are not worth a trace
    runs = compare_methods(eager, tmp_path, lambda line: None, lambda method, seed, folder: Callback())
    cells = reproduce.cells(preset, reproduce.numbers(preset, runs, "smoke"))
    assert [(cell.method, cell.column) for cell in cells] == [(m, c) for m in chosen for c in preset.columns]
    for cell in [cell for cell in cells if cell.method in must]:
        assert cell.ours.n == 1 and 0 <= cell.ours.mean <= 100


# What is said of the numbers


def invented(**changes) -> Preset:
    values = {
        "title": "invented",
        "options": {"data": "digits"},
        "small": {},
        "seeds": [0, 1],
        "columns": {"A": "personal.mean", "B": "generic.accuracy"},
        "own": ["ditto"],
        "published": {
            "ditto": {"A": [80.0, 1.5], "B": 60.0},
            "fedavg": {"A": 70.0, "B": 65.0},
            "local": {"A": 85.0},
            "fedper": {},
        },
        "unknown": [],
    }
    return Preset(**(values | changes))


OURS = {
    "ditto": {"A": [82.0, 84.0], "B": [60.0]},
    "fedavg": {"A": [72.1], "B": [59.0]},
    "local": {"A": [83.5], "B": [10.0]},
    "fedper": {"A": [50.0], "B": []},
}


def test_cells_have_theirs_ours_and_a_verdict():
    cells = {(cell.method, cell.column): cell for cell in reproduce.cells(invented(), OURS)}
    ditto = cells["ditto", "A"]
    assert (ditto.published, ditto.published_std, ditto.ours.n, ditto.ours.mean) == (80.0, 1.5, 2, 83.0)
    assert ditto.ours.std == pytest.approx(2**0.5)
    verdicts = {key: cell.verdict for key, cell in cells.items()}
    assert verdicts == {
        ("ditto", "A"): "within",  # 3 points, as much as two deviations
        ("ditto", "B"): "within",
        ("fedavg", "A"): "better",  # 2.1 points
        ("fedavg", "B"): "worse",  # 6 points
        ("local", "A"): "within",  # 1.5 points
        ("local", "B"): "",  # not published
        ("fedper", "A"): "",
        ("fedper", "B"): "",
    }


def test_orders_compare_own_methods_with_the_others_alone():
    preset = invented()
    found = {order.column: order for order in reproduce.orders(preset, reproduce.cells(preset, OURS))}
    # A: ditto 80 above fedavg 70 (ours 83, 72.1) and below local 85 (ours 83, 83.5). B: below fedavg (ours above).
    assert (found["A"].holds, found["A"].pairs, found["A"].broken) == (2, 2, [])
    assert (found["B"].holds, found["B"].pairs, found["B"].broken) == (0, 1, ["ditto below fedavg"])


def test_methods_that_were_not_run_are_not_in_the_table():
    cells = reproduce.cells(invented(), {"fedavg": {"A": [70.0], "B": []}})
    assert [(cell.method, cell.ours.n) for cell in cells] == [("fedavg", 1), ("fedavg", 0)]
    assert [order.pairs for order in reproduce.orders(invented(), cells)] == [0, 0]


def test_a_number_is_found_by_its_path():
    summary = {"personal": {"mean": 0.5}, "curve": [0.1, 0.2], "generic": None}
    paths = ["personal.mean", "curve.1", "curve.2", "generic.accuracy", "personal.mean.deeper", "nothing"]
    assert [reproduce.value_at(summary, path) for path in paths] == [0.5, 0.2, None, None, None, None]


def test_a_number_is_told_in_per_cent_or_in_the_unit_of_its_column():
    preset = invented(
        columns={"A": "personal.mean", "rounds": "to_goal.cost.round", "GB": "to_goal.cost.bytes"},
        units={"rounds": 1, "GB": 1e9},
        published={"ditto": {"A": 80.0}, "fedavg": {}},
    )
    reached = {"personal": {"mean": 0.5}, "to_goal": {"cost": {"round": 30, "bytes": 2_500_000_000}}}
    missed = {"personal": {"mean": 0.25}, "to_goal": {"cost": None}}
    runs = Runs({("ditto", 0): Result(reached, [], [], {}, None), ("fedavg", 0): Result(missed, [], [], {}, None)})
    assert reproduce.numbers(preset, runs, "full") == {
        "ditto": {"A": [50.0], "rounds": [30.0], "GB": [2.5]},
        "fedavg": {"A": [25.0], "rounds": [], "GB": []},
    }


def test_a_method_can_be_spelled_otherwise_at_small_size():
    preset = invented(small_methods={"ditto": "ditto:lam=1"})
    methods = {scale: comparison_of(preset, scale, None, 1).methods[0] for scale in SCALES}
    assert methods == {"smoke": "ditto:lam=1", "small": "ditto:lam=1", "full": "ditto"}
    cells = reproduce.cells(preset, OURS)
    assert "ditto is run as ditto:lam=1 at this size" in view.reproduction_words(preset, cells, "small")
    assert not any("run as" in line for line in view.reproduction_words(preset, cells, "full"))


# The command


def test_unknown_preset_gets_the_nearest_name_and_not_all_of_them():
    with pytest.raises(UsageError, match="did you mean 'fedala-table2-mnist'") as caught:
        preset_file.find("fedala-table2-mnst")
    assert "pfedla-table3-emnist" not in str(caught.value) and "plures list presets" in str(caught.value)


def test_reproduce_that_was_stopped_is_resumed(tmp_path, monkeypatch, capsys):
    """The run that was done is not run again, the one that was stopped ends as if it had not been."""
    monkeypatch.chdir(tmp_path)

    def call(out: str) -> int:
        return main.call(["reproduce", DITTO, "--scale", "smoke", "--workers", "1", "--json", "--out", out])

    class Stopped(view._Row):
        def played(self, state, row):
            super().played(state, row)
            if self.name.startswith("fedavg") and row.round == 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(view, "_Row", Stopped)
        assert call("stopped") == 130
    first, second = (tmp_path / "stopped" / name for name in ("ditto", "fedavg-pmlocal"))
    assert (first / "summary.json").exists() and not (second / "summary.json").exists()
    written = (first / "rounds.csv").stat().st_mtime_ns
    capsys.readouterr()
    assert call("stopped") == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["method"] for cell in found] == ["ditto", "fedavg:pm=local"]
    assert (first / "rounds.csv").stat().st_mtime_ns == written
    assert call("whole") == 0
    digests = [
        json.loads((tmp_path / o / second.name / "summary.json").read_text())["digest"] for o in ("stopped", "whole")
    ]
    assert digests[0] == digests[1]


def test_generic_accuracy_with_classes_as_in_training():
    """In Table 11 of Fed-RoD test classes are as frequent as in training: per-class recalls, weighted by that."""
    # Recalls 0.5 and 0.9; clients have 30 + 10 rows of class 0 and 0 + 10 of class 1, so 4/5 and 1/5.
    pool = Pool([0, 1], np.array([10, 10]), np.array([[5, 9], [5, 9]]), np.array([5, 9]), np.array([[30, 0], [10, 10]]))
    _, generic = pool_scores(pool)
    assert generic["as_trained"] == pytest.approx(0.8 * 0.5 + 0.2 * 0.9)
    assert generic["reweighted"] == pytest.approx((0.5 + 0.7) / 2)


# The page


@pytest.fixture(scope="module")
def script(docs_script):
    return docs_script("make_reproduction")


def test_page_is_made_from_records_and_goes_on_where_it_stopped(script, tmp_path, capsys):
    records, page = tmp_path / "records", tmp_path / "page.md"
    script.run(DITTO, "smoke", tmp_path / "runs", ["ditto"], [], None, records, 1)
    record = script.read(records / f"{DITTO}-smoke.json")
    assert list(record["runs"]) == ["ditto"] and list(record["runs"]["ditto"]) == ["0"]
    script.write(records, page)
    assert "Not run: `fedavg:pm=local`." in page.read_text()

    folder = tmp_path / "runs" / f"{DITTO}-smoke" / "ditto"
    written = (folder / "rounds.csv").stat().st_mtime_ns
    script.run(DITTO, "smoke", tmp_path / "runs", [], [0], None, records, 1)
    assert (folder / "rounds.csv").stat().st_mtime_ns == written
    (records / script.EXPLANATIONS).write_text(f'"{DITTO}-smoke" = "Digits are other data."\n')
    capsys.readouterr()
    script.write(records, page)
    text, ours = page.read_text(), script.read(records / f"{DITTO}-smoke.json")["runs"]["ditto"]["0"]["numbers"]["P-FL"]
    assert f"| `ditto` | P-FL | 90.10 | {ours:.2f} | {ours - 90.1:+.2f} |" in text
    assert f"plures reproduce {DITTO} --scale smoke" in text and "Seed 0; 2 runs" in text
    assert "Digits are other data." in text and "Not run" not in text and capsys.readouterr().err == ""


def test_committed_page_is_what_its_records_say(script, tmp_path, capsys):
    page = tmp_path / "reproduction.md"
    script.write(script.RECORDS, page)
    assert page.read_text("utf-8") == (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    assert capsys.readouterr().err == "", "a gap of a recorded table is not explained"


def test_explanations_are_of_records_that_are_there(script):
    path = script.RECORDS / script.EXPLANATIONS
    names = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    assert set(names) <= {record.stem for record in script.RECORDS.glob("*.json")}


# What the papers say, and presets once did otherwise


def test_fedala_presets_have_the_papers_rate_its_best_round_and_its_authors_batches():
    images = [p for name, p in PRESETS.items() if name.startswith("fedala-table2") and "agnews" not in name]
    assert len(images) == 5
    for preset in images:
        rate = 0.1 if preset.options["data"] == "mnist" else 0.005
        for scale in ("small", "full"):
            options = preset.options_at(scale)
            assert options["lr"] == rate and options["last_batch"] == "drop"
        assert preset.columns == {"accuracy": "personal.best_pooled"}


def test_long_tails_of_cifar10_have_the_papers_alpha():
    for name in ("fedrod-table10-cifar10-im10", "fedrod-table10-cifar10-im100"):
        assert PRESETS[name].options["partition"].endswith(",0.6")
    assert PRESETS["fedrod-table10-fmnist-im10"].options["partition"] in ("longtail:10", "longtail:10,0.3")


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("fedrod") and "cifar" in n])
def test_fed_rods_cifar_is_augmented_as_its_paper_says_but_not_in_a_smoke_test(name):
    preset = PRESETS[name]
    assert preset.options_at("full")["augment"] == preset.options_at("small")["augment"] == "crop,flip"
    assert preset.options_at("smoke").get("augment", "none") == "none"


def test_what_the_papers_show_and_was_missing_is_there():
    wanted = ["fedala-table1", "fedala-frozen", "fedala-fig4", "fedrod-fig11", "fedrod-table2-centralized", "plgu-fig7"]
    wanted += ["pfedla-fig6-cifar10", "afml-fig3d-shakespeare", "afml-fig3c-zeta0.5"]
    assert set(wanted) <= set(PRESETS)
    assert any(name.startswith("afml-fig4a") for name in PRESETS)
    assert "fedavg:pm=local+public" in PRESETS["fedrod-table12-cifar10-dir0.3"].methods()
    assert any(method.startswith("fedavg:steps=3") for method in PRESETS["afml-fig1-zeta0.1"].methods())
