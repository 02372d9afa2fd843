import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import plures
from plures import tree
from plures.errors import UsageError
from plures.methods.addons.feddyn import FedDyn
from plures.methods.addons.keep import KeepLocal, KeptClient
from plures.methods.addons.scaffold import Scaffold
from plures.methods.base import Federation
from plures.methods.pfedhn import PFedHN, PFedHNServer, pfedhn
from tests.methods.plain import (
    LR,
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
from tests.small import SIZES, played, run_of, took_part

EVERYONE = torch.arange(len(SIZES))
PLAIN = {"hyper_momentum": 0.0, "hyper_decay": 0.0, "clip": 1e9}


def hn_of(solver=None, **settings) -> PFedHN:
    return PFedHN(solver_of(**(solver or {})), **{"width": 7, "depth": 2, **settings})


def server_of(method, task, n: int = 4) -> PFedHNServer:
    """In double precision, so that gradients can be told to the last digits."""
    server = method.init_server(task, task.initial, Federation(torch.ones(n), torch.tensor(3)))
    return tree.map(lambda x: x.double() if x.is_floating_point() else x, server)


def made_by_hand(net, v, like):
    """A plain MLP: linear, and ReLU between, then one linear layer for each tensor."""
    hidden = F.linear(v, net["hidden0.weight"], net["hidden0.bias"])
    k = 1
    while f"hidden{k}.weight" in net:
        hidden = F.linear(torch.relu(hidden), net[f"hidden{k}.weight"], net[f"hidden{k}.bias"])
        k += 1
    flat = {name: F.linear(hidden, net[f"output.{name}.weight"], net[f"output.{name}.bias"]) for name in like}
    return {name: x.reshape(like[name].shape) for name, x in flat.items()}


def chain_rule(task, server, ids, loss):
    """Autograd of the sum of loss(client, model of its embedding) by net and embeddings."""
    net = {name: x.clone().requires_grad_() for name, x in server.net.items()}
    v = server.embeddings.clone().requires_grad_()
    total = sum(loss(i, made_by_hand(net, v[i], task.initial)) for i in ids)
    by_v, *by_net = torch.autograd.grad(total, [v, *net.values()])
    return dict(zip(net, by_net, strict=True)), by_v


def change_of(uploads):
    """The loss whose gradient at the sent model is what a client's training took away."""

    def loss(i, model):
        return sum((x * (x.detach() - uploads[i][name])).sum() for name, x in model.items())

    return loss


def test_models_are_made_by_an_mlp_with_one_output_for_each_tensor():
    task = task_of(Normed)
    method = hn_of(embedding=3)
    server = server_of(method, task)
    sent = method.send(task, server, torch.tensor([2, 0])).tree
    for row, client in enumerate((2, 0)):
        assert_close(tree.row(sent, row), made_by_hand(server.net, server.embeddings[client], task.initial))
    assert server.embeddings.shape == (4, 3) and list(sent) == list(task.initial)
    assert not torch.equal(sent["head.weight"][0], sent["head.weight"][1])


@pytest.mark.parametrize(("n", "size"), [(3, 1), (4, 2), (50, 13)])
def test_an_embedding_has_one_more_than_a_quarter_of_the_clients(n, size):
    task = task_of(Dense)
    server = hn_of().init_server(task, task.initial, Federation(torch.ones(n), torch.tensor(3)))
    assert server.embeddings.shape == (n, size)
    assert hn_of(embedding=6).init_server(
        task, task.initial, Federation(torch.ones(n), torch.tensor(3))
    ).embeddings.shape == (n, 6)


def test_one_plain_local_step_makes_the_servers_gradient_lr_times_that_of_the_chain_rule():
    task = task_of(Dense)
    method = hn_of({"batch": 64}, hyper_lr=0.5, **PLAIN)
    server, ids = server_of(method, task), torch.tensor([2, 0])
    shards = {2: shard_for(task, n=20, seed=2), 0: shard_for(task, n=9, seed=5)}
    sent = method.send(task, server, ids).tree
    uploads = tree.stack([method.train(task, tree.row(sent, row), (), shards[i])[1] for row, i in enumerate((2, 0))])
    new = method.merge(task, server, ids, uploads, torch.tensor([20, 9]))
    module = Dense().double()

    def loss(i, model):
        return F.cross_entropy(functional_call(module, model, (shards[i].x,)), shards[i].y)

    by_net, by_v = chain_rule(task, server, (2, 0), loss)
    for i, model in ((2, tree.row(sent, 0)), (0, tree.row(sent, 1))):  # theta - trained = lr * gradient
        leaves = {name: x.clone().requires_grad_() for name, x in model.items()}
        gradients = torch.autograd.grad(loss(i, leaves), list(leaves.values()))
        row = {2: 0, 0: 1}[i]
        away = {name: (model[name] - uploads[name][row]) / LR for name in model}
        assert_close(away, dict(zip(leaves, gradients, strict=True)))
    assert_close(new.net, {name: x - 0.5 * LR * by_net[name] for name, x in server.net.items()})
    assert_close({"v": new.embeddings}, {"v": server.embeddings - 0.5 * LR * by_v})
    assert float(by_v[[0, 2]].abs().min()) > 1e-5 and not by_v[[1, 3]].any()


@pytest.mark.parametrize("cohort", ["sum", "mean"])
def test_gradients_of_the_net_are_added_up_or_averaged_over_the_cohort_and_those_of_embeddings_are_not(cohort):
    task = task_of(Dense)
    method = hn_of(hyper_lr=0.5, cohort=cohort, **PLAIN)
    server = server_of(method, task)
    uploads = {i: moved(task.initial, i) for i in range(4)}
    for ids in ([1], [3, 0, 2]):
        new = method.merge(
            task, server, torch.tensor(ids), tree.stack([uploads[i] for i in ids]), torch.arange(1, len(ids) + 1)
        )
        by_net, by_v = chain_rule(task, server, ids, change_of(uploads))
        n = len(ids) if cohort == "mean" else 1
        assert_close(new.net, {name: x - 0.5 * by_net[name] / n for name, x in server.net.items()})
        assert_close({"v": new.embeddings}, {"v": server.embeddings - 0.5 * by_v})


def test_without_a_word_gradients_are_added_up():
    assert PFedHN().cohort == "sum"


@pytest.mark.parametrize(("cohort", "n"), [("sum", 1), ("mean", 2)])
def test_net_and_embeddings_move_as_torch_optim_moves_them_with_momentum_and_decay(cohort, n):
    task = task_of(Dense)
    method = hn_of(cohort=cohort, hyper_lr=0.05, hyper_momentum=0.9, hyper_decay=0.1, clip=1e9)
    server = server_of(method, task, 2)
    net = {name: x.clone().requires_grad_() for name, x in server.net.items()}
    v = server.embeddings.clone().requires_grad_()
    solver = torch.optim.SGD([v, *net.values()], lr=0.05, momentum=0.9, weight_decay=0.1)
    for round in range(3):
        uploads = {i: moved(task.initial, 10 * round + i) for i in range(2)}
        by_net, by_v = chain_rule(
            task, server._replace(net=tree.detach(net), embeddings=v.detach()), (0, 1), change_of(uploads)
        )
        v.grad = by_v
        for name, x in net.items():
            x.grad = by_net[name] / n
        solver.step()
        server = method.merge(task, server, torch.arange(2), tree.stack([uploads[0], uploads[1]]), torch.ones(2))
    assert_close(server.net, tree.detach(net))
    assert_close({"v": server.embeddings}, {"v": v.detach()})


@pytest.mark.parametrize("cohort", ["sum", "mean"])
def test_gradients_are_cut_to_a_length_each_embedding_by_itself_and_the_net_as_a_whole(cohort):
    """That of the net after the clients' gradients were added up, or averaged."""
    task = task_of(Dense)
    free, cut = (hn_of(cohort=cohort, hyper_lr=1.0, **(PLAIN | {"clip": clip})) for clip in (1e9, 0.01))
    server = server_of(free, task)
    ids, uploads = torch.tensor([0, 1]), tree.stack([moved(task.initial, 1), moved(task.initial, 2, 5.0)])

    def steps(method):
        new = method.merge(task, server, ids, uploads, torch.ones(2))
        return {n: server.net[n] - x for n, x in new.net.items()}, server.embeddings - new.embeddings

    (net, v), (short_net, short_v) = steps(free), steps(cut)
    length = torch.cat([x.flatten() for x in net.values()]).norm()
    torch.testing.assert_close(short_net, {n: 0.01 * x / length for n, x in net.items()}, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(short_v[:2], 0.01 * v[:2] / v[:2].norm(dim=1, keepdim=True), rtol=1e-6, atol=1e-12)
    assert float(length) > 0.01 and float(v[:2].norm(dim=1).min()) > 0.01


def test_embeddings_of_others_stay_bit_for_bit_under_momentum_and_decay():
    run = run_of("pfedhn:hyper_decay=0.1", participation=0.5, executor="one_by_one")
    for round in range(3):
        before = run.state.server.embeddings, run.state.server.embedding_momentum
        run.play_round()
        chosen = run.state.cohort(round)
        for old, new in zip(before, (run.state.server.embeddings, run.state.server.embedding_momentum), strict=True):
            assert [bool((old[i] != new[i]).any()) for i in range(6)] == [i in chosen for i in range(6)]
    run.close()


def test_a_hyper_lr_of_zero_never_changes_a_personal_model():
    run = run_of("pfedhn:hyper_lr=0", executor="one_by_one")
    before = [run.personal_model(client) for client in range(6)]
    played(run, 2)
    for client in range(6):
        assert_same(run.personal_model(client), before[client])


def test_a_step_brings_the_generated_model_nearer_to_the_trained_one():
    task = task_of(Dense)
    method = hn_of(hyper_lr=0.02, **PLAIN)
    server, ids = server_of(method, task), torch.tensor([1])
    target = tree.stack([moved(task.initial, 1)])
    far = []
    for _ in range(4):
        sent = method.send(task, server, ids).tree
        far.append(sum(float((x - target[name]).square().sum()) for name, x in sent.items()))
        server = method.merge(task, server, ids, target, torch.ones(1))
    assert far == sorted(far, reverse=True) and far[-1] < 0.95 * far[0]


def test_the_personal_model_is_generated_and_not_trained_at_home():
    run = played(run_of("pfedhn", participation=0.5, executor="one_by_one"), 2)
    for client in took_part(run):
        expected = made_by_hand(run.state.server.net, run.state.server.embeddings[client], run.state.scene.task.initial)
        torch.testing.assert_close(run.personal_model(client), expected, rtol=1e-5, atol=1e-6)
    assert run.state.scene.method.generic(run.state.scene.task, run.state.server) is None


def test_a_client_trains_what_it_received():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = hn_of({"epochs": 2, "momentum": 0.5}).train(task, received, (), shard)
    assert_close(upload, trained(Dense, received, batches(shard, 2), momentum=0.5))


@pytest.mark.parametrize("private", ["statistics", "head/statistics"])
def test_what_the_hypernetwork_does_not_make_stays_with_the_client(private):
    task = task_of(Normed)
    stays = {"norm.running_mean", "norm.running_var"} | ({"head.weight", "head.bias"} if "head" in private else set())
    method = KeepLocal(host=hn_of(), private=private).with_solver(solver_of())
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(3)))
    made = {name.removeprefix("output.").rpartition(".")[0] for name in server.net if name.startswith("output.")}
    assert made == set(task.initial) - stays
    received = tree.row(method.send(task, server, torch.tensor([0])).tree, 0)
    kept = {name: x for name, x in moved(task.initial, 1).items() if name in stays}
    shard = shard_for(task)
    client, upload, _ = method.train(task, received, KeptClient((), kept), shard)
    expected = trained(Normed, received | kept, batches(shard))
    assert_close(upload, {name: expected[name] for name in upload})
    assert_close(client.kept, {name: expected[name] for name in stays if name in client.kept})
    assert set(client.kept) == stays and set(upload) == set(task.initial) - stays
    own = method.personalize(task, received, client, shard)
    assert_same({n: own[n] for n in upload}, {n: received[n] for n in upload})
    assert_same({n: own[n] for n in client.kept}, client.kept)


def test_a_new_client_fits_its_embedding_and_leaves_the_net_alone():
    task = task_of(Dense)
    method = hn_of()
    server = server_of(method, task)
    received, shard = method.newcomer(task, server), shard_for(task)
    mean = server.embeddings.mean(0)
    assert_close(method.adapt(task, received, shard, 0), made_by_hand(server.net, mean, task.initial))
    v, module = mean.clone().requires_grad_(), Dense().double()
    for x, y in batches(shard, 2):
        model = made_by_hand(server.net, v, task.initial)
        (gradient,) = torch.autograd.grad(F.cross_entropy(functional_call(module, model, (x,)), y), [v])
        v = (v - LR * gradient).detach().requires_grad_()
    found = method.adapt(task, received, shard, 2)
    assert_close(found, tree.detach(made_by_hand(server.net, v, task.initial)))
    assert differs(found, tree.detach(made_by_hand(server.net, mean, task.initial)))


def test_pfedhn_cannot_take_what_needs_one_model_for_all():
    for addon in (Scaffold, FedDyn):
        with pytest.raises(UsageError, match="keeps no model for all"):
            addon(host=pfedhn())


def test_pfedhn_learns_digits_without_settings():
    result = plures.run("pfedhn", data="digits", rounds=30, eval_every=0)
    assert result.summary["personal"]["mean"] > 0.85
