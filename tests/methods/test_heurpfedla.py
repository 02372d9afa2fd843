import pytest
import torch

from plures import tree
from plures.learn.task import Task
from plures.methods.addons.prox import Prox
from plures.methods.base import Federation
from plures.methods.heurpfedla import KEPT, HeurpFedLA, HeurpFedLAClient, heurpfedla
from plures.methods.pfedla import PFedLA, PFedLAServer, pfedla
from plures.models.small import HnCnn, HnCnnBn
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
from tests.small import SIZES, played, run_of

N = 4
EVERYONE = torch.arange(len(SIZES))
LAYERS = {"hidden": ("hidden.weight", "hidden.bias"), "head": ("head.weight", "head.bias")}
BATCH_COUNTERS = 2 * 8  # bytes of two int64 counters of BatchNorm, which the paper's models carry and ours do not


def task_for():
    return task_of(Dense, torch.float32)


def server_of(method, task, bias=None) -> PFedLAServer:
    """A server whose clients have unlike models; logits are the output bias [receiver, layer, client], or drawn."""
    federation = Federation(torch.ones(N, dtype=torch.long), torch.tensor(5))
    start = method.init_server(task, task.initial, federation)
    mixers = dict(start.mixers)
    if bias is None:
        rng = torch.Generator().manual_seed(3)
        mixers |= {n: torch.randn(mixers[n].shape, generator=rng) for n in ("output.weight", "output.bias")}
    else:
        mixers["output.bias"] = bias
    return start._replace(models=tree.stack([moved(task.initial, i) for i in range(N)]), mixers=mixers)


def heur_of(optimizer: str, lr: float) -> HeurpFedLA:
    """The equation of the paper with plain steps; with Adam, changes in units."""
    return HeurpFedLA(width=6, k=1, mixer_lr=lr, mixer_optimizer=optimizer, unit=optimizer == "adam")


def self_bias(*rows):
    """Logits that are zero but for the receiver's own model: rows of (hidden, head)."""
    bias = torch.zeros(N, 2, N)
    for i, row in enumerate(rows):
        bias[i, :, i] = torch.tensor(row)
    return bias


def sent_to(method, task, server, client: int):
    return tree.row(method.send(task, server, torch.tensor([client])).tree, 0)


# Between pFedLA and Local


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_with_no_layer_kept_it_is_pfedla_bit_for_bit(model):
    options = {"executor": "one_by_one", "participation": 0.5}
    one = played(run_of("heurpfedla:k=0,mixer_lr=1", model, **options), 3)
    other = played(run_of("pfedla:mixer_lr=1", model, **options), 3)
    assert_same(one.state.server, other.state.server)
    took_part = [client for client in range(len(SIZES)) if one.state.store.written[client]]
    assert len(took_part) >= 4  # the others have the models of new clients
    for client in took_part:
        assert_same(one.personal_model(client), other.personal_model(client))
    assert [(row.bytes_down, row.bytes_up) for row in one.state.rows] == [
        (r.bytes_down, r.bytes_up) for r in other.state.rows
    ]


@pytest.mark.parametrize(("model", "n_layers"), [("mlp", 2), ("norm", 5)])
def test_with_all_layers_kept_it_is_local_bit_for_bit(model, n_layers):
    run = run_of(f"heurpfedla:k={n_layers},mixer_lr=1", model, executor="one_by_one")
    before = run.state.server.mixers
    played(run, 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    for client in range(len(SIZES)):
        assert_same(run.personal_model(client), other.personal_model(client))
    assert_same(run.state.server.mixers, before)
    assert [row.bytes_down for row in run.state.rows] == [0, 0, 0]
    assert all(row.bytes_up > 0 for row in run.state.rows)


def test_with_some_layers_kept_it_is_neither():
    runs = [played(run_of(f"heurpfedla:k={k}", executor="one_by_one"), 2) for k in (0, 1, 2)]
    models = [run.personal_model(4) for run in runs]
    assert differs(tree.keep(models[1], lambda n: "hidden" in n), tree.keep(models[0], lambda n: "hidden" in n))
    assert differs(tree.keep(models[1], lambda n: "head" in n), tree.keep(models[2], lambda n: "head" in n))


# Which layers stay


def test_the_layers_with_the_largest_weight_on_oneself_stay():
    """Client 0 has more of itself in the hidden layer, clients 1 and 2 in the head, client 3 as much in both."""
    task, method = task_for(), HeurpFedLA(width=6, k=1)
    server = server_of(method, task, self_bias((2.0, 1.0), (-1.0, 0.5), (0.0, 0.1), (0.3, 0.3)))
    sent = method.send(task, server, torch.tensor([3, 0, 2, 1])).tree
    assert sent[KEPT].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_the_weight_on_others_plays_no_part():
    """Nearly all of the hidden layer comes from client 2; of the head a third comes from oneself, and no more."""
    bias = torch.zeros(N, 2, N)
    bias[1, 0] = torch.tensor([-5.0, 0.0, 3.0, -5.0])
    bias[1, 1] = torch.tensor([0.0, 0.5, 0.0, 0.0])
    task, method = task_for(), HeurpFedLA(width=6, k=1)
    assert sent_to(method, task, server_of(method, task, bias), 1)[KEPT].tolist() == [0, 1]


@pytest.mark.parametrize(("k", "expected"), [(0, [0, 0]), (1, [0, 1]), (2, [1, 1]), (7, [1, 1])])
def test_k_layers_stay(k, expected):
    task, method = task_for(), HeurpFedLA(width=6, k=k)
    server = server_of(method, task, self_bias((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)))
    assert sent_to(method, task, server, 2)[KEPT].tolist() == expected


def test_choice_changes_when_the_mixers_do():
    task, method = task_for(), HeurpFedLA(width=6, k=1)
    rows = [self_bias(*[row] * N) for row in ((1.0, 0.0), (0.0, 1.0))]
    kept = [sent_to(method, task, server_of(method, task, bias), 0)[KEPT].tolist() for bias in rows]
    assert kept == [[1, 0], [0, 1]]


def test_a_run_keeps_for_each_client_the_layer_of_its_largest_learned_weight_on_itself():
    """Weights by plain PFedLA; the server's hypernetworks have learned for six rounds."""
    run = played(run_of("heurpfedla:k=1,mixer_lr=0.01", executor="one_by_one"), 6)
    server, task, method = run.state.server, run.state.scene.task, run.state.scene.method
    sent, clients = method.send(task, server, EVERYONE).tree, run.state.store.rows(EVERYONE)
    weights = PFedLA().weights(server.mixers, EVERYONE)
    stays = [("hidden", "head")[int(weights[i, :, i].argmax())] for i in range(len(SIZES))]
    assert set(stays) == {"hidden", "head"}
    for i, layer in enumerate(stays):
        assert sent[KEPT][i].tolist() == [int(layer == "hidden"), int(layer == "head")]
        personal, own = run.personal_model(i), tree.row(clients, i).host.model
        for name in personal:
            if name in LAYERS[layer]:
                assert torch.equal(personal[name], own[name])
            else:
                mixture = torch.tensordot(weights[i, list(LAYERS).index(name.split(".")[0])], server.models[name], 1)
                torch.testing.assert_close(personal[name], mixture, rtol=1e-5, atol=1e-6)
                assert not torch.allclose(mixture, own[name], atol=1e-3)


# What a client goes on with


def test_other_layers_are_the_mixture_of_pfedla():
    task, method = task_for(), HeurpFedLA(width=6, k=1)
    server = server_of(method, task)
    for client in range(N):
        sent = sent_to(method, task, server, client)
        mixture = sent_to(PFedLA(width=6), task, server, client)
        for layer, names in enumerate(LAYERS.values()):
            for name in names:
                expected = server.models[name][client] if sent[KEPT][layer] else mixture[name]
                assert torch.equal(sent[name], expected)


def test_client_goes_on_with_its_own_kept_layers_and_needs_not_be_sent_them():
    task, method = task_for(), HeurpFedLA(solver_of(epochs=2), width=6, k=1)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    for kept, mine in (([1, 0], "hidden"), ([0, 1], "head")):
        garbage = {name: x * float("nan") if name in LAYERS[mine] else x for name, x in received.items()}
        message = garbage | {KEPT: torch.tensor(kept)}
        start = {name: (own if name in LAYERS[mine] else received)[name] for name in received}
        assert_same(method.local_model(task, message, HeurpFedLAClient(own)), start)
        whole = heurpfedla()
        whole = type(whole)(method.solver, host=method, private=whole.private)
        client = whole.init_client(task, task.initial)._replace(host=HeurpFedLAClient(own))
        assert_same(whole.personalize(task, message, client, shard), start)
        client, upload, _ = whole.train(task, message, client, shard)
        assert_close(upload, trained(Dense, start, batches(shard, 2)))
        assert_same(client.host.model, upload)


def test_server_and_client_agree_on_kept_layers():
    """What the server would send of them is what the client has."""
    run = played(run_of("heurpfedla:mixer_lr=1", "norm", participation=0.5, executor="one_by_one"), 3)
    task, method = run.state.scene.task, run.state.scene.method
    sent, clients = method.send(task, run.state.server, EVERYONE).tree, run.state.store.rows(EVERYONE)
    layers = task.layers_in(tree.drop(task.initial, tree.is_statistic))
    for client in range(len(SIZES)):
        kept = layers[int(sent[KEPT][client].argmax())]
        for name in task.layers[kept]:
            if not tree.is_statistic(name):
                assert torch.equal(sent[name][client], tree.row(clients, client).host.model[name])


# The step of the mixers


@pytest.mark.parametrize("method", [heur_of("sgd", 0.5), heur_of("adam", 0.01)], ids=["paper", "adam"])
def test_mixers_do_not_learn_from_kept_layers(method):
    task = task_for()
    server = server_of(method, task, self_bias((2.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 2.0)))
    ids = torch.arange(N)
    uploads = moved(method.send(task, server, ids).tree | {KEPT: torch.zeros(N, 2)}, 50)
    del uploads[KEPT]
    mixers = method.merge(task, server, ids, uploads, torch.ones(N)).mixers
    for client in range(N):
        kept, other = (0, 1) if client % 2 == 0 else (1, 0)
        for name in ("output.weight", "output.bias"):
            assert torch.equal(mixers[name][client, kept], server.mixers[name][client, kept])
            assert not torch.equal(mixers[name][client, other], server.mixers[name][client, other])


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.5), ("adam", 0.01)], ids=["paper", "adam"])
def test_mixers_learn_from_other_layers_as_in_pfedla(optimizer, lr):
    """As if the kept layers had not moved."""
    task = task_for()
    method = heur_of(optimizer, lr)
    plain = PFedLA(width=6, mixer_lr=lr, mixer_optimizer=optimizer, unit=optimizer == "adam")
    server, ids = server_of(method, task), torch.arange(N)
    sent, mixture = method.send(task, server, ids).tree, plain.send(task, server, ids).tree
    away = moved(mixture, 50)
    layers = list(LAYERS)

    def is_kept(name):
        kept = sent[KEPT][:, layers.index(name.split(".")[0])]
        return kept.reshape(N, *[1] * (mixture[name].dim() - 1)) > 0

    as_if = {name: torch.where(is_kept(name), mixture[name], x) for name, x in away.items()}
    one = method.merge(task, server, ids, away, torch.ones(N)).mixers
    other = plain.merge(task, server, ids, as_if, torch.ones(N)).mixers
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert sent[KEPT].sum(0).min() > 0 and not torch.equal(one["embedding"], server.mixers["embedding"])


def test_whole_model_is_stored():
    task, method = task_for(), HeurpFedLA(width=6, k=1)
    server, ids = server_of(method, task), torch.tensor([2, 0])
    sent = method.send(task, server, ids).tree
    uploads = moved({name: sent[name] for name in server.models}, 50)
    assert_same(tree.rows(method.merge(task, server, ids, uploads, torch.ones(2)).models, ids), uploads)


# New clients


def test_a_new_client_keeps_nothing_and_has_the_plain_mean():
    task, method = task_for(), heurpfedla()
    server = server_of(method.host, task)
    received = method.newcomer(task, server)
    assert received[KEPT].tolist() == [0, 0]
    expected = tree.map(lambda x: x.mean(0), server.models)
    assert_close(method.adapt(task, received, shard_for(task), 0), expected)


# Bytes


def mebibytes(model, shape, kept, more_down=0, more_up=0) -> float:
    """The table's cost: 75 rounds of 10 clients, whole models up, without kept layers down, each rounded."""
    task = Task(model(shape, 10), torch.zeros(shape), 10)
    method = heurpfedla()
    shared = method.shared(task, task.initial)
    layers = task.layers_in(shared)
    message = shared | {KEPT: torch.tensor([int(layer in kept) for layer in layers])}
    down, up = method.n_bytes(task, message, shared)
    return round(round(750 * (down + more_down) / 2**20, 2) + round(750 * (up + more_up) / 2**20, 2), 2)


@pytest.mark.parametrize(
    ("kept", "expected"), [((), 491.08), (("head",), 488.65), (("head", "hidden1"), 312.52)], ids=["0", "1", "2"]
)
def test_bytes_of_the_papers_table_for_emnist(kept, expected):
    assert mebibytes(HnCnn, (1, 28, 28), kept) == expected


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((), 693.98),
        (("hidden1",), 418.97),
        (("hidden1", "conv2"), 382.25),
        (("hidden1", "conv2", "head"), 379.82),
    ],
    ids=["0", "1", "2", "3"],
)
def test_bytes_of_the_papers_table_for_cifar(kept, expected):
    """Statistics of BatchNorm stay at home. Its counters are in the paper's numbers where whole models are sent."""
    assert mebibytes(HnCnnBn, (3, 32, 32), kept, 0 if kept else BATCH_COUNTERS, BATCH_COUNTERS) == expected


def test_bytes_of_a_run_are_without_kept_layers_down_and_whole_up():
    """Of 512 + 8 and 80 + 10 numbers, the hidden layer is kept at first: of equals the lower."""
    row = played(run_of("heurpfedla", executor="one_by_one"), 1).state.rows[0]
    assert (row.bytes_down, row.bytes_up) == (len(SIZES) * 4 * 90, len(SIZES) * 4 * 610)


# Add-ons


def test_prox_pulls_towards_the_received_layers():
    task, method = task_for(), heurpfedla().with_solver(solver_of())
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    message = received | {KEPT: torch.tensor([1, 0])}
    start = {name: (own if name in LAYERS["hidden"] else received)[name] for name in received}
    client = method.init_client(task, task.initial)._replace(host=HeurpFedLAClient(own))
    _, upload, _ = Prox(solver_of(), host=method, mu=0.75).train(task, message, client, shard)

    def pull(module):
        return 0.375 * sum((p - received[name]).square().sum() for name, p in module.named_parameters())

    assert_close(upload, trained(Dense, start, batches(shard), pull))


def test_fine_tuning_before_a_round_is_no_error():
    played(run_of("heurpfedla+c:c_epochs=1", executor="one_by_one"), 1).personal_model(0)


def test_a_new_client_estimates_its_statistics_as_in_pfedla():
    task = task_of(Normed, torch.float32)
    shard, found = shard_for(task), []
    for make in (pfedla, heurpfedla):
        method = make().with_solver(solver_of())
        server = method.init_server(task, task.initial, Federation(torch.ones(4), torch.tensor(5)))
        found.append(method.adapt(task, method.newcomer(task, server), shard, 1)["norm.running_mean"])
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], torch.zeros_like(found[0]))
