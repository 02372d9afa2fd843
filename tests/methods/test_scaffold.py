import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.methods.addons.scaffold import Scaffold, ScaffoldClient, ScaffoldServer
from plures.methods.base import Federation
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.scaffold import scaffold
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
    statistics,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of, shard_of, small_split

EVERYONE = torch.arange(len(SIZES))
NOTHING = FedAvgClient({})


class Valley:
    """A task with loss a/2 (w - b)^2 for a row (a, b)."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        a, b = batch.x.unbind(1)
        return (a / 2 * (params["w"] - b).square() * batch.mask).sum() / batch.mask.sum()


class Plane:
    """A task with one gradient everywhere: the mean of the rows."""

    n_classes = 1
    smallest_batch = 1

    def loss(self, params, batch):
        return (params["w"] * batch.x * batch.mask.unsqueeze(1)).sum() / batch.mask.sum()


def rows_of(task, *rows, round=0):
    x = torch.tensor(rows, dtype=torch.float64)
    return shard_of(task, x, torch.zeros(len(x), dtype=torch.long), round=round)


def scaffold_of(**solver) -> Scaffold:
    return scaffold().with_solver(solver_of(**solver))


def at(value: float):
    return {"w": torch.tensor([value], dtype=torch.float64)}


def weights(params):
    return {name: x for name, x in params.items() if "running" not in name}


def a_round(method, task, server, clients, shards):
    """One round of all clients, one after the other."""
    ids = torch.arange(len(shards))
    message = method.send(task, server, ids).tree
    done = [method.train(task, message, client, shard) for client, shard in zip(clients, shards, strict=True)]
    uploads = tree.stack([upload for _, upload, _ in done])
    server = method.merge(task, server, ids, uploads, torch.tensor([int(s.size) for s in shards]))
    return server, [client for client, _, _ in done]


def after_rounds(method, task, start, shards, n_rounds):
    server = method.init_server(task, start, Federation(torch.ones(len(shards)), torch.tensor(0)))
    clients = [method.init_client(task, start) for _ in shards]
    for _ in range(n_rounds):
        server, clients = a_round(method, task, server, clients, shards)
    return server, clients


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_makes_scaffold_fedavg_bit_for_bit(model, momentum):
    options = {"split": small_split((31,)), "momentum": momentum, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 3) for name in ("scaffold", "fedavg"))
    assert_same(one.state.server.host, other.state.server)
    assert any(bool(x.any()) for x in one.state.server.control.values())
    assert_same(tree.row(one.state.store.rows(torch.tensor([0])).control, 0), one.state.server.control)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_controls_held_at_zero_make_scaffold_uniform_fedavg_bit_for_bit(model):
    options = {"participation": 0.5, "executor": "one_by_one"}
    run = run_of("scaffold", model, **options)
    for _ in range(3):
        run.play_round()
        run.state.server = run.state.server._replace(control=tree.zeros_like(run.state.server.control))
        clients = run.state.store.rows(EVERYONE)
        run.state.store.put(EVERYONE, clients._replace(control=tree.zeros_like(clients.control)))
    run.close()
    assert_same(run.state.server.host, played(run_of("fedavg:weights=uniform", model, **options), 3).state.server)


@pytest.mark.parametrize("participation", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mean_of_all_clients_controls_is_the_servers_in_any_participation(participation, momentum):
    run = run_of("scaffold", "harsh", participation=participation, momentum=momentum, lr=0.01, executor="one_by_one")
    for _ in range(4):
        run.play_round()
        mean = tree.map(lambda x: x.mean(0), run.state.store.rows(EVERYONE).control)
        torch.testing.assert_close(mean, run.state.server.control, rtol=1e-12, atol=1e-13)
        assert float(mean["head.weight"].abs().max()) > 1e-4
    run.close()


def test_scaffold_finds_the_common_optimum_where_fedavg_does_not():
    """Losses w^2/2 and 3/2 (w - 1)^2 have their mean's optimum at 3/4.

    Five steps of 0.2 leave 0.8^5 and 0.4^5 of the way, so FedAvg rests where
    x = (0.8^5 x + 1 + 0.4^5 (x - 1)) / 2.
    """
    shards = [rows_of(Valley(), (1.0, 0.0)), rows_of(Valley(), (3.0, 1.0))]
    solver = {"lr": 0.2, "steps": 5}
    server, clients = after_rounds(scaffold_of(**solver), Valley(), at(0.0), shards, 30)
    assert float(server.host["w"]) == pytest.approx(0.75, abs=1e-5)
    assert [float(client.control["w"]) for client in clients] == pytest.approx([0.75, -0.75], abs=1e-4)
    alone, _ = after_rounds(FedAvg(solver_of(**solver), weights="uniform"), Valley(), at(0.0), shards, 25)
    assert float(alone["w"]) == pytest.approx((1 - 0.4**5) / (2 - 0.8**5 - 0.4**5), abs=1e-9)


def test_clients_with_the_same_rows_have_the_servers_control_and_scaffold_is_fedavg():
    task = task_of(Dense)
    shards = [shard_for(task)] * 3
    server, clients = after_rounds(scaffold_of(), task, task.initial, shards, 3)
    for client in clients:
        torch.testing.assert_close(client.control, server.control, rtol=1e-12, atol=1e-14)
    alone, _ = after_rounds(FedAvg(solver_of(), weights="uniform"), task, task.initial, shards, 3)
    assert_close(server.host, alone)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_scaffold_equals_torch_optim_with_the_turned_gradient_written_out(make):
    """Gradient g - c_i + c; then c_i - c + (x - y) / (K lr) for the K steps that were taken, here twice four."""
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    c, c_i = weights(moved(task.initial, 2, 0.2)), weights(moved(task.initial, 3, 0.2))
    client, upload, _ = scaffold_of(epochs=2).train(
        task, {"host": received, "control": c}, ScaffoldClient(NOTHING, c_i), shard
    )

    def turn(module):
        return sum(((c[name] - c_i[name]) * p).sum() for name, p in module.named_parameters())

    y = trained(make, received, batches(shard, 2), turn)
    assert_close(upload["host"], y)
    new = {name: c_i[name] - c[name] + (received[name] - y[name]) / (8 * LR) for name in c}
    torch.testing.assert_close(client.control, new, rtol=1e-5, atol=1e-6)
    change = {name: new[name] - c_i[name] for name in c}
    torch.testing.assert_close(upload["control"], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_reach_is_how_far_momentum_steps_go_along_a_gradient_of_one(momentum, steps):
    velocity = far = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        far += 0.3 * 0.9**2 * velocity
    method = scaffold_of(lr=0.3, momentum=momentum, decay=0.9)
    assert float(method.reach(torch.tensor(steps), torch.tensor(2))) == pytest.approx(far, rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("round", "decay"), [(0, 1.0), (3, 0.5)])
def test_on_a_constant_gradient_the_new_control_is_that_gradient_whatever_it_was(momentum, round, decay):
    """Rows (1, -4) and (3, 0) have the gradient (2, -2)."""
    shard = rows_of(Plane(), (1.0, -4.0), (3.0, 0.0), round=round)
    method = scaffold_of(lr=0.3, momentum=momentum, decay=decay, steps=6)
    zero, c, c_i = ({"w": torch.tensor(x, dtype=torch.float64)} for x in ([0.0, 0.0], [5.0, 1.0], [-7.0, 2.0]))
    client, upload, _ = method.train(Plane(), {"host": zero, "control": c}, ScaffoldClient(NOTHING, c_i), shard)
    expected = torch.tensor([2.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(client.control["w"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(upload["control"]["w"], expected - c_i["w"], rtol=1e-5, atol=1e-5)


def test_a_client_with_one_row_counts_its_single_step():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=1)
    zero = tree.zeros_like(received)
    message = {"host": received, "control": zero}
    client, _, _ = scaffold_of().train(task, message, ScaffoldClient(NOTHING, zero), shard)
    y = trained(Dense, received, batches(shard))
    torch.testing.assert_close(
        client.control, {name: (x - y[name]) / LR for name, x in received.items()}, rtol=1e-5, atol=1e-6
    )


def test_server_adds_one_nth_of_the_changes_and_takes_the_plain_mean():
    """Two of four clients: controls by (4 + 8) / 4, models by a mean that does not see rows."""
    server = ScaffoldServer(at(0.0), at(1.0), torch.tensor(4.0, dtype=torch.float64))
    uploads = {"host": {"w": torch.tensor([[2.0], [6.0]])}, "control": {"w": torch.tensor([[4.0], [8.0]])}}
    ids, sizes = torch.tensor([0, 2]), torch.tensor([1, 99])
    new = scaffold().merge(None, server, ids, uploads, sizes)
    assert (float(new.host["w"]), float(new.control["w"])) == (4.0, 4.0)
    quarter = Scaffold(host=FedAvg(weights="uniform"), server_lr=0.25)
    server = server._replace(host=tree.map(lambda x: x.float(), server.host))
    assert float(quarter.merge(None, server, ids, uploads, sizes).host["w"]) == 1.0


def test_even_a_host_that_weighs_by_rows_takes_the_plain_mean_under_scaffold():
    server = ScaffoldServer(at(0.0), at(0.0), torch.tensor(2.0))
    uploads = {"host": {"w": torch.tensor([[2.0], [6.0]])}, "control": {"w": torch.zeros(2, 1)}}
    new = Scaffold(host=FedAvg()).merge(None, server, torch.arange(2), uploads, torch.tensor([1, 99]))
    assert float(new.host["w"]) == 4.0


def test_statistics_have_no_control_and_are_averaged():
    task = task_of(Normed)
    method = scaffold_of(lr=0.25)
    server, clients = after_rounds(method, task, task.initial, [shard_for(task, seed=s) for s in (1, 2)], 1)
    names = {name for name in task.initial if "running" not in name}
    assert set(server.control) == set(clients[0].control) == names
    free, _ = after_rounds(
        FedAvg(solver_of(lr=0.25), weights="uniform"), task, task.initial, [shard_for(task, seed=s) for s in (1, 2)], 1
    )
    assert_same(statistics(server.host), statistics(free))
    assert differs(statistics(free), statistics(task.initial))


def test_scaffold_sends_model_and_control_and_scores_the_model():
    task = task_of(Dense)
    method = scaffold_of()
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(0)))
    model = moved(task.initial, 2)
    server = server._replace(host=model, control=moved(task.initial, 1))
    message = method.send(task, server, torch.arange(2)).tree
    assert_same(message, {"host": model, "control": server.control})
    client, shard = method.init_client(task, task.initial), shard_for(task)
    assert_same(method.personalize(task, message, client, shard), model)
    assert_same(method.generic(task, server), model)


def test_the_personal_model_may_be_the_last_trained_one():
    run = played(run_of("scaffold:pm=local", executor="one_by_one"), 2)
    own = run.personal_model(5)
    assert_same(own, tree.row(run.state.store.rows(torch.tensor([5])).host.model, 0))
    assert differs(own, run.state.server.host)


def test_scaffold_is_refused_twice():
    with pytest.raises(UsageError, match="scaffold"):
        Scaffold(host=scaffold())


def test_scaffold_with_lr_zero_leaves_the_model_and_stays_finite():
    task = task_of(Dense)
    zero = tree.zeros_like(task.initial)
    client, upload, _ = scaffold_of(lr=0.0).train(
        task, {"host": task.initial, "control": zero}, ScaffoldClient(NOTHING, zero), shard_for(task)
    )
    assert_same(upload["host"], task.initial)
    assert all(bool(x.isfinite().all()) for x in client.control.values())
