import pytest
import torch

from plures.methods.addons.prox import Prox
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedprox import fedprox
from plures.simulate.executor import Each
from plures.simulate.stacking import one_by_one
from plures.simulate.work import train_function
from tests.methods.plain import (
    Bowl,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    bowl_at,
    differs,
    moved,
    shard_for,
    solver_of,
    statistics,
    task_of,
    trained,
)
from tests.small import played, run_of

NOTHING = FedAvgClient({})


def prox_of(mu: float, **solver) -> Prox:
    return Prox(host=FedAvg(solver_of(**solver)), mu=mu)


def upload_of(method, task, received, shard):
    return method.train(task, received, NOTHING, shard)[1]


def squared_distance_to(anchor):
    """The penalty as one would write it for a module: over its parameters, not its buffers."""
    return lambda module: sum((p - anchor[name]).square().sum() for name, p in module.named_parameters())


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedprox_equals_torch_optim_with_the_penalty_written_out(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    upload = upload_of(prox_of(0.75, epochs=2), task, received, shard)
    distance = squared_distance_to(received)
    assert_close(upload, trained(make, received, batches(shard, 2), lambda module: 0.75 / 2 * distance(module)))


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit(model, executor):
    one = played(run_of("fedprox", model, settings={"mu": 0.0}, executor=executor), 2)
    other = played(run_of("fedavg", model, executor=executor), 2)
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedprox_first_step_is_that_of_fedavg(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    one_step = upload_of(FedAvg(solver_of(steps=1)), task, received, shard)
    assert_same(upload_of(prox_of(5.0, steps=1), task, received, shard), one_step)


def test_fedprox_second_step_is_not_that_of_fedavg():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    two_steps = upload_of(FedAvg(solver_of(steps=2)), task, received, shard)
    assert differs(upload_of(prox_of(5.0, steps=2), task, received, shard), two_steps)


def test_fedprox_steps_on_a_bowl_are_those_worked_by_hand():
    """From w = 0 with centre 1, lr 0.5 and mu 1: 0 -> 0.5 -> 0.5 - 0.5 (-0.5 + 0.5) = 0.5; without mu, 0.75."""
    received, shard = {"w": torch.zeros(1)}, bowl_at(1.0)
    pulled, free = (upload_of(prox_of(mu, lr=0.5, steps=2), Bowl(), received, shard) for mu in (1.0, 0.0))
    assert (float(pulled["w"]), float(free["w"])) == (0.5, 0.75)


def test_fedprox_settles_between_the_received_model_and_the_clients_own_best():
    """The minimum of (v - c)^2/2 + mu/2 (v - w)^2 is (c + mu w) / (1 + mu) = (5 + 3 * 1) / 4 = 2."""
    upload = upload_of(prox_of(3.0, lr=0.2, steps=100), Bowl(), {"w": torch.ones(1)}, bowl_at(5.0))
    torch.testing.assert_close(upload["w"], torch.tensor([2.0]))


def test_fedprox_distance_to_the_received_model_does_not_grow_with_mu():
    received, shard = {"w": torch.tensor([1.0, -2.0])}, bowl_at(4.0, 2.0)
    far = []
    for mu in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0):
        upload = upload_of(prox_of(mu, lr=0.1, steps=7), Bowl(), received, shard)
        far.append(float((upload["w"] - received["w"]).norm()))
    assert far == sorted(set(far), reverse=True) and len(far) == 7


def test_fedprox_with_a_strong_pull_stays_at_the_received_model():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    near = upload_of(prox_of(1e4, lr=1e-4, epochs=5), task, received, shard)  # lr * mu = 1
    free = upload_of(prox_of(0.0, lr=1e-4, epochs=5), task, received, shard)
    far = {name: float((free[name] - received[name]).norm()) for name in received}
    for name in received:
        assert float((near[name] - received[name]).norm()) < 0.2 * far[name]


def test_fedprox_pulls_to_the_received_model_and_not_to_the_start_of_the_run():
    received = {"w": torch.tensor([3.0])}
    upload = upload_of(prox_of(1.0, lr=0.5, steps=200), Bowl(), received, bowl_at(5.0))
    torch.testing.assert_close(upload["w"], torch.tensor([4.0]))


def test_fedprox_leaves_statistics_out_of_the_pull():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    free = upload_of(FedAvg(solver_of(lr=0.0)), task, received, shard)
    assert_same(upload_of(prox_of(0.9, lr=0.0), task, received, shard), free)
    assert differs(statistics(free), statistics(received))


def test_fedprox_pulls_the_weights_of_batch_norm():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    near, free = (upload_of(prox_of(mu, lr=0.01, epochs=20), task, received, shard) for mu in (50.0, 0.0))
    for name in ("norm.weight", "norm.bias"):
        assert float((near[name] - received[name]).norm()) < 0.5 * float((free[name] - received[name]).norm())


def test_fedprox_pulls_every_client_to_what_it_received_itself():
    stacked = {"w": torch.tensor([[0.0], [2.0]])}
    shard = bowl_at(4.0)
    shards = type(shard)(shard.x, shard.y, *[part.expand(2, *part.shape) for part in shard[2:]])
    train = train_function(prox_of(1.0, lr=0.5, steps=100), Bowl())
    _, uploads, _ = one_by_one(train, Each(stacked), NOTHING, shards)
    torch.testing.assert_close(uploads["w"], torch.tensor([[2.0], [3.0]]))


def test_fedprox_moves_as_many_bytes_as_fedavg():
    one, other = (played(run_of(name), 1).state.rows[0] for name in ("fedprox", "fedavg"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)


def test_fedprox_by_name_has_a_pull():
    """Some public code has a default that turns the pull off."""
    assert fedprox().mu > 0
