"""Tuning: the same trials however it is run, test rows that nobody reads, budgets, spaces, and what is made of it."""

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import plures
from plures.cli.main import call
from plures.data import sources
from plures.data.dataset import Target
from plures.errors import RunFailed, UsageError
from plures.learn.solver import Solver
from plures.methods import ADDONS, METHODS
from plures.methods.search import among, around, linear, log
from plures.methods.spec import all_settings, make_method, setting_fields
from plures.runs.config import make_config
from plures.runs.folders import folder_name
from plures.runs.scene import Objects
from plures.runs.simulation import Simulation
from plures.studies import tune as tuning
from plures.studies.space import read_space, space_of
from plures.studies.tune import Studies, Tuning, tune_methods, without_test_rows, write_tuning
from plures.studies.tuned import read_tuned, write_tuned

pytest.importorskip("optuna", reason="tuning needs the extra tune")
SMALL = {"clients": 4, "rounds": 4, "share": 0.2, "partition": "dirichlet:0.5"}


def wanted_of(methods=("fedavg",), trials=7, seeds=(0,), objects=Objects(), options=None, **more):  # noqa: B008
    return Tuning(list(methods), make_config(SMALL | (options or {})), list(seeds), trials, objects=objects, **more)


def study(folder: Path, wanted: Tuning):
    folder.mkdir(exist_ok=True)
    write_tuning(folder, wanted)
    tune_methods(wanted, folder, lambda line: None)
    return read_tuned(folder)[1]


def facts(found):
    """What must be the same: everything but seconds."""
    return [(one.method, one.spec, [trial._replace(seconds=0.0) for trial in one.trials]) for one in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A study that nothing disturbed."""
    return study(tmp_path_factory.mktemp("alone"), wanted_of(["fedavg", "ditto"]))


# The same trials, whatever happens


def killed(folder: Path, wanted: Tuning, owner: type, name: str, at: int, before: bool) -> None:
    """Tune in a process that is killed with -9 at some call of a function, before or after it has done its work."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return
    real, calls = getattr(owner, name), []

    def replaced(*arguments):
        calls.append(1)
        if before and len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        out = real(*arguments)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(owner, name, replaced)
    try:
        tune_methods(wanted, folder, lambda line: None)
    finally:
        os._exit(0)


def test_a_study_that_is_killed_again_and_again_has_the_same_trials_and_the_same_best(alone, tmp_path):
    wanted = wanted_of(["fedavg", "ditto"])
    write_tuning(tmp_path, wanted)
    killed(tmp_path, wanted, Studies, "add", 3, before=False)  # in the middle of a batch
    killed(tmp_path, wanted, Simulation, "play_round", 5, before=False)  # in the middle of a run
    killed(tmp_path, wanted, Studies, "record", 4, before=True)  # played, and not written down
    killed(tmp_path, wanted, Studies, "end", 2, before=False)
    found = study(tmp_path, wanted)
    assert facts(found) == facts(alone)
    assert not (tmp_path / "trials").exists()


def test_processes_that_share_a_study_make_the_same_trials(alone, tmp_path):
    assert facts(study(tmp_path, wanted_of(["fedavg", "ditto"], options={"workers": 3}))) == facts(alone)


def test_another_seed_of_the_search_makes_other_trials(alone, tmp_path):
    [other] = study(tmp_path, wanted_of(options={"seed": 1}))
    assert other.default == alone[0].default._replace(seconds=other.default.seconds)
    assert other.trials[1].values != alone[0].trials[1].values


def test_a_trial_that_goes_on_is_a_whole_run_scored_on_validation_rows(alone):
    """The same run, never paused, with the option `validation`."""
    one = alone[1]
    whole = next(trial for trial in one.whole if trial.number)
    spec = wanted_of(["ditto"]).space("ditto").spec("ditto", whole.values)
    run = plures.run(spec, **SMALL, validation=0.2)
    assert run.rounds[-1]["validation_mean"] == pytest.approx(whole.scores[4], abs=1e-12)
    assert [rung for rung in whole.scores] == [1, 2, 4]
    assert run.rounds[1]["validation_mean"] == pytest.approx(whole.scores[2], abs=1e-12)
    assert sum(row["flops"] for row in run.rounds) == whole.flops


def test_trial_0_is_the_default_and_is_played_to_the_end(alone):
    for one in alone:
        assert one.default.values["lr"] == 0.05 and one.default.values["epochs"] == 1
        assert 4 in one.default.scores and one.best.scores[4] >= one.default.scores[4]
        assert len(one.trials) == 7 and len(one.whole) < 7
        assert len({json.dumps(trial.values) for trial in one.trials}) == 7


def test_of_all_trials_so_far_the_better_third_goes_on(alone):
    trials = alone[0].trials
    for after, n in ((1, 5), (1, 7)):
        values = sorted((trial.scores[after] for trial in trials[:n]), reverse=True)
        batch = [trial for trial in trials[:n] if trial.number >= n - (5 if n == 5 else 2)]
        for trial in batch:
            is_better = trial.scores[after] >= values[-(-n // 3) - 1]
            assert (2 in trial.scores) == (is_better or trial.number == 0)


# Test rows


def test_test_rows_are_not_read(tmp_path):
    """Rows that nobody may read hold no numbers, and wrong labels: nothing changes."""
    data = sources.load("digits")
    split = {"train": [list(range(0, 60)), list(range(100, 150))], "test": [list(range(60, 80)), list(range(150, 170))]}
    (tmp_path / "split.json").write_text(json.dumps(split))
    options = {"split": str(tmp_path / "split.json"), "rounds": 3}
    hidden = np.ones(len(data.y), bool)
    hidden[[row for rows in split["train"] for row in rows]] = False
    x, y = data.x.copy(), data.y.copy()
    x[hidden], y[hidden] = np.nan, (y[hidden] + 1) % 10
    found = []
    for name, one in (("open", data), ("hidden", data._replace(x=x, y=y))):
        wanted = wanted_of(["fedala:cap=2"], trials=3, options=options, objects=Objects(data=one))
        found.append(facts(study(tmp_path / name, wanted)))
    assert found[0] == found[1]
    assert found[0][0][2][0].scores[3] > 0.1


def test_no_test_row_is_in_the_data_of_trials():
    data = sources.load("digits")
    scene = plures.runs.scene.make_scene(make_config(SMALL), objects=Objects(data=data))
    kept = without_test_rows(data, scene.split, 0.2, 0)
    assert len(kept.data.y) == sum(map(len, scene.split.train))
    population = scene.population.with_validation(0.2)
    for client in range(4):
        for rows, others in ((kept.split.train, population.train), (kept.split.test, population.validation)):
            assert np.array_equal(kept.data.x[rows[client]], data.x[others[client]])


# Budgets


def test_methods_get_as_many_flops_as_the_first_and_what_is_unspent_is_said(tmp_path):
    first, second = study(tmp_path, wanted_of(["ditto:lam=1", "fedavg"], trials=4, budget="flops"))
    assert len(first.trials) == 4 and first.spent == first.budget == second.budget
    assert len(second.trials) >= 4
    assert 0.6 * second.budget < second.spent <= 1.05 * second.budget
    assert sum(trial.flops for trial in second.trials) == second.spent


def test_where_all_values_have_been_tried_the_rest_of_the_budget_is_unspent(tmp_path):
    ranges = {"fedavg": {"lr": [0.05, 0.1], "epochs": 1}}
    [found] = study(tmp_path, wanted_of(trials=6, ranges=ranges))
    assert [trial.values for trial in found.trials] == [{"lr": 0.05}, {"lr": 0.1}]
    assert found.budget - found.spent == 4


def test_settings_that_diverge_are_recorded_and_do_not_end_the_study(tmp_path):
    ranges = {"fedavg": {"lr": [0.05, 1e30], "epochs": 1}}
    [found] = study(tmp_path, wanted_of(trials=2, ranges=ranges))
    bad = found.trials[1]
    assert bad.scores == {1: -math.inf} and "not finite" in bad.failed.replace("not a finite number", "not finite")
    assert found.best.number == 0 and found.is_kept and found.spec == "fedavg:epochs=1"


def test_a_default_that_cannot_run_is_told(tmp_path):
    with pytest.raises(RunFailed, match="not a finite number"):
        study(tmp_path, wanted_of(options={"lr": 1e30}))


@pytest.mark.parametrize("objective", ["worst5", "generic"])
def test_other_objectives(objective, tmp_path):
    [found] = study(tmp_path, wanted_of(trials=1, objective=objective))
    run = plures.run("fedavg", **SMALL, validation=0.2)
    each = sorted(found.default.clients)
    if objective == "worst5":
        assert found.default.scores[4] == pytest.approx(each[0], abs=1e-6)
    else:  # over rows, not over clients
        assert found.default.scores[4] != pytest.approx(run.rounds[-1]["validation_mean"], abs=1e-9)


# Spaces

EVERYTHING = [*METHODS.lines, *[f"fedavg+{addon}" for addon in ADDONS.lines]]


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_setting_has_a_range_that_its_method_allows(name):
    method = make_method(name, {}, Solver())
    for key, field in setting_fields(method).items():
        search = field.metadata["search"]
        assert search is not None, f"{key} needs search=..."
        search = search.including(all_settings(method)[key])
        ends = search.values or (search.low, search.high)
        for end in ends:
            make_method(name, {key: type(field.default)(end)}, Solver())
        if not search.values:
            assert search.low < search.high and (search.low > 0 or not search.is_log)
            assert isinstance(field.default, float) or float(search.low).is_integer()


def test_ranges_are_around_the_default():
    space = wanted_of(["ditto"], options={"lr": 0.5, "epochs": 4}).space("ditto")
    assert space.searched["lr"].search[:3] == (0.05, 5.0, True)
    assert space.searched["epochs"].search[:2] == (1, 12)
    assert set(space.searched) == {"lr", "epochs", "lam"}
    steps = wanted_of(["fedavg"], options={"steps": 6}, named=("lr", "epochs", "steps", "weights")).space("fedavg")
    assert set(steps.searched) == {"lr", "steps", "weights"}
    assert log(1, 10).including(20).high == 20 and among(1, 2).including(3).values == (3, 1, 2)
    assert linear(0, 1).if_named().must_be_named and around(2).including(8).low == 4


def test_what_stands_in_a_name_is_held():
    config = make_config(SMALL | {"settings": {"s": 50}})
    assert set(space_of("ditto:lam=2,lr=0.1", make_config(SMALL), ("lr", "epochs"), {}).searched) == {"epochs"}
    assert set(space_of("ditto+ala:p=2", config, (), {}).searched) == {"lam", "eta"}
    space = space_of("ditto+ala:p=2", config, (), {"all": {"eta": 0.5}})
    spec = space.spec("ditto+ala:p=2", {"lam": 0.123})
    assert spec == "ditto+ala:p=2,eta=0.5,lam=0.123"
    made = all_settings(make_method(spec, {}, Solver()))
    assert (made["lam"], made["eta"], made["p"]) == (0.123, 0.5, 2)


def test_a_space_file_changes_ranges(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('[all]\nlr = {low = 0.1, high = 0.2}\nbatch = [5, 10]\n[ditto]\nlam = 1.5\nweights = ["uniform"]\n')
    space = wanted_of(["ditto"], ranges=read_space(path)).space("ditto")
    assert space.searched["lr"].search[:3] == (0.05, 0.2, False)  # with the default
    assert space.searched["batch"].search.values == (5, 10)
    assert space.searched["weights"].search.values == ("samples", "uniform")
    assert space.held == {"lam": 1.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr = 1\n", "stands alone"),
        ("[ditto]\nlam = {low = 1}\n", "is written"),
        ("[ditto]\nlam = {low = 2, high = 1}\n", "needs low below high"),
        ("[ditto]\nlam = {low = 0, high = 1, log = true}\n", "low above 0"),
        ("[ditto]\nlamb = 1\n", "did you mean 'lam'"),
        ("[all]\nlamb = 1\n", "did you mean 'lam'"),
        ("[fedrep]\nhead_epochs = 1\n", "not tuned here"),
        ("[ditto]\nlam = [-1, 1]\n", "must be 0 or more"),
        ("[ditto]\nlam = []\n", "has no values"),
    ],
)
def test_a_space_file_with_a_slip_is_refused_in_words(text, words, tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        tuning.check_tuning(wanted_of(["ditto"], ranges=read_space(path)))


def test_a_tuning_with_nothing_to_search_or_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match="nothing is left to search"):
        tuning.check_tuning(wanted_of(["fedavg"], named=()))
    for name in ("learning_rate", "optimizer"):
        with pytest.raises(UsageError, match="unknown setting or option with a range"):
            tuning.check_tuning(wanted_of(["fedavg"], named=(name,)))


def test_a_setting_of_ones_own_without_a_range_is_searched_with_a_space_file(tmp_path, monkeypatch):
    lines = [
        "import dataclasses",
        "import plures",
        "@dataclasses.dataclass(frozen=True)",
        "class Mine(plures.Method):",
        "    'Mine.'",
        "    k: float = plures.setting(0.5, 'a number')",
    ]
    (tmp_path / "method_without_range.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "method_without_range:Mine"
    assert set(wanted_of([name]).space(name).searched) == {"lr", "epochs"}
    with pytest.raises(UsageError, match="k has no range"):
        wanted_of([name], named=("k",)).space(name)
    assert set(wanted_of([name], named=(), ranges={"all": {"k": [0.5, 1.0]}}).space(name).searched) == {"k"}


def test_a_folder_of_another_tuning_is_refused(tmp_path):
    write_tuning(tmp_path, wanted_of())
    write_tuning(tmp_path, wanted_of(options={"workers": 2}))
    with pytest.raises(UsageError, match=r"other options \(rounds, trials\)"):
        write_tuning(tmp_path, wanted_of(trials=8, options={"rounds": 5}))


# The command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `plures tune` leaves behind."""
    folder = tmp_path_factory.mktemp("cli") / "tuned"
    words = "tune fedavg local --clients 4 --rounds 3 --share 0.2 --trials 6 --seeds 0,1 --workers 1 --quiet --out"
    assert call([*words.split(), str(folder)]) == 0
    return folder


def test_a_tuning_ends_with_a_table_and_a_report(folder, capsys):
    assert call(["resume", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["fedavg", "local"]
    assert rows[0]["importance"]["lr"] > 0 and rows[0]["trials"] == 6 and rows[0]["gain"] >= 0
    page = (folder / "report.html").read_text("utf-8")
    for words in (
        "Default and best",
        "Test rows were not read",
        "seeds 0, 1",
        "Which settings mattered",
        "best-so-far",
    ):
        assert words in page, words
    assert len((folder / "trials.csv").read_text().splitlines()) == 1 + 12


def test_compare_uses_what_was_tuned_on_other_seeds(folder, tmp_path, capsys):
    assert call(["compare", "--tuned", str(folder), "--seeds", "1,2"]) == 2
    assert "seed 1 was tuned on" in capsys.readouterr().err
    assert call(["compare", "ditto", "--tuned", str(folder), "--seeds", "2"]) == 2
    assert "ditto was not tuned in" in capsys.readouterr().err
    out = tmp_path / "compared"
    assert (
        call(["compare", "--tuned", str(folder), "--seeds", "2", "--quiet", "--workers", "1", "--out", str(out)]) == 0
    )
    specs = [one.spec for one in read_tuned(folder)[1]]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {folder_name(spec) for spec in specs}
    config = plures.runs.folders.read_config(out / folder_name(specs[0]))
    assert (config.clients, config.rounds, config.share, config.seed, config.validation) == (4, 3, 0.2, 2, 0.0)
    assert call(["compare", "--seeds", "2"]) == 2


def test_a_dry_run_tells_the_ranges(capsys):
    assert call(["tune", "ditto", "--trials", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "lr 0.005 to 0.5 by factors (now 0.05)" in out and "after 3, 7, 20 rounds" in out
    assert call(["tune", "ditto", "--budget", "money", "--dry-run"]) == 2


def test_what_is_no_tuning_is_refused(tmp_path, capsys):
    assert call(["compare", "fedavg", "--tuned", str(tmp_path)]) == 2
    assert "holds no tuning" in capsys.readouterr().err
    write_tuning(tmp_path, wanted_of())
    assert call(["compare", "fedavg", "--tuned", str(tmp_path)]) == 2
    assert "has not ended" in capsys.readouterr().err


def test_tuning_from_python(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    found = plures.tune(["fedavg"], trials=2, data=(x, y, np.arange(60) % 3), options={"rounds": 2}, out=tmp_path)
    assert found["fedavg"].trials[0].values["lr"] == 0.05 and (tmp_path / "best.toml").exists()
    assert plures.run(found["fedavg"].spec, data=(x, y), clients=3, rounds=1).summary["rounds"] == 1
    with pytest.raises(UsageError, match="unknown option 'roundz'"):
        plures.tune(["fedavg"], options={"roundz": 2})
    assert call(["resume", str(tmp_path)]) == 2


def test_where_an_error_is_measured_less_is_better():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    y = (x @ np.array([1.0, 2.0, 0.0, -1.0]) + 3).astype(np.float32)
    data = plures.Dataset("mine", x, y, 1, 80, None, target=Target("number"))
    options = {"rounds": 4, "partition": "iid", "clients": 4}
    found = plures.tune(["fedavg"], trials=4, data=data, options=options)["fedavg"]
    assert found.metric.name == "rmse" and all(score < 0 for trial in found.whole for score in trial.scores.values())
    assert found.best.scores[4] >= found.default.scores[4] and "%" not in found.text(found.best.scores[4])
    alone = plures.run("fedavg", data=data, validation=0.2, **options)
    assert -found.default.scores[4] == pytest.approx(alone.rounds[-1]["validation_mean"], rel=1e-5)


def test_the_default_is_kept_unless_it_is_beaten_by_more_than_the_error(alone):
    one = alone[0]
    trials = [trial._replace(scores=dict(trial.scores), clients=list(trial.clients)) for trial in one.trials]
    best = one.best.number or next(trial.number for trial in one.whole if trial.number)
    trials[0] = trials[0]._replace(scores={4: 0.8}, clients=[0.8, 0.8, 0.8, 0.8])
    for clients, is_kept in (([0.9, 0.9, 0.91, 0.9], False), ([0.6, 1.0, 1.0, 0.61], True)):
        trials[best] = trials[best]._replace(scores={4: float(np.mean(clients))}, clients=clients)
        assert one._replace(trials=[trials[0], trials[best]]).is_kept is is_kept


def test_tables_are_written(alone, tmp_path):
    write_tuned(tmp_path, alone)
    assert (tmp_path / "tuning.csv").read_text().startswith("method,metric,default,best,gain")
    assert "after_4" in (tmp_path / "trials.csv").read_text().splitlines()[0]
