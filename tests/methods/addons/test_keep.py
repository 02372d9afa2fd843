import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.methods.addons.keep import KeepLocal, KeptClient
from plures.methods.addons.prox import Prox
from plures.methods.addons.scaffold import Scaffold, ScaffoldClient
from plures.methods.base import Federation
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedper import fedper
from plures.methods.lgfedavg import lgfedavg
from tests.methods.plain import (
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    differs,
    moved,
    shard_for,
    solver_of,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of, small_split, took_part
from tests.small import task_of as tiny

EVERYONE = torch.arange(len(SIZES))
NOTHING = FedAvgClient({})
HEAD = {"head.weight", "head.bias"}

# Numbers of floats of the tiny model with BatchNorm, by hand.
CONV, NORM, HIDDEN, SECOND, TOP = 4 * 9 + 4, 4 * 4, 36 * 12 + 12, 4 * 12, 12 * 10 + 10
MODEL = CONV + NORM + HIDDEN + SECOND + TOP
STATISTICS = (NORM + SECOND) // 2


def keep_of(private: str, pm: str = "global", **solver) -> KeepLocal:
    return KeepLocal(host=FedAvg(pm=pm), private=private).with_solver(solver_of(**solver))


def only(params, names):
    return {name: x for name, x in params.items() if name in names}


def without(params, names):
    return {name: x for name, x in params.items() if name not in names}


# What travels


def wire():
    """Method -> floats down and up for one client and round."""
    body = MODEL - TOP
    both = {
        **dict.fromkeys(["fedavg", "fedavg+ft", "fedavg+c", "fedprox", "fedprox+c", "feddyn", "perfedavg"], MODEL),
        **dict.fromkeys(["fedmeta", "pfedme", "ditto", "fedamp", "fedphp", "partialfed", "mtl", "apfl"], MODEL),
        **dict.fromkeys(["fedper", "fedpermeta", "fedrep"], body),
        "fedpermeta:share_head=true": MODEL,
        "fedper:private=nothing": MODEL,
        "fedper:private=head/body": 0,
        "fedper:private=head/batch-norm": body - NORM - SECOND,
        "lgfedavg": TOP,
        "fedbn": MODEL - NORM - SECOND,
        "scaffold": MODEL + MODEL - STATISTICS,  # statistics have no control
        "pfedhn": MODEL - STATISTICS,
        "pfedhn:private=head/statistics": MODEL - STATISTICS - TOP,
        "local": 0,
    }
    found = {name: (n, n) for name, n in both.items()}
    for n in (0, 1, 3, 5, 9):  # of five others
        found[f"fedfomo:models={n}"] = (min(n, 5) * MODEL, MODEL)
        found[f"apple:models={n}"] = (min(n or 5, 5) * MODEL, MODEL)  # 0: all of them
    return found


@pytest.mark.parametrize(("name", "floats"), wire().items(), ids=str)
def test_a_round_moves_the_bytes_that_the_method_needs(name, floats):
    run = played(run_of(name, "norm", split=small_split((4, 5, 6, 7, 4, 5)), batch=8, executor="one_by_one"), 1)
    assert (run.state.rows[0].bytes_down, run.state.rows[0].bytes_up) == (6 * 4 * floats[0], 6 * 4 * floats[1])


def test_the_count_by_hand_is_the_models():
    assert sum(x.numel() for x in tiny("norm", 0).initial.values()) == MODEL


# FedPer


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedper_with_the_head_shared_too_is_fedavg_bit_for_bit(model):
    options = {"participation": 0.5, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 3) for name in ("fedper:private=nothing", "fedavg"))
    assert_same(one.state.server, other.state.server)
    assert_same(one.personal_model(3), other.personal_model(3))
    assert_same(one.state.scene.method.generic(one.state.scene.task, one.state.server), other.state.server)


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("private", ["head/body", "body/head/statistics"])
def test_fedper_with_the_body_private_too_is_local_bit_for_bit(model, private):
    one = played(run_of("fedper", model, settings={"private": private}, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    assert one.state.server == {}
    for client in (0, 2, 5):
        assert_same(one.personal_model(client), other.personal_model(client))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedper_trains_the_received_body_under_its_own_head(make):
    """Over two rounds: the head goes on where it was left, the body is the received one."""
    task = task_of(make)
    method = keep_of("head", momentum=0.5)
    client, head = method.init_client(task, task.initial), only(task.initial, HEAD)
    for round in range(2):
        received, shard = without(moved(task.initial, 10 + round), HEAD), shard_for(task, round=round)
        client, upload, _ = method.train(task, received, client, shard)
        expected = trained(make, received | head, batches(shard), momentum=0.5)
        head = only(expected, HEAD)
        assert_close(client.kept, head)
        assert_close(upload, without(expected, HEAD))


def test_fedper_uploads_no_head_and_the_server_has_none():
    run = played(run_of("fedper", "norm", executor="one_by_one"), 1)
    assert not set(run.state.server) & HEAD and len(run.state.server) == len(run.state.scene.task.initial) - 2
    assert run.state.scene.method.generic(run.state.scene.task, run.state.server) is None
    assert set(run.state.store.rows(EVERYONE).kept) == HEAD


def test_fedper_personal_model_is_the_servers_body_under_the_own_head():
    run = played(run_of("fedper", "norm", participation=0.5, executor="one_by_one"), 3)
    for client in (0, 3, 5):
        own = run.personal_model(client)
        kept = tree.row(run.state.store.rows(torch.tensor([client])).kept, 0)
        assert_same(only(own, HEAD), only(kept, HEAD))
        assert_same(without(own, HEAD), run.state.server)
    assert differs(only(run.personal_model(4), HEAD), only(run.personal_model(5), HEAD))


def test_fedper_personal_model_may_be_the_last_trained_one():
    task = task_of(Dense)
    method = keep_of("head", pm="local")
    received, shard = without(moved(task.initial, 1), HEAD), shard_for(task)
    client, upload, _ = method.train(task, received, method.init_client(task, task.initial), shard)
    own = method.personalize(task, without(moved(task.initial, 2), HEAD), client, shard)
    assert_same(own, {name: (upload | client.kept)[name] for name in own})


def test_fedper_head_of_a_client_that_sits_out_stays_and_its_body_is_new():
    run = run_of("fedper", participation=0.5, executor="one_by_one")
    try:
        run.play_round()
        before = run.state.store.rows(EVERYONE).kept
        chosen = run.state.cohort(run.state.round)
        run.play_round()
        after = run.state.store.rows(EVERYONE).kept
    finally:
        run.close()
    for client in range(len(SIZES)):
        assert torch.equal(before["head.weight"][client], after["head.weight"][client]) == (client not in chosen)
    for client in took_part(run):
        assert torch.equal(run.personal_model(client)["hidden.weight"], run.state.server["hidden.weight"])


def test_fedper_mean_is_weighted_by_rows_and_that_of_lgfedavg_is_not():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    merged = [m.merge(None, {}, torch.arange(2), stacked, torch.tensor([1, 3])) for m in (fedper(), lgfedavg())]
    assert [float(x["w"]) for x in merged] == [2.5, 2.0]


# LG-FedAvg


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_lgfedavg_with_all_layers_shared_is_uniform_fedavg_bit_for_bit(model):
    options = {"participation": 0.5, "executor": "one_by_one"}
    names = ("lgfedavg:private=nothing", "fedavg:weights=uniform")
    one, other = (played(run_of(name, model, **options), 3) for name in names)
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_lgfedavg_with_no_layer_shared_is_local_bit_for_bit(model):
    one = played(run_of("lgfedavg:private=head/body", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    for client in (1, 4):
        assert_same(one.personal_model(client), other.personal_model(client))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_lgfedavg_trains_the_received_head_on_its_own_body(make):
    task = task_of(make)
    method = keep_of("body")
    client, body = method.init_client(task, task.initial), without(task.initial, HEAD)
    for round in range(2):
        received, shard = only(moved(task.initial, 10 + round), HEAD), shard_for(task, round=round)
        client, upload, _ = method.train(task, received, client, shard)
        expected = trained(make, body | received, batches(shard))
        body = without(expected, HEAD)
        assert_close(client.kept, body)
        assert_close(upload, only(expected, HEAD))


def test_lgfedavg_bodies_never_mix():
    """A client's body, BatchNorm too, after a round does not depend on the rows of others; the head does."""
    split = small_split()
    fewer = type(split)([*split.train[:5], split.train[5][:7]], split.test)
    one, other = (played(run_of("lgfedavg", "norm", split=s, executor="one_by_one"), 1) for s in (split, fewer))
    for client in range(5):
        own, same = one.personal_model(client), other.personal_model(client)
        assert_same(without(own, HEAD), without(same, HEAD))
        assert not torch.equal(own["head.weight"], same["head.weight"])
    assert set(one.state.server) == HEAD
    assert differs(*({"w": one.personal_model(c)["hidden.weight"]} for c in (4, 5)))


# Settings


@pytest.mark.parametrize(
    ("private", "stays"),
    [
        ("head", HEAD),
        (
            "body",
            {"hidden.weight", "hidden.bias"} | {f"norm.{x}" for x in ("weight", "bias", "running_mean", "running_var")},
        ),
        ("batch-norm", {f"norm.{x}" for x in ("weight", "bias", "running_mean", "running_var")}),
        ("statistics", {"norm.running_mean", "norm.running_var"}),
        ("nothing", set()),
        ("head/statistics", HEAD | {"norm.running_mean", "norm.running_var"}),
    ],
)
def test_what_stays_is_what_the_setting_names(private, stays):
    task = task_of(Normed)
    method = keep_of(private)
    client = method.init_client(task, task.initial)
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(0)))
    assert set(client.kept) == stays and set(server) == set(task.initial) - stays
    new, upload, _ = method.train(task, server, client, shard_for(task))
    assert set(new.kept) == stays and set(upload) == set(task.initial) - stays
    assert list(method.personalize(task, server, new, shard_for(task))) == list(task.initial)


@pytest.mark.parametrize("private", ["neck", "head/neck", ""])
def test_a_part_that_is_not_known_is_refused(private):
    with pytest.raises(UsageError, match="head, body, batch-norm, statistics, nothing"):
        keep_of(private)


def test_a_pull_on_the_shared_part_leaves_what_stays_alone():
    """FedPer under Prox: the head is trained by its gradient alone."""
    task = task_of(Normed)
    received, head, shard = without(moved(task.initial, 1), HEAD), only(moved(task.initial, 2), HEAD), shard_for(task)
    method = Prox(host=keep_of("head", epochs=2), mu=0.75)
    client, upload, _ = method.train(task, received, KeptClient(NOTHING, head), shard)

    def near(module):
        named = [(name, p) for name, p in module.named_parameters() if name not in HEAD]
        return 0.75 / 2 * sum((p - received[name]).square().sum() for name, p in named)

    expected = trained(Normed, received | head, batches(shard, 2), near)
    assert_close(upload, {name: expected[name] for name in upload})
    assert_close(client.kept, only(expected, HEAD))


def test_scaffold_around_fedper_has_controls_for_the_body_only():
    task = task_of(Normed)
    method = Scaffold(host=keep_of("head"))
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(0)))
    client = method.init_client(task, task.initial)
    body = {name for name in task.initial if name not in HEAD and "running" not in name}
    assert set(server.control) == set(client.control) == body
    message = method.send(task, server, torch.arange(2)).tree
    client, upload, _ = method.train(task, message, client, shard_for(task))
    assert isinstance(client, ScaffoldClient) and set(upload["control"]) == body
    assert not set(upload["host"]) & HEAD
