"""Stock layers of torch: the same numbers as torch's own, in both executors, traced, with FLOPs; what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import plures
from plures import seeds
from plures.cli.doctor import diagnosis
from plures.data.batches import Batch
from plures.errors import UsageError
from plures.learn.stock import attend
from plures.learn.task import Task
from plures.runs.callbacks import say_nothing
from plures.runs.config import make_config
from plures.runs.scene import Objects, make_scene
from plures.runs.simulation import Simulation
from tests.methods.test_every_method import assert_same_state
from tests.small import played


class Net(nn.Module):
    """Eight rows of eight numbers, a layer that looks at them as a sequence, and a head."""

    def __init__(self):
        super().__init__()
        self.layer = self.make()
        self.head = nn.Linear(self.width, 10)

    width = 8

    def make(self):
        raise NotImplementedError

    def forward(self, x):
        return self.head(self.mean(x.flatten(1).unflatten(1, (8, 8))))

    def mean(self, x):
        return self.layer(x).mean(1)


class Lstm(Net):
    def make(self):
        return nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.2)

    def mean(self, x):
        found, (last, cell) = self.layer(x)
        return found.mean(1) + last[-1] + cell[0]


class BothWays(Net):
    width = 12

    def make(self):
        return nn.LSTM(8, 6, bidirectional=True)

    def mean(self, x):
        start = (x.mean() + torch.zeros(2, len(x), 6), torch.ones(2, len(x), 6))
        return self.layer(x.transpose(0, 1), start)[0].mean(0)


class Gru(Net):
    def make(self):
        return nn.GRU(8, 8, num_layers=2, batch_first=True, dropout=0.2, bias=False)

    def mean(self, x):
        found, last = self.layer(x)
        return found.mean(1) + last[0]


class Rnn(Net):
    def make(self):
        return nn.RNN(8, 8, batch_first=True, nonlinearity="relu")

    def mean(self, x):
        return self.layer(x)[0].mean(1)


class Encoder(Net):
    """With its default dropout of 0.1."""

    def make(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Attention(Net):
    """Of places over others, some of which are hidden."""

    def make(self):
        return nn.MultiheadAttention(8, 2, dropout=0.1, kdim=4, vdim=4, batch_first=True)

    def mean(self, x):
        hidden = torch.zeros(len(x), 8, dtype=torch.bool)
        hidden[:, 6:] = True
        found, weights = self.layer(x, x[:, :, :4], x[:, :, 4:], key_padding_mask=hidden)
        return found.mean(1) + weights.mean(1)


class Functions(Net):
    """Dropout and attention that the module's own text calls."""

    def make(self):
        return nn.Linear(8, 24)

    def mean(self, x):
        query, key, value = self.layer(x).chunk(3, -1)
        p = 0.1 if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        return F.dropout(found, 0.2, self.training).mean(1)


class WeightNorm(Net):
    def make(self):
        return weight_norm(nn.Linear(8, 8))


class Tied(Net):
    """One matrix in two places."""

    def make(self):
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        layers[2].weight = layers[0].weight
        return layers


class Padded(Net):
    def make(self):
        return nn.Embedding(17, 8, padding_idx=0)

    def mean(self, x):
        return self.layer((x[:, :, 3] * 16).long().clamp(0, 16)).mean(1)


STOCK = [Lstm, BothWays, Gru, Rnn, Encoder, Attention, Functions, WeightNorm, Tied, Padded]
every_layer = pytest.mark.parametrize("layer", STOCK, ids=lambda layer: layer.__name__)


def batch_of(x, y, key=0):
    return Batch(x, y, torch.ones(len(y)), torch.ones(10), torch.tensor(key))


@every_layer
def test_numbers_and_gradients_are_those_of_torch(layer):
    torch.manual_seed(0)
    module = layer().eval()
    task = Task(module, torch.rand(1, 8, 8), 10)
    x, y = torch.rand(5, 1, 8, 8), torch.tensor([1, 2, 3, 4, 5])
    torch.testing.assert_close(task.logits(task.initial, x), module(x), rtol=1e-4, atol=1e-6)
    params = {name: value.clone().requires_grad_() for name, value in task.initial.items()}
    F.cross_entropy(task.logits(params, x), y).backward()
    F.cross_entropy(module(x), y).backward()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(params[name].grad, weight.grad, rtol=1e-3, atol=1e-6)


@every_layer
def test_both_executors_agree_stacked_steps_are_traced_and_flops_counted(layer):
    def run(**how):
        values = {"method": "ditto", "clients": 3, "share": 0.1, "partition": "iid", "lr": 0.1, "model": "object:Net"}
        scene = make_scene(make_config({**values, **how}), objects=Objects(model=layer))
        return played(Simulation(scene, None, say_nothing), 2)

    stacked, alone = run(executor="vectorised"), run(executor="one_by_one")
    assert_same_state(stacked, alone)
    assert stacked.executor.usage.eager == 0 and stacked.executor.usage.traced > 0, stacked.executor.usage.why
    assert stacked.state.rows[0].flops == alone.state.rows[0].flops
    task = stacked.state.scene.task
    assert task.flops > 2 * 8 * 10 or layer is Padded  # more than the head alone


def test_flops_of_an_lstm_are_those_of_its_products():
    """Two layers, eight positions, four gates, of eight inputs and states each; the first state is zero, and free."""
    task = Task(Lstm(), torch.rand(1, 8, 8), 10)
    assert task.flops == 2 * (2 * 8 * 4 * 8 * 8 + 2 * 7 * 4 * 8 * 8) + 2 * 8 * 10


@pytest.mark.parametrize("layer", [Lstm, Encoder, Attention, Functions], ids=lambda layer: layer.__name__)
def test_dropout_inside_comes_from_the_key_of_the_batch(layer):
    task = Task(layer(), torch.rand(1, 8, 8), 10)
    x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    same = [float(task.loss(task.initial, batch_of(x, y, key=5)).detach()) for _ in range(2)]
    assert same[0] == same[1] != float(task.loss(task.initial, batch_of(x, y, key=6)).detach())
    assert torch.equal(task.logits(task.initial, x), task.logits(task.initial, x))


def test_functional_dropout_keeps_the_share_it_says():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4000, 10)

        def forward(self, x):
            return self.head(F.dropout(x, 0.3, self.training))

    task = Task(Wide(), torch.ones(4000), 10)
    z = task.training_features(task.initial, batch_of(torch.ones(5, 4000), torch.zeros(5).long()))
    assert abs(float((z == 0).float().mean()) - 0.3) < 0.02
    torch.testing.assert_close(z.max(), torch.tensor(1 / 0.7))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.9, 1 - 2**-24, 1.0])
def test_whole_numbers_are_compared_as_the_numbers_that_they_stand_for(p):
    key, shape = torch.tensor(123), (40, 50)
    assert torch.equal(seeds.at_least(key, shape, p, 3), seeds.uniform(key, shape, 3) >= p)


def test_a_tied_weight_moves_in_both_places():
    task = Task(Tied(), torch.rand(1, 8, 8), 10)
    x = torch.rand(4, 1, 8, 8)
    moved = task.initial | {"layer.0.weight": task.initial["layer.0.weight"] + 1}
    module = Tied()
    module.load_state_dict(moved | {"layer.2.weight": moved["layer.0.weight"]})
    torch.testing.assert_close(task.logits(moved, x), module(x), rtol=1e-4, atol=1e-5)
    assert "layer.2.weight" not in task.initial


def test_an_attention_row_that_may_look_at_nothing_gives_zeros():
    query = torch.rand(1, 2, 3, 4)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    expected = F.scaled_dot_product_attention(query, query, query, mask)
    torch.testing.assert_close(attend(query, query, query, mask)[0], expected)


class Shared(Net):
    def make(self):
        return nn.Linear(8, 8)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 10)
        self.again = nn.Linear(8, 10)
        self.head.weight = self.again.weight
        self.head_name = "head"


class Renormed(Padded):
    def make(self):
        return nn.Embedding(17, 8, max_norm=1.0)


class Packed(Lstm):
    def mean(self, x):
        rows = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 8), batch_first=True)
        return self.layer(rows)[1][0][-1]


class Alpha(Net):
    def make(self):
        return nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.1))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [(Shared, "shares its weights"), (Renormed, "max_norm"), (Packed, "packed"), (Alpha, "random numbers of its own")],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(layer, sentence):
    with pytest.raises(UsageError, match=sentence):
        make_scene(make_config({"clients": 3, "model": "object:Net"}), objects=Objects(model=layer))


def test_doctor_takes_a_stock_layer_by_its_name():
    lines = diagnosis(make_scene(make_config({"clients": 3, "model": "tests.learn.test_stock:Encoder", "rounds": 1})))
    assert any(line.startswith("engine") and "traced" in line for line in lines)
    assert plures.run("fedavg", model=Encoder, clients=3, rounds=1).summary["engine"]["eager"] == 0
