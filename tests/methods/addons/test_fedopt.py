"""FedOpt: the server's steps against numbers worked by hand, what it refuses, and its way in by an option."""

import math

import pytest
import torch

import plures
from plures import tree
from plures.errors import UsageError
from plures.learn.solver import Solver
from plures.methods.base import Federation
from plures.methods.spec import make_method
from tests.small import played, run_of, scene_of


def merged(spec, rounds=2):
    """The server's weight w after some rounds in which two clients, with 1 and 3 rows, upload 1.0 and 3.0: mean 2.5."""
    method, task = make_method(spec, {}, Solver()), scene_of().task
    model = tree.map(lambda x: torch.full_like(x, 1.5), task.initial)
    server = method.init_server(task, model, Federation(torch.tensor([1, 3]), torch.tensor(0)))
    uploads = tree.map(lambda x: torch.stack([torch.ones_like(x), 3 * torch.ones_like(x)]), task.initial)
    found = []
    for _ in range(rounds):
        server = method.merge(task, server, torch.arange(2), uploads, torch.tensor([1, 3]))
        [value] = {float(x.unique()) for x in tree.leaves(server.host)}
        found.append(value)
    return found


def test_sgd_at_rate_one_is_the_mean():
    assert merged("fedavg+fedopt:server_optimizer=sgd") == [2.5, 2.5]


def test_sgd_goes_a_share_of_the_way():
    """g = 1.5 - 2.5 = -1: 1.5 + 0.5 = 2, then g = -0.5: 2.25."""
    assert merged("fedavg+fedopt:server_optimizer=sgd,server_lr=0.5") == [2.0, 2.25]


def test_momentum_adds_up():
    """m = -1: 2.5; then g = 0 and m = -0.9: 3.4."""
    assert merged("fedavg+fedopt:server_optimizer=momentum") == pytest.approx([2.5, 3.4])


def test_adam_by_hand():
    m, v, w, found = 0.0, 1e-6, 1.5, []
    for _ in range(3):
        g = w - 2.5
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w -= 0.2 * m / (math.sqrt(v) + 1e-3)
        found.append(w)
    assert merged("fedavg+fedopt:server_lr=0.2", 3) == pytest.approx(found, rel=1e-5)


def test_yogi_differs_from_adam_where_squares_shrink():
    adam, yogi = merged("fedavg+fedopt:server_lr=1", 4), merged("fedavg+fedopt:server_optimizer=yogi,server_lr=1", 4)
    assert adam[0] == pytest.approx(yogi[0], rel=1e-3) and abs(adam[3] - yogi[3]) > 1e-3


def test_statistics_of_batch_norm_are_averaged():
    plain, adam = (played(run_of(spec, "norm"), 1).state.server for spec in ("fedavg", "fedavg+fedopt"))
    for name, x in plain.items():
        if tree.is_statistic(name):
            assert torch.equal(adam.host[name], x)
        elif "norm" not in name:
            assert not torch.equal(adam.host[name], x)


@pytest.mark.parametrize("method", ["local", "pfedhn", "fedamp", "apple"])
def test_methods_that_average_nothing_refuse_it(method):
    with pytest.raises(UsageError, match="cannot take the add-on fedopt: its server takes no mean of models"):
        plures.run(method, server_optimizer="adam", rounds=1)


def test_it_must_stand_before_scaffold():
    with pytest.raises(UsageError, match="add it the other way round, before scaffold"):
        plures.run("fedavg+scaffold+fedopt", rounds=1)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedala:cap=3", "fedrod", "scaffold", "fedrep", "fedavg+prox"])
def test_the_option_puts_it_next_to_the_method(method):
    options = {"clients": 4, "rounds": 2, "share": 0.2}
    found = plures.run(method, server_optimizer="adam", server_lr=0.05, **options)
    plain = plures.run(method, **options)
    assert found.summary["digest"] != plain.summary["digest"]
    assert all(torch.isfinite(x).all() for model in found.models.values() for x in model.values())


def test_feddyn_has_a_step_of_its_own():
    with pytest.raises(UsageError, match="cannot take the add-on feddyn: FedDyn's server has a step of its own"):
        plures.run("feddyn", server_optimizer="adam", rounds=1)


def test_the_option_is_the_add_on():
    options = {"clients": 4, "rounds": 2, "share": 0.2}
    a = plures.run("fedavg", server_optimizer="yogi", **options)
    b = plures.run("fedavg+fedopt:server_optimizer=yogi", **options)
    assert a.summary["digest"] == b.summary["digest"]


def test_a_stopped_run_goes_on_with_the_servers_momentum(tmp_path):
    options = {"clients": 4, "rounds": 4, "share": 0.2, "server_optimizer": "momentum", "checkpoint_every": 2}
    whole = plures.run("fedavg", **options)

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(Exception, match="interrupted"):
        plures.run("fedavg", out=tmp_path / "run", callback=Stop(), **options)
    assert plures.resume(tmp_path / "run").summary["digest"] == whole.summary["digest"]
