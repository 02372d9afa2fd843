import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.data.batches import Batch
from plures.errors import UsageError
from plures.learn.task import Task
from plures.methods.addons.brm import Brm
from plures.methods.addons.feddyn import FedDyn, FedDynClient, FedDynServer
from plures.methods.addons.prox import Prox
from plures.methods.addons.scaffold import Scaffold, ScaffoldClient
from plures.methods.base import Federation
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedrod import HYPER, FedRoD, FedRoDClient, generate_head
from plures.methods.ingredients import meta_balance
from plures.methods.ingredients.balance import LOSSES
from plures.methods.spec import make_method
from plures.models.small import RodCnn
from plures.runs import adapt
from tests.methods.plain import (
    LR,
    N_CLASSES,
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

WIDTH, N_FEATURES = 4, 6
EVERYONE = torch.arange(len(SIZES))
NOTHING = FedAvgClient({})


def drawn(seed: int, *shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hyper_of(seed: int = 1):
    hidden, output = drawn(seed, WIDTH, N_CLASSES), 0.3 * drawn(seed + 50, N_CLASSES * N_FEATURES, WIDTH)
    return {HYPER + "hidden": hidden, HYPER + "output": output}


def hyper_method(loss: str = "bsm", **settings) -> FedRoD:
    solver = {key: settings.pop(key) for key in list(settings) if key in ("lr", "epochs", "batch", "momentum", "decay")}
    return FedRoD(solver_of(**solver), head="hyper", width=WIDTH, loss=loss, **settings)


def client_of(seed: int | None = None, learned=()):
    head = torch.zeros(N_CLASSES, N_FEATURES, dtype=torch.float64) if seed is None else drawn(seed, 3, 6)
    return FedRoDClient({"weight": head}, {}, learned)


def shares_of(shard):
    return torch.bincount(shard.y, minlength=N_CLASSES).double() / len(shard.y)


def papers_head(hyper, shares):
    """Two matrices without bias, ReLU between them."""
    hidden = (hyper[HYPER + "hidden"] * shares).sum(1).clamp(min=0)
    return (hyper[HYPER + "output"] * hidden).sum(1).reshape(N_CLASSES, N_FEATURES)


def balanced_softmax(shard):
    prior = torch.bincount(shard.y, minlength=N_CLASSES).log()
    return lambda logits, y: F.cross_entropy(logits + prior, y)


def papers_round(make, shared, head, weight_of, steps, balanced, penalty=lambda module: 0.0):
    """Balanced loss for the shared model, plain one for what makes the personal head, each with its own optimizer."""
    module = module_of(make, shared)
    head = {name: x.clone().requires_grad_() for name, x in head.items()}
    first = torch.optim.SGD(module.parameters(), lr=LR)
    second = torch.optim.SGD(head.values(), lr=LR)
    for x, y in steps:
        features = module.body(x)
        generic = module.head(features)
        first.zero_grad()
        (balanced(generic, y) + penalty(module)).backward()
        second.zero_grad()
        F.cross_entropy(generic.detach() + features.detach() @ weight_of(head).T, y).backward()
        first.step()
        second.step()
    return params_of(module), {name: x.detach() for name, x in head.items()}


def hyper_round(make, shared, hyper, shard, steps, balanced, penalty=lambda module: 0.0):
    return papers_round(make, shared, hyper, lambda h: papers_head(h, shares_of(shard)), steps, balanced, penalty)


def assert_near(one, other):
    """Class counts are of single precision, so that what they enter is too."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# The hypernetwork


def test_hypernetwork_makes_a_head_from_class_proportions():
    counts = torch.tensor([1.0, 2.0, 5.0])
    assert_near(generate_head(hyper_of(), counts), papers_head(hyper_of(), counts.double() / 8))


def test_clients_with_equal_proportions_have_equal_heads():
    few, many = (generate_head(hyper_of(), k * torch.tensor([1.0, 2.0, 5.0])) for k in (1, 3))
    assert torch.equal(few, many)
    assert not torch.equal(few, generate_head(hyper_of(), torch.tensor([2.0, 1.0, 5.0])))


def test_order_of_classes_matters_through_the_weights_alone():
    turned, hyper = torch.tensor([2, 0, 1]), hyper_of()
    counts = torch.tensor([1.0, 2.0, 5.0])
    other = hyper | {HYPER + "hidden": hyper[HYPER + "hidden"][:, turned]}
    torch.testing.assert_close(generate_head(other, counts[turned]), generate_head(hyper, counts))


@pytest.mark.parametrize(
    ("shape", "n_classes", "width", "head", "hyper"),
    [((1, 28, 28), 10, 16, 500, 8_160), ((3, 32, 32), 10, 32, 640, 20_800), ((3, 32, 32), 100, 16, 6_400, 104_000)],
    ids=["fmnist", "cifar10", "cifar100"],
)
def test_heads_and_hypernetworks_have_the_papers_sizes(shape, n_classes, width, head, hyper):
    task = Task(RodCnn(shape, n_classes), torch.zeros(shape), n_classes)
    method = FedRoD(head="hyper", width=width)
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(5)))
    assert sum(x.numel() for name, x in server.items() if name.startswith(HYPER)) == hyper
    assert sum(x.numel() for x in method.init_client(task, task.initial).head.values()) == head
    assert sum(x.numel() for name, x in task.initial.items() if task.is_head(name)) == head


def test_hypernetwork_starts_with_heads_of_zero_whatever_the_proportions():
    task = task_of(Dense)
    server = hyper_method().init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(5)))
    assert torch.equal(generate_head(server, torch.tensor([4.0, 0.0, 9.0])), torch.zeros(3, 6))
    hidden = server[HYPER + "hidden"]
    assert hidden.shape == (WIDTH, 3) and 0.1 < float(hidden.abs().max()) <= 1
    other = hyper_method().init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(6)))
    assert not torch.equal(hidden, other[HYPER + "hidden"])


@pytest.mark.parametrize("make", [Dense, Normed])
def test_with_heads_of_zero_the_personal_model_is_the_generic_one(make):
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = hyper_method(pm_base="server")
    hyper = hyper_of() | {HYPER + "output": torch.zeros(18, WIDTH, dtype=torch.float64)}
    assert_same(method.adapt(task, model | hyper, shard, 0), model)
    assert_same(method.personalize(task, model | hyper, client_of(), shard), model)


# A client's round


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("classes", [(0, 1, 2), (0, 2)])
def test_round_is_that_of_two_optimizers_one_of_which_goes_through_the_hypernetwork(make, classes):
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task, classes=classes)
    client, upload, _ = hyper_method(epochs=2).train(task, model | hyper_of(), client_of(), shard)
    shared, hyper = hyper_round(make, model, hyper_of(), shard, batches(shard, 2), balanced_softmax(shard))
    assert_near(upload, shared | hyper)
    assert differs(hyper, hyper_of())
    assert_near(client.head["weight"], papers_head(hyper, shares_of(shard)))


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("loss", ["ce", "bsm", "ir", "ldam", "cdt"])
def test_shared_model_gets_no_gradient_of_the_personal_loss(make, loss):
    """Bit for bit the same whatever the hypernetwork, and the one that FedAvg with that balanced loss uploads."""
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task)
    uploads = [hyper_method(loss).train(task, model | hyper_of(seed), client_of(), shard)[1] for seed in (1, 2)]
    shared = [{name: upload[name] for name in model} for upload in uploads]
    _, plain, _ = Brm(solver_of(), host=FedAvg(solver_of()), balance=loss).train(task, model, NOTHING, shard)
    assert_same(*shared)
    assert_same(shared[0], plain)


def test_hypernetwork_learns_from_plain_cross_entropy_whatever_the_balanced_loss():
    """On one full batch, where all losses begin from the same shared model."""
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    _, expected = hyper_round(Dense, model, hyper_of(), shard, batches(shard, batch=17), F.cross_entropy)
    for loss in LOSSES:
        _, upload, _ = hyper_method(loss, batch=17).train(task, model | hyper_of(), client_of(), shard)
        assert_near({name: upload[name] for name in expected}, expected)


def test_nothing_that_a_client_keeps_enters_its_round():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    one, other = (hyper_method().train(task, model | hyper_of(), client_of(seed), shard) for seed in (None, 3))
    assert_same(one[0], other[0])
    assert_same(one[1], other[1])


def test_client_with_one_class_uploads_the_shared_model_that_it_received_and_trains_the_hypernetwork():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task, classes=(1,))
    _, upload, _ = hyper_method(epochs=3).train(task, model | hyper_of(), client_of(), shard)
    assert_same({name: upload[name] for name in model}, model)
    assert not torch.equal(upload[HYPER + "output"], hyper_of()[HYPER + "output"])


@pytest.mark.parametrize(
    ("base", "own_body", "own_head"), [("server", False, True), ("local", True, True), ("generated", False, False)]
)
def test_personal_model_has_body_and_hypernetwork_of_the_server_or_those_that_the_client_trained(
    base, own_body, own_head
):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = hyper_method(pm_base=base)
    client, upload, _ = method.train(task, model | hyper_of(), client_of(), shard)
    later = moved(task.initial, 9) | hyper_of(2)
    personal = method.personalize(task, later, client, shard)
    hyper, shared = upload if own_head else later, upload if own_body else later
    head = papers_head({name: hyper[name] for name in hyper_of()}, shares_of(shard))
    body = {name: shared[name] for name in model}
    assert_near(personal, body | {"head.weight": body["head.weight"] + head})


# The federation


def test_hypernetwork_is_averaged_by_rows_and_is_no_part_of_the_generic_model():
    stacked = {"head.weight": torch.tensor([[1.0], [5.0]]), HYPER + "hidden": torch.tensor([[2.0], [6.0]])}
    method = hyper_method()
    merged = method.merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
    assert {name: x.tolist() for name, x in merged.items()} == {"head.weight": [2.0], HYPER + "hidden": [3.0]}
    assert set(method.generic(None, merged)) == {"head.weight"}
    assert method.generic(None, merged)["head.weight"].tolist() == [2.0]


def test_hypernetwork_travels_both_ways_and_proportions_do_not():
    """16 * 10 + 80 * 16 numbers beside the 610 of the model."""
    run = played(run_of("fedrod:head=hyper", executor="one_by_one"), 1)
    assert run.state.rows[0].bytes_down == run.state.rows[0].bytes_up == len(SIZES) * 4 * (610 + 1440)
    assert set(run.state.server) == set(run.state.scene.task.initial) | {HYPER + "hidden", HYPER + "output"}


@pytest.mark.parametrize("executor", ["one_by_one", "vectorised"])
def test_run_shares_the_model_of_fedrod_with_own_heads_bit_for_bit(executor):
    """Personal heads of either kind leave the shared model alone, round after round."""
    one, other = (played(run_of(f"fedrod:head={kind}", executor=executor), 2) for kind in ("hyper", "linear"))
    assert_same({name: one.state.server[name] for name in other.state.server}, other.state.server)


def test_every_client_has_the_head_that_the_servers_hypernetwork_makes_of_its_class_mix_even_if_never_drawn():
    run = run_of("fedrod:head=hyper,pm_base=generated", participation=0.5, new_epochs=0, executor="one_by_one")
    never = set(range(len(SIZES))) - {*run.state.cohort(0), *run.state.cohort(1)}
    assert never
    server, population = played(run, 2).state.server, run.state.scene.population
    for client in range(len(SIZES)):
        shares = torch.bincount(population.y[population.train[client]], minlength=10) / SIZES[client]
        hidden = (server[HYPER + "hidden"] @ shares).clamp(min=0)
        head = (server[HYPER + "output"] @ hidden).reshape(10, 8)
        personal = run.personal_model(client)
        generic = {name: server[name] for name in personal}
        torch.testing.assert_close(personal, generic | {"head.weight": generic["head.weight"] + head})
        assert float(head.abs().max()) > 1e-4


# New clients


@pytest.mark.parametrize("make", [Dense, Normed])
def test_a_new_client_has_a_personal_model_from_its_class_counts_alone(make):
    """No row is looked at: here all are not a number."""
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task)
    blind = shard._replace(x=shard.x * float("nan"), y=torch.zeros_like(shard.y))
    personal = hyper_method().adapt(task, model | hyper_of(), blind, 0)
    head = papers_head(hyper_of(), shares_of(shard))
    assert_near(personal, model | {"head.weight": model["head.weight"] + head})
    assert float(head.abs().max()) > 0.01
    logits = hyper_method().predict(task, personal, shard.x)
    features = task.features(model, shard.x)
    assert_near(logits, task.classify(model, features) + features @ head.T)


def test_a_new_client_of_fedrod_with_own_heads_has_the_generic_model():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    assert_same(FedRoD(solver_of()).adapt(task, model, shard, 0), model)


def test_counts_make_the_model_of_a_new_client_of_a_run():
    run = played(run_of("fedrod:head=hyper", executor="one_by_one"), 2)
    counts = [3, 0, 0, 9, 1, 0, 0, 0, 2, 5]
    model = adapt.from_counts(run.state, counts).model
    shares = torch.tensor(counts) / 20
    hidden = (run.state.server[HYPER + "hidden"] @ shares).clamp(min=0)
    head = (run.state.server[HYPER + "output"] @ hidden).reshape(10, 8)
    generic = {name: run.state.server[name] for name in model}
    torch.testing.assert_close(model, generic | {"head.weight": generic["head.weight"] + head})
    assert float(head.abs().max()) > 1e-4


@pytest.mark.parametrize("head", ["hyper", "linear"])
def test_a_new_client_then_trains_as_the_method_does_from_its_first_head(head):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = hyper_method() if head == "hyper" else FedRoD(solver_of())
    received = model | hyper_of() if head == "hyper" else model
    first = papers_head(hyper_of(), shares_of(shard)) if head == "hyper" else torch.zeros(3, 6, dtype=torch.float64)
    personal = method.adapt(task, received, shard, 2)
    shared, own = papers_round(
        Dense, model, {"weight": first}, lambda h: h["weight"], batches(shard, 2), balanced_softmax(shard)
    )
    assert_near(personal, shared | {"head.weight": shared["head.weight"] + own["weight"]})


# Optimisers of the shared model around it


HEADS = ["linear", "hyper"]


def host_of(head: str, loss: str = "ce") -> FedRoD:
    return hyper_method(loss, epochs=2) if head == "hyper" else FedRoD(solver_of(epochs=2), loss=loss)


def received_of(head: str, model):
    return model | hyper_of() if head == "hyper" else model


def expected_of(head, model, shard, penalty, balanced=F.cross_entropy):
    """Upload and kept head of a round whose shared model has a penalty."""
    steps = batches(shard, 2)
    if head == "hyper":
        shared, hyper = hyper_round(Dense, model, hyper_of(), shard, steps, balanced, penalty)
        return shared | hyper, papers_head(hyper, shares_of(shard))
    own = {"weight": drawn(3, 3, 6)}
    shared, own = papers_round(Dense, model, own, lambda h: h["weight"], steps, balanced, penalty)
    return shared, own["weight"]


def towards(gradient, module):
    return sum((gradient[name] * p).sum() for name, p in module.named_parameters())


def away(model, module):
    return sum((p - model[name]).square().sum() for name, p in module.named_parameters())


@pytest.mark.parametrize("head", HEADS)
def test_prox_pulls_the_shared_model_alone(head):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = Prox(solver_of(epochs=2), host=host_of(head), mu=0.75)
    client, upload, _ = method.train(task, received_of(head, model), client_of(3), shard)
    expected, weight = expected_of(head, model, shard, lambda module: 0.375 * away(model, module))
    assert_near((upload, client.head["weight"]), (expected, weight))


@pytest.mark.parametrize("head", HEADS)
def test_scaffold_turns_the_shared_model_alone(head):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    solver = solver_of(epochs=2)
    method = Scaffold(solver, host=host_of(head))
    control, own = moved(tree.zeros_like(model), 5, 0.2), moved(tree.zeros_like(model), 6, 0.2)
    received = {"host": received_of(head, model), "control": control}
    client, upload, _ = method.train(task, received, ScaffoldClient(client_of(3), own), shard)
    expected, weight = expected_of(head, model, shard, lambda module: towards(tree.sub(control, own), module))
    assert_near((upload["host"], client.host.head["weight"]), (expected, weight))
    steps = 8  # two epochs of 5, 5, 5 and 2 rows
    change = {name: (x - expected[name]) / (steps * LR) - control[name] for name, x in model.items()}
    assert_near(upload["control"], change)
    assert_near(client.control, tree.add(own, change))


@pytest.mark.parametrize("head", HEADS)
def test_feddyn_acts_on_the_shared_model_alone(head):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = FedDyn(solver_of(epochs=2), host=host_of(head), alpha=0.5)
    gradient = moved(tree.zeros_like(model), 5, 0.2)
    client, upload, _ = method.train(task, received_of(head, model), FedDynClient(client_of(3), gradient), shard)

    def penalty(module):
        return 0.25 * away(model, module) - towards(gradient, module)

    expected, weight = expected_of(head, model, shard, penalty)
    assert_near((upload, client.host.head["weight"]), (expected, weight))
    assert_near(client.gradient, {name: x - 0.5 * (expected[name] - model[name]) for name, x in gradient.items()})


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("addon", [Scaffold, FedDyn])
def test_server_memory_of_an_add_on_is_of_the_shared_model_alone(head, addon):
    task = task_of(Normed)
    method = addon(solver_of(), host=host_of(head))
    server = method.init_server(task, task.initial, Federation(torch.ones(2), torch.tensor(5)))
    memory = server.control if addon is Scaffold else server.drift
    client = method.init_client(task, task.initial)
    kept = client.control if addon is Scaffold else client.gradient
    assert set(memory) == set(kept) == set(tree.trainable(task.initial))


def test_feddyn_moves_the_mean_of_hypernetworks_by_nothing():
    """The shared model is moved on by how far clients went; the hypernetwork is their mean."""
    task = task_of(Dense)
    method = FedDyn(solver_of(), host=host_of("hyper"), alpha=0.5)
    server = method.init_server(task, task.initial, Federation(torch.ones(4), torch.tensor(5)))
    uploads = tree.stack([moved(server.host, seed) for seed in (1, 2)])
    merged = method.merge(task, server, torch.tensor([0, 3]), uploads, torch.tensor([3, 1]))
    for name, x in uploads.items():
        mean = x.mean(0)
        if not name.startswith(HYPER):
            mean = mean + (x - server.host[name]).sum(0) / 4
        assert_near(merged.host[name], mean)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("head", HEADS)
def test_feddyn_of_strength_zero_with_its_memory_held_at_zero_is_plain_fedrod_with_uniform_mean(make, head):
    task = task_of(make)
    plain = FedRoD(solver_of(), head=head, width=WIDTH, weights="uniform")
    dynamic = FedDyn(solver_of(), host=FedRoD(solver_of(), head=head, width=WIDTH), alpha=0.0)
    federation = Federation(torch.tensor([17, 9]), torch.tensor(5))
    server, other = (method.init_server(task, task.initial, federation) for method in (plain, dynamic))
    clients = [plain.init_client(task, task.initial)] * 2
    others = [dynamic.init_client(task, task.initial)] * 2
    ids = torch.arange(2)
    for round in range(2):
        shards = [shard_for(task, n=n, round=round, seed=seed) for seed, n in enumerate((17, 9))]
        found = [plain.train(task, server, c, s) for c, s in zip(clients, shards, strict=True)]
        again = [dynamic.train(task, other.host, c, s) for c, s in zip(others, shards, strict=True)]
        for one, two in zip(found, again, strict=True):
            assert_same(one[1], two[1])
            assert_same(one[0], two[0].host)
        server = plain.merge(task, server, ids, tree.stack([f[1] for f in found]), federation.sizes)
        other = dynamic.merge(task, other, ids, tree.stack([f[1] for f in again]), federation.sizes)
        held = {name: x + other.drift[name] if name in other.drift else x for name, x in other.host.items()}
        assert_close(held, server)
        assert differs(other.drift, tree.zeros_like(other.drift)) or make is Normed
        other = FedDynServer(server, tree.zeros_like(other.drift), other.n_clients)
        clients, others = [f[0] for f in found], [f[0] for f in again]


# The balanced loss as an add-on of others


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_brm_around_fedavg_trains_the_shared_model_of_fedrod_bit_for_bit(make, loss):
    task = task_of(make)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = Brm(solver_of(), host=FedAvg(solver_of()), balance=loss, gamma=0.5)
    fedrod = FedRoD(solver_of(), loss=loss, gamma=0.5)
    assert_same(method.train(task, model, NOTHING, shard)[1], fedrod.train(task, model, client_of(3), shard)[1])


def test_brm_trains_with_the_balanced_softmax_of_the_clients_counts():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = Brm(solver_of(), host=FedAvg(solver_of()))
    module = module_of(Dense, model)
    solver = torch.optim.SGD(module.parameters(), lr=LR)
    for x, y in batches(shard):
        solver.zero_grad()
        balanced_softmax(shard)(module(x), y).backward()
        solver.step()
    assert_near(method.train(task, model, NOTHING, shard)[1], params_of(module))


def test_brm_with_plain_cross_entropy_is_its_host_bit_for_bit():
    one, other = (
        played(run_of(name, "norm", executor="one_by_one"), 2) for name in ("fedavg+brm:balance=ce", "fedavg")
    )
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("addon", ["brm", "sam"])
def test_fedrod_refuses_add_ons_that_would_change_half_of_its_loss(addon):
    with pytest.raises(UsageError):
        make_method(f"fedrod+{addon}", {}, solver_of())


# Meta-BSM


def public_task(make=Dense):
    task = task_of(make)
    public = shard_for(task, n=12, seed=8)
    return task.with_public(public.x, public.y), public


def learned_of(gamma: float = 1.0):
    return meta_balance.init_learned(gamma, torch.float64)


def plain_weights(losses, weigher):
    hidden = (losses.detach()[:, None] * weigher["hidden.weight"][:, 0] + weigher["hidden.bias"]).clamp(min=0)
    raw = 1 / (1 + torch.exp(-(hidden @ weigher["output.weight"][0] + weigher["output.bias"])))
    return raw / raw.mean()


def papers_meta_round(make, model, head, learned, shard, public, meta_lr, learn_gamma=True):
    """A trial step, a step of strength and weights down the public loss of the trial, then the real step."""
    module = module_of(make, model)
    names = [name for name, _ in module.named_parameters()]
    prior = torch.bincount(shard.y, minlength=N_CLASSES).double().log()
    gamma, weigher, head = learned.gamma, learned.weigher, head.clone()

    def weighed(logits, y, gamma, weigher):
        each = F.cross_entropy(logits + gamma * prior, y, reduction="none")
        return (plain_weights(each, weigher) * each).mean()

    def called(params, x):
        return torch.func.functional_call(module, dict(zip(names, params, strict=True)), (x,))

    for x, y in batches(shard):
        params = [p.detach().requires_grad_() for p in module.parameters()]
        gamma = gamma.detach().requires_grad_()
        weigher = {name: w.detach().requires_grad_() for name, w in weigher.items()}
        gradients = torch.autograd.grad(weighed(called(params, x), y, gamma, weigher), params, create_graph=True)
        trial = [p - LR * g for p, g in zip(params, gradients, strict=True)]
        judged = F.cross_entropy(called(trial, public.x), public.y)
        first, *others = torch.autograd.grad(judged, [gamma, *weigher.values()])
        gamma = (gamma - meta_lr * first * learn_gamma).detach()
        weigher = {name: (w - meta_lr * g).detach() for (name, w), g in zip(weigher.items(), others, strict=True)}
        features = module.body(x)
        generic = module.head(features)
        real = torch.autograd.grad(weighed(generic, y, gamma, weigher), list(module.parameters()))
        weight = head.requires_grad_()
        (own,) = torch.autograd.grad(F.cross_entropy(generic.detach() + features.detach() @ weight.T, y), weight)
        head = (head - LR * own).detach()
        with torch.no_grad():
            for p, g in zip(module.parameters(), real, strict=True):
                p -= LR * g
    return params_of(module), head, meta_balance.Learned(gamma, weigher)


@pytest.mark.parametrize("learn_gamma", [True, False])
def test_meta_bsm_round_is_the_papers_three_steps(learn_gamma):
    task, public = public_task()
    model, shard = moved(task.initial, 1), shard_for(task)
    method = FedRoD(solver_of(), loss="meta-bsm", meta_lr=2.0, learn_gamma=learn_gamma)
    client, upload, _ = method.train(task, model, client_of(3, learned_of()), shard)
    shared, head, learned = papers_meta_round(
        Dense, model, drawn(3, 3, 6), learned_of(), shard, public, 2.0, learn_gamma
    )
    assert_near((upload, client.head["weight"]), (shared, head))
    assert_near(client.learned, learned)
    assert (abs(float(learned.gamma) - 1) > 1e-3) == learn_gamma
    assert float((learned.weigher["output.weight"] - learned_of().weigher["output.weight"]).abs().max()) > 1e-4


def test_meta_bsm_with_a_fixed_strength_keeps_it_to_the_last_bit():
    task, _ = public_task()
    model, shard = moved(task.initial, 1), shard_for(task)
    method = FedRoD(solver_of(), loss="meta-bsm", meta_lr=2.0, learn_gamma=False)
    client, _, _ = method.train(task, model, client_of(3, learned_of(0.7)), shard)
    assert torch.equal(client.learned.gamma, learned_of(0.7).gamma)


def test_meta_bsm_that_learns_at_rate_zero_stays_as_it_was():
    task, _ = public_task()
    model, shard = moved(task.initial, 1), shard_for(task)
    method = FedRoD(solver_of(), loss="meta-bsm", meta_lr=0.0)
    client, _, _ = method.train(task, model, client_of(3, learned_of()), shard)
    assert_same(client.learned, learned_of())


def test_meta_bsm_with_equal_weights_is_balanced_softmax():
    task, _ = public_task()
    model, shard = moved(task.initial, 1), shard_for(task)
    still = learned_of()._replace(weigher=tree.zeros_like(learned_of().weigher))
    meta = FedRoD(solver_of(), loss="meta-bsm", meta_lr=0.0).train(task, model, client_of(3, still), shard)
    plain = FedRoD(solver_of(), loss="bsm").train(task, model, client_of(3), shard)
    assert_near(meta[1], plain[1])
    assert_near(meta[0].head, plain[0].head)


def test_meta_bsm_weights_of_rows_have_mean_one_over_the_rows_and_see_no_padding():
    losses, mask = torch.tensor([0.1, 2.0, 0.7, 9.0, 9.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    weights = meta_balance.row_weights(losses, mask, meta_balance.init_learned(1.0, torch.float32).weigher)
    assert float(weights[:3].mean()) == pytest.approx(1.0, rel=1e-6)
    assert float(weights.min()) > 0 and float(weights[:3].std()) > 1e-4
    torch.testing.assert_close(
        weights[:3], plain_weights(losses[:3], meta_balance.init_learned(1.0, torch.float32).weigher)
    )


def test_meta_bsm_weights_pass_no_gradient_to_the_losses():
    learned = meta_balance.init_learned(1.0, torch.float32)
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 0]), torch.ones(3), torch.tensor([3.0, 1.0]), torch.tensor(0))
    logits = torch.tensor([[1.0, 0.0], [0.3, 2.0], [-1.0, 0.5]])
    gradient = torch.func.grad(lambda z: meta_balance.weighted_loss(z, batch, learned))(logits)
    each = F.cross_entropy(logits + batch.counts.log(), batch.y, reduction="none")
    q = plain_weights(each, learned.weigher)
    row_gradients = (logits + batch.counts.log()).softmax(1) - F.one_hot(batch.y, 2)
    torch.testing.assert_close(gradient, q[:, None] * row_gradients / 3)


def test_meta_bsm_leaves_absent_classes_out():
    learned = meta_balance.init_learned(1.0, torch.float32)
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]), torch.ones(1), torch.tensor([1.0, 1.0, 0.0]), torch.tensor(0))
    loss = meta_balance.weighted_loss(torch.tensor([[0.0, 0.0, 50.0]]), batch, learned)
    assert float(loss) == pytest.approx(torch.log(torch.tensor(2.0)).item())


def test_meta_bsm_keeps_what_it_learned_from_round_to_round_and_never_sends_it():
    run = run_of("fedrod:loss=meta-bsm,meta_lr=1", executor="one_by_one")
    first = played(run, 2).state.store.rows(EVERYONE).learned
    assert 1.0 != float(first.gamma[4]) != float(first.gamma[5]) != 1.0  # the clients that have most rows left
    assert set(run.state.server) == set(run.state.scene.task.initial)
    assert run.state.rows[0].bytes_up == len(SIZES) * 4 * 610


def test_meta_bsm_goes_on_from_what_it_learned():
    task, public = public_task()
    model, learned = moved(task.initial, 1), learned_of()
    method = FedRoD(solver_of(), loss="meta-bsm", meta_lr=2.0)
    client = client_of(3, learned)
    head = drawn(3, 3, 6)
    for round in range(2):
        shard = shard_for(task, round=round)
        client, _, _ = method.train(task, model, client, shard)
        _, head, learned = papers_meta_round(Dense, model, head, learned, shard, public, 2.0)
    assert_near(client.learned, learned)


def test_meta_bsm_moves_statistics_once_a_batch_by_the_clients_rows():
    """Neither the trial step nor the public set moves them."""
    task, _ = public_task(Normed)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = FedRoD(solver_of(lr=0.0), loss="meta-bsm")
    _, upload, _ = method.train(task, model, client_of(3, learned_of()), shard)
    _, plain, _ = FedAvg(solver_of(lr=0.0)).train(task, model, NOTHING, shard)
    assert_same(upload, plain)
    assert differs(statistics(upload), statistics(model))


def test_meta_bsm_asks_for_ten_public_rows_of_each_class_and_others_for_none():
    assert FedRoD(loss="meta-bsm").public_rows == 10
    assert [FedRoD(loss=loss).public_rows for loss in LOSSES] == [0] * len(LOSSES)
    task = task_of(Dense)
    with pytest.raises(UsageError):
        method = FedRoD(solver_of(), loss="meta-bsm")
        method.train(task, task.initial, client_of(3, learned_of()), shard_for(task))


def test_ala_blends_the_shared_model_and_not_the_hypernetwork():
    run = played(run_of("fedrod:head=hyper+ala", executor="one_by_one", settings={"cap": 2}), 2)
    assert not any(name.startswith(HYPER) for name in run.state.store.rows(EVERYONE).model)


def test_meta_bsm_of_a_model_of_double_precision_is_no_error():
    task, _ = public_task()
    method = FedRoD(solver_of(), loss="meta-bsm")
    method.train(task, task.initial, method.init_client(task, task.initial), shard_for(task))


def test_a_linear_head_cannot_be_generated():
    with pytest.raises(UsageError, match="head=hyper"):
        FedRoD(head="linear", pm_base="generated")


def test_client_that_never_took_part_has_a_generated_head_and_the_others_their_own():
    run = run_of("fedrod:head=hyper", participation=0.5, new_epochs=0, executor="one_by_one")
    trained = {*run.state.cohort(0), *run.state.cohort(1)}
    never = set(range(len(SIZES))) - trained
    assert never
    server, population = played(run, 2).state.server, run.state.scene.population
    hyper = {name: x for name, x in server.items() if name.startswith(HYPER)}
    for client in range(len(SIZES)):
        counts = torch.bincount(population.y[population.train[client]], minlength=population.n_classes)
        generated = server["head.weight"] + generate_head(hyper, counts)
        found = run.personal_model(client)["head.weight"]
        assert torch.allclose(found, generated, atol=1e-6) == (client in never)
