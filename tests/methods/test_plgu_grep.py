import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedrep import FedRep, FedRepClient
from plures.methods.plgu_grep import PlguGRep, PlguGRepClient
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

HEAD_EPOCHS = 2
SCORES = {"hidden": 0.6, "second": 1.4}


class Deep(Dense):
    """Two layers in the body, so that their scores can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(6, 6)
        self.head = self._modules.pop("head")  # last in order

    def body(self, x):
        return torch.tanh(self.second(torch.relu(self.hidden(x))))


def grep_of(**settings) -> PlguGRep:
    solver = {key: settings.pop(key) for key in list(settings) if key in ("lr", "epochs", "decay")}
    return PlguGRep(solver_of(**solver), head_epochs=HEAD_EPOCHS, **settings)


def parts(task, params):
    return tree.drop(params, task.is_head), tree.keep(params, task.is_head)


def round_of(method, task, body, head, last, shard, rounds=1):
    client, upload, _ = method.train(task, body, PlguGRepClient(head, last, torch.tensor(rounds)), shard)
    assert int(client.rounds) == rounds + 1
    return client, upload


def gradients_of(module, x, y):
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if not name.startswith("head")}


def step(module, gradients, by):
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in gradients:
                p += by * gradients[name]


def papers_round(make, body, head, scores, shard, rho, stages="two", epochs=1):
    """The head on the frozen body, then equations 11 to 13 on the body, each batch in three passes."""
    module = module_of(make, body | head).eval()
    for x, y in batches(shard, HEAD_EPOCHS):
        with torch.no_grad():
            features = module.body(x)
        gradients = torch.autograd.grad(F.cross_entropy(module.head(features), y), list(module.head.parameters()))
        with torch.no_grad():
            for p, g in zip(module.head.parameters(), gradients, strict=True):
                p -= LR * g
    module.train()
    for x, y in batches(shard, epochs):
        kept = statistics(params_of(module))
        if stages == "two":
            step(module, gradients_of(module, x, y), -LR)
            module.load_state_dict(kept, strict=False)
        g = gradients_of(module, x, y)
        kept = statistics(params_of(module))
        long = torch.cat([s.flatten() for s in g.values()]).norm()
        eps = {name: scores[name.split(".")[0]] * s / long for name, s in g.items()}
        step(module, eps, rho)
        sharp = gradients_of(module, x, y)
        step(module, eps, -rho)
        step(module, sharp, -LR)
        module.load_state_dict(kept, strict=False)
    return params_of(module)


def last_body(body):
    """A body whose layers are off by 0.6 and 1.4 times their number of weights, so that these are the scores."""
    sizes = {layer: sum(x.numel() for n, x in body.items() if n.startswith(layer)) for layer in SCORES}
    last = {name: x.clone() for name, x in body.items()}
    for layer, score in SCORES.items():
        last[f"{layer}.bias"][0] += 0.01 * score * sizes[layer]
    return last


# The round


@pytest.mark.parametrize("stages", ["two", "one"])
def test_round_is_the_papers_equations_step_by_step(stages):
    task = task_of(Deep)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    method = grep_of(rho=0.5, stages=stages, epochs=2)
    client, upload = round_of(method, task, body, head, last_body(body), shard)
    expected = papers_round(Deep, body, head, SCORES, shard, 0.5, stages, 2)
    assert_close(upload | client.head, expected)


@pytest.mark.parametrize("stages", ["two", "one"])
def test_first_time_of_a_client_has_equal_scores(stages):
    """However far the received body is from where all began."""
    task = task_of(Deep)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    client, upload = round_of(grep_of(rho=0.5, stages=stages), task, body, head, last_body(body), shard, rounds=0)
    expected = papers_round(Deep, body, head, dict.fromkeys(SCORES, 1.0), shard, 0.5, stages)
    assert_close(upload | client.head, expected)


@pytest.mark.parametrize("stages", ["two", "one"])
def test_round_of_a_model_with_batch_norm_is_the_papers(stages):
    """One layer and the norm that follows it: their score is one."""
    task = task_of(Normed)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    last, _ = parts(task, moved(task.initial, 2))
    client, upload = round_of(grep_of(rho=0.5, stages=stages), task, body, head, last, shard)
    expected = papers_round(Normed, body, head, {"hidden": 1.0, "norm": 1.0}, shard, 0.5, stages)
    assert_close(upload | client.head, expected)


def test_norm_of_the_gradients_is_of_the_body_alone():
    """The head's gradients do not weigh: a head many times as large changes gradients' directions, not the length."""
    task = task_of(Deep)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task, n=5)
    head = {name: 5 * x for name, x in head.items()}
    method = PlguGRep(solver_of(), head_epochs=0, rho=0.5, stages="one")
    _, upload = round_of(method, task, body, head, body, shard)
    module = module_of(Deep, body | head)
    ((x, y),) = batches(shard)
    g = gradients_of(module, x, y)
    step(module, g, 0.5 / torch.cat([s.flatten() for s in g.values()]).norm())
    sharp = gradients_of(module, x, y)
    assert_close(upload, {name: p - LR * sharp[name] for name, p in body.items()})


def test_rate_of_a_late_round_is_that_of_both_stages():
    task = task_of(Deep)
    body, head = parts(task, moved(task.initial, 1))
    late, first = shard_for(task, round=3), shard_for(task)
    found = round_of(grep_of(rho=0.5, decay=0.5), task, body, head, body, late._replace(key=first.key))
    assert_same(found, round_of(grep_of(rho=0.5, lr=LR / 8), task, body, head, body, first))


# FedRep as a limit


@pytest.mark.parametrize("make", [Dense, Normed])
def test_rho_zero_in_two_stages_is_fedrep_with_two_steps_on_every_batch(make):
    task = task_of(make)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    last, _ = parts(task, moved(task.initial, 2))
    client, upload = round_of(grep_of(rho=0.0, epochs=2), task, body, head, last, shard)
    fitted = FedRep(solver_of(), head_epochs=HEAD_EPOCHS).train(task, body, FedRepClient(head), shard)[0]
    assert_same(client.head, fitted.head)
    module = module_of(make, body | fitted.head)
    for x, y in batches(shard, 2):
        for _ in range(2):
            step(module, gradients_of(module, x, y), -LR)
    assert_close(tree.trainable(upload), tree.drop(tree.trainable(params_of(module)), task.is_head))


@pytest.mark.parametrize("make", [Dense, Normed])
def test_rho_zero_in_one_stage_is_fedrep_bit_for_bit(make):
    task = task_of(make)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    last, _ = parts(task, moved(task.initial, 2))
    client, upload = round_of(grep_of(rho=0.0, stages="one", epochs=2), task, body, head, last, shard)
    method = FedRep(solver_of(epochs=2), head_epochs=HEAD_EPOCHS)
    plain, expected, _ = method.train(task, body, FedRepClient(head), shard)
    assert_same(client.head, plain.head)
    assert_same(upload, expected)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_run_with_rho_zero_in_one_stage_is_fedrep_with_uniform_mean_bit_for_bit(model):
    settings = {"rho": 0.0, "stages": "one", "head_epochs": 2}
    one = played(run_of("plgu-grep", model, executor="one_by_one", settings=settings), 2)
    settings = {"weights": "uniform", "head_epochs": 2}
    other = played(run_of("fedrep", model, executor="one_by_one", settings=settings), 2)
    assert_same(one.state.server, other.state.server)
    for client in range(len(SIZES)):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_one_stage_of_sam_is_not_fedrep():
    task = task_of(Dense)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    one, other = (round_of(grep_of(rho=rho, stages="one"), task, body, head, body, shard)[1] for rho in (0.0, 0.5))
    assert differs(one, other)


# Scores


def test_head_does_not_depend_on_rho_or_on_the_last_body():
    task = task_of(Deep)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    one, _ = round_of(grep_of(rho=0.0), task, body, head, body, shard)
    other, _ = round_of(grep_of(rho=3.0), task, body, head, last_body(body), shard)
    assert_same(one.head, other.head)
    assert differs(one.head, head)


def test_client_keeps_the_body_that_it_trained_for_the_scores_of_the_next_round():
    task = task_of(Deep)
    method = grep_of(rho=0.5)
    client = method.init_client(task, task.initial)
    assert_same(client.body, tree.drop(task.initial, task.is_head))
    last, _ = parts(task, task.initial)
    for round in range(3):
        body, _ = parts(task, moved(task.initial, 5 + round))
        shard = shard_for(task, round=round)
        expected = round_of(method, task, body, client.head, last, shard, rounds=round)[1]
        client, upload, _ = method.train(task, body, client, shard)
        assert_same(upload, expected)
        assert_same(client.body, upload)
        last = upload


def test_the_head_is_not_scored():
    """Scores have mean one over the layers of the body."""
    task = task_of(Deep)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    each = [round_of(grep_of(rho=0.5), task, body, head, last_body(body), shard)[1]]
    each.append(round_of(grep_of(rho=1.0, scale="sum1"), task, body, head, last_body(body), shard)[1])
    assert_close(*each)


# Statistics


@pytest.mark.parametrize("stages", ["two", "one"])
def test_statistics_move_once_a_batch_and_not_by_the_perturbed_pass(stages):
    task = task_of(Normed)
    (body, head), shard = parts(task, moved(task.initial, 1)), shard_for(task)
    _, upload = round_of(grep_of(rho=3.0, lr=0.0, stages=stages), task, body, head, body, shard)
    plain = FedAvg(solver_of(lr=0.0)).train(task, body | head, FedAvgClient({}), shard)[1]
    assert_same(upload, tree.drop(plain, task.is_head))
    assert differs(statistics(upload), statistics(body))


# The federation


def test_server_takes_the_uniform_mean():
    stacked = {"w": torch.tensor([[1.0], [5.0]])}
    for weights, expected in (("uniform", 3.0), ("samples", 2.0)):
        merged = PlguGRep(weights=weights).merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
        assert merged["w"].tolist() == [expected]
    assert PlguGRep().weights == "uniform"


def test_personal_model_is_the_servers_body_under_the_own_head():
    run = played(run_of("plgu-grep", executor="one_by_one", settings={"head_epochs": 1}), 2)
    for client in range(len(SIZES)):
        kept = tree.row(run.state.store.rows(torch.arange(len(SIZES))), client)
        assert_same(run.personal_model(client), run.state.server | kept.head)
    assert run.state.scene.method.generic(run.state.scene.task, run.state.server) is None


def test_head_and_last_body_of_a_client_that_sits_out_are_stale():
    run = run_of("plgu-grep", participation=0.5, executor="one_by_one", settings={"head_epochs": 1})
    try:
        run.play_round()
        before = run.state.store.rows(torch.arange(len(SIZES)))
        chosen = run.state.cohort(run.state.round)
        run.play_round()
        after = run.state.store.rows(torch.arange(len(SIZES)))
    finally:
        run.close()
    others = torch.tensor([i for i in range(len(SIZES)) if i not in chosen])
    assert_same(tree.rows(before, others), tree.rows(after, others))
    assert not torch.equal(before.body["hidden.weight"][chosen], after.body["hidden.weight"][chosen])


def test_moves_as_many_bytes_as_fedrep():
    one, other = (played(run_of(name, executor="one_by_one"), 1).state.rows[0] for name in ("plgu-grep", "fedrep"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)
    assert one.bytes_down == len(SIZES) * 4 * (64 * 8 + 8)


def test_ft_fine_tunes_the_personal_model():
    run, plain = (played(run_of(name, executor="one_by_one"), 1) for name in ("plgu-grep+ft:ft_epochs=2", "plgu-grep"))
    assert differs(run.personal_model(5), plain.personal_model(5))
