import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from plures import tree
from plures.methods.addons.keep import KeepLocal, KeptClient
from plures.methods.afml import Afml
from plures.methods.base import Federation
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedmeta import FedMeta
from plures.methods.fedpermeta import FedPerMeta, FedPerMetaClient
from plures.methods.perfedavg import PerFedAvg
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
    trained,
)
from tests.small import run_of, shard_of

INNER = 0.25
HEAD = ("head.weight", "head.bias")


def merged(method, task, model, uploads, sizes):
    """The shared model of FedMeta after a first merge."""
    server = method.init_server(task, model, Federation(torch.tensor(sizes), torch.tensor(0)))
    return method.merge(task, server, torch.arange(len(sizes)), uploads, torch.tensor(sizes)).model


def meta_of(
    inner_lr: float = INNER, support: float = 0.5, pers: int = 5, first_order=False, server_lr=0.0, **solver
) -> FedMeta:
    """FedMeta whose server takes plain steps, at the clients' rate if no other is given."""
    return FedMeta(
        solver_of(**solver),
        inner_lr=inner_lr,
        support=support,
        pers=pers,
        first_order=first_order,
        server_kind="sgd",
        server_lr=server_lr,
    )


def per_meta_of(inner_lr=INNER, support=0.5, pers=5, first_order=False, share_head=False, **solver) -> FedPerMeta:
    return FedPerMeta(
        solver_of(**solver),
        inner_lr=inner_lr,
        support=support,
        pers=pers,
        first_order=first_order,
        share_head=share_head,
    )


def drawn(seed: int, *shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(shard):
    rows = shard.rows[: int(shard.size)]
    return shard.x[rows], shard.y[rows]


def parts_of(shard, support: float = 0.5):
    return [rows_of(part) for part in shard.split(support, "support")]


def split_head(params):
    """Head and body."""
    return {n: x for n, x in params.items() if n in HEAD}, {n: x for n, x in params.items() if n not in HEAD}


def through_adaptation(make, fast, slow, support, query, lr, first_order=False):
    """Autograd of the query loss through one step on the support rows; and the adapted tensors."""
    whole = fast | slow
    leaves = {name: x.clone().requires_grad_() for name, x in whole.items() if "running" not in name}
    module = make().double()

    def loss(params, x, y):
        buffers = {name: value.clone() for name, value in whole.items() if "running" in name}
        return F.cross_entropy(functional_call(module, params | buffers, (x,)), y)

    names = [name for name in fast if name in leaves]
    inner = torch.autograd.grad(loss(leaves, *support), [leaves[n] for n in names], create_graph=not first_order)
    adapted = {name: leaves[name] - lr * g for name, g in zip(names, inner, strict=True)}
    found = torch.autograd.grad(loss(leaves | adapted, *query), list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), {name: x.detach() for name, x in adapted.items()}


def passed(make, params, x):
    """The statistics of a plain module after one pass in training."""
    module = module_of(make, params)
    module(x)
    return statistics(params_of(module))


# FedMeta


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("first_order", [False, True])
def test_fedmeta_uploads_the_gradient_that_autograd_finds_through_the_adaptation(make, first_order):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task, n=40)
    _, upload, _ = meta_of(first_order=first_order).train(task, received, (), shard)
    expected, _ = through_adaptation(make, received, {}, *parts_of(shard), INNER, first_order)
    assert_close(tree.trainable(upload["gradients"]), expected)


def test_first_order_and_whole_gradients_differ():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=40)
    one, other = (meta_of(first_order=f).train(task, received, (), shard)[1]["gradients"] for f in (False, True))
    assert differs(one, other)


def test_fedmeta_gradient_is_over_all_rows_even_of_a_client_with_many():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task, n=230)
    support, query = parts_of(shard, 0.3)
    assert (len(support[0]), len(query[0])) == (69, 161)
    _, upload, _ = meta_of(support=0.3).train(task, received, (), shard)
    assert_close(upload["gradients"], through_adaptation(Dense, received, {}, support, query, INNER)[0])


def test_support_and_query_share_no_row_and_leave_none_out():
    task = task_of(Dense)
    support, query = shard_for(task, n=17).split(0.8, "support")
    rows = [part.rows[: int(part.size)].tolist() for part in (support, query)]
    assert [len(part) for part in rows] == [13, 4] and sorted(rows[0] + rows[1]) == list(range(17))


def test_fedmeta_with_inner_lr_zero_is_a_gradient_step_on_the_query_rows():
    task = task_of(Dense)
    shards = [shard_for(task, n=n, seed=n) for n in (9, 30)]
    method = meta_of(0.0, support=0.8)
    uploads = [method.train(task, task.initial, (), shard)[1] for shard in shards]
    server = merged(method, task, task.initial, tree.stack(uploads), [9, 30])
    one, other = (trained(Dense, task.initial, [parts_of(shard, 0.8)[1]]) for shard in shards)
    assert_close(server, {name: (x + other[name]) / 2 for name, x in one.items()})


def test_perfedavg_with_one_step_on_the_same_rows_is_fedmeta():
    """Rows are laid so that the thirds D and D'' of the batch hold the support rows, and D' the query rows."""
    task = task_of(Dense)
    x, y = rows_of(shard_for(task, n=10))
    support, query = (x[:5], y[:5]), (x[5:], y[5:])
    start = moved(task.initial, 1)

    def laid(n, place):
        empty = shard_of(task, torch.zeros(n, 4, dtype=torch.float64), torch.zeros(n, dtype=torch.long))
        xs, ys = torch.zeros(n, 4, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
        place(empty, xs, ys)
        return shard_of(task, xs, ys)

    def for_meta(empty, xs, ys):
        for part, (x, y) in zip(empty.split(0.5, "support"), (support, query), strict=True):
            xs[part.rows[:5]], ys[part.rows[:5]] = x, y

    def for_per(empty, xs, ys):
        numbered = empty._replace(y=torch.arange(15))
        ((_, order),) = batches(numbered, batch=15)
        for k, (x, y) in enumerate((support, query, support)):
            xs[order[k::3]], ys[order[k::3]] = x, y

    method = meta_of(lr=0.5)
    _, upload, _ = method.train(task, start, (), laid(10, for_meta))
    server = merged(method, task, start, tree.stack([upload]), [10])
    per = PerFedAvg(solver_of(lr=0.5, steps=1), order="exact", alpha=INNER)
    assert_close(server, per.train(task, start, (), laid(15, for_per))[1])
    assert differs(server, start)


def test_a_client_with_one_row_adapts_on_it_and_is_judged_by_it():
    task = task_of(Dense)
    shard = shard_for(task, n=1)
    row = rows_of(shard)
    _, upload, _ = meta_of().train(task, task.initial, (), shard)
    assert_close(upload["gradients"], through_adaptation(Dense, task.initial, {}, row, row, INNER)[0])


def test_fedmeta_server_takes_one_step_along_the_plain_mean():
    gradients = {"gradients": {"w": torch.tensor([2.0, 6.0]), "running_mean": torch.tensor([1.0, 3.0])}}
    server = {"w": torch.tensor(10.0), "running_mean": torch.tensor(10.0)}
    new = merged(meta_of(lr=0.5), None, server, gradients, [1, 99])
    assert (float(new["w"]), float(new["running_mean"])) == (8.0, 8.0)
    new = merged(meta_of(lr=0.5, server_lr=0.25), None, server, gradients, [1, 99])
    assert (float(new["w"]), float(new["running_mean"])) == (9.0, 8.0)


def test_by_default_fedmeta_server_takes_the_steps_of_torchs_adam():
    """Four rounds; a statistic moves by the plain mean of what clients upload, not by Adam."""
    method, model = FedMeta(solver_of()), {"w": drawn(0, 5), "bn.running_mean": drawn(9, 5)}
    server = method.init_server(None, model, Federation(torch.ones(2), torch.tensor(0)))
    weight, statistic = model["w"].clone().requires_grad_(), model["bn.running_mean"]
    solver = torch.optim.Adam([weight], lr=0.006, eps=1e-5)
    for round in range(4):
        solver.param_groups[0]["lr"] = 0.006 * min(1, (round + 1) / 5)  # five rounds of warm-up
        gradients = {"w": drawn(10 + round, 2, 5), "bn.running_mean": drawn(20 + round, 2, 5)}
        server = method.merge(None, server, torch.arange(2), {"gradients": gradients}, torch.tensor([1, 99]))
        weight.grad = gradients["w"].mean(0)
        solver.step()
        statistic = statistic - gradients["bn.running_mean"].mean(0)
    torch.testing.assert_close(server.model, {"w": weight.detach(), "bn.running_mean": statistic})
    assert float((server.model["w"] - model["w"]).abs().min()) > 1e-4


def test_the_step_of_adam_is_that_of_server_lr_whatever_the_clients_rate():
    """A first step of Adam is lr * sign(gradient)."""
    gradients = {"gradients": {"w": torch.tensor([2.0, 6.0])}}
    for lr in (0.1, 0.5):
        method = FedMeta(solver_of(lr=lr), server_lr=0.25, warm_up=0)
        assert float(merged(method, None, {"w": torch.tensor(10.0)}, gradients, [1, 1])["w"]) == pytest.approx(9.75)


def test_statistics_move_by_one_pass_over_the_query_rows_with_the_adapted_weights():
    task = task_of(Normed)
    received, shards = moved(task.initial, 1), [shard_for(task, n=40, seed=seed) for seed in (1, 2)]
    method = meta_of()
    uploads = [method.train(task, received, (), shard)[1] for shard in shards]
    server = merged(method, task, received, tree.stack(uploads), [40, 40])
    found = []
    for shard in shards:
        support, query = parts_of(shard)
        _, adapted = through_adaptation(Normed, received, {}, support, query, INNER)
        found.append(passed(Normed, received | adapted, query[0]))
    assert_close(statistics(server), {name: (x + found[1][name]) / 2 for name, x in found[0].items()})
    assert differs(statistics(server), statistics(received))


def test_the_personal_model_is_fine_tuned_from_the_shared_one():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    expected = trained(Normed, received, batches(shard, 3), momentum=0.5)
    assert_close(meta_of(pers=3, momentum=0.5).personalize(task, received, (), shard), expected)


def test_a_plain_step_of_the_server_falls_with_lr_decay():
    run = run_of("fedmeta:server_kind=sgd", lr_decay=0.5, executor="one_by_one", settings={"server_lr": 0.0})
    far = []
    for _ in range(3):
        before = run.state.server.model["head.weight"]
        message = run.state.scene.method.send(run.state.scene.task, run.state.server, torch.arange(6))
        with torch.no_grad():
            _, uploads, *_ = run.executor.train(run.state.round, message, list(range(6)))
        run.play_round()
        gradient = uploads["gradients"]["head.weight"].mean(0)
        far.append(float((before - run.state.server.model["head.weight"]).norm() / gradient.norm()))
    run.close()
    assert far == pytest.approx([0.1, 0.05, 0.025], rel=1e-3)


# FedPer-Meta


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("first_order", [False, True])
def test_fedpermeta_steps_along_the_gradients_that_autograd_finds_through_the_adapted_head(make, first_order):
    task = task_of(make)
    head, body = split_head(moved(task.initial, 1))
    shard = shard_for(task, n=40)
    method = per_meta_of(first_order=first_order)
    client, upload, _ = method.train(task, body, FedPerMetaClient(head), shard)
    expected, _ = through_adaptation(make, head, body, *parts_of(shard), INNER, first_order)
    assert_close(client.head, {name: x - LR * expected[name] for name, x in head.items()})
    weights = tree.trainable(body)
    assert_close(tree.trainable(upload), {name: x - LR * expected[name] for name, x in weights.items()})
    assert set(upload) == set(body)


def test_fedpermeta_body_gradient_counts_how_the_adaptation_depends_on_the_body():
    task = task_of(Dense)
    head, body = split_head(moved(task.initial, 1))
    shard = shard_for(task, n=40)
    one, other = (per_meta_of(first_order=f).train(task, body, FedPerMetaClient(head), shard)[1] for f in (False, True))
    assert differs(one, other)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_fedpermeta_with_inner_lr_zero_and_all_rows_as_query_is_fedper_with_one_step(make):
    task = task_of(make)
    method, fedper = per_meta_of(0.0, support=1.0), KeepLocal(host=FedAvg(solver_of(batch=64)), private="head")
    head, _ = split_head(task.initial)
    client, other = FedPerMetaClient(head), KeptClient(FedAvgClient({}), head)
    for round in range(2):
        _, body = split_head(moved(task.initial, 10 + round))
        shard = shard_for(task, n=30, round=round)
        client, upload, _ = method.train(task, body, client, shard)
        other, expected, _ = fedper.train(task, body, other, shard)
        assert_close(upload, expected)
        assert_close(client.head, other.kept)


def test_fedpermeta_statistics_move_by_one_pass_over_the_query_rows():
    task = task_of(Normed)
    head, body = split_head(moved(task.initial, 1))
    shard = shard_for(task, n=40)
    _, upload, _ = per_meta_of(lr=0.5).train(task, body, FedPerMetaClient(head), shard)
    assert_close(statistics(upload), passed(Normed, body | head, parts_of(shard)[1][0]))


def test_fedpermeta_step_falls_with_lr_decay():
    task = task_of(Dense)
    head, body = split_head(task.initial)
    shard = shard_for(task, n=40, round=2)
    expected, _ = through_adaptation(Dense, head, body, *parts_of(shard), INNER)
    client, upload, _ = per_meta_of(decay=0.5).train(task, body, FedPerMetaClient(head), shard)
    new = {name: x - LR / 4 * expected[name] for name, x in task.initial.items()}
    torch.testing.assert_close(upload | client.head, {n: new[n] for n in (upload | client.head)}, rtol=1e-6, atol=1e-8)


def test_fedpermeta_head_stays_unless_it_is_shared():
    task = task_of(Normed)
    head, body = split_head(task.initial)
    shard = shard_for(task)
    client, upload, _ = per_meta_of().train(task, body, FedPerMetaClient(head), shard)
    assert set(client.head) == set(HEAD) and not set(upload) & set(HEAD)
    assert per_meta_of().generic(task, body) is None
    shared = per_meta_of(share_head=True)
    assert shared.init_client(task, task.initial) == FedPerMetaClient({})
    nobody, whole, _ = shared.train(task, task.initial, FedPerMetaClient({}), shard)
    assert nobody.head == {} and list(whole) == list(task.initial)
    assert_same(whole, {name: (upload | client.head)[name] for name in whole})
    assert_same(shared.generic(task, whole), whole)


def test_fedpermeta_mean_does_not_see_rows_unless_told():
    uploads = {"w": torch.tensor([1.0, 3.0])}
    for method, expected in ((per_meta_of(), 2.0), (FedPerMeta(weights="samples"), 2.5)):
        assert float(method.merge(None, {}, torch.arange(2), uploads, torch.tensor([1, 3]))["w"]) == expected


def test_fedpermeta_personal_model_fine_tunes_the_head_on_the_body_as_it_is():
    """The body, its statistics too, stays; the head learns from features in inference mode."""
    task = task_of(Normed)
    head, body = split_head(moved(task.initial, 1))
    shard = shard_for(task)
    own = per_meta_of(pers=2).personalize(task, body, FedPerMetaClient(head), shard)
    assert_same({name: own[name] for name in body}, body)
    module = module_of(Normed, body | head).eval()
    solver = torch.optim.SGD(module.head.parameters(), lr=LR)
    for x, y in batches(shard, 2):
        solver.zero_grad()
        F.cross_entropy(module(x), y).backward()
        solver.step()
    assert_close(own, {name: params_of(module)[name] for name in own})
    new = per_meta_of(pers=9).adapt(task, body, shard, 2)
    fresh = per_meta_of(pers=2).personalize(task, body, per_meta_of().init_client(task, task.initial), shard)
    assert_same({name: new[name] for name in HEAD}, {name: fresh[name] for name in HEAD})


def test_all_meta_methods_have_the_same_optimizer_at_the_server():
    """Else a comparison of AFML with FedMeta compares optimizers."""
    for name in ("server_kind", "server_lr", "warm_up", "support", "pers"):
        assert getattr(FedMeta(), name) == getattr(Afml(), name)
