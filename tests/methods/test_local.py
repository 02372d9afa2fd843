import numpy as np
import pytest
import torch

from plures import tree
from plures.data import partition
from plures.methods.local import Local, LocalClient
from tests.methods.plain import (
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    module_of,
    params_of,
    shard_for,
    solver_of,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of, small_split

EVERYONE = torch.arange(len(SIZES))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_local_goes_on_from_its_own_model_every_round(make):
    task = task_of(make)
    method = Local(solver_of(momentum=0.9, weight_decay=0.01))
    client, expected = method.init_client(task, task.initial), task.initial
    for round in range(3):
        shard = shard_for(task, n=17, round=round)
        client, upload, _ = method.train(task, {}, client, shard)
        expected = trained(make, expected, batches(shard), momentum=0.9, weight_decay=0.01)
        assert upload == {}
    assert_close(client.model, expected)


def test_local_moves_no_byte():
    run = played(run_of("local"), 2)
    assert [(row.bytes_down, row.bytes_up) for row in run.state.rows] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("executor", ["vectorised", "one_by_one"])
def test_local_model_does_not_depend_on_the_data_of_others(executor):
    split = small_split()
    others = partition.Split(
        [split.train[0], split.train[1], split.train[2], split.train[3], split.train[5], split.train[4][:9]], split.test
    )
    one = played(run_of("local", split=split, executor=executor), 3)
    other = played(run_of("local", split=others, executor=executor), 3)
    for client in (0, 1, 2, 3):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_local_score_does_not_depend_on_the_data_of_others():
    split = small_split()
    others = partition.Split([*split.train[:5], split.train[5][:3]], split.test)
    hits = []
    for dealt in (split, others):
        run = run_of("local", split=dealt, epochs=5, rounds=1)
        try:
            run.play_round()
            hits.append(run.evaluate().personal["hits"][:5])
        finally:
            run.close()
    assert hits[0] == hits[1]


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_local_equals_fedavg_with_one_client(model):
    split = small_split((31,))
    alone = played(run_of("local", model, split=split, executor="one_by_one"), 3)
    shared = played(run_of("fedavg", model, split=split, executor="one_by_one"), 3)
    assert_same(alone.personal_model(0), shared.state.server)


def test_local_gives_every_client_as_many_turns():
    run = run_of("local", participation=0.5)
    turns = torch.zeros(len(SIZES), dtype=torch.long)
    try:
        for _ in range(4):
            before = run.state.store.rows(EVERYONE).model
            run.play_round()
            after = run.state.store.rows(EVERYONE).model
            turns += (before["head.bias"] != after["head.bias"]).any(1)
    finally:
        run.close()
    assert turns.tolist() == [2] * 6


def test_local_reports_the_mean_of_models_weighted_by_rows_as_the_one_for_all():
    run = run_of("local")
    try:
        run.play_round()
        found = run.evaluator._mean_of_personal(run.state.server, run.state.round, set())
        models = run.state.store.rows(EVERYONE).model
    finally:
        run.close()
    n = torch.tensor(SIZES, dtype=torch.float64)
    expected = {name: torch.einsum("c,c...->...", n / sum(SIZES), x.double()).float() for name, x in models.items()}
    assert_close(found, expected)


def test_local_client_that_never_took_part_has_the_common_start_before_it_trains():
    run = run_of("local", participation=0.5, new_epochs=0)
    took_part = run.state.cohort(0)
    played(run, 1)
    for client in range(len(SIZES)):
        kept = tree.row(run.state.store.rows(torch.tensor([client])), 0).model
        assert_same(run.personal_model(client), kept if client in took_part else run.state.scene.task.initial)
    assert len(took_part) == 3


@pytest.mark.parametrize("make", [Dense, Normed])
def test_local_client_that_never_took_part_trains_alone_from_the_common_start(make):
    task = task_of(make)
    shard = shard_for(task)
    assert_close(Local(solver_of()).adapt(task, {}, shard, 2), trained(make, task.initial, batches(shard, 2)))


def test_local_has_no_model_for_all_of_its_own():
    task = task_of(Dense)
    assert Local().generic(task, {}) is None


def test_local_with_one_class_learns_to_name_it():
    run = run_of("local", epochs=10)
    try:
        for _ in range(3):
            run.play_round()
        evaluation = run.evaluate()
    finally:
        run.close()
    single = evaluation.ids.index(2)
    assert evaluation.personal["hits"][single] == evaluation.personal["n"][single] == 5


def test_local_personal_model_is_the_one_it_trained():
    task = task_of(Dense)
    model = params_of(module_of(Dense, {name: torch.ones_like(x) for name, x in task.initial.items()}))
    assert_same(Local().personalize(task, {}, LocalClient(model), shard_for(task)), model)


def test_local_clients_start_from_one_model():
    run = run_of("local")
    run.close()
    first = run.state.store.rows(EVERYONE).model
    assert np.all([torch.equal(x, x[:1].expand_as(x)) for x in tree.leaves(first)])
    assert_same(tree.row(first, 3), run.state.scene.task.initial)
