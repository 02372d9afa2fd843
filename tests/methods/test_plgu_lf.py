import pytest
import torch
from torch.nn import functional as F

from plures import tree
from plures.methods.fedavg import FedAvg, FedAvgClient
from plures.methods.fedsam import fedsam
from plures.methods.local import Local
from plures.methods.messages import Same
from plures.methods.plgu_lf import PlguLf, PlguLfClient
from plures.simulate.stacking import vectorised
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
from tests.small import SIZES, played, run_of, small_split

NOTHING = FedAvgClient({})
EVERYONE = torch.arange(len(SIZES))
SIZE = {"hidden": 30, "head": 21}  # weights of the layers of Dense; BatchNorm goes with the hidden layer


def lf_of(personal: int = 1, **settings) -> PlguLf:
    solver = {key: settings.pop(key) for key in list(settings) if key in ("lr", "epochs", "decay")}
    return PlguLf(solver_of(**solver), personal=personal, **settings)


def client_of(own, rounds: int = 1) -> PlguLfClient:
    return PlguLfClient(own, torch.tensor(rounds))


def round_of(method, task, received, own, shard):
    client, upload, _ = method.train(task, received, client_of(own), shard)
    assert int(client.rounds) == 2
    return client.model, upload


def shard_in(run, client: int, use: str, round: int):
    """The training rows of a client of a run, for one use of them in a round."""
    stacked = run.state.scene.population.shards([client], "train", use, round)
    return type(stacked)(stacked.x, stacked.y, *[part[0] for part in stacked[2:]])


def papers_scores(own, received):
    """Length of each layer's difference by its number of weights, with mean one over both layers."""
    distance = {
        layer: sum(
            float((own[f"{layer}.{name}"] - received[f"{layer}.{name}"]).square().sum()) for name in ("weight", "bias")
        )
        ** 0.5
        / n
        for layer, n in SIZE.items()
    }
    total = sum(distance.values())
    if total == 0:
        return dict.fromkeys(SIZE, 1.0)
    return {layer: 2 * d / total for layer, d in distance.items()}


def layer_of(name: str) -> str:
    return "head" if name.startswith("head") else "hidden"


def gradients_of(module, x, y):
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def uphill_gradients(module, eps, x, y):
    """Gradients of a module some way off, which leaves it as it was."""
    before = params_of(module)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p += eps[name]
    found = gradients_of(module, x, y)
    module.load_state_dict(before, strict=False)
    return found


def papers_round(make, received, own, scores, personal, steps, rho, eps_from="theta", grad_at="w"):
    """Algorithm 1 with two modules; `scores` and the set of `personal` layers are given."""
    start = {name: own[name] if layer_of(name) in personal else received[name] for name in received}
    theta, shared = module_of(make, start), module_of(make, received)
    for x, y in steps:
        g = gradients_of(theta, x, y)
        still = gradients_of(shared, x, y)  # moves the statistics of the shared model
        climb = g if eps_from == "theta" else still
        long = torch.cat([s.flatten() for s in climb.values()]).norm()
        eps = {name: rho * scores[layer_of(name)] * s / long for name, s in climb.items()}
        sharp = uphill_gradients(shared if grad_at == "w" else theta, eps, x, y)
        with torch.no_grad():
            for module, gradients in ((theta, g), (shared, sharp)):
                for name, p in module.named_parameters():
                    p -= LR * gradients[name]
    return params_of(theta), params_of(shared)


# The round


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("eps_from", ["theta", "w"])
@pytest.mark.parametrize("grad_at", ["w", "theta"])
def test_round_is_the_papers_algorithm_step_by_step(make, eps_from, grad_at):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    scores = papers_scores(own, received)
    assert scores["hidden"] < scores["head"] < 2
    found = round_of(lf_of(rho=0.5, epochs=2, eps_from=eps_from, grad_at=grad_at), task, received, own, shard)
    expected = papers_round(make, received, own, scores, {"head"}, batches(shard, 2), 0.5, eps_from, grad_at)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


@pytest.mark.parametrize(
    ("perturb", "touched"), [("all", ("hidden", "head")), ("uni", ("hidden",)), ("per", ("head",))]
)
def test_perturb_names_the_layers_that_are_perturbed(perturb, touched):
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    scores = {layer: s * (layer in touched) for layer, s in papers_scores(own, received).items()}
    _, upload = round_of(lf_of(rho=0.5, perturb=perturb), task, received, own, shard)
    assert_close(upload, papers_round(Dense, received, own, scores, {"head"}, batches(shard), 0.5)[1])


def test_scores_are_of_the_stored_model_and_not_of_what_training_starts_from():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    replaced = own | {name: x for name, x in received.items() if layer_of(name) == "hidden"}
    one, other = (round_of(lf_of(rho=0.5), task, received, model, shard)[1] for model in (own, replaced))
    assert differs(one, other)


def test_rate_of_a_late_round_is_that_of_both_models():
    task = task_of(Dense)
    received, own = moved(task.initial, 1), moved(task.initial, 2)
    late, first = shard_for(task, round=3), shard_for(task)
    found = round_of(lf_of(rho=0.5, decay=0.5), task, received, own, late._replace(key=first.key))
    expected = round_of(lf_of(rho=0.5, lr=LR / 8), task, received, own, first)
    assert_same(found, expected)


@pytest.mark.parametrize("personal", [1, 5])
@pytest.mark.parametrize("make", [Dense, Normed])
def test_first_time_of_a_client_has_equal_scores_and_takes_all_layers_as_received(make, personal):
    """Also in a late round, when the received model is far from where all began."""
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, upload, _ = lf_of(personal, rho=0.5).train(task, received, client_of(own, 0), shard)
    expected = papers_round(make, received, own, {"hidden": 1.0, "head": 1.0}, set(), batches(shard), 0.5)
    assert_close(client.model, expected[0])
    assert_close(upload, expected[1])
    assert int(client.rounds) == 1 and int(lf_of().init_client(task, task.initial).rounds) == 0


@pytest.mark.parametrize("far", ["hidden", "head"])
def test_second_time_of_a_client_keeps_its_furthest_layer_from_the_first(far):
    """At a rate of zero nothing moves: first its model is the first one received, and then that layer still is."""
    task, method = task_of(Dense), lf_of(1, lr=0.0)
    first = moved(task.initial, 1)
    second = {name: x + (0.5 if layer_of(name) == far else 0.01) for name, x in first.items()}
    client, _, _ = method.train(task, first, method.init_client(task, task.initial), shard_for(task))
    assert_same(client.model, first)
    client, _, _ = method.train(task, second, client, shard_for(task, round=1))
    assert_same(client.model, {name: (first if layer_of(name) == far else second)[name] for name in first})


def test_first_time_in_a_run_is_when_a_client_is_first_chosen():
    """With all layers personal, client 0, first chosen in the second round, starts from the server's model; client 2,
    chosen before, from its own."""
    run = run_of("plgu-lf:personal=9", participation=0.5, executor="one_by_one")
    assert [run.state.cohort(round) for round in range(2)] == [[2, 3, 4], [0, 2, 4]]
    run.play_round()
    start = {0: run.state.server, 2: run.personal_model(2)}
    played(run, 1)
    alone = FedAvg(run.state.scene.method.solver)
    for client, model in start.items():
        with torch.no_grad():
            expected = alone.train(run.state.scene.task, model, NOTHING, shard_in(run, client, "train", 1))[1]
        assert_same(run.personal_model(client), expected)


# Rho zero


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("personal", [0, 1, 9])
@pytest.mark.parametrize("perturb", ["all", "uni", "per"])
def test_rho_zero_makes_the_shared_path_fedavg_bit_for_bit(make, personal, perturb):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    _, upload = round_of(lf_of(personal, rho=0.0, perturb=perturb), task, received, own, shard)
    assert_same(upload, FedAvg(solver_of()).train(task, received, NOTHING, shard)[1])


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_run_with_rho_zero_has_the_generic_model_of_fedavg_with_uniform_mean_bit_for_bit(model):
    settings = {"rho": 0.0, "personal": 1}
    one = played(run_of("plgu-lf", model, executor="one_by_one", settings=settings), 2)
    other = played(run_of("fedavg:weights=uniform", model, executor="one_by_one"), 2)
    assert_same(one.state.server, other.state.server)
    assert_same(one.state.scene.method.generic(one.state.scene.task, one.state.server), other.state.server)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_own_path_does_not_depend_on_rho(make):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    paths = [round_of(lf_of(rho=rho, epochs=2), task, received, own, shard) for rho in (0.0, 0.05, 3.0)]
    assert_same(paths[0][0], paths[1][0])
    assert_same(paths[0][0], paths[2][0])
    assert differs(tree.keep(paths[0][1], task.is_head), tree.keep(paths[1][1], task.is_head))


# FedSAM and FedAvg as limits


@pytest.mark.parametrize("make", [Dense, Normed])
def test_with_no_personal_layer_and_equal_scores_the_shared_path_is_fedsam_bit_for_bit(make):
    task = task_of(make)
    received, shard = moved(task.initial, 1), shard_for(task)
    method = lf_of(0, rho=0.5, perturb="uni", eps_from="w", scale="mean1", epochs=2)
    _, upload = round_of(method, task, received, received, shard)
    sam = fedsam().with_solver(solver_of(epochs=2))
    _, expected, _ = type(sam)(sam.solver, host=sam.host, rho=0.5).train(task, received, NOTHING, shard)
    assert_same(upload, expected)


def test_first_round_of_a_run_with_no_personal_layer_is_fedsam_bit_for_bit():
    settings = {"personal": 0, "perturb": "uni", "eps_from": "w"}
    one = played(run_of("plgu-lf", "norm", executor="one_by_one", settings=settings), 1)
    other = played(run_of("fedsam", "norm", executor="one_by_one"), 1)
    assert_same(one.state.server, other.state.server)


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("eps_from", ["w", "theta"])
def test_with_all_layers_personal_and_universal_ones_perturbed_the_shared_path_is_fedavg_bit_for_bit(make, eps_from):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    _, upload = round_of(lf_of(2, rho=0.5, perturb="uni", eps_from=eps_from), task, received, own, shard)
    assert_same(upload, FedAvg(solver_of()).train(task, received, NOTHING, shard)[1])


def test_scores_of_sum_one_climb_half_as_far_with_two_layers():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    one = round_of(lf_of(rho=0.5, scale="sum1"), task, received, own, shard)
    other = round_of(lf_of(rho=0.25), task, received, own, shard)
    assert_close(one[1], other[1])


def test_norm_one_climbs_by_signs():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=5)
    scores = papers_scores(own, received)
    ((x, y),) = batches(shard)
    start = own | {name: x for name, x in received.items() if layer_of(name) == "hidden"}
    g = gradients_of(module_of(Dense, start), x, y)
    eps = {name: 0.01 * scores[layer_of(name)] * s.sign() for name, s in g.items()}
    sharp = uphill_gradients(module_of(Dense, received), eps, x, y)
    _, upload = round_of(lf_of(rho=0.01, q=1.0), task, received, own, shard)
    assert_close(upload, {name: p - LR * sharp[name] for name, p in received.items()})


# Which layers stay


@pytest.mark.parametrize("make", [Dense, Normed])
def test_with_all_layers_personal_the_own_model_is_local_bit_for_bit(make):
    task = task_of(make)
    method, local = lf_of(5, rho=0.5), Local(solver_of())
    own, alone = task.initial, local.init_client(task, task.initial)
    for round in range(3):
        shard = shard_for(task, round=round)
        own, _ = round_of(method, task, moved(task.initial, round), own, shard)
        alone, _, _ = local.train(task, {}, alone, shard)
    assert_same(own, alone.model)


@pytest.mark.parametrize("make", [Dense, Normed])
def test_with_no_layer_personal_the_own_model_starts_from_the_received_one(make):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    trained, _ = round_of(lf_of(0, rho=0.5), task, received, own, shard)
    assert_same(trained, FedAvg(solver_of()).train(task, received, NOTHING, shard)[1])
    still, _ = round_of(lf_of(0, lr=0.0), task, received, own, shard)
    assert_same(tree.trainable(still), tree.trainable(received))


@pytest.mark.parametrize(("far", "stays"), [("hidden", "hidden"), ("head", "head")])
def test_the_layer_furthest_from_the_received_one_stays(far, stays):
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = {n: x + (0.5 if layer_of(n) == far else 0.01) for n, x in received.items()}
    kept, _ = round_of(lf_of(1, lr=0.0), task, received, own, shard)
    for name in tree.trainable(received):
        assert torch.equal(kept[name], (own if layer_of(name) == stays else received)[name])


def test_a_layer_is_far_by_its_length_over_its_number_of_weights():
    """Off by 3 in 30 weights is nearer than by 2.4 in 21, unless the root of the number counts."""
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = {name: x.clone() for name, x in received.items()}
    own["hidden.weight"][0, 0] += 3.0
    own["head.bias"][0] += 2.4
    for score, stays in (("mean", "head"), ("rms", "hidden")):
        kept, _ = round_of(lf_of(1, lr=0.0, score=score), task, received, own, shard)
        assert_same(kept, {name: (own if layer_of(name) == stays else received)[name] for name in received})


def test_statistics_of_a_norm_layer_stay_or_go_with_the_layer_before():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    for far, source in (("hidden", "own"), ("head", "received")):
        own = {n: x + (0.5 if layer_of(n) == far else 0.01) for n, x in received.items()}
        kept, _ = round_of(lf_of(1, lr=0.0), task, received, own, shard)
        start = {"own": own, "received": received}[source]
        # A frozen layer before BatchNorm, so that what the batches add to statistics can be seen from another start.
        frozen = received | {n: x for n, x in own.items() if layer_of(n) == far and not tree.is_statistic(n)}
        _, moved_on, _ = FedAvg(solver_of(lr=0.0)).train(task, frozen | statistics(start), NOTHING, shard)
        assert_close(statistics(kept), statistics(moved_on))


def test_norm_layers_may_be_scored_as_layers_of_their_own():
    task = task_of(Normed)
    received, shard = moved(task.initial, 1), shard_for(task)
    own = {n: x + (0.5 if n.startswith("norm") else 0.01) for n, x in received.items()}
    kept, _ = round_of(lf_of(1, lr=0.0, score_norm_layers=True), task, received, own, shard)
    for name in tree.trainable(received):
        assert torch.equal(kept[name], (own if name.startswith("norm") else received)[name])


# Statistics


def test_statistics_of_the_shared_model_move_by_its_unperturbed_pass():
    task = task_of(Normed)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    plain = FedAvg(solver_of(lr=0.0)).train(task, received, NOTHING, shard)[1]
    for grad_at in ("w", "theta"):
        _, upload = round_of(lf_of(lr=0.0, rho=2.0, grad_at=grad_at), task, received, own, shard)
        assert_same(upload, plain)


# The federation


def test_server_takes_the_uniform_mean():
    stacked = {"w": torch.tensor([[1.0], [5.0]])}
    for weights, expected in (("uniform", 3.0), ("samples", 2.0)):
        merged = PlguLf(weights=weights).merge(None, {}, torch.tensor([0, 1]), stacked, torch.tensor([3, 1]))
        assert merged["w"].tolist() == [expected]
    assert PlguLf().weights == "uniform"


def test_one_client_trains_the_shared_model_by_layerwise_sharpness_alone():
    """What it uploads is what the server has: the mean is the identity."""
    run = run_of("plgu-lf", split=small_split((31,)), executor="one_by_one", settings={"personal": 1, "rho": 0.5})
    task, method = run.state.scene.task, run.state.scene.method
    received, client = task.initial, method.init_client(task, task.initial)
    played(run, 3)
    for round in range(3):
        with torch.no_grad():
            client, received, _ = method.train(task, received, client, shard_in(run, 0, "train", round))
    assert_same(run.state.server, received)
    assert_same(run.personal_model(0), client.model)


def test_one_client_follows_the_papers_algorithm_round_by_round():
    task = task_of(Dense)
    method, client = lf_of(1, rho=0.5), client_of(task.initial, 0)
    received = own = task.initial
    for round in range(3):
        shard = shard_for(task, round=round)
        scores = papers_scores(own, received)
        top = max(SIZE, key=lambda layer: scores[layer])  # of equals the first
        own, expected = papers_round(Dense, received, own, scores, {top}, batches(shard), 0.5)
        client, upload, _ = method.train(task, received, client, shard)
        received = method.merge(task, received, torch.tensor([0]), tree.stack([upload]), shard.size[None])
        assert_close(received, expected)
        assert_close(client.model, own)
        received = expected


def test_personal_model_is_the_own_one_and_the_generic_model_the_servers():
    run = played(run_of("plgu-lf", executor="one_by_one", settings={"personal": 1}), 2)
    for client in range(len(SIZES)):
        assert_same(run.personal_model(client), tree.row(run.state.store.rows(EVERYONE), client).model)
        assert differs(run.personal_model(client), run.state.server)
    assert_same(run.state.scene.method.generic(run.state.scene.task, run.state.server), run.state.server)


def test_personal_model_of_a_client_that_sits_out_stays_and_of_one_never_chosen_is_that_of_a_new_client():
    run = run_of("plgu-lf", participation=0.5, new_epochs=2, executor="one_by_one", settings={"personal": 1})
    try:
        run.play_round()
        before = [run.personal_model(client) for client in range(len(SIZES))]
        run.play_round()
        after = [run.personal_model(client) for client in range(len(SIZES))]
    finally:
        run.close()
    assert [run.state.cohort(round) for round in range(2)] == [[2, 3, 4], [0, 2, 4]]
    assert_same(before[3], after[3])
    for client in (0, 1, 2, 4, 5):
        assert differs(before[client], after[client])
    task, solver = run.state.scene.task, run.state.scene.method.solver
    for client in (1, 5):  # two plain epochs from the server's model
        shard = shard_in(run, client, "personalize", 2)
        with torch.no_grad():
            expected = FedAvg(solver.for_epochs(2)).train(task, run.state.server, NOTHING, shard)[1]
        assert_same(after[client], expected)


def test_a_new_client_has_the_servers_model():
    task = task_of(Dense)
    server, shard = moved(task.initial, 1), shard_for(task)
    method = lf_of()
    assert_same(method.adapt(task, method.newcomer(task, server), shard, 0), server)


def test_moves_as_many_bytes_as_fedavg():
    one, other = (played(run_of(name, executor="one_by_one"), 1).state.rows[0] for name in ("plgu-lf", "fedavg"))
    assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)


def test_stacked_clients_have_scores_and_personal_layers_of_their_own():
    task = task_of(Dense)
    received, shard = moved(task.initial, 1), shard_for(task)
    far = [
        {n: x + (0.5 if layer_of(n) == layer else 0.01) for n, x in received.items()} for layer in ("hidden", "head")
    ]
    parts = [torch.stack([part, part]) for part in shard[2:]]
    method = lf_of(1, rho=0.5)
    with torch.no_grad():
        clients, uploads, _ = vectorised(
            train_function(method, task),
            Same(received),
            tree.stack([client_of(model) for model in far]),
            type(shard)(shard.x, shard.y, *parts),
        )
    for i, own in enumerate(far):
        expected = papers_round(
            Dense, received, own, papers_scores(own, received), {("hidden", "head")[i]}, batches(shard), 0.5
        )
        assert_close(tree.row(clients, i).model, expected[0])
        assert_close(tree.row(uploads, i), expected[1])


def test_ft_fine_tunes_the_personal_model():
    run, plain = (played(run_of(name, executor="one_by_one"), 1) for name in ("plgu-lf+ft:ft_epochs=2", "plgu-lf"))
    assert differs(run.personal_model(5), plain.personal_model(5))


def test_by_default_at_most_half_of_the_layers_are_personal_and_never_more_than_five():
    assert [PlguLf().n_personal(n) for n in (1, 2, 3, 5, 9, 10, 23)] == [0, 1, 1, 2, 4, 5, 5]
    assert [PlguLf(personal=7).n_personal(n) for n in (2, 23)] == [7, 7]
    mlp = run_of("plgu-lf", executor="one_by_one")
    mlp.close()
    assert mlp.state.scene.method.notes(mlp.state.scene.task) == ()
