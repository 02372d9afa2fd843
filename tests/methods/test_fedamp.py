import math

import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.methods.addons.feddyn import FedDyn
from plures.methods.addons.prox import Prox
from plures.methods.addons.scaffold import Scaffold
from plures.methods.base import AddonTerms, Federation
from plures.methods.fedamp import FedAMP, FedAMPClient, FedAMPServer
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
from tests.small import SIZES, played, run_of, small_split

EVERYONE = torch.arange(len(SIZES))


def amp_of(pull: float = 0.1, start: str = "mixture", **solver) -> FedAMP:
    return FedAMP(solver_of(**solver), pull=pull, start=start)


def models_of(task, n: int = 4):
    return tree.stack([moved(task.initial, seed) for seed in range(n)])


def points(*values):
    return {"w": torch.tensor(values, dtype=torch.float64)}


def server_of(models, seen=None) -> FedAMPServer:
    """A server with these models; without `seen` all clients have trained."""
    n = len(next(iter(models.values())))
    return FedAMPServer(models, torch.ones(n) if seen is None else torch.tensor(seen))


def weights_of(method, models, seen=None):
    return method.weights(*server_of(models, seen))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_without_pull_and_from_its_own_model_fedamp_is_local_bit_for_bit(model):
    one = played(run_of("fedamp:pull=0,start=own", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    assert_same(one.state.store.rows(EVERYONE).model, other.state.store.rows(EVERYONE).model)


@pytest.mark.parametrize("kernel", ["gauss", "cosine"])
def test_equal_models_are_mixed_to_themselves(kernel):
    task = task_of(Normed)
    server = server_of(tree.repeat(moved(task.initial, 1), 5))
    mixed = FedAMP(kernel=kernel).send(task, server, torch.arange(5)).tree
    torch.testing.assert_close(mixed, server.models, rtol=0, atol=1e-14)


def test_a_wide_kernel_mixes_to_the_mean_and_a_narrow_one_to_the_own_model():
    task = task_of(Dense)
    server = server_of(models_of(task, 5))
    wide, narrow = (FedAMP(sigma=sigma).send(task, server, torch.arange(5)).tree for sigma in (1e12, 1e-12))
    mean = tree.map(lambda x: x.mean(0, keepdim=True).expand_as(x), server.models)
    torch.testing.assert_close(wide, mean, rtol=0, atol=1e-10)
    assert_same(narrow, server.models)


@pytest.mark.parametrize("kernel", ["gauss", "cosine"])
@pytest.mark.parametrize("sigma", [1e-3, 0.3, 1.0, 1e6])
def test_weights_of_a_client_sum_to_one_and_none_is_negative(kernel, sigma):
    task = task_of(Dense)
    sharpness = min(sigma, 100.0)
    for n in (1, 2, 7):
        weights = weights_of(FedAMP(kernel=kernel, sigma=sharpness), models_of(task, n))
        torch.testing.assert_close(weights.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-12)
        assert bool((weights >= 0).all())


@pytest.mark.parametrize(("sigma", "share"), [(1.0, 1.0), (0.5, 0.75)])
def test_gauss_weights_are_those_worked_by_hand(sigma, share):
    """Models at 0, 1 and 3: squared distances 1, 9 and 4, each twice, whose (lower) median is 4."""
    found = weights_of(FedAMP(sigma=sigma, share=share), points([0.0], [1.0], [3.0]))
    near = {1: math.exp(-1 / (4 * sigma)), 4: math.exp(-4 / (4 * sigma)), 9: math.exp(-9 / (4 * sigma))}
    a = share / 3
    expected = [
        [1 - a * (near[1] + near[9]), a * near[1], a * near[9]],
        [a * near[1], 1 - a * (near[1] + near[4]), a * near[4]],
        [a * near[9], a * near[4], 1 - a * (near[9] + near[4])],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_cosine_weights_are_those_worked_by_hand():
    """Models (1, 0), (0, 2) and (3, 3): the first has cosines 0 and 1/sqrt 2 with the others."""
    method = FedAMP(kernel="cosine", sigma=2.0, self_weight=0.4)
    found = weights_of(method, points([1.0, 0.0], [0.0, 2.0], [3.0, 3.0]))
    far, near = 1.0, math.exp(2 / 2**0.5)
    first = [0.4, 0.6 * far / (far + near), 0.6 * near / (far + near)]
    assert found[0].tolist() == pytest.approx(first, rel=1e-9)
    assert found[2].tolist() == pytest.approx([0.3, 0.3, 0.4], rel=1e-9)


def test_models_are_mixed_by_the_weights_statistics_too_though_these_count_for_no_distance():
    task = task_of(Normed)
    models = models_of(task, 4)
    weights = weights_of(FedAMP(), models)
    mixed = FedAMP().send(task, server_of(models), torch.tensor([2, 0])).tree
    for row, client in enumerate((2, 0)):
        expected = tree.map(lambda x, k=client: sum(weights[k, j] * x[j] for j in range(4)), models)
        assert_close(tree.row(mixed, row), expected)
    elsewhere = models | {name: x + 7 for name, x in statistics(models).items()}
    assert torch.equal(weights_of(FedAMP(), elsewhere), weights)
    assert set(statistics(mixed)) == {"norm.running_mean", "norm.running_var"}


def held_near(anchor, pull):
    return lambda module: pull / 2 * sum((p - anchor[name]).square().sum() for name, p in module.named_parameters())


@pytest.mark.parametrize("make", [Dense, Normed])
@pytest.mark.parametrize("start", ["mixture", "own"])
def test_a_client_equals_torch_optim_held_near_the_mixture(make, start):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task)
    client, upload, _ = amp_of(0.75, start, epochs=2).train(task, received, FedAMPClient(own), shard)
    begun = received if start == "mixture" else own
    assert_close(upload, trained(make, begun, batches(shard, 2), held_near(received, 0.75)))
    assert_same(client.model, upload)


def test_the_pull_is_live_and_on_the_square_of_the_distance():
    """The minimum of (w - 5)^2/2 + 3/2 (w - 1)^2 is (5 + 3) / 4; public code has penalties without effect."""
    client = FedAMPClient({"w": torch.zeros(1)})
    _, upload, _ = amp_of(3.0, lr=0.2, steps=60).train(Bowl(), {"w": torch.ones(1)}, client, bowl_at(5.0))
    torch.testing.assert_close(upload["w"], torch.tensor([2.0]))


def test_a_worn_start_comes_before_the_own_one_and_a_worn_pull_beside_the_own_pull():
    """From 3 with centre 5, lr 0.5, anchor 1, penalties 1 and 2: 3 - 0.5 (-2 + 3 * 2)."""
    client, received = FedAMPClient({"w": torch.tensor([9.0])}), {"w": torch.ones(1)}
    method = Prox(host=amp_of(1.0, "own", lr=0.5, steps=1), mu=2.0)
    for terms, start in ((AddonTerms(start={"w": torch.tensor([3.0])}), 3), (AddonTerms(), 9)):
        _, upload, _ = method.train(Bowl(), received, client, bowl_at(5.0), terms)
        assert float(upload["w"]) == start - 0.5 * (start - 5 + 3 * (start - 1))


def test_a_client_that_sits_out_counts_with_its_last_model():
    server = server_of(points([0.0], [1.0], [3.0]), [0.0, 1.0, 0.0])
    ids, uploads = torch.tensor([2, 0]), points([5.0], [-1.0])
    new = FedAMP().merge(None, server, ids, uploads, torch.tensor([1, 9]))
    assert new.models["w"].tolist() == [[-1.0], [1.0], [5.0]] and new.seen.tolist() == [1.0] * 3


@pytest.mark.parametrize("kernel", ["gauss", "cosine"])
def test_a_client_that_never_trained_changes_neither_the_mixtures_of_others_nor_the_median(kernel):
    """Client 1 of four, wherever its model is: the others' weights are those worked without it, for a = 1/4."""
    method = FedAMP(kernel=kernel, sigma=0.5)
    for place in ([1.0, 1.0], [6.0, -3.0]):
        found = weights_of(method, points([0.0, 1.0], place, [1.0, 2.0], [3.0, 0.0]), [1.0, 0.0, 1.0, 1.0])
        assert found[:, 1].tolist() == [0.0] * 4
        if kernel == "gauss":  # squared distances 2, 8 and 10, whose median is 8
            to_second, to_third = math.exp(-2 / 4) / 4, math.exp(-10 / 4) / 4
        else:  # cosines 2 / sqrt 5 and 0
            near = math.exp(0.5 * 2 / 5**0.5)
            to_second, to_third = 0.5 * near / (near + 1), 0.5 / (near + 1)
        first = [1 - to_second - to_third, 0.0, to_second, to_third]
        assert found[0].tolist() == pytest.approx(first, rel=1e-9)


def test_a_client_that_never_trained_gets_the_others_without_its_own_model():
    """From 0, models at 1 and 3, whose squared distance is 4: exp(-1/4) to exp(-9/4), divided by their sum."""
    found = weights_of(FedAMP(), points([0.0], [1.0], [3.0]), [0.0, 1.0, 1.0])[0].tolist()
    near, far = math.exp(-1 / 4), math.exp(-9 / 4)
    assert found == pytest.approx([0.0, near / (near + far), far / (near + far)], rel=1e-9)
    assert weights_of(FedAMP(), points([0.0], [1.0], [3.0]), [0.0, 0.0, 1.0]).tolist() == [[0.0, 0.0, 1.0]] * 3
    assert weights_of(FedAMP(), points([0.0], [1.0], [3.0]), [0.0] * 3).tolist() == torch.eye(3).tolist()


def test_the_personal_model_is_the_trained_one_and_there_is_none_for_all():
    run = run_of("fedamp", participation=0.5, executor="one_by_one")
    took_part = sorted({*run.state.cohort(0), *run.state.cohort(1)})
    played(run, 2)
    for client in took_part:
        own = tree.row(run.state.store.rows(torch.tensor([client])).model, 0)
        assert_same(run.personal_model(client), own)
        assert_same(tree.row(run.state.server.models, client), own)
    assert run.state.server.seen.nonzero().flatten().tolist() == took_part != list(range(6))
    assert run.state.scene.method.generic(run.state.scene.task, run.state.server) is None


def test_every_client_begins_with_the_common_start_and_gets_it():
    task = task_of(Dense)
    method = FedAMP()
    server = method.init_server(task, task.initial, Federation(torch.ones(3), torch.tensor(0)))
    sent = method.send(task, server, torch.arange(3)).tree
    for i in range(3):
        assert_close(tree.row(sent, i), task.initial)
    assert_close(method.newcomer(task, server), task.initial)


def test_likeness_draws_models_together():
    """Of models at 0, 0.1 and 5 the first two give each other more than the third."""
    weights = weights_of(FedAMP(), points([0.0], [0.1], [5.0]))
    assert float(weights[0, 1]) > 2 * float(weights[0, 2]) and float(weights[2, 2]) > 0.7


def test_one_client_is_alone():
    run = played(run_of("fedamp", split=small_split((31,)), executor="one_by_one"), 2)
    assert weights_of(FedAMP(), points([4.0])).tolist() == [[1.0]]
    assert differs(run.personal_model(0), run.state.scene.task.initial)


@pytest.mark.parametrize("addon", [Scaffold, FedDyn])
def test_fedamp_cannot_take_what_needs_one_model_for_all(addon):
    with pytest.raises(UsageError):
        addon(host=FedAMP())


def test_weights_of_many_models_that_are_close_are_right():
    """Distances by products of models would lose digits."""
    rng = torch.Generator().manual_seed(0)
    models = 0.3 * torch.randn(2000, generator=rng) + 1e-3 * torch.randn(40, 2000, generator=rng)
    squares = (models[:, None].double() - models[None].double()).square().sum(-1)
    off = ~torch.eye(40, dtype=torch.bool)
    expected = torch.exp(-squares / squares[off].median())[off] / 40
    torch.testing.assert_close(weights_of(FedAMP(), {"w": models})[off].double(), expected, rtol=1e-3, atol=0)


def test_who_never_trained_gets_the_others_however_far_they_are():
    """With exponents of -400 and below their kernels are zero; only their differences count."""
    weights = FedAMP().weights({"w": torch.tensor([[0.0], [20.0], [21.0], [22.0]])}, torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert weights[0, 0] == 0 and weights[0, 1] > 0.99
    torch.testing.assert_close(weights.sum(1), torch.ones(4))


def test_a_new_client_gets_the_mean_of_the_models_that_were_trained():
    server = FedAMPServer({"w": torch.tensor([0.0, 3.0, 6.0])}, torch.tensor([0.0, 1.0, 1.0]))
    assert float(FedAMP().newcomer(None, server)["w"]) == 4.5
    assert float(FedAMP().newcomer(None, server._replace(seen=torch.zeros(3)))["w"]) == 3.0
