import numpy as np
import pytest
import torch
from torch.nn import functional as F

from plures import seeds, tree
from plures.data.batches import batches_per_epoch, plan_batches
from plures.methods.partialfed import PartialFed, PartialFedClient
from tests.methods.plain import (
    BATCH,
    Dense,
    Normed,
    assert_close,
    assert_same,
    batches,
    differs,
    module_of,
    moved,
    shard_for,
    solver_of,
    task_of,
    trained,
)
from tests.small import SIZES, played, run_of

EVERYONE = torch.arange(len(SIZES))
HEAD = {"head.weight", "head.bias"}
GLOBAL, OWN = (1.0, 0.0), (0.0, 1.0)


def partial_of(warm_up: int = 0, logits_lr: float = 0.1, strategy: str = "adaptive", temperature=1.0, **solver):
    return PartialFed(
        solver_of(**solver), warm_up=warm_up, logits_lr=logits_lr, strategy=strategy, temperature=temperature
    )


def client_of(model, *logits, rounds: int = 9) -> PartialFedClient:
    return PartialFedClient(model, torch.tensor(logits), torch.tensor(rounds))


def rows_for(shard):
    """The rows that the model and that the choice is trained on."""
    return shard.fixed_split(0.8, "choice of layers")


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("spec", ["partialfed:strategy=global", "partialfed:warm_up=3"])
def test_with_all_layers_loaded_partialfed_is_fedavg_bit_for_bit(model, spec):
    """By a fixed choice, and in all rounds of warming up."""
    options = {"participation": 0.5, "executor": "one_by_one"}
    one, other = (played(run_of(name, model, **options), 3) for name in (spec, "fedavg"))
    assert_same(one.state.server, other.state.server)
    assert_same(one.personal_model(5), other.personal_model(5))


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_with_all_layers_kept_partialfed_is_local_bit_for_bit(model):
    one = played(run_of("partialfed:strategy=local", model, executor="one_by_one"), 3)
    other = played(run_of("local", model, executor="one_by_one"), 3)
    for client in range(6):
        assert_same(one.personal_model(client), other.personal_model(client))


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize(("strategy", "other"), [("head", "fedper"), ("batch-norm", "fedbn")])
def test_with_head_or_batch_norm_kept_partialfed_is_fedper_or_fedbn_bit_for_bit(model, strategy, other):
    options = {"participation": 0.5, "executor": "one_by_one"}
    one = played(run_of(f"partialfed:strategy={strategy}", model, **options), 3)
    other = played(run_of(other, model, **options), 3)
    assert_same({name: one.state.server[name] for name in other.state.server}, other.state.server)
    for client in (0, 3, 5):
        assert_same(one.personal_model(client), other.personal_model(client))


def test_each_layer_is_loaded_or_kept_by_the_larger_logit():
    """Three layers, BatchNorm one of them; the choice holds for all tensors of a layer, statistics too."""
    task = task_of(Normed)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=31)
    client = client_of(own, GLOBAL, OWN, GLOBAL)
    start = {name: own[name] if name.startswith("norm.") else x for name, x in received.items()}
    method = partial_of(logits_lr=0.0)
    assert_same(method.personalize(task, received, client, shard), start)
    new, upload, _ = method.train(task, received, client, shard)
    assert_close(upload, trained(Normed, start, batches(rows_for(shard)[0])))
    assert_same(new.model, upload)
    assert list(task.layers) == ["hidden", "norm", "head"]


def test_equal_logits_load_the_received_layer():
    task = task_of(Dense)
    received, own = moved(task.initial, 1), moved(task.initial, 2)
    client = client_of(own, (0.0, 0.0), (0.5, 0.5))
    assert_same(partial_of().personalize(task, received, client, shard_for(task)), received)


def test_while_warming_up_logits_count_for_nothing():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=31)
    client = client_of(own, OWN, OWN, rounds=4)
    method = partial_of(warm_up=5)
    assert_same(method.personalize(task, received, client, shard), received)
    new, upload, _ = method.train(task, received, client, shard)
    assert_close(upload, trained(Dense, received, batches(shard)))  # all rows
    assert new.logits.tolist() == [[0.0, 1.0], [0.0, 1.0]] and int(new.rounds) == 5


def test_rows_of_the_choice_and_of_the_model_share_none_and_are_the_same_in_all_rounds():
    task = task_of(Dense)
    found = []
    for round in range(3):
        for_model, for_choice = rows_for(shard_for(task, n=31, round=round))
        found.append([part.rows[: int(part.size)].tolist() for part in (for_model, for_choice)])
    assert all(part == found[0] for part in found) and [len(part) for part in found[0]] == [24, 7]
    assert sorted(found[0][0] + found[0][1]) == list(range(31))


def test_the_model_is_not_trained_on_rows_of_the_choice_nor_the_choice_on_rows_of_the_model():
    """Rubbish in the one leaves the other as it was, bit for bit."""
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=31)
    client = client_of(own, (0.3, 0.0), (0.0, 0.3))

    def found(spoilt, logits_lr):
        x = shard.x.clone()
        x[spoilt] = 50.0
        new, upload, _ = partial_of(logits_lr=logits_lr).train(task, received, client, shard._replace(x=x))
        return new.logits, upload

    nothing = torch.zeros(0, dtype=torch.long)
    for_model, for_choice = (part.rows[: int(part.size)] for part in rows_for(shard))
    assert_same(found(for_choice, 0.0)[1], found(nothing, 0.0)[1])
    assert torch.equal(found(for_model, 0.1)[0], found(nothing, 0.1)[0])
    assert not torch.equal(found(for_choice, 0.1)[0], found(nothing, 0.1)[0])
    assert differs(found(for_model, 0.0)[1], found(nothing, 0.0)[1])


def logits_by_hand(make, layers, received, own, logits, shard, lr, temperature):
    """An epoch of straight-through steps: gradients at the hard choice, through the soft one."""
    sizes, smallest = shard.size.reshape(1).numpy(), int(shard.smallest)
    n_steps = batches_per_epoch(sizes, BATCH, smallest, "keep")
    made = plan_batches(
        shard.rows[None].numpy(), sizes, shard.key[None].numpy(), np.array(n_steps), BATCH, smallest, True, "keep"
    )
    for rows, mask, key in zip(made.rows, made.mask, made.keys, strict=True):
        here = rows[mask.bool()]
        lots = seeds.uniform(key, logits.shape).clamp(1e-6, 1 - 1e-6)
        soft = ((logits - torch.log(-torch.log(lots))) / temperature).softmax(1)[:, 1]
        kept = {layer for layer, share in zip(layers, soft, strict=True) if share > 0.5}
        module = module_of(make, {n: own[n] if n.split(".")[0] in kept else x for n, x in received.items()})
        F.cross_entropy(module(shard.x[here]), shard.y[here]).backward()
        gain = dict.fromkeys(layers, 0.0)
        for name, p in module.named_parameters():
            gain[name.split(".")[0]] += float((p.grad * (own[name] - received[name])).sum())
        gradient = torch.tensor(list(gain.values())) * soft * (1 - soft) / temperature
        logits = logits - lr * torch.stack([-gradient, gradient], 1)
    return logits


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("make", [Dense, Normed])
def test_logits_take_straight_through_steps_on_the_rows_of_the_choice(make, temperature):
    task = task_of(make)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=80)
    start = torch.tensor([(0.2, 0.1), (0.0, 0.4), (0.3, 0.0)])[: len(task.layers)]
    client = PartialFedClient(own, start, torch.tensor(9))
    new, _, _ = partial_of(logits_lr=0.25, temperature=temperature).train(task, received, client, shard)
    expected = logits_by_hand(make, list(task.layers), received, own, start, rows_for(shard)[1], 0.25, temperature)
    torch.testing.assert_close(new.logits, expected, rtol=0, atol=1e-5)
    assert float((expected - start).abs().min()) > 1e-3


def test_the_choice_of_a_round_is_by_the_logits_that_it_just_learned():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=80)
    client = client_of(own, (0.0, 0.0), (0.0, 0.0))
    new, upload, _ = partial_of(logits_lr=1.0).train(task, received, client, shard)
    keeps = dict(zip(task.layers, (new.logits[:, 1] > new.logits[:, 0]).tolist(), strict=True))
    assert any(keeps.values())
    start = {name: own[name] if keeps[name.split(".")[0]] else x for name, x in received.items()}
    assert_close(upload, trained(Dense, start, batches(rows_for(shard)[0])))


def test_a_client_with_one_row_trains_its_model_and_learns_no_choice():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=1)
    client = client_of(own, (0.2, 0.1), (0.0, 0.4))
    new, upload, _ = partial_of().train(task, received, client, shard)
    assert torch.equal(new.logits, client.logits)
    start = {name: own[name] if name in HEAD else x for name, x in received.items()}
    assert_close(upload, trained(Dense, start, batches(shard)))


def test_a_fixed_choice_trains_on_all_rows_and_learns_nothing():
    task = task_of(Dense)
    received, own, shard = moved(task.initial, 1), moved(task.initial, 2), shard_for(task, n=31)
    client = client_of(own, OWN, OWN)
    new, upload, _ = partial_of(strategy="global").train(task, received, client, shard)
    assert_close(upload, trained(Dense, received, batches(shard)))
    assert torch.equal(new.logits, client.logits)


def test_clients_begin_with_no_preference_and_keep_their_model_and_logits():
    run = played(run_of("partialfed:warm_up=1", "norm", executor="one_by_one"), 3)
    kept = run.state.store.rows(EVERYONE)
    assert kept.logits.shape == (6, 5, 2) and kept.rounds.tolist() == [3] * 6
    assert not kept.logits[0].any() and kept.logits[5].abs().min() > 0
    assert not run.state.store.initial.logits.any()
    for client in (0, 5):
        whole = run.personal_model(client)
        keeps = (kept.logits[client, :, 1] > kept.logits[client, :, 0]).tolist()
        own = tree.row(kept.model, client)
        for layer, keep in zip(run.state.scene.task.layers, keeps, strict=True):
            for name in run.state.scene.task.layers[layer]:
                assert torch.equal(whole[name], own[name] if keep else run.state.server[name])


def test_partialfed_mean_is_weighted_by_rows():
    stacked = {"w": torch.tensor([1.0, 3.0])}
    for weights, expected in (("samples", 2.5), ("uniform", 2.0)):
        merged = PartialFed(weights=weights).merge(None, {}, torch.arange(2), stacked, torch.tensor([1, 3]))
        assert float(merged["w"]) == expected
