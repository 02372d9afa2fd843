"""The model as pure functions: parts, statistics, padding, dropout, and what is refused."""

import pytest
import torch
from torch import nn

from plures import seeds
from plures.data.batches import Batch
from plures.errors import UsageError
from plures.learn.losses import cross_entropy
from plures.learn.task import Task, _Centred, build
from plures.models.names import model_maker
from tests.small import TinyNorm


def batch_of(x, y, mask=None, key=0):
    mask = torch.ones(len(y)) if mask is None else mask
    return Batch(x, y, mask, torch.ones(10), torch.tensor(key))


def norm_task():
    return build(lambda: TinyNorm((1, 8, 8), 10), torch.zeros(1, 8, 8), 10, 0)


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "n_weights"),
    [
        ("cnn4", (1, 28, 28), 10, 582_026),
        ("cnn4", (3, 32, 32), 10, 878_538),
        ("cnn4", (3, 32, 32), 100, 924_708),
        ("hncnn", (3, 32, 32), 10, 121_182),
        ("hncnn", (3, 32, 32), 100, 128_832),
        ("hncnn", (1, 28, 28), 10, 85_822),
        ("hncnn-bn", (3, 32, 32), 10, 121_278),
        ("rod-cnn", (1, 28, 28), 10, 103_846),
        ("rod-cnn", (3, 32, 32), 10, 122_560),
        ("rod-cnn", (3, 32, 32), 100, 128_320),
        ("mlp", (1, 8, 8), 10, 4_810),
    ],
)
def test_model_has_the_published_number_of_weights(name, shape, n_classes, n_weights):
    model = model_maker(name, shape, n_classes)()
    assert sum(p.numel() for p in model.parameters()) == n_weights


def test_head_is_the_last_linear_layer_and_a_layer_is_a_module():
    task = build(model_maker("hncnn-bn", (1, 28, 28), 10), torch.zeros(1, 28, 28), 10, 0)
    assert task.head == "head"
    assert list(task.layers) == ["conv1", "norm1", "conv2", "norm2", "hidden1", "hidden2", "head"]
    assert task.layers["conv1"] == ("conv1.weight", "conv1.bias")
    assert task.layers["norm1"] == ("norm1.weight", "norm1.bias", "norm1.running_mean", "norm1.running_var")
    assert task.is_batch_norm("norm2.running_var") and not task.is_batch_norm("conv2.weight")


def test_declared_head_and_blocks_are_taken():
    class Declared(nn.Module):
        head_name, block_names = "last", ["body", "last"]

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3)
            self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return self.last(self.body(x))

    task = Task(Declared(), torch.zeros(5), 3)
    assert task.head == "last" and list(task.layers) == ["body.0", "body.2", "last"]
    assert list(task.blocks) == ["body", "last"] and len(task.blocks["body"]) == 4
    assert task.blocks_in(["last.bias", "body.2.weight"]) == ["body", "last"]


def test_logits_are_those_of_the_module():
    model = model_maker("hncnn-bn", (1, 28, 28), 10)().eval()
    task = Task(model, torch.zeros(1, 28, 28), 10)
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(task.logits(task.initial, x), model(x))


def test_batch_norm_trains_as_that_of_torch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).train()
    task = Task(model, torch.zeros(5), 3)
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    params = {k: v.clone().requires_grad_() for k, v in task.initial.items()}
    loss = task.loss(params, Batch(x, y, torch.ones(6), torch.ones(3), torch.tensor(0)))
    gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    expected = nn.functional.cross_entropy(model(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close((params[name] - gradients[name]).detach(), model.state_dict()[name])


def test_padded_rows_change_neither_loss_nor_statistics():
    task = norm_task()
    x, y = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 2, 3])
    params = {k: v.clone().requires_grad_() for k, v in task.initial.items()}
    padded = batch_of(torch.cat([x, 100 + x[:2]]), torch.cat([y, y[:2]]), torch.tensor([1.0, 1, 1, 0, 0]))
    results = []
    for batch in (batch_of(x, y), padded):
        task._training.module.drop.p = 0.0
        loss = task.loss(params, batch)
        results.append([loss, *torch.autograd.grad(loss, list(params.values()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_inference_moves_no_statistic():
    task = norm_task()
    params = {k: v.clone().requires_grad_() for k, v in task.initial.items()}
    loss = cross_entropy(task.logits(params, torch.randn(4, 1, 8, 8)), batch_of(torch.zeros(4), torch.zeros(4).long()))
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    unmoved = {name for name, gradient in zip(params, gradients, strict=True) if gradient is None}
    assert unmoved == {"norm.running_mean", "norm.running_var", "second.running_mean", "second.running_var"}


def test_dropout_comes_from_the_key_of_the_batch_alone():
    task = norm_task()
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    same = [float(task.loss(task.initial, batch_of(x, y, key=5))) for _ in range(2)]
    assert same[0] == same[1] != float(task.loss(task.initial, batch_of(x, y, key=6)))


def test_dropout_keeps_the_share_it_says():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.head = nn.Dropout(0.3), nn.Linear(4000, 2)

        def forward(self, x):
            return self.head(self.drop(x))

    task = Task(Wide(), torch.ones(4000), 2)
    z = task.training_features(task.initial, batch_of(torch.ones(5, 4000), torch.zeros(5).long()))
    assert abs(float((z == 0).float().mean()) - 0.3) < 0.02
    torch.testing.assert_close(z.max(), torch.tensor(1 / 0.7))


def test_memory_of_a_row_counts_the_outputs_of_all_layers():
    task = build(model_maker("cnn4", (1, 28, 28), 10), torch.zeros(1, 28, 28), 10, 0)
    head = 512  # in the place of the head, what it reads passes through
    assert task.row_bytes == 4 * (28 * 28 + 32 * 24 * 24 + 64 * 8 * 8 + 512 + head)


def test_initial_weights_come_from_the_seed_alone():
    make = model_maker("mlp", (1, 8, 8), 10)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a, b, c = (build(make, torch.zeros(1, 8, 8), 10, seed).initial["head.weight"] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.random.get_rng_state())


class _Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(x).softmax(-1)


class _HiddenDropout(_Softmax):
    def forward(self, x):
        return self.head(nn.functional.alpha_dropout(x, 0.5, self.training))


class _NoLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 5)

    def forward(self, x):
        return self.conv(x[:, None]).flatten(1)


@pytest.mark.parametrize(
    ("module", "n_classes", "words"),
    [
        (_Softmax(), 3, "no softmax or scaling"),
        (_HiddenDropout(), 3, "nn.Dropout"),
        (_NoLinear(), 3, "no linear layer"),
        (nn.Linear(5, 4), 3, "4 logits, the data has 3 classes"),
        (nn.Sequential(nn.Linear(6, 3)), 3, "cannot read rows of shape"),
        (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), 3, "BatchNorm"),
    ],
    ids=["softmax", "hidden dropout", "no head", "classes", "shape", "cumulative norm"],
)
def test_model_that_cannot_serve_is_refused_in_words(module, n_classes, words):
    with pytest.raises(UsageError, match=words):
        Task(nn.Sequential(module) if isinstance(module, nn.Linear) else module, torch.ones(5), n_classes)


def test_centring_has_exact_first_and_second_gradients():
    """Rows that the mask leaves out count for nothing, whatever stands in them."""
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for shape in [(4, 2), (4, 2, 3), (4, 2, 2, 3)]:
        x = seeds.normal(torch.tensor(5), shape).double().requires_grad_()

        def centred(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _Centred.apply(x, mask)

        kept = x[mask.bool()]
        axes = (0, *range(2, x.dim()))
        _, mean, var = centred(x)
        torch.testing.assert_close(mean, kept.mean(axes))
        torch.testing.assert_close(var, kept.var(axes, correction=0))
        assert torch.autograd.gradcheck(centred, x) and torch.autograd.gradgradcheck(centred, x)
