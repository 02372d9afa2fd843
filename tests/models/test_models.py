"""The models: published numbers of weights, blocks, geometry, what is refused, and that clients can be stacked."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from plures import engine, tree
from plures.data.population import Population
from plures.errors import UsageError
from plures.learn.fit import descend, fit
from plures.learn.solver import Solver
from plures.learn.task import Task, build
from plures.methods.messages import Same
from plures.models import resnet, text
from plures.models.names import MODELS, model_maker
from plures.simulate.stacking import run_group

SMALL, MIDDLE, LARGE = (3, 8, 8), (3, 32, 32), (3, 64, 64)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "n_tokens", "n_weights"),
    [
        ("resnet18", LARGE, 10, 0, 11_181_642),
        ("resnet18", LARGE, 200, 0, 11_279_112),
        ("resnet18-gn", LARGE, 10, 0, 11_181_642),
        ("resnet18-small", MIDDLE, 10, 0, 11_173_962),
        ("resnet18-small-gn", MIDDLE, 10, 0, 11_173_962),
        ("resnet50", LARGE, 200, 0, 23_917_832),
        ("resnet8", MIDDLE, 10, 0, 75_290),
        ("resnet8-gn", MIDDLE, 10, 0, 75_290),
        ("resnet20", MIDDLE, 10, 0, 269_722),
        ("resnet20-gn", MIDDLE, 10, 0, 269_722),
        ("wrn28-10", MIDDLE, 100, 0, 36_536_884),
        ("vgg11", MIDDLE, 10, 0, 9_225_610),
        ("vgg11-bn", MIDDLE, 10, 0, 9_231_114),
        ("fasttext", (200,), 4, 98_635, 3_157_508),
        ("charlstm", (80,), 80, 80, 640 + 70_656 + 132_096 + 10_320),
    ],
)
def test_model_has_the_published_number_of_weights_and_gives_logits(name, shape, n_classes, n_tokens, n_weights):
    with torch.device("meta"):  # shapes without numbers, so that size costs nothing
        model = model_maker(name, shape, n_classes, n_tokens)()
        logits = model(torch.zeros(2, *shape, dtype=torch.int64 if n_tokens else torch.float32))
    assert sum(p.numel() for p in model.parameters()) == n_weights
    assert logits.shape == ((2, 80, n_classes) if name == "charlstm" else (2, n_classes))
    assert not any(getattr(module, "inplace", False) for module in model.modules())


NAMED = {
    **dict.fromkeys(("resnet18", "resnet18-gn"), (3, 16, 16)),
    **dict.fromkeys(("resnet18-small", "resnet18-small-gn", "resnet8", "resnet20", "resnet20-gn"), SMALL),
    **dict.fromkeys(("vgg11", "vgg11-bn"), MIDDLE),
    "fasttext": (200,),
    "charlstm": (80,),
}


@pytest.mark.parametrize("name", NAMED)
def test_model_is_taken_as_a_task(name):
    shape = NAMED[name]
    n_tokens = 30 if len(shape) == 1 else 0
    example = torch.ones(shape, dtype=torch.int64 if n_tokens else torch.float32)
    task = build(model_maker(name, shape, 10, n_tokens), example, 10, 0)
    assert task.head == list(task.blocks)[-1] == list(task.layers)[-1] == "head"
    assert sum(map(len, task.blocks.values())) == len(task.initial)
    assert task.smallest_batch == (
        2 if name in ("resnet18", "resnet18-small", "resnet8", "resnet20", "vgg11-bn") else 1
    )


def test_blocks_of_resnet18_are_its_stages():
    task = build(model_maker("resnet18", LARGE, 10), torch.zeros(LARGE), 10, 0)
    sizes = {
        block: sum(task.initial[name].numel() for name in names if not tree.is_statistic(name))
        for block, names in task.blocks.items()
    }
    assert sizes == {
        "stem": 9_536,
        "layer1": 147_968,
        "layer2": 525_568,
        "layer3": 2_099_712,
        "layer4": 8_393_728,
        "head": 5_130,
    }
    from_the_top = np.cumsum(list(sizes.values())[::-1])
    assert from_the_top[[0, 1, -1]].tolist() == [5_130, 8_398_858, 11_181_642]


@pytest.mark.parametrize(
    ("name", "shape", "stage", "side"),
    [
        ("resnet18", LARGE, "layer1", 16),
        ("resnet18", LARGE, "layer4", 2),
        ("resnet18-small", MIDDLE, "layer1", 32),
        ("resnet18-small", MIDDLE, "layer4", 4),
        ("resnet50", LARGE, "layer4", 2),
        ("resnet20", MIDDLE, "layer3", 8),
        ("wrn28-10", MIDDLE, "layer3", 8),
        ("vgg11", MIDDLE, "conv8", 2),  # before its pooling
    ],
)
def test_stage_has_the_published_size(name, shape, stage, side):
    sides = []
    with torch.device("meta"):
        model = model_maker(name, shape, 10)()
        getattr(model, stage).register_forward_hook(lambda _module, _inputs, out: sides.append(out.shape[2:]))
        model(torch.zeros(1, *shape))
    assert sides == [(side, side)]


def test_shortcut_without_weights_takes_every_second_pixel_and_adds_channels_of_zeros():
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    out = resnet._Padded(2, 2)(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2]) and out.shape == (1, 4, 2, 2) and not out[:, 2:].any()


def test_lstm_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = text._Lstm(5, 4), nn.LSTM(5, 4, batch_first=True)
    x = torch.randn(3, 6, 5)
    with torch.no_grad():
        for mine, name in zip(ours.parameters(), ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), strict=True):
            let_in, keep, cell, let_out = getattr(theirs, name + "_l0").chunk(4)
            mine.copy_(torch.cat([let_in, keep, let_out, cell]))
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_fasttext_leaves_padding_out_of_the_mean():
    torch.manual_seed(0)
    model = text.FastText((4,), 3, 9)
    padded, plain = torch.tensor([[5, 7, 0, 0], [0, 0, 0, 0]]), torch.tensor([[5, 7]])
    torch.testing.assert_close(model(padded)[:1], model(plain))
    assert model(padded).isfinite().all()


# What is refused


@pytest.mark.parametrize("name", ["resnet18", "resnet18-small-gn", "resnet20", "wrn28-10", "vgg11", "resnet50"])
def test_image_that_is_too_small_is_refused_in_words(name):
    with pytest.raises(UsageError, match=rf"model {name} needs images of at least \d+x\d+, got rows of shape \(3, 7,"):
        model_maker(name, (3, 7, 40), 10)()


@pytest.mark.parametrize("name", ["fasttext", "charlstm"])
def test_model_of_text_refuses_images(name):
    with pytest.raises(UsageError, match=f"model {name} needs rows of tokens, got rows of shape .* that hold no"):
        model_maker(name, (1, 28, 28), 10)()
    with pytest.raises(UsageError, match=r"needs rows of tokens, got rows of shape \(4, 5\); choose another model"):
        model_maker(name, (4, 5), 10, 30)()


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"fasttext", "charlstm", "minilm"}))
def test_model_of_images_refuses_tokens(name):
    with pytest.raises(
        UsageError, match=rf"model {name} reads .* the rows hold tokens.*\(fasttext, charlstm, minilm\)"
    ):
        model_maker(name, (80,), 10, 30)()


# Clients in a stack. Of the largest models, narrow and short ones of the same make


class NarrowResNet18(resnet.ResNet18):
    widths, depths = (4, 6), (1, 1)


class NarrowResNet50(resnet.ResNet50):
    widths, depths = (4, 6), (1, 1)


class NarrowWideResNet(resnet.WideResNet28):
    widths, depth = (16, 8, 12), 1  # the first block with the identity as its shortcut


class NarrowVgg(resnet.Vgg11):
    widths = (4, 6, 8, 8, 10, 10, 12, 12)


def world(make, shape, n_tokens, sizes, labels=()):
    """A task, and the shards of clients with some rows each; `labels` is the shape of the label of a row."""
    numbers = torch.Generator().manual_seed(0)
    n, ends = sum(sizes), np.cumsum([0, *sizes])
    if n_tokens:
        x = torch.randint(0, n_tokens, (n, *shape), generator=numbers)
    else:
        x = torch.randn(n, *shape, generator=numbers)
    y = torch.randint(0, 5, (n, *labels), generator=numbers)
    task = build(make, x[0], 5, 0)
    rows = [np.arange(a, b) for a, b in pairwise(ends)]
    population = Population(x, y, rows, rows, 5, 0, task.smallest_batch)
    return task, population.shards(range(len(sizes)), "train", "train", 0)


def train(style, objective, task, shards, solver):
    def client(received, shard):
        return fit(objective, received, shard, solver)

    return run_group(style, client, Same(task.initial), shards)


def trained_apart(task, shards, solver):
    """How far a stack of clients ends from the same clients one by one, as a part of the way they went."""
    with engine.metered() as meter:
        stacked = train("vectorised", task.loss, task, shards, solver)
    assert meter.usage.traced > 0 and meter.usage.eager == 0
    alone = train("one_by_one", task.loss, task, shards, solver)
    assert stacked.steps.tolist() == alone.steps.tolist() and alone.loss.isfinite().all()
    start, ours, theirs = (
        torch.cat([params[name].flatten(1) for name in task.initial], 1)
        for params in (tree.repeat(task.initial, len(alone.steps)), stacked.params, alone.params)
    )
    return float(((ours - theirs).norm(dim=1) / (theirs - start).norm(dim=1)).max())


CASES = {
    "resnet8-gn": (resnet.ResNet8Gn, SMALL, 0),
    "resnet18, narrow": (NarrowResNet18, MIDDLE, 0),
    "resnet50, narrow": (NarrowResNet50, (3, 16, 16), 0),
    "wrn28-10, narrow": (NarrowWideResNet, SMALL, 0),
    "vgg11, narrow": (NarrowVgg, MIDDLE, 0),
    "fasttext": (text.FastText, (12,), 50),
    "charlstm": (text.CharLstm, (6,), 20),
}


@pytest.mark.parametrize("case", CASES)
def test_stack_of_clients_equals_each_alone(case):
    make, shape, n_tokens = CASES[case]
    labels = shape if case == "charlstm" else ()
    arguments = (shape, 5, n_tokens) if n_tokens else (shape, 5)
    task, shards = world(lambda: make(*arguments), shape, n_tokens, (3, 9, 5), labels)
    assert task.head == list(task.blocks)[-1] == "head" and task.row_bytes > 0
    assert trained_apart(task, shards, Solver(lr=0.02, batch=4)) < 1e-4


def test_stack_of_clients_of_resnet18_equals_each_alone():
    shape = (3, 16, 16)
    task, shards = world(model_maker("resnet18-gn", shape, 5), shape, 0, (2, 5))
    assert trained_apart(task, shards, Solver(lr=0.02, batch=2, steps=2)) < 1e-4


# Recurrent layers of torch in a user's own model


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 5)

    def forward(self, x):
        out = self.cell(x)
        return self.head(out[0] if isinstance(out, tuple) else out)


def test_layer_with_more_than_one_output_is_counted():
    task = Task(Recurrent(nn.LSTM(3, 4, batch_first=True)), torch.zeros(7, 3), 5)
    assert task.row_bytes == 4 * (7 * 3 + 7 * 4 + 4 + 4 + 7 * 4)  # the row; outputs, two states; what the head reads


# What torch does client by client is not traced, or the trace would be a loop over ten thousand clients


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_layer_without_a_rule_for_vmap_is_trained_untraced():
    task, shards = world(lambda: Recurrent(nn.GRUCell(3, 4)), (3,), 0, (1, 5))
    stacked, alone = (train(style, task.loss, task, shards, Solver(batch=2)) for style in ("vectorised", "one_by_one"))
    torch.testing.assert_close(stacked.params, alone.params)


def test_slope_of_the_slope_of_a_convolution_is_untraced():
    task, shards = world(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5)), (1, 4, 4), 0, (1, 5)
    )

    def objective(params, batch):
        return task.loss(descend(lambda p: task.loss(p, batch), params, 0.1), batch)

    stacked, alone = (train(style, objective, task, shards, Solver(batch=2)) for style in ("vectorised", "one_by_one"))
    torch.testing.assert_close(stacked.params, alone.params)
