"""Adapters: what trains, that they start as the model without them, and what becomes of them."""

import pytest
import torch
from torch import nn

import plures
from plures.errors import UsageError
from plures.learn.adapters import parse
from plures.learn.frozen import Chosen
from plures.learn.task import Task
from plures.methods import METHODS
from plures.runs.callbacks import say_nothing
from plures.runs.config import make_config
from plures.runs.scene import Objects, make_scene
from plures.runs.simulation import Simulation
from tests.methods.test_every_method import QUICK, assert_same_state, named
from tests.small import played, run_of

SMALL = {"clients": 3, "share": 0.1, "partition": "iid", "lr": 0.1, "model": "object:Net"}


class Net(nn.Module):
    """A convolution, attention, a linear layer, and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x)[0]
        return self.head(torch.tanh(self.hidden(x.mean(1))))


def simulation(adapter, method="ditto", model=Net, **options):
    scene = make_scene(
        make_config({**SMALL, "method": method, "adapter": adapter, **options}), objects=Objects(model=model)
    )
    return Simulation(scene, None, say_nothing)


@pytest.mark.parametrize("adapter", ["lora:rank=2", "lora:rank=2,alpha=4,fixed=a", "scale", "bias", "head"])
def test_adapters_start_as_the_model_and_both_executors_agree(adapter):
    stacked, alone = (
        played(simulation(adapter, executor=how, precision="float64"), 2) for how in ("vectorised", "one_by_one")
    )
    assert_same_state(stacked, alone)
    assert stacked.executor.usage.eager == 0, stacked.executor.usage.why
    scene = stacked.state.scene
    x = scene.population.x[:5]
    plain = scene.task.template.eval()
    torch.testing.assert_close(scene.task.logits(scene.task.initial, x), plain(x), rtol=1e-4, atol=1e-5)
    # Merged, it is a plain model that predicts the same.
    model = stacked.personal_model(stacked.state.eligible[0])
    assert set(scene.task.whole(model)) == set(plain.state_dict())
    with torch.no_grad():
        merged = scene.task.as_module(model).eval()(x)
    torch.testing.assert_close(merged, scene.task.logits(model, x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged, plain(x), atol=1e-4)  # it has learned something


@named([QUICK.get(name, name) for name in METHODS if name not in ("fedbn",)])
def test_every_method_takes_an_adapter(name):
    run = played(run_of(name, "deep", adapter="lora:rank=2"), 1)
    assert run.state.rows[0].loss > 0
    body = {"first.adapter.lora_A", "first.adapter.lora_B", "hidden.adapter.lora_A", "hidden.adapter.lora_B"}
    assert set(run.state.scene.task.initial) == body | {"head.weight", "head.bias"}


def test_lora_of_full_rank_from_the_identity_is_full_training_of_the_layer():
    lora = played(simulation("lora:rank=full,start=identity,fixed=a,layers=hidden", "fedavg", precision="float64"), 3)
    full = played(simulation(None, "fedavg", train="hidden.weight,head", precision="float64"), 3)
    merged, other = (run.state.scene.task.whole(run.state.server) for run in (lora, full))
    assert merged.keys() == other.keys()
    for name in merged:
        torch.testing.assert_close(merged[name], other[name], rtol=0, atol=1e-6)
    assert not torch.equal(other["hidden.weight"], full.state.scene.task.initial["hidden.weight"])


def test_uploads_of_ffa_lora_hold_no_a_and_those_of_fedsa_lora_no_b():
    ffa = simulation("lora:rank=2,fixed=a", "fedavg").state.shapes.upload
    assert any("lora_B" in name for name in ffa) and not [name for name in ffa if "lora_A" in name]
    fedsa = simulation("lora:rank=2", "fedavg+keep:private=*.lora_B").state.shapes
    assert any("lora_A" in name for name in fedsa.upload) and not [name for name in fedsa.upload if "lora_B" in name]
    assert all("lora_B" in name for name in fedsa.kept.kept) and len(fedsa.kept.kept) == 4
    personal = simulation("lora:rank=2", "fedavg+keep:private=*.adapter").state.shapes
    assert set(personal.upload) == {"head.weight", "head.bias"}


def test_matrices_are_drawn_from_the_seed():
    def first(seed):
        run = simulation("lora", seed=seed)
        run.close()
        return run.state.scene.task.initial["hidden.adapter.lora_A"]

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_bytes_of_lora_are_those_of_the_small_matrices():
    """By hand: rank 2 beside hidden, 8 in and 6 out, 28 numbers; the head 6 x 10 and 10."""
    run = played(simulation("lora:rank=2,layers=hidden", "fedavg"), 1)
    assert run.state.rows[0].bytes_up == 3 * 4 * (2 * 8 + 6 * 2 + 70)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lore", "did you mean 'lora'"),
        ("lora:rang=3", "did you mean 'rank'"),
        ("lora:rank=x", "rank is a whole number or full"),
        ("lora:rank=0", "1 or more"),
        ("lora:start=zero", "start of the adapter"),
        ("bias:rank=2", "setting of the adapter bias"),
    ],
)
def test_a_slip_in_an_adapter_is_told(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse(text)


def test_an_adapter_that_finds_no_layer_and_one_beside_train_are_refused():
    with pytest.raises(UsageError, match="unknown layer for an adapter 'hiden'; did you mean 'hidden'"):
        Task(Net(), torch.zeros(1, 8, 8), 10, chosen=Chosen(adapter="lora:layers=hiden"))
    with pytest.raises(UsageError, match="leave train out"):
        plures.run("fedavg", adapter="lora", train="head", clients=3)
