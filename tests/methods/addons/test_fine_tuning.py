"""FedAvg-FT, FedAvg-C and FedProx-C: the add-ons `ft` and `c`."""

import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.methods.addons.c import C
from plures.methods.addons.ft import Ft
from plures.methods.addons.keep import KeepLocal
from plures.methods.addons.prox import Prox
from plures.methods.addons.scaffold import Scaffold
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedmeta import FedMeta
from plures.methods.local import Local
from plures.methods.pfedme import PFedMe, PFedMeClient
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
from tests.small import played, run_of

NOTHING = FedAvgClient({})


def ft_of(tuning: int, host=None, **solver) -> Ft:
    return Ft(host=host or FedAvg(), ft_epochs=tuning).with_solver(solver_of(**solver))


def c_of(tuning: int, host=None, **solver) -> C:
    return C(host=host or FedAvg(), c_epochs=tuning).with_solver(solver_of(**solver))


def near(anchor, mu):
    return lambda module: mu / 2 * sum((p - anchor[name]).square().sum() for name, p in module.named_parameters())


# ft


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_ft_of_no_epoch_is_fedavg_bit_for_bit(model):
    one, other = (played(run_of(name, model, executor="one_by_one"), 2) for name in ("fedavg+ft:ft_epochs=0", "fedavg"))
    assert_same(one.state.server, other.state.server)
    for client in (0, 5):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_ft_leaves_no_trace_in_training_bit_for_bit():
    """With and without looking at the personal models, training is that of FedAvg."""
    looked_at, other = (run_of(name, "norm", executor="one_by_one") for name in ("fedavg+ft:ft_epochs=2", "fedavg"))
    for _ in range(2):
        looked_at.evaluate()
        looked_at.play_round()
    looked_at.evaluate()
    looked_at.close()
    assert_same(looked_at.state.server, played(other, 2).state.server)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_ft_tunes_the_hosts_personal_model_by_plain_training(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = ft_of(3, momentum=0.5, steps=1).personalize(task, received, NOTHING, shard)
    assert_close(own, trained(make, received, batches(shard, 3), momentum=0.5))


def test_ft_begins_at_the_hosts_personal_model_and_not_at_what_was_sent():
    task = task_of(Dense)
    theta, received, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    own = ft_of(2, PFedMe()).personalize(task, received, PFedMeClient(theta), shard)
    assert_close(own, trained(Dense, theta, batches(shard, 2)))
    body = tree.drop(received, task.is_head)
    fedper = KeepLocal(host=FedAvg())
    own = ft_of(2, fedper).personalize(task, body, fedper.init_client(task, theta), shard)
    head = tree.keep(theta, task.is_head)
    assert_close(own, trained(Dense, {name: (body | head)[name] for name in theta}, batches(shard, 2)))


def test_ft_has_no_pull_of_the_hosts():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = ft_of(2, Prox(host=FedAvg(), mu=5.0)).personalize(task, received, NOTHING, shard)
    assert_close(own, trained(Dense, received, batches(shard, 2)))


def test_ft_uploads_what_the_host_does():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = ft_of(7, epochs=2).train(task, received, NOTHING, shard)
    assert_close(upload, trained(Dense, received, batches(shard, 2)))


def test_ft_says_so():
    assert ft_of(1).personal_model_name == "global, fine-tuned"


@pytest.mark.parametrize("name", ["local", "fedmeta", "fedpermeta", "fedfomo", "apple", "mtl"])
def test_methods_that_train_no_shared_model_can_take_ft(name):
    played(run_of(f"{name}+ft", executor="one_by_one"), 1)


def test_what_a_method_cannot_take_it_cannot_take_over_ft():
    for host in (Local(), FedMeta()):
        with pytest.raises(UsageError, match="trains no shared model"):
            Prox(host=Ft(host=host))


# c


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_c_of_no_epoch_is_fedavg_bit_for_bit(model):
    one, other = (played(run_of(name, model, executor="one_by_one"), 2) for name in ("fedavg+c:c_epochs=0", "fedavg"))
    assert_same(one.state.server, other.state.server)
    assert_same(one.personal_model(5), other.personal_model(5))


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize(("tuning", "epochs"), [(3, 1), (1, 2), (0, 2), (2, 0)])
def test_c_uploads_what_fedavg_does_with_the_epochs_of_both_stages(make, tuning, epochs):
    """With all rows in one batch, where their order is no matter."""
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = c_of(tuning, batch=32, epochs=epochs).train(task, received, NOTHING, shard)
    _, whole, _ = FedAvg(solver_of(batch=32, epochs=tuning + epochs)).train(task, received, NOTHING, shard)
    assert_close(upload, whole)
    assert_close(upload, trained(make, received, [(shard.x, shard.y)] * (tuning + epochs)))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_c_trains_on_from_the_tuned_model_with_a_fresh_solver(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = c_of(2, momentum=0.9, epochs=1).train(task, received, NOTHING, shard)
    tuned = trained(make, received, batches(shard, 2), momentum=0.9)
    assert_close(upload, trained(make, tuned, batches(shard), momentum=0.9))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_c_has_the_tuned_model_before_the_rounds_training_as_personal_one(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = c_of(2, epochs=3).personalize(task, received, NOTHING, shard)
    assert_close(own, trained(make, received, batches(shard, 2)))
    assert c_of(2).personal_model_name == "received, fine-tuned"


def test_c_makes_the_personal_model_from_what_the_server_would_send_now():
    run = played(run_of("fedavg+c:c_epochs=1", executor="one_by_one", batch=64), 2)
    rows = run.state.scene.population.train[5]
    x, y = run.state.scene.population.x[rows], run.state.scene.population.y[rows]
    params = {name: p.clone().requires_grad_() for name, p in run.state.server.items()}
    hidden = torch.relu(x.flatten(1) @ params["hidden.weight"].mT + params["hidden.bias"])
    loss = torch.nn.functional.cross_entropy(hidden @ params["head.weight"].mT + params["head.bias"], y)
    gradients = torch.autograd.grad(loss, list(params.values()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(params.items(), gradients, strict=True)}
    torch.testing.assert_close(run.personal_model(5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedprox_c_has_its_pull_to_the_received_model_in_both_stages(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = c_of(2, Prox(host=FedAvg(), mu=0.75))
    _, upload, _ = method.train(task, received, NOTHING, shard)
    tuned = trained(make, received, batches(shard, 2), near(received, 0.75))
    assert_close(upload, trained(make, tuned, batches(shard), near(received, 0.75)))
    assert_close(method.personalize(task, received, NOTHING, shard), tuned)
    free = trained(make, received, batches(shard, 2))
    assert differs({"w": tuned["head.weight"]}, {"w": free["head.weight"]})


def test_c_keeps_what_the_round_left_and_not_what_tuning_did():
    """The host's state after a round is that of its second stage."""
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    client, upload, _ = c_of(2, FedAvg(pm="local")).train(task, received, FedAvgClient(task.initial), shard)
    assert_same(client.model, upload)


def test_scaffold_is_added_over_c_and_not_under_it():
    with pytest.raises(UsageError, match="before scaffold"):
        C(host=Scaffold(host=FedAvg()))
    played(run_of("fedavg+c:c_epochs=1+scaffold", executor="one_by_one"), 1)
