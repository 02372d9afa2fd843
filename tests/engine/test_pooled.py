"""First layers that are pooled: numbers and gradients are torch's, also where outputs are equal."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d

from plures import engine
from plures.engine.passes import pooled
from tests.engine.stacks import assert_trains_as_alone, seen_after, trained

# clients, rows, in, out, height, width, window, padding, pooling: window, stride, padding, dilation, rounding up
SHAPES = [
    (3, 4, 2, 6, 12, 10, (5, 5), (0, 0), ([2, 2], [], [0, 0], [1, 1], False)),
    (1, 2, 3, 4, 9, 8, (2, 3), (1, 1), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
    (2, 3, 4, 4, 8, 9, (3, 3), (1, 1), ([2, 2], [2, 2], [0, 0], [1, 1], True)),
]


@pytest.mark.parametrize("n, rows, n_in, n_out, height, width, window, padding, pooling", SHAPES)
def test_is_a_convolution_that_is_pooled(n, rows, n_in, n_out, height, width, window, padding, pooling):
    torch.manual_seed(0)
    x = torch.randint(0, 2, (n, rows, n_in, height, width)).double()
    x[:, :, :, :6] = 0  # outputs of an empty place are equal: the gradient goes to the first
    kernels = torch.randn(n, n_out, n_in, *window, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(n, n_out, dtype=torch.float64)
    wide, stride, around, dilation, up = pooling
    outputs = [conv2d(a, k, b, padding=padding) for a, k, b in zip(x, kernels, bias, strict=True)]
    wanted = torch.stack([max_pool2d(each, wide, stride or None, around, dilation, up) for each in outputs])
    of_out = torch.randn_like(wanted)
    (right,) = torch.autograd.grad(wanted, (kernels,), of_out)
    with torch.no_grad():
        flat = kernels.flatten(0, 1)
        found, kept = pooled.convolve(x, flat, bias.flatten(), padding, pooling)
        without, _ = pooled.convolve(x, flat, None, padding, pooling)
        of_kernels = pooled.gradients(of_out, kept, flat, padding, pooling)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(without + bias[:, None, :, None, None], wanted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(of_kernels, right.flatten(0, 1), rtol=1e-12, atol=1e-12)


class Pooled(nn.Module):
    """Two first layers for images of four channels: one is pooled as it is, the other after a ReLU."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.beside = nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.Conv2d(4, 16, 3, padding=1)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, n_classes)

    def forward(self, x):
        x = nn.functional.pixel_unshuffle(x, 2)
        pooled = max_pool2d(self.first(x), 2) + max_pool2d(torch.relu(self.beside(x)), 2)
        return self.head(torch.tanh(self.second(pooled)).mean((2, 3)))


class Read(Pooled):
    """What is pooled is read by something else as well, so that it has to be written."""

    def forward(self, x):
        x = nn.functional.pixel_unshuffle(x, 2)
        first, beside = self.first(x), torch.relu(self.beside(x))
        pooled = max_pool2d(first, 2) + max_pool2d(beside, 2) + first.mean((2, 3), True) + beside.mean((2, 3), True)
        return self.head(torch.tanh(self.second(pooled)).mean((2, 3)))


@pytest.mark.parametrize("model, n_taken", [(Pooled, 2), (Read, 0)])
def test_rewritten_step_trains_as_one_client_after_another(model, n_taken, monkeypatch):
    rewritten = seen_after(monkeypatch, pooled)
    monkeypatch.setattr(pooled, "LARGE", 1)
    assert_trains_as_alone(f"{__name__}:{model.__name__}")
    (targets,) = rewritten
    assert targets.count(pooled.convolve) == targets.count(pooled.gradients) == n_taken
    assert targets.count(torch.ops.aten.max_pool2d_with_indices.default) == 2 - n_taken
    engine._steps.clear()


def test_small_outputs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(pooled, "_rewrite", lambda *_: pytest.fail("they stay in the cache"))
    engine._steps.clear()
    trained(f"{__name__}:Pooled", "vectorised")
