import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.methods.addons.feddyn import FedDyn, FedDynClient, FedDynServer
from plures.methods.addons.scaffold import Scaffold
from plures.methods.base import Federation
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.feddyn import feddyn
from plures.methods.scaffold import scaffold
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
    statistics,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of, shard_of

EVERYONE = torch.arange(len(SIZES))
NOTHING = FedAvgClient({})


class Regression:
    """Least squares: the last column of a row is what the others are to give. A quadratic loss."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        each = (batch.x[:, :-1] @ params["w"] - batch.x[:, -1]).square() / 2
        return (each * batch.mask).sum() / batch.mask.sum()


def regression(seed: int, n: int = 4):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    return shard_of(Regression(), x, torch.zeros(n, dtype=torch.long))


def curve(shard):
    """A and b of the gradient A w - b of a client's loss."""
    x, t = shard.x[:, :-1], shard.x[:, -1]
    return x.mT @ x / len(x), x.mT @ t / len(x)


def feddyn_of(alpha: float, **solver) -> FedDyn:
    return FedDyn(host=FedAvg(weights="uniform"), alpha=alpha).with_solver(solver_of(**solver))


def weights(params):
    return {name: x for name, x in params.items() if "running" not in name}


def point(*values: float):
    return {"w": torch.tensor(values, dtype=torch.float64)}


def after_rounds(method, task, start, shards, n_rounds):
    ids = torch.arange(len(shards))
    server = method.init_server(task, start, Federation(torch.ones(len(shards)), torch.tensor(0)))
    clients = [method.init_client(task, start) for _ in shards]
    for _ in range(n_rounds):
        message = method.send(task, server, ids).tree
        done = [method.train(task, message, client, shard) for client, shard in zip(clients, shards, strict=True)]
        clients = [client for client, _, _ in done]
        uploads = tree.stack([upload for _, upload, _ in done])
        server = method.merge(task, server, ids, uploads, torch.tensor([int(s.size) for s in shards]))
    return server, clients


def test_at_the_exact_local_optimum_the_gradient_kept_is_that_of_the_clients_own_loss():
    shard = regression(1)
    client = FedDynClient(NOTHING, point(0.3, -0.2))
    client, upload, _ = feddyn_of(0.5, lr=0.3, steps=150).train(Regression(), point(1.0, 2.0), client, shard)
    a, b = curve(shard)
    best = torch.linalg.solve(a + 0.5 * torch.eye(2), b + torch.tensor([0.3, -0.2]) + 0.5 * torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(upload["w"], best, rtol=0, atol=1e-7)
    torch.testing.assert_close(client.gradient["w"], a @ best - b, rtol=0, atol=1e-7)
    assert float(client.gradient["w"].norm()) > 0.1


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_alpha_zero_with_drift_and_gradients_held_at_zero_is_uniform_fedavg_bit_for_bit(model, participation):
    options = {"participation": participation, "executor": "one_by_one"}
    run = run_of("feddyn", model, settings={"alpha": 0.0}, **options)
    run.state.server = run.state.server._replace(drift={})  # a drift of nothing cannot grow
    played(run, 3)
    assert all(not x.any() for x in run.state.store.rows(EVERYONE).gradient.values())
    assert_same(run.state.server.host, played(run_of("fedavg:weights=uniform", model, **options), 3).state.server)


@pytest.mark.parametrize("alpha", [0.0, 1e-6])
def test_alpha_near_zero_is_not_fedavg_for_the_server_adds_the_drift_once_more(alpha):
    """With all clients, h / alpha = -(mean - w) after one round, so that the server sends 2 mean - w."""
    task = task_of(Dense)
    shards = [shard_for(task, seed=seed) for seed in (1, 2)]
    server, _ = after_rounds(feddyn_of(alpha), task, task.initial, shards, 1)
    mean, _ = after_rounds(FedAvg(solver_of(), weights="uniform"), task, task.initial, shards, 1)
    far = {name: 2 * mean[name] - x for name, x in task.initial.items()}
    torch.testing.assert_close(server.host, far, rtol=0, atol=1e-4)
    assert differs(server.host, mean)


def test_one_client_rests_at_its_optimum_and_gets_there():
    shard = regression(2)
    a, b = curve(shard)
    best = torch.linalg.solve(a, b)
    method = feddyn_of(0.5, lr=0.5, steps=20)
    server, clients = after_rounds(method, Regression(), {"w": best}, [shard], 2)
    torch.testing.assert_close(server.host["w"], best, rtol=0, atol=1e-12)
    torch.testing.assert_close(clients[0].gradient["w"], torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    server, _ = after_rounds(method, Regression(), point(2.0, -2.0), [shard], 30)
    torch.testing.assert_close(server.host["w"], best, rtol=0, atol=1e-4)


def test_clients_agree_on_the_optimum_of_their_mean_loss_where_fedavg_does_not():
    """Losses w^2/2 and 3/2 (w - 1)^2, as rows (1, 0) and (3, 3) over their roots: optimum 3/4, gradients +-3/4."""
    rows = [torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 3.0]]) / 3**0.5]
    shards = [shard_of(Regression(), x.double(), torch.zeros(1, dtype=torch.long)) for x in rows]
    solver = {"lr": 0.3, "steps": 8}
    server, clients = after_rounds(feddyn_of(0.5, **solver), Regression(), point(0.0), shards, 35)
    assert float(server.host["w"]) == pytest.approx(0.75, abs=1e-4)
    assert [float(client.gradient["w"]) for client in clients] == pytest.approx([0.75, -0.75], abs=1e-3)
    alone, _ = after_rounds(FedAvg(solver_of(**solver), weights="uniform"), Regression(), point(0.0), shards, 10)
    assert float(alone["w"]) == pytest.approx((1 - 0.1**8) / (2 - 0.7**8 - 0.1**8), abs=1e-5)


@pytest.mark.parametrize("participation", [1.0, 0.5, 0.2])
def test_servers_drift_is_the_mean_of_all_clients_gradients_over_alpha(participation):
    run = run_of(
        "feddyn", "harsh", settings={"alpha": 0.125}, participation=participation, lr=0.02, executor="one_by_one"
    )
    for _ in range(4):
        run.play_round()
        mean = tree.map(lambda x: x.mean(0), run.state.store.rows(EVERYONE).gradient)
        torch.testing.assert_close(tree.scale(0.125, run.state.server.drift), mean, rtol=1e-11, atol=1e-14)
        assert float(mean["head.weight"].abs().max()) > 1e-6
    run.close()


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_feddyn_equals_torch_optim_with_the_dynamic_term_written_out(make, momentum):
    task = task_of(make)
    received, gradient, shard = moved(task.initial, 1), weights(moved(task.initial, 2, 0.2)), shard_for(task)
    client, upload, _ = feddyn_of(0.75, epochs=2, momentum=momentum).train(
        task, received, FedDynClient(NOTHING, gradient), shard
    )

    def term(module):
        named = module.named_parameters()
        return sum((-gradient[name] * p + 0.75 / 2 * (p - received[name]).square()).sum() for name, p in named)

    v = trained(make, received, batches(shard, 2), term, momentum=momentum)
    assert_close(upload, v)
    assert_close(client.gradient, {name: x - 0.75 * (v[name] - received[name]) for name, x in gradient.items()})


def test_merge_is_the_one_worked_by_hand():
    """w = 1, of four clients two end at 2 and 6: away is 1 + 5, so that the drift 0.5 becomes 0.5 - 6/4 = -1.

    The plain mean is 4, whatever the rows, and 4 - (-1) = 5 is sent.
    """
    server = FedDynServer(point(1.0), point(0.5), torch.tensor(4.0, dtype=torch.float64))
    uploads = {"w": torch.tensor([[2.0], [6.0]], dtype=torch.float64)}
    ids, sizes = torch.tensor([3, 1]), torch.tensor([1, 50])
    for host in (FedAvg(weights="uniform"), FedAvg()):
        new = FedDyn(host=host).merge(None, server, ids, uploads, sizes)
        assert (float(new.host["w"]), float(new.drift["w"]), float(new.n_clients)) == (5.0, -1.0, 4.0)
    assert float(FedDyn(host=FedAvg()).generic(None, new)["w"]) == 5.0
    assert float(FedDyn(host=FedAvg(), gm="mean").generic(None, new)["w"]) == 4.0
    assert float(FedDyn(host=FedAvg()).send(None, new, ids).tree["w"]) == 5.0


def test_statistics_have_no_gradient_and_no_drift_and_are_averaged():
    task = task_of(Normed)
    shards = [shard_for(task, seed=seed) for seed in (1, 2)]
    server, clients = after_rounds(feddyn_of(0.5), task, task.initial, shards, 1)
    assert set(server.drift) == set(clients[0].gradient) == set(weights(task.initial))
    zero = FedDynClient(NOTHING, tree.zeros_like(clients[0].gradient))
    one, other = (statistics(feddyn_of(0.5).train(task, task.initial, zero, shard)[1]) for shard in shards)
    assert_close(statistics(server.host), {name: (x + other[name]) / 2 for name, x in one.items()})
    assert differs(one, other)


def test_the_personal_model_is_what_is_sent_or_the_last_trained_one():
    run = played(run_of("feddyn", executor="one_by_one"), 2)
    assert_same(run.personal_model(5), run.state.server.host)
    run = played(run_of("feddyn:pm=local", executor="one_by_one"), 2)
    assert_same(run.personal_model(5), tree.row(run.state.store.rows(torch.tensor([5])).host.model, 0))


def test_feddyn_and_scaffold_refuse_each_other():
    for make in (lambda: Scaffold(host=feddyn()), lambda: FedDyn(host=scaffold())):
        with pytest.raises(UsageError):
            make()


def test_feddyn_is_refused_twice():
    with pytest.raises(UsageError):
        FedDyn(host=feddyn())
