"""Every method where something else than classes is predicted: it runs in every executor, or refuses in a sentence."""

import csv
import importlib.util

import numpy as np
import pytest

import plures
from plures.errors import UsageError
from plures.methods import METHODS

KINDS = {"number": "level", "count": "visits", "labels": "cough,fever"}
NEED_CLASSES = {"fedrod"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Four sites whose levels differ; what is predicted can be learned from the columns."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("table") / "sites.csv"
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", "a", "b", "level", "visits", "cough", "fever"])
        for k in range(96):
            site, a, b = k % 4, rng.normal(), rng.choice(["u", "v"])
            level = 3 * a + (b == "u") + site + rng.normal(0, 0.1)
            visits = rng.poisson(np.exp(0.5 * a + 0.5))
            out.writerow([f"s{site}", round(a, 3), b, round(level, 3), visits, int(a > 0), int(b == "u")])
    return path


def run(method, table, kind, **options):
    others = [name for target in KINDS.values() for name in target.split(",") if name not in KINDS[kind]]
    options = {"rounds": 2, "model": "mlp:8", "lr": 0.02} | options
    return plures.run(
        method, data=table, client="site", target=KINDS[kind], drop=",".join(others), task=kind, **options
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_a_number_or_says_why_not(method, table):
    if method in NEED_CLASSES:
        with pytest.raises(UsageError, match=r"is for classes: .* a number is predicted"):
            run(method, table, "number")
        return
    one = run(method, table, "number", metric="mae")
    other = run(method, table, "number", metric="mae", executor="one_by_one", workers=1)
    assert one.summary["metric"] == "mae" and one.summary["personal"]["scored"] == 4
    assert one.summary["personal"]["mean"] == pytest.approx(other.summary["personal"]["mean"], rel=1e-3)


@pytest.mark.parametrize("kind", ["count", "labels"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedala", "afml", "fedfomo", "pfedla"])
def test_counts_and_labels_are_learned_alike_by_both_executors(method, kind, table):
    one, other = (run(method, table, kind, executor=name) for name in ("vectorised", "one_by_one"))
    assert one.summary["personal"]["mean"] == pytest.approx(other.summary["personal"]["mean"], rel=1e-3, abs=0.05)


@pytest.mark.parametrize("name", ["fedavg+brm", "fedavg+public", "fedphp:inherit=kd"])
def test_addons_and_settings_that_need_classes_say_so(name, table):
    with pytest.raises(UsageError, match="is for classes"):
        run(name, table, "number")


def test_a_number_is_learned(table):
    """The spread of the target within a site is about 3.2: what is left is far below it."""
    alone = run("local", table, "number", rounds=40, lr=0.4)
    shared = run("ditto", table, "number", rounds=40, lr=0.4)
    assert shared.summary["personal"]["mean"] < 1.2 and alone.summary["personal"]["mean"] < 1.6
    found = shared.summary["metrics"]
    assert found["r2"]["personal"]["pooled"] > 0.85 and list(found) == ["rmse", "mae", "r2"]


def test_counts_and_labels_are_learned(table):
    assert run("fedavg", table, "labels", rounds=60, lr=0.5).summary["personal"]["mean"] > 0.9
    found = run("fedavg", table, "count", rounds=60, lr=0.2).summary
    assert found["metric"] == "mae" and found["metrics"]["r2"]["personal"]["pooled"] > 0.4


def test_metric_of_the_run_is_that_of_rounds_clients_and_comparisons(table, tmp_path):
    options = {"data": table, "client": "site", "target": "cough", "drop": "level,visits,fever", "metric": "auc"}
    runs = plures.compare(["local", "ditto"], **options, rounds=2, out=tmp_path, validation=0.2, new_clients=1)
    summary = runs["ditto", 0].summary
    assert summary["metric"] == "auc" and summary["harmed"] is not None
    row = runs["ditto", 0].clients[0]
    assert {"personal_auc", "generic_auc", "local_auc", "personal_f1"} <= set(row)
    known = [row["personal_auc"] for row in runs["ditto", 0].clients if row["role"] == "client"]
    assert summary["personal"]["mean"] == pytest.approx(np.mean([x for x in known if x is not None]))
    assert summary["personal"]["mean"] == pytest.approx(runs["ditto", 0].rounds[-1]["personal_mean"])
    assert 0 <= summary["new_clients"]["after"] <= 1
    assert summary["personal"]["validated"]["validation_mean"] is not None


@pytest.mark.parametrize("executor", ["vectorised", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_workers_change_nothing_of_a_metric(table, executor):
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    options = {"metric": "rmse", "executor": executor}
    one, two = (run("ditto", table, "number", workers=n, **options) for n in (1, 2))
    assert one.summary["personal"] == two.summary["personal"] and one.summary["metrics"] == two.summary["metrics"]
