"""Features once: frozen layers that come first are run once for every row, and nothing else changes."""

import numpy as np
import pytest
import torch
from torch import nn

import plures
from plures.cli.doctor import diagnosis
from plures.errors import UsageError
from plures.learn.frozen import Chosen
from plures.learn.lower import Stub
from plures.learn.task import Task
from plures.runs.callbacks import say_nothing
from plures.runs.config import make_config
from plures.runs.predict import outputs
from plures.runs.scene import Objects, make_scene
from plures.runs.simulation import Simulation, open_simulation, settle
from plures.simulate import features
from tests.methods.test_every_method import assert_same_state
from tests.small import played

SMALL = {"clients": 3, "share": 0.1, "partition": "iid", "lr": 0.1, "model": "object:Net", "precision": "float64"}


class Deep(nn.Module):
    """Two convolutions with dropout and BatchNorm, a hidden layer with dropout, and a head."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6)
        self.drop1 = nn.Dropout(0.3)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.hidden, self.drop2 = nn.Linear(72, 9), nn.Dropout(0.2)
        self.head = nn.Linear(9, 10)

    def forward(self, x):
        x = self.drop1(torch.tanh(self.norm(self.conv1(x))))
        x = nn.functional.dropout(torch.tanh(self.conv2(x)), 0.1, self.training).flatten(1)
        return self.head(self.drop2(torch.tanh(self.hidden(x))))


class Residual(nn.Module):
    """Blocks that add to what they are given; the first one calls its layers in a way of its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.tanh(self.stem(x.flatten(1)))
        x = x + torch.tanh(self.one(x))
        return self.head(x + torch.tanh(self.two(x)))


class Encoder(nn.Module):
    """Tokens, padding and attention; the mean at the end looks at the tokens again."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        make = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(make)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        is_padding, h = x == 0, self.embedding(x)
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=is_padding)
        weights = (~is_padding).to(h.dtype).unsqueeze(-1)
        return self.head((h * weights).sum(1) / weights.sum(1).clamp(min=1))


def tokens():
    rng = np.random.default_rng(1)
    x = rng.integers(1, 20, (60, 6))
    x[::3, 4:] = 0
    return plures.Dataset("tokens", x, np.arange(60) % 3, 3, 60, None, 20)


def simulation(method="ditto", model=Deep, once="once", data=None, folder=None, **options):
    config = make_config({**SMALL, "method": method, "features": once, **options})
    return Simulation(make_scene(config, objects=Objects(model=model, data=data)), folder, say_nothing)


def both(rounds=2, **options):
    once, each = (played(simulation(once=how, **options), rounds) for how in ("once", "each"))
    assert once.features is not None and each.features is None
    return once, each


# What is found


def lower_of(module, row, n_classes=10, **chosen):
    return Task(module, row, n_classes, chosen=Chosen(**chosen)).lower


@pytest.mark.parametrize(
    ("chosen", "cut", "below"),
    [
        ({"freeze": "body"}, None, None),
        ({"adapter": "head"}, None, None),
        ({"freeze": "conv1,norm"}, "conv2", {"conv1", "norm", "drop1"}),
        ({"adapter": "lora:layers=conv2"}, "conv2", {"conv1", "norm", "drop1"}),  # up to the first adapted layer
    ],
)
def test_the_lower_part_ends_at_the_first_layer_that_trains(chosen, cut, below):
    lower = lower_of(Deep(), torch.randn(1, 8, 8), **chosen)
    if cut is None:
        assert lower.upper is None and lower.shapes == [(9,)]
    else:
        assert lower.upper.path == cut and set(lower.upper.stubs) == below and not lower.keeps_row


def test_there_is_none_where_the_first_layer_trains():
    assert lower_of(Deep(), torch.randn(1, 8, 8), freeze="conv2,hidden") is None
    assert lower_of(Deep(), torch.randn(1, 8, 8), adapter="lora") is None
    assert lower_of(Deep(), torch.randn(1, 8, 8), adapter="bias") is None


def test_there_is_none_where_dropout_below_the_cut_is_called_by_the_model_itself():
    """Its numbers are drawn anew in every step, and no layer is there that could be told to compute as in inference."""
    assert lower_of(Deep(), torch.randn(1, 8, 8), freeze="conv1,norm,conv2") is None


def test_a_value_that_goes_around_the_cut_is_seen():
    """What the first block adds to is made by the frozen stem: cut at the layer in the block, it would be lost."""
    assert lower_of(Residual(), torch.randn(1, 8, 8), freeze="stem") is None
    assert lower_of(Residual(), torch.randn(1, 8, 8), freeze="stem,one,two").upper is None


def test_tokens_are_kept_where_the_rest_looks_at_them():
    row = torch.tensor([3, 4, 5, 6, 0, 0])
    lower = lower_of(Encoder(), row, 3, adapter="lora:layers=layers.2.*")
    assert lower.upper.path == "layers.2" and lower.keeps_row and lower.shapes == [(6, 8)]
    values, rows = lower.unpack(lower.run(torch.stack([row, row])))
    assert torch.equal(rows[0], row) and values[0].shape == (2, 6, 8)


# That nothing changes


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", slow("pfedhn"), slow("fedrod")])
def test_a_method_ends_in_the_same_state_on_a_frozen_body(name):
    once, each = both(method=name, freeze="body")
    assert_same_state(once, each)


@pytest.mark.parametrize("method", ["lgfedavg", slow("afml"), slow("ditto+ala")])
def test_a_method_ends_in_the_same_state_where_upper_layers_train(method):
    once, each = both(method=method, freeze="conv1,norm")
    assert_same_state(once, each)
    assert once.executor.usage.eager == 0, once.executor.usage.why


@pytest.mark.parametrize("executor", [slow("vectorised"), "one_by_one"])
def test_adapters_above_the_cut_train_as_without(executor):
    once, each = both(model=Encoder, data=tokens(), adapter="lora:rank=2,layers=layers.2.*", executor=executor)
    assert_same_state(once, each)
    layer = once.executor.work.task._training.module.layers
    assert isinstance(layer[1], Stub) and not isinstance(layer[2], Stub)


@pytest.mark.slow
def test_scores_of_everybody_and_of_new_clients_are_the_same():
    options = {"freeze": "body", "new_clients": 1, "clients": 4, "validation": 0.2, "personal_epochs": 1}
    once, each = both(method="fedavg+ft", **options)
    one, other = once.evaluate(is_last=True), each.evaluate(is_last=True)
    for name in ("personal", "generic", "validation"):
        assert getattr(one, name)["hits"] == getattr(other, name)["hits"]
        np.testing.assert_allclose(getattr(one, name)["loss"], getattr(other, name)["loss"], rtol=1e-6)
    assert np.array_equal(one.pool.personal, other.pool.personal)
    assert once.score_new_clients().curve == each.score_new_clients().curve
    assert once.score_as_new().curve == each.score_as_new().curve
    client = once.state.eligible[0]
    for name, x in once.whole_model(client).items():
        torch.testing.assert_close(x, each.whole_model(client)[name], rtol=1e-6, atol=1e-9)


def test_frozen_layers_compute_as_in_inference_and_those_above_do_not():
    task = Task(Deep(), torch.randn(1, 8, 8), 10, chosen=Chosen(freeze="conv1,norm"))
    body = task._training.module
    assert not body.drop1.training and body.drop2.training and body.training


def test_a_run_that_stopped_is_resumed_in_the_same_bits(tmp_path):
    options = {"model": "mlp", "freeze": "body", "clients": 3, "share": 0.1, "checkpoint_every": 1}
    whole = plures.run("ditto", rounds=4, out=tmp_path / "whole", **options)
    plures.run("ditto", rounds=2, out=tmp_path / "half", **options)
    features._known.clear()  # as in another process
    resumed = plures.resume(tmp_path / "half", rounds=4)
    assert resumed.summary["digest"] == whole.summary["digest"] and "features" in whole.summary
    with open_simulation(tmp_path / "whole") as opened:  # raw rows, for predictions and exports
        assert opened.features is None
        model, scene = opened.personal_model(0), opened.state.scene
        x = scene.population.x[:5].numpy()
        with torch.no_grad():
            expected = scene.task.as_module(scene.task.whole(model)).eval()(scene.population.x[:5])
    np.testing.assert_allclose(outputs(scene, model, x), expected.numpy(), rtol=1e-4, atol=1e-5)


# When it is not done


def test_augmentation_switches_it_off_with_a_word():
    config = make_config({**SMALL, "freeze": "body", "augment": "flip", "method": "fedavg"})
    scene = make_scene(config, objects=Objects(model=Deep))
    assert not scene.has_features and any("augmentation changes every image" in note for note in scene.notes)


def test_values_that_are_cheap_to_make_again_are_not_kept():
    embedding = lower_of(Encoder(), torch.tensor([3, 4, 5, 6, 0, 0]), 3, freeze="embedding")
    assert embedding is not None and embedding.flops == 0 and not embedding.pays


def test_an_unknown_word_is_refused():
    with pytest.raises(UsageError, match="features"):
        make_config({"features": "twice"})


# Where they are kept


def test_features_are_read_from_a_file_that_belongs_to_the_model_and_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "LONG_SECONDS", 0.0)
    task = Task(Deep(), torch.zeros(1, 8, 8), 10, chosen=Chosen(freeze="body"))
    x, rows = torch.randn(150, 1, 8, 8), np.arange(0, 150, 2)
    first = features.make_features(task, x, rows, tmp_path, 2, print)
    assert first.seconds > 0 and len(list(tmp_path.glob("*.npy"))) == 1 and first.table.shape == (75, 9)
    torch.testing.assert_close(first.table, task.features(task.initial, x[::2]))
    features._known.clear()
    again = features.make_features(task, x, rows, tmp_path, 1, print)
    assert again.seconds == 0 and torch.equal(again.table, first.table)
    features._known.clear()
    changed = x.clone()
    changed[2] += 1
    assert features.make_features(task, changed, rows, tmp_path, 1, print).seconds > 0
    other = Task(Deep(), torch.zeros(1, 8, 8), 10, chosen=Chosen(freeze="body"))
    assert features.make_features(other, x, rows, tmp_path, 1, print).seconds > 0
    next(iter(tmp_path.glob(f"{features._name(task, x, rows)}.npy"))).write_bytes(b"torn")
    features._known.clear()
    assert torch.equal(features.make_features(task, x, rows, tmp_path, 1, print).table, first.table)


def test_any_number_of_threads_gives_the_same_bits():
    task = Task(Deep(), torch.zeros(1, 8, 8), 10, chosen=Chosen(freeze="body"))
    x = torch.randn(200, 1, 8, 8)
    one, three = (features._compute(task.lower, x, np.arange(200), n) for n in (1, 3))
    assert torch.equal(one, three)


def test_a_choice_of_how_clients_are_run_takes_few_rows(monkeypatch):
    counted = []
    compute = features._compute
    monkeypatch.setattr(
        features, "_compute", lambda lower, x, rows, n: counted.append(len(rows)) or compute(lower, x, rows, n)
    )
    config = make_config({"method": "fedavg", "freeze": "body", "clients": 3, "share": 0.2, "seed": 9})
    settle(make_scene(config))
    assert counted == [3]


def test_doctor_says_that_features_are_computed_once_and_how_long_it_takes():
    lines = diagnosis(make_scene(make_config({"method": "fedavg", "freeze": "body", "clients": 3, "share": 0.1})))
    line = next(line for line in lines if line.startswith("features"))
    assert "once for each of" in line and "about" in line
