import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.addons.prox import Prox
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedrod import FedRoD, FedRoDClient
from plures.methods.messages import Same
from plures.simulate.stacking import one_by_one
from plures.simulate.work import train_function
from tests.methods.plain import (
    LR,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    differs,
    module_of,
    moved,
    params_of,
    shard_for,
    solver_of,
    statistics,
    task_of,
)
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))


def fedrod_of(loss: str = "bsm", pm_base: str = "local", **solver) -> FedRoD:
    return FedRoD(solver_of(**solver), loss=loss, pm_base=pm_base)


def head_of(seed: int | None = None):
    """A personal head: zero, or drawn."""
    if seed is None:
        return {"weight": torch.zeros(3, 6, dtype=torch.float64)}
    return {"weight": torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}


def client_of(task, head):
    return FedRoDClient(head, task.initial, ())


def two_optimizers(make, received, head, steps, balanced, penalty=lambda module: 0.0, **options):
    """A client's round with one optimizer for the shared model and one for the personal head."""
    module = module_of(make, received)
    weight = head["weight"].clone().requires_grad_()
    shared = torch.optim.SGD(module.parameters(), **{"lr": LR, **options})
    personal = torch.optim.SGD([weight], **{"lr": LR, **options})
    for x, y in steps:
        features = module.body(x)
        generic = module.head(features)
        shared.zero_grad()
        (balanced(generic, y) + penalty(module)).backward()
        with torch.no_grad():
            seen, base = features.clone(), generic.clone()
        personal.zero_grad()
        F.cross_entropy(base + seen @ weight.T, y).backward()
        shared.step()
        personal.step()
    return params_of(module), {"weight": weight.detach()}


def balanced_softmax(shard):
    """Of the counts in all the client's rows, not in a batch."""
    prior = torch.bincount(shard.y, minlength=3).log()
    return lambda logits, y: F.cross_entropy(logits + prior, y)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("classes", [(0, 1, 2), (0, 2)])
def test_fedrod_joint_step_equals_two_optimizers(make, classes):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task, classes=classes)
    client, upload, _ = fedrod_of(epochs=2).train(task, received, client_of(task, head_of(1)), shard)
    shared, head = two_optimizers(make, received, head_of(1), batches(shard, 2), balanced_softmax(shard))
    torch.testing.assert_close((upload, client.head), (shared, head), rtol=1e-6, atol=1e-7)


def test_fedrod_momentum_and_weight_decay_act_on_both_branches():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    solver = {"momentum": 0.9, "weight_decay": 0.25}
    method = fedrod_of("ce", epochs=2, **solver)
    client, upload, _ = method.train(task, received, client_of(task, head_of(1)), shard)
    shared, head = two_optimizers(Dense, received, head_of(1), batches(shard, 2), F.cross_entropy, **solver)
    assert_close(upload | client.head, shared | head)


def test_fedrod_goes_on_from_its_own_head_every_round():
    task = task_of(Dense)
    method = fedrod_of("ce")
    client, head = method.init_client(task, task.initial), head_of()
    for round in range(2):
        received, shard = moved(task.initial, round), shard_for(task, round=round)
        client, _, _ = method.train(task, received, client, shard)
        _, head = two_optimizers(Dense, received, head, batches(shard), F.cross_entropy)
    assert_close(client.head, head)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("loss", ["ce", "bsm", "ir", "ldam", "cdt"])
def test_fedrod_upload_does_not_depend_on_the_personal_head(make, loss):
    """No gradient of the personal loss reaches body or generic head, through features or through generic logits."""
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    uploads = [fedrod_of(loss).train(task, received, client_of(task, head_of(k)), shard)[1] for k in (None, 1, 2)]
    assert_same(uploads[0], uploads[1])
    assert_same(uploads[0], uploads[2])


def test_fedrod_personal_head_learns_from_plain_cross_entropy_whatever_the_balanced_loss():
    """On one full batch, where all losses begin from the same shared model."""
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    heads = [
        fedrod_of(loss, batch=17).train(task, received, client_of(task, head_of(1)), shard)[0].head
        for loss in ("ce", "bsm", "ir", "ldam", "cdt")
    ]
    features = task.features(received, shard.x)
    logits = task.logits(received, shard.x) + features @ head_of(1)["weight"].T
    gradient = (logits.softmax(1) - F.one_hot(shard.y, 3)).T @ features / 17
    for head in heads:
        assert_close(head, {"weight": head_of(1)["weight"] - LR * gradient})


def test_fedrod_personal_logits_are_the_sum_of_both_heads():
    task = task_of(Dense)
    base, shard = moved(task.initial, 1), shard_for(task)
    method = fedrod_of()
    personal = method.personalize(task, {}, FedRoDClient(head_of(1), base, ()), shard)
    features = task.features(base, shard.x)
    expected = task.classify(base, features) + features @ head_of(1)["weight"].T
    torch.testing.assert_close(method.predict(task, personal, shard.x), expected)


def test_fedrod_with_a_zero_head_has_the_generic_model_as_personal_one():
    task = task_of(Normed)
    server, shard = moved(task.initial, 1), shard_for(task)
    method = fedrod_of(pm_base="server")
    personal = method.personalize(task, server, method.init_client(task, task.initial), shard)
    assert_same(personal, server)


def test_fedrod_personal_model_has_the_body_of_the_server_by_default():
    assert FedRoD().pm_base == "server"


def test_fedrod_personal_heads_start_at_zero():
    head = FedRoD().init_client(task_of(Dense), task_of(Dense).initial).head
    assert torch.equal(head["weight"], torch.zeros(3, 6))


@pytest.mark.parametrize(("model", "executor"), [("mlp", "one_by_one"), ("mlp", "vectorised"), ("norm", "one_by_one")])
def test_fedrod_with_cross_entropy_shares_the_model_of_fedavg_bit_for_bit(model, executor):
    one = played(run_of("fedrod", model, settings={"loss": "ce"}, executor=executor), 2)
    other = played(run_of("fedavg", model, executor=executor), 2)
    assert_same(one.state.server, other.state.server)


def test_fedrod_with_balanced_softmax_does_not_share_the_model_of_fedavg():
    one, other = (played(run_of(name, executor="one_by_one"), 1) for name in ("fedrod", "fedavg"))
    assert differs(one.state.server, other.state.server)


@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_fedrod_client_with_one_class_uploads_what_it_received(executor):
    run = run_of("fedrod", executor=executor, epochs=3)
    try:
        received = moved(run.state.scene.task.initial, 1)
        with torch.no_grad():
            clients, uploads, *_ = run.executor.train(0, Same(received), [1, 2, 5])
    finally:
        run.close()
    assert_same(tree.row(uploads, 1), received)
    assert differs(tree.row(uploads, 2), received)
    assert float(tree.row(clients, 1).head["weight"].abs().max()) > 1e-3


def test_fedrod_client_with_one_class_trains_its_head():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, classes=(1,))
    client, upload, _ = fedrod_of(epochs=3).train(task, received, client_of(task, head_of()), shard)
    _, head = two_optimizers(Dense, received, head_of(), batches(shard, 3), lambda logits, y: 0 * logits.sum())
    assert_same(upload, received)
    assert_close(client.head, head)
    assert float(client.head["weight"].abs().max()) > 0.01


def test_fedrod_client_with_one_class_moves_statistics_only():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task, classes=(1,))
    _, upload, _ = fedrod_of().train(task, received, client_of(task, head_of()), shard)
    assert_same(tree.trainable(upload), tree.trainable(received))
    assert differs(statistics(upload), statistics(received))


@pytest.mark.parametrize("loss", ["ce", "bsm"])
def test_fedrod_statistics_move_once_a_batch(loss):
    """Both losses read one forward pass."""
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = fedrod_of(loss, lr=0.0).train(task, received, client_of(task, head_of(1)), shard)
    _, plain, _ = FedAvg(solver_of(lr=0.0)).train(task, received, FedAvgClient({}), shard)
    assert_same(upload, plain)
    assert differs(statistics(upload), statistics(received))


def test_fedrod_personal_model_has_the_body_that_the_client_trained():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = fedrod_of()
    client, upload, _ = method.train(task, received, client_of(task, head_of()), shard)
    personal = method.personalize(task, moved(task.initial, 9), client, shard)
    assert_same(personal, upload | {"head.weight": upload["head.weight"] + client.head["weight"]})


def test_fedrod_with_pm_base_server_has_the_body_of_the_server():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = fedrod_of(pm_base="server")
    client, _, _ = method.train(task, received, FedRoDClient(head_of(), {}, ()), shard)
    server = moved(task.initial, 9)
    personal = method.personalize(task, server, client, shard)
    assert_same(personal, server | {"head.weight": server["head.weight"] + client.head["weight"]})


def test_fedrod_pm_base_changes_nothing_of_training():
    one, other = (
        played(run_of("fedrod", settings={"pm_base": base}, executor="one_by_one"), 2) for base in ("local", "server")
    )
    assert_same(one.state.server, other.state.server)
    assert_same(one.state.store.rows(EVERYONE).head, other.state.store.rows(EVERYONE).head)


def two_rounds(base: str):
    """A run in which half of the clients take part in a round; models after each; and who sat out the second one."""
    run = run_of("fedrod", participation=0.5, settings={"pm_base": base}, executor="one_by_one", new_epochs=0)
    models, heads = [], []
    try:
        for _ in range(2):
            run.play_round()
            models.append([run.personal_model(client) for client in range(len(SIZES))])
            heads.append(run.state.store.rows(EVERYONE).head["weight"])
    finally:
        run.close()
    sat_out = sorted({*run.state.cohort(0)} - {*run.state.cohort(1)})
    assert sat_out
    for client in sat_out:
        assert torch.equal(heads[0][client], heads[1][client])
    return run, models, heads[1], sat_out


def test_fedrod_client_that_sat_out_has_the_servers_newest_body_with_its_old_head():
    run, (before, after), heads, sat_out = two_rounds("server")
    server = run.state.server
    for client in sat_out:
        assert_same(after[client], server | {"head.weight": server["head.weight"] + heads[client]})
        assert differs(after[client], before[client])


def test_fedrod_with_pm_base_local_leaves_a_client_that_sat_out_as_it_was():
    _, (before, after), _, sat_out = two_rounds("local")
    for client in sat_out:
        assert_same(before[client], after[client])


@pytest.mark.parametrize("base", ["local", "server"])
def test_fedrod_client_that_never_took_part_has_the_generic_model_before_it_trains(base):
    run, (_, after), _, _ = two_rounds(base)
    never = sorted(set(range(len(SIZES))) - {*run.state.cohort(0), *run.state.cohort(1)})
    assert never
    for client in never:
        assert_same(after[client], run.state.server)


def test_fedrod_generic_model_is_the_mean_and_has_no_personal_head():
    stacked = {"head.weight": torch.tensor([[1.0], [5.0]])}
    merged = FedRoD().merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
    assert FedRoD().generic(None, merged)["head.weight"].tolist() == [2.0]


def test_fedrod_uniform_mean_does_not_see_rows():
    stacked = {"head.weight": torch.tensor([[1.0], [5.0]])}
    merged = FedRoD(weights="uniform").merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
    assert merged["head.weight"].tolist() == [3.0]


def test_fedrod_moves_as_many_bytes_as_fedavg():
    one, other = (played(run_of(name), 1).state.rows[0] for name in ("fedrod", "fedavg"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)


def test_fedrod_with_prox_pulls_the_shared_model_and_not_the_personal_head():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = Prox(host=fedrod_of("ce", epochs=2), mu=0.75)
    client, upload, _ = method.train(task, received, client_of(task, head_of(1)), shard)

    def pull(module):
        return 0.75 / 2 * sum((p - received[name]).square().sum() for name, p in module.named_parameters())

    shared, head = two_optimizers(Dense, received, head_of(1), batches(shard, 2), F.cross_entropy, pull)
    assert_close(upload | client.head, shared | head)


def test_fedrod_counts_classes_over_all_rows_of_a_client_and_not_of_others():
    """Two clients with the same rows and unlike counts upload unlike models; each the one of its own counts."""
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    skewed = shard._replace(counts=torch.tensor([1.0, 6.0, 10.0]))
    parts = [torch.stack(pair) for pair in zip(shard[2:], skewed[2:], strict=True)]
    clients = tree.stack([client_of(task, head_of(1))] * 2)
    train = train_function(fedrod_of(), task)
    _, uploads, _ = one_by_one(train, Same(received), clients, type(shard)(shard.x, shard.y, *parts))
    for i, own in enumerate((shard, skewed)):

        def balanced(logits, y, own=own):
            return F.cross_entropy(logits + own.counts.log(), y)

        expected, _ = two_optimizers(Dense, received, head_of(1), batches(shard), balanced)
        torch.testing.assert_close(tree.row(uploads, i), expected, rtol=1e-6, atol=1e-7)
