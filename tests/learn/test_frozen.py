"""Frozen tensors: what trains, what is sent and kept, and what is refused."""

import pytest
import torch
from torch import nn

import plures
from plures import tree
from plures.data.batches import Batch
from plures.errors import DataError, UsageError
from plures.learn.frozen import Chosen, fingerprint
from plures.learn.task import Task, build
from plures.methods import METHODS
from plures.methods.spec import make_method
from plures.models.small import Mlp
from plures.runs.config import make_config
from plures.runs.folders import open_scene
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from plures.simulate.memory import forecast
from plures.simulate.shapes import shapes_of
from tests.methods.test_every_method import QUICK, assert_same_state, named, state
from tests.small import DeepMlp, played, run_of, scene_of, task_of

FROZEN = Chosen(freeze="first,norm")  # of DeepMlp: 64x8 weights, 8 biases, BatchNorm with statistics


class Rest(nn.Module):
    """What of DeepMlp trains where its first layers are frozen."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


every_method = named([QUICK.get(name, name) for name in METHODS])


def names_and_shapes(of):
    return {name: x.shape for name, x in zip(tree.names(of), tree.leaves(of), strict=True)}


@every_method
def test_what_is_kept_and_sent_is_that_of_a_model_of_the_trainable_layers(name):
    method, sizes = make_method(name, {}, plures.Solver()), torch.tensor([5, 6, 7])
    tasks = task_of("deep", 0, FROZEN), Task(Rest(), torch.zeros(8), 10)
    frozen, rest = (shapes_of(method, task, sizes) for task in tasks)
    for of_frozen, of_rest in zip(frozen[:-1], rest[:-1], strict=True):
        assert names_and_shapes(of_frozen) == names_and_shapes(of_rest)
    assert forecast(frozen, 3, 3) == forecast(rest, 3, 3)  # bytes of memory, and of checkpoints
    assert tree.n_bytes(frozen.upload) == tree.n_bytes(rest.upload)


@every_method
def test_frozen_layers_stay_and_both_executors_agree(name):
    freeze = "first" if name == "fedbn" else FROZEN.freeze  # which needs a BatchNorm that trains
    stacked, alone = (
        played(run_of(name, "deep", freeze=freeze, executor=how), 2) for how in ("vectorised", "one_by_one")
    )
    assert_same_state(stacked, alone)
    assert not [tensor for tensor in state(stacked) if any(f"{layer}." in tensor for layer in freeze.split(","))]
    task = stacked.state.scene.task
    start = build(lambda: DeepMlp((64,), 10), torch.zeros(64), 10, 0).initial
    assert len(task.frozen) == (2 if name == "fedbn" else 6)
    assert fingerprint(task.frozen) == fingerprint({name: start[name] for name in task.frozen})
    for body in (task._training, task._inference):  # one copy for all calls and clients
        assert body.module.first.weight is task.frozen["first.weight"]


def test_bytes_state_and_checkpoint_are_those_of_the_trainable_part(tmp_path):
    """By hand: hidden 8x6+6 and head 6x10+10 make 124 numbers of 4 bytes; the frozen ones are 552 numbers."""
    run = run_of("ditto", "deep", folder=tmp_path, freeze=FROZEN.freeze)
    played(run, 1)
    row = run.state.rows[0]
    assert row.bytes_up == row.bytes_down == 6 * 124 * 4
    assert tree.n_bytes(run.state.server) == tree.n_bytes(run.state.store.initial) == 124 * 4
    run.state.save(run.manifest())
    files = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint" / "000001").glob("*.safetensors")}
    assert 124 * 4 < files["state.safetensors"] < 124 * 4 + 500  # names and shapes take the rest
    assert 6 * 124 * 4 < files["clients-00000.safetensors"] < 6 * 124 * 4 + 600


def test_weights_that_a_module_freezes_do_not_train():
    class Half(DeepMlp):
        def __init__(self):
            super().__init__((64,), 10)
            self.first.requires_grad_(False)

    x, y = torch.randn(30, 64), torch.arange(30) % 10
    model = Half()
    before = model.first.weight.clone()
    result = plures.run("fedavg", data=(x.numpy(), y.numpy()), model=Half, clients=2, rounds=1, partition="iid", seed=1)
    again = plures.run("fedavg", data=(x.numpy(), y.numpy()), model=Half, clients=2, rounds=3, partition="iid", seed=1)
    one, other = result.models[0], again.models[0]
    assert set(one) == set(model.state_dict()) - {"norm.num_batches_tracked"}
    assert torch.equal(one["first.weight"], other["first.weight"]) and before.shape == one["first.weight"].shape
    assert not torch.equal(one["hidden.weight"], other["hidden.weight"])


def test_gradients_are_those_of_torch_with_frozen_layers_in_inference():
    torch.manual_seed(3)
    module = DeepMlp((64,), 10)
    module.norm.running_mean.uniform_(-1, 1)
    task = Task(module, torch.zeros(64), 10, chosen=FROZEN)
    x, y = torch.randn(5, 64), torch.tensor([1, 2, 3, 4, 5])
    params = {name: value.clone().requires_grad_() for name, value in task.initial.items()}
    loss = task.loss(params, Batch(x, y, torch.ones(5), torch.ones(10), torch.tensor(0)))
    expected = nn.functional.cross_entropy(module.eval()(x), y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for name, gradient in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
        torch.testing.assert_close(gradient, dict(module.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)
    assert task.smallest_batch == 1  # no BatchNorm is left that a batch of one tells nothing


@pytest.mark.parametrize(
    ("chosen", "trained"),
    [
        (Chosen(freeze="body"), {"head.weight", "head.bias"}),
        (Chosen(train="head"), {"head.weight", "head.bias"}),
        (Chosen(freeze="first, n*,head.bias"), {"hidden.weight", "hidden.bias", "head.weight"}),
        (Chosen(train="*.bias"), {f"{layer}.bias" for layer in ("first", "norm", "hidden", "head")}),
        (Chosen(freeze="norm.weight"), None),
    ],
)
def test_patterns_name_layers_and_tensors(chosen, trained):
    task = Task(DeepMlp((64,), 10), torch.zeros(64), 10, chosen=chosen)
    statistics = {"norm.running_mean", "norm.running_var"}
    if trained is None:
        assert set(task.frozen) == {"norm.weight"}
    else:
        moving = statistics if chosen.train == "*.bias" else set()  # they go with a layer of which something trains
        assert set(task.initial) == trained | moving


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedavg", {"freeze": "head,body"}, "nothing is left to train"),
        ("fedavg", {"freeze": "hiden"}, "did you mean 'hidden'"),
        ("fedavg", {"freeze": "head", "train": "head"}, "give one of them"),
        ("fedrep", {"freeze": "head"}, "FedRep trains the model's head apart"),
        ("fedper", {"freeze": "head"}, "private=head"),
        ("lgfedavg", {"freeze": "body"}, "private=body"),
        ("afml", {"freeze": "body"}, "body apart"),
        ("fedbn", {"freeze": "norm", "model": DeepMlp}, "private=batch-norm"),
    ],
)
def test_what_makes_no_sense_is_refused(method, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        plures.run(method, clients=3, rounds=1, **options)


def test_fedrep_on_a_frozen_body_sends_nothing_and_says_so():
    scene = scene_of("fedrep:head_epochs=2", "deep", freeze="body")
    run = played(Simulation(scene, None, print), 2)
    assert [row.bytes_up for row in run.state.rows] == [0, 0] and run.state.rows[1].loss < run.state.rows[0].loss
    made = make_scene(make_config({"method": "fedrep", "freeze": "body", "clients": 3}))
    assert any("nothing travels" in note for note in made.notes)


def test_a_run_knows_its_frozen_weights_again(tmp_path):
    options = {"clients": 3, "rounds": 1, "freeze": "body", "checkpoint_every": 1}
    plures.run("fedavg", out=tmp_path / "r", **options)
    scene = open_scene(tmp_path / "r")
    resumed = Simulation(scene, tmp_path / "r", print)
    resumed.state.load()
    assert resumed.state.round == 1
    resumed.close()
    other = Task(Mlp(tuple(scene.task.example.shape), 10), scene.task.example, 10, chosen=Chosen(freeze="body"))
    resumed = Simulation(scene._replace(task=other), tmp_path / "r", print)
    with pytest.raises(DataError, match="frozen weights of mlp have changed"):
        resumed.state.load()
    resumed.close()
