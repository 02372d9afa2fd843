"""Every number of the evaluation record, worked by hand on invented or tiny cases."""

import copy
import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

import plures
from plures import files
from plures.data.population import Population
from plures.engine import KernelCount, Usage
from plures.errors import UsageError
from plures.learn.metrics import ACCURACY
from plures.methods.messages import Each, Same
from plures.runs import results
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.loop import Result
from plures.runs.scene import make_scene
from plures.simulate.drift import measure_drift
from plures.simulate.evaluate import Evaluation, Pool, affordable_pool
from plures.studies import stats
from plures.studies.compare import Comparison, Runs, compare_methods
from plures.studies.tables import differences, latex, lines, write_tables

QUICK = {"data": "digits", "clients": 5, "rounds": 2, "eval_every": 1}


def evaluation(hits, n, generic=None):
    loss = [0.0] * len(n)
    other = None if generic is None else {"hits": generic, "loss": loss, "n": n}
    return Evaluation(list(range(len(n))), {"hits": hits, "loss": loss, "n": n}, other, 0.0)


def a_round(round, mean=None, validation=None, bytes_each=10, n_flops=100, seconds=1.0):
    return results.Round(
        round=round,
        clients=2,
        loss=1.0,
        bytes_down=bytes_each,
        bytes_up=2 * bytes_each,
        refused=0,
        flops=n_flops,
        update_norm=None,
        update_variance=None,
        train_seconds=seconds,
        personal_mean=mean,
        personal_pooled=mean,
        validation_mean=validation,
    )


# Accuracies


def test_mean_is_over_clients_and_pooled_over_samples():
    found = results.personal_scores(evaluation([1.0, 30.0], [2.0, 40.0]))
    assert found["mean"] == (0.5 + 0.75) / 2
    assert found["pooled"] == 31 / 42
    assert found["std"] == 0.125


@pytest.mark.parametrize("n, tail", [(7, 1), (20, 1), (21, 2), (100, 5), (101, 6)])
def test_worst_and_top_five_per_cent_are_rounded_up_to_whole_clients(n, tail):
    values = np.random.default_rng(0).permutation(n) / n
    worst, top = results.tail(values)
    assert worst == pytest.approx(np.mean(np.arange(tail)) / n)
    assert top == pytest.approx(np.mean(np.arange(n - tail, n)) / n)


def test_generic_accuracy_is_over_all_test_rows():
    found = results.generic_scores(evaluation([0.0, 0.0], [2.0, 8.0], generic=[2.0, 4.0]))
    assert found["accuracy"] == 6 / 10
    assert found["on_clients"] == (1.0 + 0.5) / 2


def test_reweighted_accuracy_is_equation_20():
    # Two classes with 4 and 2 test rows. Client 0 has 3 of 4 rows of class 0; its model is right on 2 and 1 of them.
    n = np.array([4, 2])
    hits, counts = np.array([[2.0, 1.0], [4.0, 0.0]]), np.array([[3, 1], [0, 5]])
    by_rows = (0.75 * 2 + 0.25 * 1) / (0.75 * 4 + 0.25 * 2)
    assert results.reweighted(hits, n, counts) == pytest.approx([by_rows, 0.0])


def test_reweighted_accuracy_of_a_constant_answer_is_the_mean_share_of_that_class():
    counts = np.array([[1, 3, 0], [5, 0, 5], [0, 0, 7]])
    balanced = np.array([10, 10, 10])
    hits = np.tile([0.0, 10.0, 0.0], (3, 1))  # always answers class 1
    assert results.reweighted(hits, balanced, counts).mean() == pytest.approx((0.75 + 0 + 0) / 3)


def test_client_whose_classes_are_not_in_the_pool_is_left_out_of_the_mean():
    pool = Pool([0, 1], np.array([4, 0]), np.array([[3.0, 0], [3.0, 0]]), None, np.array([[1, 0], [0, 1]]))
    personal, generic = results.pool_scores(pool)
    assert personal == {"reweighted": 0.75, "on_pool": 0.75} and generic == {}


def test_pool_of_a_run_is_all_test_rows_and_agrees_with_the_models():
    result = plures.run("fedavg", **QUICK, pool_rows=10_000)
    scene = make_scene(make_config({"method": "fedavg", **QUICK, "pool_rows": 10_000}))
    pool = scene.population.pool
    assert sorted(pool) == sorted(np.concatenate(scene.population.test))
    model = result.models[0]
    right = scene.task.logits(model, scene.population.x[pool]).argmax(-1) == scene.population.y[pool]
    assert result.summary["personal"]["on_pool"] == pytest.approx(float(right.float().mean()))
    labels = scene.population.y.numpy()
    shares = [np.bincount(labels[own], minlength=10) / len(own) for own in scene.population.train]
    by_hand = [(p[labels[pool]] * right.numpy()).sum() / p[labels[pool]].sum() for p in shares]  # eq. 20, row by row
    assert result.summary["personal"]["reweighted"] == pytest.approx(np.mean(by_hand))
    assert result.summary["generic"]["reweighted"] == pytest.approx(np.mean(by_hand))


def test_pool_is_drawn_when_there_are_more_rows():
    population = make_scene(make_config({"method": "fedavg", **QUICK, "pool_rows": 50})).population
    assert len(population.pool) == 50 and set(population.pool) <= set(np.concatenate(population.test))
    assert len(make_scene(make_config({"method": "fedavg", **QUICK, "pool_rows": 0})).population.pool) == 0


def test_pool_is_smaller_where_it_would_take_long():
    task = copy.copy(make_scene(make_config({"method": "fedavg", **QUICK})).task)  # tasks are shared between tests
    assert affordable_pool(20, task) == 2000
    task.__dict__["flops"] = 10**8  # of a row: 20 models take 2e9 for each
    assert affordable_pool(20, task) == 500
    assert affordable_pool(10**6, task) == 100


def test_pool_can_be_tested_on_along_the_way():
    result = plures.run("fedavg:pm=local", **QUICK | {"rounds": 4, "participation": 0.4}, pool_every=2)
    seen = [row["personal_on_pool"] for row in result.rounds]
    assert [value is not None for value in seen] == [False, True, False, True]
    assert seen[-1] == result.summary["personal"]["on_pool"]
    early = plures.run("fedavg:pm=local", **QUICK | {"rounds": 2, "participation": 0.4})
    assert seen[1] == early.summary["personal"]["on_pool"]


def test_gains_over_another_method():
    found = results.gains(np.array([0.9, 0.5, 0.7, 0.7]), np.array([0.8, 0.6, 0.7, 0.2]), np.full(4, 20))
    assert found["mean"] == pytest.approx(0.125)
    assert found["share_gaining"] == 0.5 and found["harmed"] == 1
    assert found["lowest_decile"] == pytest.approx(-0.1)


def test_a_client_is_harmed_by_more_than_one_row_and_more_than_a_point():
    """Of 10 rows one is 10 points: no harm. Two are. Of 1,000 rows, 10 are a point: no harm. Eleven are."""
    own, others = np.array([0.8, 0.7, 0.890, 0.889]), np.array([0.9, 0.9, 0.9, 0.9])
    n_test = np.array([10, 10, 1000, 1000])
    assert results.are_harmed(own, others, n_test).tolist() == [False, True, False, True]
    found = results.gains(own, others, n_test)
    assert found["harmed"] == 2 and found["below"] == 4


def test_a_repeated_seed_does_not_make_a_difference_surer():
    one = {("a", 0): invented([0.5, 0.6, 0.4, 0.7]), ("b", 0): invented([0.6, 0.8, 0.5, 0.6])}
    three = {(name, seed): result for seed in range(3) for (name, _), result in one.items()}
    assert lines(Runs(three))[1].p == lines(Runs(one))[1].p


def test_holms_correction_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.5: times 4, 3, 2, 1 gives 0.04, 0.06, 0.06, 0.5; none below an earlier."""
    assert stats.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0] and stats.holm([]) == []


def test_tables_have_raw_and_corrected_values(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.uniform(0.4, 0.6, 12)
    runs = Runs({(name, 0): invented(base + shift) for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.2))})
    write_tables(runs, tmp_path)
    pairs = results.read_csv(tmp_path / "pairs.csv")
    assert [row["p_holm"] for row in pairs] == pytest.approx(stats.holm([row["p"] for row in pairs]))
    assert all(row["p_holm"] >= row["p"] for row in pairs)
    table = results.read_csv(tmp_path / "table.csv")
    assert [row["p_against_first_holm"] for row in table[1:]] == pytest.approx(
        stats.holm([row["p_against_first"] for row in table[1:]])
    )


# Rounds


def chosen(found, scores=None):
    return results._chosen(found, scores or {"mean": 0.1, "pooled": 0.2}, ACCURACY)


def test_best_round_on_test_and_the_one_chosen_on_rows_kept_apart():
    history = [a_round(1, 0.5, 0.6), a_round(2, 0.9, 0.3), a_round(3, 0.7, 0.6), a_round(4)]
    found = chosen(history)
    assert (found["best_round"], found["best_mean"]) == (2, 0.9)
    assert found["validated"] == {"round": 1, "validation_mean": 0.6, "mean": 0.5}  # the first of equals
    assert found["mean_last10"] == pytest.approx(0.7)


def test_best_pooled_is_that_of_the_best_round_and_not_the_last_or_the_best_of_its_own():
    pooled = {1: 0.4, 2: 0.5, 3: 0.9, 4: 0.8}
    means = {1: 0.2, 2: 0.9, 3: 0.7, 4: 0.6}
    history = [replace(a_round(r, means[r]), personal_pooled=pooled[r]) for r in means]
    found = chosen(history)
    assert (found["best_round"], found["best_mean"], found["best_pooled"]) == (2, 0.9, 0.5)


@pytest.mark.parametrize(
    ("method", "is_mean"), [("local", True), ("fedamp", True), ("fedavg", False), ("ditto", False)]
)
def test_summary_marks_a_generic_model_that_is_only_the_mean_of_personal_ones(method, is_mean):
    assert plures.run(method, **QUICK).summary["generic"]["is_mean_of_personal"] is is_mean


def test_mean_of_the_last_ten_evaluations():
    history = [a_round(i + 1, i / 20) for i in range(12)]
    assert chosen(history)["mean_last10"] == pytest.approx(np.mean(np.arange(2, 12) / 20))


def test_run_without_evaluated_rounds_has_its_last_scores_as_best():
    found = chosen([a_round(1), a_round(2)])
    assert (found["best_round"], found["best_mean"], found["best_pooled"]) == (2, 0.1, 0.2)
    assert found["validated"] is None


def test_cost_of_reaching_a_target():
    history = [a_round(1, 0.2), a_round(2), a_round(3, 0.8), a_round(4, 0.9)]
    assert results.to_goal(history, 0.75) == {"round": 3, "bytes": 90, "flops": 300, "seconds": 3.0}
    assert results.to_goal(history, 0.8)["round"] == 3  # at the target is reached
    assert results.to_goal(history, 0.95) is None


def test_run_tells_what_a_target_cost():
    result = plures.run("local", **QUICK, goal=0.2)
    cost = result.summary["to_goal"]["cost"]
    until = result.rounds[: cost["round"]]
    assert until[-1]["personal_mean"] >= 0.2 and all(row["personal_mean"] < 0.2 for row in until[:-1])
    assert cost["flops"] == sum(row["flops"] for row in until)


# Rows kept apart, and one more training on a copy


def test_validation_rows_are_neither_trained_nor_tested_on():
    kept = make_scene(make_config({"method": "fedavg", **QUICK, "validation": 0.2})).population
    whole = make_scene(make_config({"method": "fedavg", **QUICK})).population
    for client in range(5):
        assert len(kept.validation[client]) == max(1, int(0.2 * len(whole.train[client])))
        assert sorted([*kept.train[client], *kept.validation[client]]) == sorted(whole.train[client])
        assert list(kept.test[client]) == list(whole.test[client])


def test_client_with_one_row_keeps_none_apart():
    x, y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    population = Population(x, y, [np.array([0]), np.array([1, 2])], [np.array([0])] * 2, 2, 0, 1)
    kept = population.with_validation(0.5)
    assert [len(part) for part in kept.train] == [1, 1] and [len(part) for part in kept.validation] == [0, 1]


def test_validation_accuracy_is_that_of_the_kept_rows():
    result = plures.run("local", **QUICK, validation=0.3)
    scene = make_scene(make_config({"method": "local", **QUICK, "validation": 0.3}))
    each = []
    for client, own in enumerate(scene.population.validation):
        right = scene.task.logits(result.models[client], scene.population.x[own]).argmax(-1) == scene.population.y[own]
        each.append(float(right.float().mean()))
    assert result.rounds[-1]["validation_mean"] == pytest.approx(np.mean(each))


def test_refresh_scores_clients_after_one_more_training_on_a_copy():
    options = QUICK | {"participation": 0.4}
    carried = plures.run("fedavg:pm=local", **options)
    fresh = plures.run("fedavg:pm=local", **options, unchosen="refresh")
    assert fresh.summary["digest"] == carried.summary["digest"]
    assert fresh.summary["personal"]["unchosen"] == "refresh"
    # By hand: everybody trains the final global model once more, with the order of the next round.
    scene = make_scene(make_config({"method": "fedavg", **options, "participation": 1.0, "rounds": 3}))
    run = plures.run("fedavg", **options)  # its generic model is the one that is trained
    server = run.models[0]
    shards = scene.population.shards(range(5), "train", "train", 2)
    each = []
    for client in range(5):
        one = type(shards)(shards.x, shards.y, *[part[client] for part in shards[2:]])
        _, model, _ = scene.method.train(scene.task, server, scene.method.init_client(scene.task, server), one)
        own = scene.population.test[client]
        right = scene.task.logits(model, scene.population.x[own]).argmax(-1) == scene.population.y[own]
        each.append(float(right.float().mean()))
    assert fresh.summary["personal"]["mean"] == pytest.approx(np.mean(each))
    assert fresh.summary["personal"]["mean"] != carried.summary["personal"]["mean"]


@pytest.mark.parametrize("method", ["fedala:cap=11", "pfedla", "fedrod", "scaffold"])
def test_evaluation_never_changes_training(method):
    digests = {
        plures.run(method, **(QUICK | {"rounds": 4} | options)).summary["digest"]
        for options in ({"eval_every": 1}, {"eval_every": 3}, {"eval_every": 0}, {"unchosen": "refresh"})
    }
    assert len(digests) == 1


def test_scores_as_if_new_follow_the_server_alone():
    result = plures.run("fedavg", **QUICK, personal_epochs=2)
    found = result.summary["personal_epochs"]
    assert found["n"] == 5 and len(found["curve"]) == 3
    assert found["curve"][0] == pytest.approx(result.summary["generic"]["on_clients"])
    assert found["curve"][2] > found["curve"][0]


# Bytes and FLOPs


def test_bytes_by_group_add_up_to_the_traffic():
    for method in ("fedrod:head=hyper", "scaffold", "heurpfedla", "fedfomo", "fedrep"):
        summary = plures.run(method, **QUICK | {"rounds": 1, "eval_every": 0}).summary
        if method != "heurpfedla":  # which sends the first round whole
            assert 5 * sum(summary["bytes"]["down_each"].values()) == summary["bytes"]["down"], method
        assert 5 * sum(summary["bytes"]["up_each"].values()) == summary["bytes"]["up"], method
    assert set(plures.run("fedrep", **QUICK).summary["bytes"]["up_each"]) == {"body"}


# A row of digits through 64-64-10: forward and gradients of the weights, and gradients of the hidden layer.
FORWARD = 2 * (64 * 64 + 64 * 10)
STEP = 2 * FORWARD + 2 * 64 * 10
WEIGHTS = 64 * 64 + 64 + 64 * 10 + 10
MEAN = 2 * 5 * WEIGHTS  # of five uploads


def n_rows():
    return int(make_scene(make_config({"method": "fedavg", **QUICK})).population.sizes().sum())


def of_rounds(method, **options):
    return [row["flops"] for row in plures.run(method, **QUICK | {"eval_every": 0} | options).rounds]


@pytest.mark.parametrize("executor", ["vectorised", "one_by_one"])
def test_flops_of_a_small_net_by_hand(executor):
    assert of_rounds("fedavg", executor=executor) == [n_rows() * STEP + MEAN] * 2
    assert of_rounds("local", executor=executor) == [n_rows() * STEP] * 2


def test_flops_of_extra_passes():
    assert of_rounds("fedsam") == [2 * n_rows() * STEP + MEAN] * 2
    assert of_rounds("ditto") == [2 * n_rows() * STEP + MEAN] * 2
    assert of_rounds("fedavg+c:c_epochs=3") == [4 * n_rows() * STEP + MEAN] * 2
    assert of_rounds("fedavg", epochs=3) == [3 * n_rows() * STEP + MEAN] * 2


def test_flops_of_fedala_have_its_first_stage():
    first, second, third = of_rounds("fedala:s=100,cap=11,threshold=0", rounds=3)
    blend = FORWARD + 2 * 64 * 10 * 1  # of a row: forward, and the gradient of the head's weights
    assert first == n_rows() * STEP + MEAN
    assert second == n_rows() * (STEP + 11 * blend) + MEAN
    assert third == n_rows() * (STEP + blend) + MEAN


def test_evaluation_is_not_counted_as_training():
    assert of_rounds("fedavg+ft", eval_every=1) == of_rounds("fedavg+ft", eval_every=0)


def test_counting_as_it_happens():
    with KernelCount() as direct:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert direct.flops == 2 * 2 * 3 * 4


# Drift


def test_drift_of_clients_by_hand():
    task = make_scene(make_config({"method": "fedavg", **QUICK})).task
    zero = {name: torch.zeros_like(x) for name, x in task.initial.items()}
    up = {name: torch.zeros(2, *x.shape) for name, x in zero.items()}
    up["head.bias"][0, 0], up["head.bias"][1, 1] = 3.0, 4.0
    found = measure_drift(task, Same(zero), up)
    assert found.norm == pytest.approx(3.5)
    assert found.variance == pytest.approx((1.5**2 + 2**2 + 1.5**2 + 2**2) / 2)
    each = {name: torch.stack([x, x + 0]) for name, x in zero.items()}
    assert measure_drift(task, Each(each), {"host": up}) == found
    assert measure_drift(task, Same(zero), {"gradients": up}) == (None, None)


# Several seeds


def test_spread_of_seeds():
    found = stats.spread([1.0, 2.0, 3.0])
    assert (found.n, found.mean, found.std) == (3, 2.0, 1.0)
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert math.isnan(stats.spread([1.0]).std) and stats.spread([]).n == 0


@pytest.mark.parametrize("df, t", [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_quantiles_of_students_t_are_those_of_the_tables(df, t):
    assert stats.t_quantile(0.975, df) == pytest.approx(t, abs=5e-5)


def test_paired_test_tries_all_signs():
    assert stats.paired_test([1.0, 2.0, 3.0]) == 2 / 8  # only all plus and all minus are as far
    assert stats.paired_test([1.0, -1.0]) == 1.0
    assert stats.paired_test([3.0, -1.0, 0.5]) == 6 / 8  # sums 4.5, 3.5, 2.5, 1.5, each with both signs; seen is 2.5
    assert stats.paired_test([0.0, 0.0]) == 1.0 and stats.paired_test([]) == 1.0


def test_paired_test_of_many_draws_signs_and_repeats_itself():
    rng = np.random.default_rng(0)
    noise, shifted = rng.normal(size=50), rng.normal(size=50) + 1
    assert stats.paired_test(list(noise)) > 0.05
    assert stats.paired_test(list(shifted)) < 0.001
    assert stats.paired_test(list(noise)) == stats.paired_test(list(noise))


def invented(personal, seed_shift=0.0):
    clients = [{"client": i, "role": "client", "personal_accuracy": a + seed_shift} for i, a in enumerate(personal)]
    scores = {"mean": float(np.mean(personal)) + seed_shift, "worst5": min(personal), "pooled": 0.5}
    summary = {"personal": scores, "generic": None, "harmed": None, "flops": 10, "seconds": {"total": 1.0}}
    return Result(summary | {"bytes": {"down": 1, "up": 2}}, [], clients, {}, None)


def test_lines_of_a_comparison():
    runs = Runs(
        {
            ("a", 0): invented([0.5, 0.6]),
            ("b_1", 0): invented([0.7, 0.9]),
            ("a", 1): invented([0.5, 0.6], 0.1),
            ("b_1", 1): invented([0.6, 0.7], 0.1),
        }
    )
    first, second = lines(runs)
    assert first.p is None and first.spreads["personal"].mean == pytest.approx(0.6)
    assert differences(runs, "b_1", "a") == pytest.approx([0.15, 0.2])  # of each client, over both seeds
    assert second.p == 2 / 4 and second.spreads["generic"].n == 0
    text = latex([first, second])
    assert r"b\_1" in text and r"\textbf{77.50 $\pm$ 3.54}" in text and text.count(r"\\") == 3


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_latex_compiles(tmp_path):
    names = ["fedavg+c:c_epochs=3", "own_method:x=50%"]
    table = latex(lines(Runs({(name, 0): invented([0.5, 0.6]) for name in names})))
    page = rf"\documentclass{{article}}\begin{{document}}{table}\end{{document}}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0 and (tmp_path / "page.pdf").exists(), found.stdout[-2000:]


def test_comparison_goes_on_where_it_stopped(tmp_path):
    config = make_config(QUICK)
    played = []

    class Count(Callback):
        def __init__(self, name):
            self.name = name

        def played(self, state, row):
            played.append(self.name)
            if self.name == "ditto" and state.round == 1 and played.count("ditto") == 1:
                state.save(state.manifest(Usage()))
                raise RuntimeError("the machine went down")

    def go():
        return compare_methods(
            Comparison(["local", "ditto"], config, [0]), tmp_path, print, lambda method, seed, place: Count(method)
        )

    with pytest.raises(RuntimeError):
        go()
    assert played == ["local", "local", "ditto"]
    runs = go()
    assert played == ["local", "local", "ditto", "ditto"]
    whole = plures.compare(["local", "ditto"], **QUICK)
    for key, result in whole.items():
        assert runs[key].summary["digest"] == result.summary["digest"]
        assert runs[key].summary["gains"] == result.summary["gains"]
    other = Comparison(["local"], config.model_copy(update={"lr": 0.2}), [0])
    with pytest.raises(UsageError, match="other options"):
        compare_methods(other, tmp_path, print, lambda method, seed, place: Callback())


@pytest.mark.parametrize("equal, rounds", [("flops", 2), ("bytes", 4)])
def test_equal_cost_gives_methods_other_numbers_of_rounds(equal, rounds):
    # Ditto does twice the work of FedAvg and has the same traffic.
    wanted = Comparison(["fedavg", "ditto"], make_config(QUICK | {"rounds": 4, "eval_every": 0}), [0], equal)
    runs = compare_methods(wanted, None, print, lambda method, seed, place: Callback())
    assert runs["fedavg", 0].summary["rounds"] == 4
    assert runs["ditto", 0].summary["rounds"] == rounds


def test_flops_of_making_personal_models_are_told_apart():
    """The mlp has 64*64 + 64*10 products; fine-tuning is two epochs over all rows."""
    options = {"clients": 3, "rounds": 1, "share": 0.2, "last_batch": "keep"}
    plain, tuned = plures.run("fedavg", **options), plures.run("fedavg+ft:ft_epochs=2", **options)
    assert plain.summary["personal_flops"] == 0 and plain.summary["flops"] == tuned.summary["flops"]
    n_rows = sum(row["n_train"] for row in tuned.clients)
    of_training = plures.run("fedavg", epochs=2, **options).summary["flops"]
    assert tuned.summary["personal_flops"] == pytest.approx(of_training, rel=0.01)  # that of the server beside it
    assert tuned.summary["personal_flops"] > 2 * n_rows * 2 * (64 * 64 + 64 * 10)
    alone = plures.run("fedavg+ft:ft_epochs=2", executor="one_by_one", **options)
    assert alone.summary["personal_flops"] == tuned.summary["personal_flops"]


def test_a_name_that_a_spreadsheet_would_compute_is_text(tmp_path):
    names = ["=cmd|' /C calc'!A0", "+1", "@x", "-2", "'quoted", "plain"]
    results.write_csv(tmp_path / "t.csv", [{"client": k, "name": name} for k, name in enumerate(names)])
    cells = [line.split(",", 1)[1].strip('"') for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    assert all(cell.startswith("'") for cell in cells[:4])
    assert [row["name"] for row in results.read_csv(tmp_path / "t.csv")] == names


def test_toml_that_is_nested_too_deeply_or_too_large_is_told(tmp_path, monkeypatch):
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(UsageError, match="nested too deeply"):
        files.read_toml(tmp_path / "deep.toml")
    monkeypatch.setattr(files, "MOST_TOML_BYTES", 3)
    with pytest.raises(UsageError, match="too much"):
        files.read_toml(tmp_path / "deep.toml")
