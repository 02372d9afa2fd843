import math

import pytest
import torch

import plures
from plures import tree
from plures.learn.optimizers import SERVER_EPSILON
from plures.learn.task import Task
from plures.methods.base import Federation
from plures.methods.pfedla import PFedLA, PFedLAServer, pfedla
from plures.models.small import HnCnn
from tests.methods.plain import Dense, Normed, assert_close, assert_same, differs, moved, task_of
from tests.small import SIZES, played, run_of, small_split

N = 4
EVERYONE = torch.arange(len(SIZES))
LAYERS = {"hidden": ("hidden.weight", "hidden.bias"), "head": ("head.weight", "head.bias")}


def task_for(make=Dense):
    return task_of(make, torch.float32)


def paper_of(mixer_lr: float = 0.5, layer_mean: bool = False, alpha_map: str = "softmax") -> PFedLA:
    """The equation of the paper: plain steps along the change itself."""
    return PFedLA(
        width=6, mixer_lr=mixer_lr, mixer_optimizer="sgd", unit=False, layer_mean=layer_mean, alpha_map=alpha_map
    )


def adam_of(mixer_lr: float = 0.01) -> PFedLA:
    return PFedLA(width=6, mixer_lr=mixer_lr, mixer_optimizer="adam", unit=True)


BOTH = pytest.mark.parametrize("method", [paper_of(), adam_of()], ids=["paper", "adam"])


def server_of(method, task, n: int = N, seed: int = 0, drawn: bool = False) -> PFedLAServer:
    """A server whose clients have unlike models; `drawn` also gives it unlike mixers."""
    federation = Federation(torch.ones(n, dtype=torch.long), torch.tensor(5))
    start = method.init_server(task, task.initial, federation)
    models = tree.stack([moved(task.initial, seed + i) for i in range(n)])
    mixers = dict(start.mixers)
    if drawn:
        rng = torch.Generator().manual_seed(seed)
        for name in ("output.weight", "output.bias"):
            mixers[name] = mixers[name] + 0.3 * torch.randn(mixers[name].shape, generator=rng)
    return start._replace(models=models, mixers=mixers)


def weights_of(method, server, ids):
    return method.weights(tree.rows(server.mixers, ids), ids)


def moved_from(sent, seed=50, by=0.5):
    return moved(sent, seed, by)


def inner(a, b):
    """For each client, the inner product of two stacked models."""
    return sum((a[name] * b[name]).flatten(1).sum(1) for name in a)


# The mixture


@pytest.mark.parametrize("drawn", [False, True])
def test_pfedla_sends_the_weighted_sum_of_clients_layer_by_layer(drawn):
    task = task_for()
    method = PFedLA(width=6)
    server, ids = server_of(method, task, drawn=drawn), torch.tensor([2, 0])
    weights, sent = weights_of(method, server, ids), method.send(task, server, ids).tree
    for place in range(2):
        for layer, names in enumerate(LAYERS.values()):
            for name in names:
                expected = sum(weights[place, layer, j] * server.models[name][j] for j in range(N))
                torch.testing.assert_close(sent[name][place], expected, rtol=1e-5, atol=1e-6)


def test_pfedla_layer_is_a_module_so_weight_and_bias_share_a_weight():
    """Client 0 receives the hidden layer of client 1 and the head of client 3, each whole."""
    task = task_for()
    method = PFedLA(width=6)
    server = server_of(method, task)
    bias = torch.zeros(N, 2, N)
    bias[0, 0, 1] = bias[0, 1, 3] = 1e4
    server = server._replace(mixers=server.mixers | {"output.bias": bias})
    sent = tree.row(method.send(task, server, torch.tensor([0])).tree, 0)
    for layer, source in (("hidden", 1), ("head", 3)):
        for name in LAYERS[layer]:
            assert torch.equal(sent[name], server.models[name][source])


def test_pfedla_batch_norm_is_a_layer_of_its_own():
    task = task_for(Normed)
    method = pfedla()
    federation = Federation(torch.ones(N, dtype=torch.long), torch.tensor(5))
    server = method.init_server(task, task.initial, federation)
    assert server.mixers["output.bias"].shape == (N, 3, N)


def test_pfedla_first_mixture_is_the_plain_mean():
    task = task_for()
    method = PFedLA(width=6)
    server = server_of(method, task)
    assert torch.equal(weights_of(method, server, torch.arange(N)), torch.full((N, 2, N), 0.25))
    sent = method.send(task, server, torch.arange(N)).tree
    assert_close(tree.row(sent, 3), tree.map(lambda x: x.mean(0), server.models))


def test_pfedla_self_bias_starts_closer_to_the_clients_own_model():
    """With N = 4 and a bias of log 3 the client's own weight is 3/6, the others' 1/6."""
    task = task_for()
    method = PFedLA(width=6, self_bias=math.log(3))
    weights = weights_of(method, server_of(method, task), torch.tensor([2, 1]))
    expected = torch.full((2, 2, N), 1 / 6)
    expected[0, :, 2] = expected[1, :, 1] = 1 / 2
    torch.testing.assert_close(weights, expected)


def test_pfedla_hypernetwork_has_the_size_of_the_public_one():
    """An embedding of 100, three layers of 100 and an output layer for every target layer: 30400 + L * 101 N."""
    task = task_for()
    federation = Federation(torch.ones(10, dtype=torch.long), torch.tensor(5))
    mixers = PFedLA().init_server(task, task.initial, federation).mixers
    assert sum(x[0].numel() for x in mixers.values()) == 30400 + 2 * 101 * 10


def test_pfedla_hypernetwork_is_a_stack_of_linear_layers_with_relu():
    task = task_for()
    method = PFedLA(width=6)
    server = server_of(method, task, drawn=True)
    mixer = tree.row(server.mixers, 2)
    hidden = mixer["embedding"]
    for k in range(3):
        hidden = torch.relu(mixer[f"hidden{k}.weight"] @ hidden + mixer[f"hidden{k}.bias"])
    logits = mixer["output.weight"] @ hidden + mixer["output.bias"]
    found = weights_of(method, server, torch.tensor([2]))[0]
    torch.testing.assert_close(found, logits.exp() / logits.exp().sum(1, keepdim=True))
    assert float(hidden.abs().max()) > 0


def test_pfedla_clients_have_unlike_hypernetworks():
    method = PFedLA(width=6)
    mixers = server_of(method, task_for()).mixers
    for name in ("embedding", "hidden0.weight", "hidden2.bias"):
        assert not torch.equal(mixers[name][0], mixers[name][1])


# The step of the mixers


def test_pfedla_step_moves_the_mixture_the_way_clients_moved():
    """One small step raises <mixture, movement> for every client: the sign of the paper's derivation."""
    task = task_for()
    method = paper_of(1e-3)
    server, ids = server_of(method, task, drawn=True), torch.arange(N)
    sent = method.send(task, server, ids).tree
    uploads = moved_from(sent)
    merged = method.merge(task, server, ids, uploads, torch.ones(N))
    again = method.send(task, server._replace(mixers=merged.mixers), ids).tree
    gain = inner(tree.sub(again, sent), tree.sub(uploads, sent))
    assert bool((gain > 1e-4).all())


def test_pfedla_step_is_as_long_as_the_gradient_says():
    """To first order the gain of a step is mixer_lr * |J^T movement|^2, and the step itself mixer_lr * J^T movement."""
    task = task_for()
    method = paper_of(1e-4)
    server, ids = server_of(method, task, drawn=True), torch.arange(N)
    sent = method.send(task, server, ids).tree
    uploads = moved_from(sent)
    merged = method.merge(task, server, ids, uploads, torch.ones(N))
    step = tree.sub(merged.mixers, server.mixers)
    again = method.send(task, server._replace(mixers=merged.mixers), ids).tree
    gain = inner(tree.sub(again, sent), tree.sub(uploads, sent))
    torch.testing.assert_close(gain, inner(step, step) / 1e-4, rtol=0.05, atol=0)


@pytest.mark.parametrize("drawn", [False, True])
def test_pfedla_step_of_the_logits_is_the_closed_form(drawn):
    """The output bias adds to the logits: it moves by lr * weight_j * <model_j - mixture, movement> of the layer."""
    task = task_for()
    method = paper_of()
    server, ids = server_of(method, task, drawn=drawn), torch.tensor([3, 1])
    weights, sent = weights_of(method, server, ids), method.send(task, server, ids).tree
    uploads = moved_from(sent)
    merged = method.merge(task, server, ids, uploads, torch.ones(2))
    for place, client in enumerate(ids.tolist()):
        for layer, names in enumerate(LAYERS.values()):
            for j in range(N):
                towards = sum(
                    ((server.models[n][j] - sent[n][place]) * (uploads[n][place] - sent[n][place])).sum() for n in names
                )
                step = merged.mixers["output.bias"][client, layer, j] - server.mixers["output.bias"][client, layer, j]
                torch.testing.assert_close(step, 0.5 * weights[place, layer, j] * towards, rtol=1e-4, atol=1e-5)


def test_pfedla_step_of_the_output_weights_is_that_of_the_logits_times_the_hidden_layer():
    task = task_for()
    method = paper_of()
    server, ids = server_of(method, task), torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    mixers = method.merge(task, server, ids, uploads, torch.ones(N)).mixers
    hidden = server.mixers["embedding"]
    for k in range(3):
        weight, bias = server.mixers[f"hidden{k}.weight"], server.mixers[f"hidden{k}.bias"]
        hidden = torch.relu((weight @ hidden.unsqueeze(-1)).squeeze(-1) + bias)
    torch.testing.assert_close(mixers["output.weight"], mixers["output.bias"].unsqueeze(-1) * hidden[:, None, None])


@BOTH
def test_pfedla_step_reaches_embedding_and_hidden_layers(method):
    task = task_for()
    server, ids = server_of(method, task, drawn=True), torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    mixers = method.merge(task, server, ids, uploads, torch.ones(N)).mixers
    for name in mixers:
        assert not torch.equal(mixers[name], server.mixers[name])


def test_pfedla_with_layer_mean_divides_movements_by_the_size_of_the_layer():
    task = task_for()
    plain, divided = (paper_of(layer_mean=flag) for flag in (False, True))
    server, ids = server_of(plain, task), torch.arange(N)
    uploads = moved_from(plain.send(task, server, ids).tree)
    whole, part = (m.merge(task, server, ids, uploads, torch.ones(N)).mixers["output.bias"] for m in (plain, divided))
    torch.testing.assert_close(part[:, 0] * (4 * 6 + 6), whole[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(part[:, 1] * (6 * 3 + 3), whole[:, 1], rtol=1e-4, atol=1e-5)


@BOTH
def test_pfedla_does_not_move_the_mixers_of_clients_that_did_not_move(method):
    task = task_for()
    server, ids = server_of(method, task, drawn=True), torch.arange(N)
    sent = method.send(task, server, ids).tree
    assert_same(method.merge(task, server, ids, sent, torch.ones(N)).mixers, server.mixers)


@BOTH
def test_pfedla_mixers_do_not_see_the_number_of_rows(method):
    task = task_for()
    server, ids = server_of(method, task), torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    one, other = (method.merge(task, server, ids, uploads, torch.tensor(s)) for s in ([1, 1, 1, 1], [1, 2, 3, 9]))
    assert_same(one, other)


# The step in units, and Adam


def gradients_by_hand(server, client, upload):
    """How a client's mixer raises <mixture, change of unit length by the spread of clients>, summed over layers."""
    mixer = {name: x[client].clone().requires_grad_() for name, x in server.mixers.items()}
    hidden = mixer["embedding"]
    for k in range(3):
        hidden = torch.relu(mixer[f"hidden{k}.weight"] @ hidden + mixer[f"hidden{k}.bias"])
    weights = (mixer["output.weight"] @ hidden + mixer["output.bias"]).softmax(-1)
    total = torch.zeros(())
    for layer, names in enumerate(LAYERS.values()):
        models = torch.cat([server.models[name].flatten(1) for name in names], 1)
        mixture = weights[layer] @ models
        here = mixture.detach()
        change = torch.cat([upload[name].flatten() for name in names]) - here
        spread = (models - here).square().sum(1).mean().sqrt()
        total = total + mixture @ (change / change.norm() / spread)
    return dict(zip(mixer, torch.autograd.grad(total, list(mixer.values())), strict=True))


def in_double(server):
    """Numbers of double precision, so that what differs in more than the last digits is wrong."""
    return tree.map(lambda x: x.double(), server)


@pytest.mark.parametrize("length", [3.0, 3e-3])
def test_pfedla_unit_makes_steps_of_one_size_however_far_a_client_moved(length):
    """Two clients at +2 and -2 in one number: a spread of 2. Half of it, over that, times the rate of 0.5 is 0.25."""
    task = task_for()
    method = PFedLA(width=6, mixer_lr=0.5, mixer_optimizer="sgd", unit=True)
    server, ids = server_of(method, task, 2), torch.arange(2)
    models, uploads = tree.zeros_like(server.models), tree.zeros_like(server.models)
    models["hidden.bias"][:, 3] = torch.tensor([2.0, -2.0])
    uploads["hidden.bias"][:, 3] = length
    uploads["head.bias"][:, 1] = length  # in the head all clients are equal: no step
    merged = method.merge(task, server._replace(models=models), ids, uploads, torch.ones(2))
    expected = torch.tensor([[[0.25, -0.25], [0.0, 0.0]]] * 2)
    torch.testing.assert_close(merged.mixers["output.bias"], expected)


def test_pfedla_unit_is_a_plain_step_along_the_change_in_units():
    task = task_for()
    method = PFedLA(width=6, mixer_lr=0.5, mixer_optimizer="sgd", unit=True)
    server, ids = in_double(server_of(method, task, drawn=True)), torch.tensor([3, 1])
    uploads = moved_from(method.send(task, server, ids).tree)
    merged = method.merge(task, server, ids, uploads, torch.ones(2))
    for place, client in enumerate(ids.tolist()):
        upwards = gradients_by_hand(server, client, tree.row(uploads, place))
        expected = {name: x[client] + 0.5 * upwards[name] for name, x in server.mixers.items()}
        torch.testing.assert_close(tree.row(merged.mixers, client), expected)


def test_pfedla_with_unit_layer_mean_makes_no_difference():
    task = task_for()
    plain, divided = (
        PFedLA(width=6, mixer_lr=0.5, mixer_optimizer="sgd", unit=True, layer_mean=flag) for flag in (False, True)
    )
    server, ids = server_of(plain, task, drawn=True), torch.arange(N)
    uploads = moved_from(plain.send(task, server, ids).tree)
    one, other = (m.merge(task, server, ids, uploads, torch.ones(N)).mixers for m in (plain, divided))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert float((one["output.bias"] - server.mixers["output.bias"]).abs().max()) > 0.01


def test_pfedla_adam_is_that_of_torch_for_each_client_with_a_count_of_its_own():
    """Four rounds of unlike cohorts; client 2 takes part in none of them."""
    task, method = task_for(), adam_of(0.01)
    server = start = in_double(server_of(method, task, drawn=True))
    mixers = [{name: x[i].clone().requires_grad_() for name, x in server.mixers.items()} for i in range(N)]
    solvers = [torch.optim.Adam(mixers[i].values(), lr=0.01, eps=SERVER_EPSILON, maximize=True) for i in range(N)]
    for round, cohort in enumerate(([3, 1], [1], [1, 0], [3, 1])):
        ids = torch.tensor(cohort)
        uploads = moved_from(method.send(task, server, ids).tree, 50 + round)
        for place, client in enumerate(cohort):
            upwards = gradients_by_hand(server, client, tree.row(uploads, place))
            for name, x in mixers[client].items():
                x.grad = upwards[name]
            solvers[client].step()
        server = method.merge(task, server, ids, uploads, torch.ones(len(cohort)))
        torch.testing.assert_close(server.mixers, tree.detach(tree.stack(mixers)), rtol=1e-6, atol=1e-8)
    assert server.steps.tolist() == [1, 4, 0, 2]
    assert_same(tree.row(server, 2), tree.row(start, 2))
    assert not any(x[2].any() for x in [*server.first.values(), *server.second.values()])
    assert all(bool(x[i].any()) for x in server.first.values() for i in (0, 1, 3))


def test_pfedla_first_step_of_adam_is_as_long_as_its_rate():
    """Where the gradient is far above 1e-5, as that of the output bias is here."""
    task, method = task_for(), adam_of(0.01)
    server, ids = server_of(method, task), torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    steps = method.merge(task, server, ids, uploads, torch.ones(N)).mixers["output.bias"]
    torch.testing.assert_close(steps.abs(), torch.full((N, 2, N), 0.01), rtol=0.02, atol=0)
    assert steps.sign().unique().tolist() == [-1, 1]


def test_pfedla_adam_moves_the_mixture_the_way_clients_moved():
    """One small step raises what it climbs, for every client: changes in units."""
    task, method = task_for(), adam_of(1e-4)
    server, ids = in_double(server_of(method, task, drawn=True)), torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    merged = method.merge(task, server, ids, uploads, torch.ones(N))
    for client in range(N):
        upwards = gradients_by_hand(server, client, tree.row(uploads, client))
        step = tree.sub(tree.row(merged.mixers, client), tree.row(server.mixers, client))
        assert float(tree.dot(step, upwards)) > 1e-5


def test_pfedla_without_adam_keeps_no_moments():
    task = task_for()
    method = paper_of()
    server, ids = server_of(method, task), torch.arange(N)
    merged = method.merge(task, server, ids, moved_from(method.send(task, server, ids).tree), torch.ones(N))
    assert merged.first == merged.second == {}
    assert merged.steps.tolist() == [0] * N


# Models that are equal, or alone


@BOTH
def test_pfedla_with_equal_models_gets_no_gradient(method):
    """With weights of 1/4 and whole numbers everything is exact: the mixers do not move by a bit."""
    task = task_for()
    server, ids = server_of(method, task), torch.arange(N)
    whole = {name: (8 * x).round() for name, x in moved(task.initial, 1).items()}
    server = server._replace(models=tree.repeat(whole, N))
    sent = method.send(task, server, ids).tree
    assert_same(sent, server.models)
    uploads = tree.map(lambda x: x + torch.arange(x.numel()).reshape(x.shape) % 5, sent)
    assert_same(method.merge(task, server, ids, uploads, torch.ones(N)).mixers, server.mixers)


def test_pfedla_takes_no_step_in_units_where_models_differ_by_rounding_alone():
    task, method = task_for(), adam_of()
    server, ids = server_of(method, task, drawn=True), torch.arange(N)
    server = server._replace(models=tree.repeat(moved(task.initial, 1), N))
    sent = method.send(task, server, ids).tree
    assert not torch.equal(sent["hidden.weight"], server.models["hidden.weight"])
    assert_same(method.merge(task, server, ids, moved_from(sent), torch.ones(N)).mixers, server.mixers)


def test_pfedla_with_equal_models_sends_that_model_whatever_the_weights():
    task = task_for()
    method = PFedLA(width=6)
    server = server_of(method, task, drawn=True)
    server = server._replace(models=tree.repeat(moved(task.initial, 1), N))
    assert float(weights_of(method, server, torch.arange(N)).std()) > 0.01
    assert_close(method.send(task, server, torch.arange(N)).tree, server.models)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_pfedla_with_one_client_is_local(model):
    split = small_split((31,))
    one, other = (played(run_of(name, model, split=split, executor="one_by_one"), 3) for name in ("pfedla", "local"))
    assert_same(one.personal_model(0), other.personal_model(0))


def test_pfedla_with_one_client_never_moves_its_mixer():
    run = run_of("pfedla", split=small_split((31,)), executor="one_by_one", settings={"mixer_lr": 1.0})
    before = run.state.server.mixers
    assert_same(played(run, 3).state.server.mixers, before)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_pfedla_with_all_weight_on_oneself_is_local(model):
    one = played(run_of("pfedla", model, settings={"self_bias": 1e4}, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    for client in range(len(SIZES)):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_pfedla_with_fixed_uniform_weights_sends_everyone_the_plain_mean():
    one = played(run_of("pfedla", settings={"mixer_lr": 0.0}, executor="one_by_one"), 3)
    other = played(run_of("fedavg", settings={"weights": "uniform"}, executor="one_by_one"), 3)
    for client in range(len(SIZES)):
        assert_close(one.personal_model(client), other.state.server)


# Rounds: who changes, and when


def test_pfedla_weights_sum_to_one_after_any_number_of_rounds():
    run = played(run_of("pfedla", participation=0.5, settings={"mixer_lr": 20.0}, executor="one_by_one"), 4)
    weights = run.state.scene.method.host.weights(run.state.server.mixers, EVERYONE)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(SIZES), 2))
    assert float(weights.min()) >= 0 and float(weights.std()) > 0.01


def test_pfedla_mixers_and_models_of_clients_that_sit_out_stay():
    run = run_of("pfedla", participation=0.5, executor="one_by_one")
    try:
        run.play_round()
        before = run.state.server
        chosen = run.state.cohort(run.state.round)
        run.play_round()
    finally:
        run.close()
    others = torch.tensor([i for i in range(len(SIZES)) if i not in chosen])
    assert len(others) == 3
    assert_same(tree.rows(run.state.server, others), tree.rows(before, others))
    for name in ("output.weight", "output.bias"):
        assert not torch.equal(run.state.server.mixers[name][chosen], before.mixers[name][chosen])


def test_pfedla_stores_the_model_that_the_client_holds():
    """What it received and its movement: what it uploaded, not its old model and its movement."""
    task = task_for()
    method = PFedLA(width=6)
    server, ids = server_of(method, task), torch.tensor([3, 1])
    uploads = moved_from(method.send(task, server, ids).tree)
    merged = method.merge(task, server, ids, uploads, torch.ones(2))
    assert_same(tree.rows(merged.models, ids), uploads)


def test_pfedla_sends_the_last_model_of_a_client_that_sat_out():
    task = task_for()
    method = PFedLA(width=6, mixer_lr=0.0)
    server, ids = server_of(method, task), torch.tensor([3, 1])
    uploads = moved_from(method.send(task, server, ids).tree)
    merged = method.merge(task, server, ids, uploads, torch.ones(2))
    sent = tree.row(method.send(task, merged, torch.tensor([0])).tree, 0)
    expected = {name: (x[0] + x[2] + uploads[name].sum(0)) / 4 for name, x in server.models.items()}
    assert_close(sent, expected)


@BOTH
def test_pfedla_result_does_not_depend_on_the_order_of_the_cohort(method):
    task = task_for()
    server = server_of(method, task, drawn=True)
    ids, back = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    sent = method.send(task, server, ids).tree
    uploads = moved_from(sent)
    one = method.merge(task, server, ids, uploads, torch.ones(3))
    other = method.merge(task, server, ids[back], tree.rows(uploads, back), torch.ones(3))
    assert_same(one.models, other.models)
    for name in one.mixers:
        torch.testing.assert_close(one.mixers[name], other.mixers[name])


@BOTH
def test_pfedla_mixers_learn_from_the_models_that_were_mixed_and_not_from_new_ones(method):
    """A client's mixer moves alike whether others of its cohort upload something new or not."""
    task = task_for()
    server = server_of(method, task, drawn=True)
    together, alone = torch.tensor([0, 2]), torch.tensor([2])
    uploads = moved_from(method.send(task, server, together).tree)
    both = method.merge(task, server, together, uploads, torch.ones(2)).mixers
    only = method.merge(task, server, alone, tree.rows(uploads, torch.tensor([1])), torch.ones(1)).mixers
    torch.testing.assert_close(tree.row(both, 2), tree.row(only, 2))


# The map of public code


def relu_server(task, bias):
    """A server whose logits are the given output bias."""
    method = paper_of(alpha_map="relu_norm")
    server = server_of(method, task)
    zero = torch.zeros_like(server.mixers["output.weight"])
    return method, server._replace(mixers=server.mixers | {"output.weight": zero, "output.bias": bias})


def test_pfedla_relu_norm_divides_what_is_positive_by_its_sum():
    bias = torch.tensor([1.0, -2.0, 3.0, 0.0]).expand(N, 2, N).clone()
    method, server = relu_server(task_for(), bias)
    weights = weights_of(method, server, torch.tensor([1]))
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.25, 0.0, 0.75, 0.0]))


def test_pfedla_relu_norm_falls_back_to_oneself_where_all_is_dead():
    bias = torch.ones(N, 2, N)
    bias[2, 1] = -1.0  # the head of client 2 alone is dead
    method, server = relu_server(task_for(), bias)
    ids = torch.tensor([3, 2])
    weights = weights_of(method, server, ids)
    assert weights[1, 1].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert weights[1, 0].tolist() == weights[0, 1].tolist() == [0.25] * 4
    sent = method.send(task_for(), server, ids).tree
    assert torch.equal(sent["head.weight"][1], server.models["head.weight"][2])


def test_pfedla_relu_norm_gives_dead_layers_no_gradient():
    task = task_for()
    bias = torch.ones(N, 2, N)
    bias[2, 1] = -1.0
    method, server = relu_server(task, bias)
    ids = torch.arange(N)
    uploads = moved_from(method.send(task, server, ids).tree)
    mixers = method.merge(task, server, ids, uploads, torch.ones(N)).mixers
    assert torch.equal(mixers["output.bias"][2, 1], bias[2, 1])
    assert all(bool(x.isfinite().all()) for x in mixers.values())
    assert not torch.equal(mixers["output.bias"][2, 0], bias[2, 0])


def test_pfedla_relu_norm_starts_with_positive_weights():
    task = task_for()
    method = PFedLA(width=6, alpha_map="relu_norm")
    weights = weights_of(method, server_of(method, task), torch.arange(N))
    assert float(weights.min()) > 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, 2))


# As it is without settings


class Seen(plures.Callback):
    """Keeps the state of a run, to look at what the server has at its end."""

    def started(self, state):
        self.state = state


def run_on_digits(method, partition):
    """The mean accuracy of personal models, and the largest distance of each client's weights from equal ones."""
    seen = Seen()
    result = plures.run(method, data="digits", partition=partition, rounds=30, eval_every=0, callback=seen)
    host, n = seen.state.scene.method.host, 20
    weights = host.weights(seen.state.server.mixers, torch.arange(n))
    assert weights.shape == (n, 2, n)
    return result.summary["personal"]["mean"], (weights - 1 / n).abs().amax((1, 2))


@pytest.mark.parametrize("partition", [None, "labels:4"])
def test_pfedla_learns_weights_that_are_not_equal_and_beats_fedavg(partition):
    fedavg, local = (
        plures.run(name, data="digits", partition=partition, rounds=30, eval_every=0).summary["personal"]["mean"]
        for name in ("fedavg", "local")
    )
    mean, far = run_on_digits("pfedla", partition)
    assert int((far > 0.05).sum()) > 10  # of 20 clients
    assert mean > fedavg
    assert mean > local - 0.01


def test_pfedla_with_plain_steps_at_the_rate_of_public_code_keeps_equal_weights():
    _, far = run_on_digits("pfedla:mixer_optimizer=sgd,unit=false,mixer_lr=0.005", "labels:4")
    assert 0 < float(far.max()) < 0.001


# BatchNorm and the wire


def test_pfedla_statistics_stay_with_the_client():
    run = played(run_of("pfedla", "norm", executor="one_by_one"), 2)
    sent = run.state.scene.method.send(run.state.scene.task, run.state.server, torch.tensor([4])).tree
    kept = tree.row(run.state.store.rows(torch.tensor([4])), 0).kept
    assert (
        set(kept)
        == set(run.state.scene.task.initial) - set(sent)
        == {n for n in run.state.scene.task.initial if "running" in n}
    )
    personal = run.personal_model(4)
    assert_same(tree.keep(personal, tree.is_statistic), kept)
    assert differs(kept, tree.row(run.state.store.rows(torch.tensor([5])), 0).kept)


def test_pfedla_personal_model_is_the_received_mixture():
    run = played(run_of("pfedla", executor="one_by_one"), 2)
    sent = run.state.scene.method.send(run.state.scene.task, run.state.server, EVERYONE).tree
    for client in range(len(SIZES)):
        assert_close(run.personal_model(client), tree.row(sent, client))


def test_pfedla_moves_the_bytes_of_the_papers_table():
    """EMNIST with ten classes, 75 rounds of 10 clients, no layer kept: 491.08 MiB."""
    task = Task(HnCnn((1, 28, 28), 10), torch.zeros(1, 28, 28), 10)
    method = pfedla()
    federation = Federation(torch.ones(2, dtype=torch.long), torch.tensor(5))
    message = tree.row(method.send(task, method.init_server(task, task.initial, federation), torch.tensor([0])).tree, 0)
    down, up = method.n_bytes(None, message, message)
    assert down == up == 4 * 85822
    assert round(750 * (down + up) / 2**20, 2) == 491.08


def test_pfedla_has_no_model_for_all():
    task = task_for()
    assert pfedla().generic(task, server_of(PFedLA(), task)) is None
