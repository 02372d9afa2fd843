import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from plures import seeds, tree
from plures.data.batches import Batch, plan_batches
from plures.learn.optimizers import SERVER_EPSILON
from plures.methods.afml import Afml, AfmlServer, divergence
from plures.methods.base import Federation
from plures.methods.ingredients.meta import meta_gradients
from plures.methods.messages import Each, Same
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

HEAD = ("head.weight", "head.bias")


def afml_of(**settings) -> Afml:
    return Afml(solver_of(), **{"inner_lr": 0.5, "server_kind": "sgd", "server_lr": 0.25, **settings})


def federation_of(n: int = 3) -> Federation:
    return Federation(torch.ones(n, dtype=torch.long), torch.tensor(5))


def rows_of(shard):
    rows = shard.rows[: int(shard.size)]
    return shard.x[rows], shard.y[rows]


def message_of(model, latent=None):
    return {"model": model, "latent": latent or {}}


def latent_of(seed: int = 3):
    rng = torch.Generator().manual_seed(seed)
    weight = 0.3 * torch.randn(6, 6, generator=rng, dtype=torch.float64)
    return {"weight": weight, "bias": torch.randn(6, generator=rng, dtype=torch.float64)}


def plain_logits(p, x):
    return torch.relu(x @ p["hidden.weight"].T + p["hidden.bias"]) @ p["head.weight"].T + p["head.bias"]


def leaves_of(params):
    return {name: x.clone().requires_grad_() for name, x in params.items()}


def adapted(p, x, y, lr, create_graph=True):
    """The head after one step on these rows, in the graph of where it began."""
    gradients = torch.autograd.grad(
        F.cross_entropy(plain_logits(p, x), y), [p[n] for n in HEAD], create_graph=create_graph
    )
    return p | {name: p[name] - lr * g for name, g in zip(HEAD, gradients, strict=True)}


def papers_gradients(model, support, query, lr, first_order=False):
    """Gradients of the query loss of the adapted head with respect to everything, by autograd through the step."""
    p = leaves_of(model)
    after = adapted(p, *support, lr, not first_order)
    x, y = query
    return dict(zip(p, torch.autograd.grad(F.cross_entropy(plain_logits(after, x), y), list(p.values())), strict=True))


# Gradients through a step of adaptation


def inner(fast, slow, batch):
    each = F.cross_entropy(plain_logits(fast | slow, batch.x), batch.y, reduction="none")
    return (each * batch.mask).sum() / batch.mask.sum()


def split_model(model):
    return tree.keep(model, lambda n: n in HEAD), tree.drop(model, lambda n: n in HEAD)


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("n", [17, 150])
def test_meta_gradients_are_those_of_autograd_through_the_step(first_order, n):
    """Also of more rows than a pass holds, with a last pass of fewer."""
    task = task_of(Dense)
    fast, slow = split_model(moved(task.initial, 1))
    support, query = shard_for(task, n=n), shard_for(task, n=n + 2, seed=1)
    found = meta_gradients(inner, inner, fast, slow, support, query, 0.5, first_order)
    expected = papers_gradients(fast | slow, rows_of(support), rows_of(query), 0.5, first_order)
    assert_close(found.fast | found.slow, {name: expected[name] for name in (*fast, *slow)})


def test_second_order_gradients_are_not_first_order_ones():
    task = task_of(Dense)
    fast, slow = split_model(moved(task.initial, 1))
    support, query = shard_for(task), shard_for(task, seed=1)
    one, other = (meta_gradients(inner, inner, fast, slow, support, query, 0.5, flag) for flag in (False, True))
    assert differs(one.fast, other.fast) and differs(one.slow, other.slow)
    assert_same(one.adapted, other.adapted)


def test_first_and_second_order_gradients_coincide_for_a_linear_loss():
    """Linear in what adapts, with a coefficient that the slow part does not enter."""
    task = task_of(Dense)
    fast, slow = split_model(moved(task.initial, 1))
    support, query = shard_for(task), shard_for(task, seed=1)

    def linear(fast, slow, batch):
        return (fast["head.weight"][:, :4] * batch.x.mean(0)).sum() + 3 * fast["head.bias"].sum()

    one, other = (meta_gradients(linear, inner, fast, slow, support, query, 0.5, flag) for flag in (False, True))
    assert_same(one.fast, other.fast)
    assert_same(one.slow, other.slow)
    assert differs(one.adapted, fast)


def test_meta_gradients_report_the_adapted_part_and_its_loss_on_the_query_rows():
    task = task_of(Dense)
    fast, slow = split_model(moved(task.initial, 1))
    support, query = shard_for(task, n=70), shard_for(task, n=80, seed=1)
    found = meta_gradients(inner, inner, fast, slow, support, query, 0.5, False)
    after = adapted(leaves_of(fast | slow), *rows_of(support), 0.5)
    assert_close(found.adapted, {name: after[name].detach() for name in HEAD})
    x, y = rows_of(query)
    torch.testing.assert_close(found.loss, F.cross_entropy(plain_logits(after, x), y).detach())


# A client's round


@pytest.mark.parametrize("first_order", [False, True])
def test_without_trade_off_a_client_returns_the_gradients_of_head_only_maml(first_order):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    method = afml_of(alpha=0.0, first_order=first_order)
    _, upload, _ = method.train(task, message_of(model), (), shard)
    support, query = (rows_of(part) for part in shard.split(0.8, "support"))
    assert_close(upload["gradients"], papers_gradients(model, support, query, 0.5, first_order))


def test_with_inner_rate_zero_a_client_returns_plain_gradients_on_its_query_rows():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    _, upload, _ = afml_of(alpha=0.0, inner_lr=0.0).train(task, message_of(model), (), shard)
    module = module_of(Dense, model)
    x, y = rows_of(shard.split(0.8, "support")[1])
    F.cross_entropy(module(x), y).backward()
    assert_close(upload["gradients"], {name: p.grad for name, p in module.named_parameters()})


@pytest.mark.parametrize(("share", "n_support"), [(0.8, 13), (0.2, 3)])
def test_support_and_query_rows_are_disjoint_and_are_all(share, n_support):
    shard = shard_for(task_of(Dense), n=17)
    support, query = shard.split(share, "support")
    first, second = (part.rows[: int(part.size)].tolist() for part in (support, query))
    assert len(first) == n_support and sorted(first + second) == list(range(17))


def test_a_client_with_one_row_has_it_on_both_sides():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task, n=1)
    _, upload, _ = afml_of(alpha=0.0).train(task, message_of(model), (), shard)
    assert_close(upload["gradients"], papers_gradients(model, rows_of(shard), rows_of(shard), 0.5))


def query_key(shard):
    """The key of the only batch of the query rows."""
    _, query = shard.split(0.8, "support")
    rows, sizes = query.rows[None].numpy(), query.size[None].numpy()
    return plan_batches(rows, sizes, query.key[None].numpy(), 1 + 0 * sizes, 64, 1, False, "keep").keys[0]


def papers_trade_off(p, latent, x, y, noise):
    """Loss of the head as sent on noisy features, and the features' divergence from N(0, I), both by torch."""
    features = torch.relu(x @ p["hidden.weight"].T + p["hidden.bias"])
    log_variance = features @ latent["weight"].T + latent["bias"] if latent else torch.zeros_like(features)
    deviation = torch.exp(log_variance / 2)
    before = F.cross_entropy((features + deviation * noise) @ p["head.weight"].T + p["head.bias"], y)
    return before, kl_divergence(Normal(features, deviation), Normal(0.0, 1.0)).sum(1).mean()


@pytest.mark.parametrize("latent", ["vib", "unit"])
def test_client_returns_the_gradients_of_the_papers_total_loss(latent):
    """Of the encoder and the variances from all three terms, of the head from the adapted loss alone."""
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task)
    layer = latent_of() if latent == "vib" else {}
    _, upload, _ = afml_of(alpha=0.3, latent=latent).train(task, message_of(model, layer), (), shard)
    support, (x, y) = (rows_of(part) for part in shard.split(0.8, "support"))
    noise = seeds.normal(query_key(shard), (len(y), 6), 3).double()

    p, variances = leaves_of(model), leaves_of(layer)
    after = adapted(p, *support, 0.5)
    sent = p | {name: p[name].detach() for name in HEAD}
    total = F.cross_entropy(plain_logits(after, x), y) + 0.3 * sum(papers_trade_off(sent, variances, x, y, noise))
    gradients = dict(zip((*p, *variances), torch.autograd.grad(total, [*p.values(), *variances.values()]), strict=True))
    assert_close(upload["gradients"], {name: gradients[name] for name in model})
    assert list(upload["latent_gradients"]) == list(layer)
    for name in layer:
        torch.testing.assert_close(upload["latent_gradients"][name], gradients[name])


@pytest.mark.parametrize("latent", ["vib", "unit"])
def test_trade_off_is_the_sum_of_both_terms(latent):
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task, n=7)
    layer = latent_of() if latent == "vib" else {}
    batch = Batch(shard.x, shard.y, torch.ones(7), shard.counts, torch.tensor(77))
    noise = seeds.normal(batch.key, (7, 6), 3).double()
    slow = {"latent": layer, "sent head": {name: model[name] for name in HEAD}}
    found = afml_of(latent=latent).trade_off(task, task.features(model, shard.x), slow, batch)
    before, spread = papers_trade_off(model, layer, shard.x, shard.y, noise)
    torch.testing.assert_close(found, before + spread)
    assert float(before) > 0.1 and float(spread) > 0.1


def test_trade_off_does_not_see_padding():
    task = task_of(Dense)
    model, shard = moved(task.initial, 1), shard_for(task, n=7)
    slow = {"latent": latent_of(), "sent head": {name: model[name] for name in HEAD}}
    whole = Batch(shard.x, shard.y, torch.tensor([1.0] * 4 + [0.0] * 3), shard.counts, torch.tensor(77))
    part = whole._replace(x=shard.x[:4], y=shard.y[:4], mask=torch.ones(4))
    found = [afml_of().trade_off(task, task.features(model, batch.x), slow, batch) for batch in (whole, part)]
    torch.testing.assert_close(*found)


def test_client_keeps_nothing():
    task = task_of(Dense)
    method = afml_of()
    assert method.init_client(task, task.initial) == ()
    client, _, _ = method.train(task, message_of(task.initial, latent_of()), (), shard_for(task))
    assert client == ()


# What the server draws


def server_of(task, method, seed: int = 4, round: int = 0) -> AfmlServer:
    start = method.init_server(task, moved(task.initial, seed), federation_of())
    rng = torch.Generator().manual_seed(seed)
    spread = tree.map(lambda x: x + torch.rand(x.shape, generator=rng, dtype=x.dtype), start.spread)
    return start._replace(spread=spread, round=torch.tensor(round))


def noise_of(task, method, server):
    """What was drawn, told from what was sent."""
    sent = method.send(task, server, torch.arange(3)).tree["model"]
    return {name: (sent[name] - server.model[name]) / F.softplus(x) for name, x in server.spread.items()}


def test_all_clients_of_a_round_receive_the_same_draw():
    task, method = task_of(Dense), afml_of(sigma=0.5)
    server = server_of(task, method)
    first, second = (method.send(task, server, ids) for ids in (torch.tensor([0]), torch.tensor([2, 1])))
    assert isinstance(first, Same) and not isinstance(first, Each)
    assert_same(first.tree, second.tree)
    assert not torch.equal(first.tree["model"]["hidden.weight"], server.model["hidden.weight"])


def test_another_round_or_seed_has_another_draw():
    task, method = task_of(Dense), afml_of(sigma=0.5)
    server = server_of(task, method)
    draws = [
        noise_of(task, method, other)["hidden.weight"]
        for other in (server, server._replace(round=torch.tensor(1)), server._replace(key=torch.tensor(6)))
    ]
    assert differs({"a": draws[0]}, {"a": draws[1]}) and differs({"a": draws[0]}, {"a": draws[2]})


def test_draws_are_standard_normal_times_the_deviation():
    task, method = task_of(Dense), afml_of(sigma=0.5)
    server = method.init_server(task, task.initial, federation_of())
    each = [
        method.send(task, server._replace(round=torch.tensor(r)), torch.arange(1)).tree["model"]["hidden.weight"]
        for r in range(200)
    ]
    off = torch.stack(each) - server.model["hidden.weight"]
    assert float(off.mean()) == pytest.approx(0, abs=0.03) and float(off.std()) == pytest.approx(0.5, abs=0.03)


def test_only_weights_of_the_encoder_are_random_and_start_with_deviation_sigma():
    task, method = task_of(Normed), afml_of(sigma=0.02)
    server = method.init_server(task, task.initial, federation_of())
    assert set(server.spread) == {"hidden.weight"}
    torch.testing.assert_close(F.softplus(server.spread["hidden.weight"]), torch.full((6, 4), 0.02).double())
    sent = method.send(task, server, torch.arange(1)).tree["model"]
    others = [name for name in task.initial if name != "hidden.weight"]
    assert_same({name: sent[name] for name in others}, {name: task.initial[name] for name in others})


def test_without_deviation_the_means_are_sent():
    task, method = task_of(Dense), afml_of(sigma=0.0)
    server = method.init_server(task, task.initial, federation_of())
    assert_same(method.send(task, server, torch.arange(2)).tree["model"], task.initial)
    assert server.spread == {}


# The divergence of the weights


def test_divergence_is_zero_at_the_standard_normal_and_nowhere_else():
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert float(divergence([zero], [one])) == 0
    for mean, deviation in ((0.1, 1.0), (-0.1, 1.0), (0.0, 0.9), (0.0, 1.1)):
        assert float(divergence([zero + mean], [deviation * one])) > 1e-3


def test_divergence_is_that_of_normal_distributions():
    rng = torch.Generator().manual_seed(0)
    means = [torch.randn(n, generator=rng, dtype=torch.float64) for n in (3, 5)]
    deviations = [0.1 + torch.rand(n, generator=rng, dtype=torch.float64) for n in (3, 5)]
    expected = sum(kl_divergence(Normal(m, s), Normal(0.0, 1.0)).sum() for m, s in zip(means, deviations, strict=True))
    torch.testing.assert_close(divergence(means, deviations), expected)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_gradients_of_means_and_deviations_are_those_of_autograd_through_the_draw(beta):
    """The server has the gradient at the drawn weights and the draw: by the chain rule, all that autograd would use."""
    task, method = task_of(Dense), afml_of(sigma=0.5, beta=beta)
    server = server_of(task, method)
    noise = noise_of(task, method, server)
    gradients = moved(tree.zeros_like(server.model), 9)
    model, spread = method.server_gradients(server, gradients)

    p, s = leaves_of(server.model), leaves_of(server.spread)
    drawn = p | {name: p[name] + F.softplus(s[name]) * e for name, e in noise.items()}
    # Its gradient at the drawn weights is as given.
    loss = sum((gradients[name] * x).sum() for name, x in drawn.items())
    each = [kl_divergence(Normal(p[n], F.softplus(s[n])), Normal(0.0, 1.0)).sum() for n in noise]
    expected = torch.autograd.grad(loss + beta * sum(each), [*p.values(), *s.values()])
    assert_close(model, dict(zip(p, expected[: len(p)], strict=True)))
    assert_close(spread, dict(zip(s, expected[len(p) :], strict=True)))


def test_divergence_gradients_are_those_of_autograd():
    task, method = task_of(Dense), afml_of(sigma=0.5, beta=1.0)
    server = server_of(task, method)
    model, spread = method.server_gradients(server, tree.zeros_like(server.model))
    p, s = leaves_of(server.model), leaves_of(server.spread)
    loss = divergence([p["hidden.weight"]], [F.softplus(s["hidden.weight"])])
    mean, deviation = torch.autograd.grad(loss, [p["hidden.weight"], s["hidden.weight"]])
    torch.testing.assert_close(model["hidden.weight"], mean)
    torch.testing.assert_close(spread["hidden.weight"], deviation)
    assert all(float(model[name].abs().max()) == 0 for name in model if name != "hidden.weight")


# The server's step


def uploads_of(task, layer, seeds_):
    each = [{"gradients": moved(tree.zeros_like(task.initial), s), "latent_gradients": latent_of(s)} for s in seeds_]
    return tree.stack(each if layer else [e | {"latent_gradients": {}} for e in each])


@pytest.mark.parametrize("latent", ["vib", "unit"])
def test_server_steps_down_the_uniform_mean_of_gradients_with_the_draw_that_it_sent(latent):
    task, method = task_of(Dense), afml_of(sigma=0.5, beta=0.7, latent=latent)
    server = server_of(task, method, round=6)
    noise = noise_of(task, method, server)
    uploads = uploads_of(task, latent == "vib", (1, 2))
    merged = method.merge(task, server, torch.tensor([0, 2]), uploads, torch.tensor([9, 1]))
    mean = {name: (x[0] + x[1]) / 2 for name, x in uploads["gradients"].items()}

    deviation = F.softplus(server.spread["hidden.weight"])
    model = {name: x - 0.25 * mean[name] for name, x in server.model.items()}
    model["hidden.weight"] = model["hidden.weight"] - 0.25 * 0.7 * server.model["hidden.weight"]
    by_deviation = mean["hidden.weight"] * noise["hidden.weight"] + 0.7 * (deviation - 1 / deviation)
    chain = 1 / (1 + torch.exp(-server.spread["hidden.weight"]))
    assert_close(merged.model, model)
    assert_close(merged.spread, {"hidden.weight": server.spread["hidden.weight"] - 0.25 * by_deviation * chain})
    assert int(merged.round) == 7 and torch.equal(merged.key, server.key)
    expected = {name: x - 0.25 * uploads["latent_gradients"][name].mean(0) for name, x in server.latent.items()}
    assert_close(merged.latent, expected)
    assert bool(expected) == (latent == "vib")


@pytest.mark.parametrize("warm_up", [0, 2])
def test_server_may_step_with_adam_and_its_rate_rises_at_first(warm_up):
    settings = {"sigma": 0.0, "alpha": 0.0, "latent": "unit", "server_kind": "adam", "server_lr": 0.1}
    task, method = task_of(Dense), afml_of(**settings, warm_up=warm_up)
    server = method.init_server(task, task.initial, federation_of())
    p = leaves_of(task.initial)
    solver = torch.optim.Adam(p.values(), lr=0.1, eps=SERVER_EPSILON)
    for round in range(3):
        uploads = uploads_of(task, False, (3 * round, 3 * round + 1))
        server = method.merge(task, server, torch.tensor([0, 2]), uploads, torch.tensor([9, 1]))
        for name, x in p.items():
            x.grad = uploads["gradients"][name].mean(0)
        solver.param_groups[0]["lr"] = 0.05 if warm_up and round == 0 else 0.1
        solver.step()
    assert_close(server.model, {name: x.detach() for name, x in p.items()})


def test_without_trade_off_and_deviation_rounds_are_head_only_maml_with_mean_gradients():
    task = task_of(Dense)
    method = afml_of(alpha=0.0, beta=0.0, sigma=0.0)
    server = method.init_server(task, task.initial, federation_of())
    model, ids = task.initial, torch.arange(2)
    for round in range(3):
        shards = [shard_for(task, n=n, round=round, seed=seed) for seed, n in enumerate((17, 9))]
        received = method.send(task, server, ids).tree
        uploads = [method.train(task, received, (), shard)[1] for shard in shards]
        server = method.merge(task, server, ids, tree.stack(uploads), torch.tensor([17, 9]))
        each = []
        for shard in shards:
            support, query = (rows_of(part) for part in shard.split(0.8, "support"))
            each.append(papers_gradients(model, support, query, 0.5))
        model = {name: x - 0.25 * (each[0][name] + each[1][name]) / 2 for name, x in model.items()}
    assert_close(server.model, model)


def test_with_inner_rate_zero_rounds_are_gradient_steps_on_the_query_rows():
    task = task_of(Dense)
    method = afml_of(alpha=0.0, beta=0.0, sigma=0.0, inner_lr=0.0)
    server = method.init_server(task, task.initial, federation_of())
    shards = [shard_for(task, n=n, seed=seed) for seed, n in enumerate((17, 9))]
    received = method.send(task, server, torch.arange(2)).tree
    uploads = [method.train(task, received, (), shard)[1] for shard in shards]
    server = method.merge(task, server, torch.arange(2), tree.stack(uploads), torch.tensor([17, 9]))
    module = module_of(Dense, task.initial)
    for shard in shards:
        x, y = rows_of(shard.split(0.8, "support")[1])
        (F.cross_entropy(module(x), y) / 2).backward()
    assert_close(server.model, {name: p.detach() - 0.25 * p.grad for name, p in module.named_parameters()})


# Statistics


def test_statistics_of_the_server_are_the_mean_of_one_pass_over_each_clients_query_rows():
    task = task_of(Normed)
    method = afml_of(sigma=0.0, alpha=0.3, latent="unit")
    server = method.init_server(task, moved(task.initial, 1), federation_of())
    shards = [shard_for(task, n=n, seed=seed) for seed, n in enumerate((17, 29))]
    received = method.send(task, server, torch.arange(2)).tree
    uploads = [method.train(task, received, (), shard)[1] for shard in shards]
    merged = method.merge(task, server, torch.arange(2), tree.stack(uploads), torch.tensor([17, 29]))
    expected = []
    for shard in shards:
        module = module_of(Normed, server.model)
        module(rows_of(shard.split(0.8, "support")[1])[0])
        expected.append(statistics(params_of(module)))
    assert_close(statistics(merged.model), {n: (expected[0][n] + expected[1][n]) / 2 for n in expected[0]})


# The personal model


@pytest.mark.parametrize("make", [Dense, Normed])
def test_personal_model_with_no_epoch_is_the_generic_one(make):
    task = task_of(make)
    method = afml_of(sigma=0.5, pers=0)
    server = server_of(task, method)
    received = method.serve(task, server, torch.arange(3)).tree
    assert_same(method.personalize(task, received, (), shard_for(task)), method.generic(task, server))
    assert_same(method.adapt(task, method.newcomer(task, server), shard_for(task), 0), server.model)


def test_run_with_no_epoch_scores_the_generic_model_on_every_client():
    run = played(run_of("afml:pers=0,sigma=0.5", executor="one_by_one"), 2)
    generic = run.state.scene.method.generic(run.state.scene.task, run.state.server)
    for client in range(len(SIZES)):
        assert_same(run.personal_model(client), generic)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_personal_head_is_fine_tuned_on_all_training_rows_over_the_mean_encoder(make):
    task = task_of(make)
    method = afml_of(sigma=0.5, pers=3)
    server, shard = server_of(task, method), shard_for(task)
    received = method.serve(task, server, torch.arange(3)).tree
    personal = method.personalize(task, received, (), shard)
    module = module_of(make, server.model).eval()
    solver = torch.optim.SGD(module.head.parameters(), lr=LR)
    for x, y in batches(shard, 3):
        solver.zero_grad()
        F.cross_entropy(module.head(module.body(x).detach()), y).backward()
        solver.step()
    assert_close(personal, params_of(module))
    assert_same(personal, method.adapt(task, method.newcomer(task, server), shard, 3))


def test_evaluation_changes_nothing_of_training():
    one, other = (played(run_of(f"afml:pers={p}", executor="one_by_one"), 2) for p in (0, 5))
    assert_same(one.state.server, other.state.server)


# The wire


@pytest.mark.parametrize(("latent", "more"), [("unit", 0), ("vib", 8 * 8 + 8)])
def test_one_model_goes_down_and_one_comes_up(latent, more):
    """610 numbers, and the layer of variances; deviations stay with the server."""
    row = played(run_of(f"afml:latent={latent}", executor="one_by_one"), 1).state.rows[0]
    assert row.bytes_down == row.bytes_up == len(SIZES) * 4 * (610 + more)


def test_ft_fine_tunes_the_personal_model():
    run, plain = (played(run_of(name, executor="one_by_one"), 1) for name in ("afml+ft:ft_epochs=2", "afml"))
    assert differs(run.personal_model(5), plain.personal_model(5))
