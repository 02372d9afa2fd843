"""Convolutions that run client by client are convolutions, and so are their gradients, for every kind of layer."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d, pad, pixel_unshuffle
from torch.utils._python_dispatch import TorchDispatchMode

from plures import engine
from plures.engine.passes import client_by_client, winograd
from tests.engine.stacks import assert_trains_as_alone, seen_after, trained

# clients, rows, in, out, height, width, window, stride, padding, dilation, groups of one client
SHAPES = [
    (3, 4, 5, 6, 9, 8, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (2, 3, 4, 8, 7, 7, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (1, 2, 6, 6, 6, 9, (3, 2), (1, 2), (0, 1), (2, 1), 3),
    (2, 2, 260, 8, 4, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),  # so many channels that they stay first
    (3, 4, 4, 6, 8, 8, (1, 1), (2, 2), (0, 0), (1, 1), 1),  # windows of one place, which skip others
    (2, 3, 6, 4, 9, 8, (1, 1), (3, 2), (1, 2), (1, 1), 2),
    (1, 2, 6, 3, 5, 7, (1, 1), (1, 2), (0, 0), (2, 2), 1),
]


pytestmark = pytest.mark.usefixtures("by_mkl")  # where more convolutions are rewritten


@pytest.mark.parametrize("n, rows, n_in, n_out, height, width, window, stride, padding, dilation, groups", SHAPES)
def test_is_a_convolution(n, rows, n_in, n_out, height, width, window, stride, padding, dilation, groups):
    torch.manual_seed(0)
    x = torch.randn(n, rows, n_in, height, width, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(n, n_out, n_in // groups, *window, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(n, n_out, dtype=torch.float64)
    options = (stride, padding, dilation, groups)
    wanted = torch.stack([conv2d(a, k, b, *options) for a, k, b in zip(x, kernels, bias, strict=True)])
    of_out = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, (x, kernels), of_out)
    with torch.no_grad():
        out = client_by_client.convolve_each(x, kernels, bias, *options)
        both = client_by_client.gradients_each(of_out, x, kernels, *options, [True, True])
        of_x, nothing = client_by_client.gradients_each(of_out, x, kernels, *options, [True, False])
    for found, exact in zip((out, *both), (wanted, *right), strict=True):
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-12)
    assert nothing is None and torch.equal(of_x, both[0])


def test_windows_of_one_place_have_no_stride_of_their_own():
    """Kernels that have one write beyond their memory, on some processors, with channels last."""
    strides = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
                strides.append(args[4 if func is torch.ops.aten.convolution_backward.default else 3])
            return func(*args, **(kwargs or {}))

    x, kernels = torch.randn(2, 4, 4, 8, 8), torch.randn(2, 6, 4, 1, 1)
    with Seen():
        out = client_by_client.convolve_each(x, kernels, None, [2, 2], [0, 0], [1, 1], 1)
        client_by_client.gradients_each(out, x, kernels, [2, 2], [0, 0], [1, 1], 1, [True, True])
    assert strides == [[1, 1]] * 4 and out.shape == (2, 4, 6, 4, 4)


@pytest.mark.parametrize("n", [1, 3])
def test_winograd_client_by_client_is_winograd(n):
    torch.manual_seed(0)
    x = torch.randn(n, 4, 16, 9, 8, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(n, 32, 16, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(n, 32, dtype=torch.float64)
    wanted = torch.stack([conv2d(a, k, b, padding=1) for a, k, b in zip(x, kernels, bias, strict=True)])
    of_out = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, (x, kernels), of_out)
    with torch.no_grad():
        out, *at_points = winograd.convolve_each(x, kernels, bias, (1, 1))
        found = winograd.gradients_each(of_out, *at_points, (3, 3), (1, 1))
    for one, exact in zip((out, *found), (wanted, *right), strict=True):
        assert torch.allclose(one, exact, rtol=1e-10, atol=1e-10)


def test_windows_side_by_side_and_back():
    """Of 5 x 7 pixels, windows of 2 x 3 cover 4 x 6; the last row and the last column are in none."""
    x = torch.arange(35.0).reshape(1, 1, 1, 5, 7)
    columns = client_by_client.windows(x, 2, 3)
    assert columns.shape == (1, 4, 6)
    assert columns[0, 1].tolist() == [3, 4, 5, 10, 11, 12] and columns[0, 2].tolist() == [14, 15, 16, 21, 22, 23]
    back = client_by_client.from_windows(columns, (1, 1, 5, 7), 2, 3)
    assert torch.equal(back[..., :4, :6], x[..., :4, :6]) and back.sum() == columns.sum()


class Strided(nn.Module):
    """Strides, a window of one, BatchNorm, and a shortcut that is cut and padded; wide enough for Winograd once."""

    used = client_by_client.convolve_each

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.norm = nn.Conv2d(shape[0], 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.second, self.third = nn.Conv2d(32, 48, 3, 2, 1), nn.Conv2d(32, 48, 1, 2)
        self.head = nn.Linear(48, n_classes)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        short = pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 16))
        return self.head(torch.relu(self.second(x) + self.third(x) + short).mean((2, 3)))


class Grouped(nn.Module):
    """Depthwise convolutions, GroupNorm and pooling."""

    used = client_by_client.convolve_each

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.norm = nn.Conv2d(shape[0], 12, 3, padding=1), nn.GroupNorm(3, 12)
        self.deep, self.wide = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 20, 1)
        self.head = nn.Linear(20, n_classes)

    def forward(self, x):
        x = max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.tanh(self.wide(self.deep(x))).mean((2, 3)))


class Patches(nn.Module):
    """Patches of an image, and patches of these: windows that lie side by side."""

    used = client_by_client.windows

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.second = nn.Conv2d(shape[0], 6, 3, 3), nn.Conv2d(6, 5, 2, 2, bias=False)
        self.head = nn.Linear(5, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.tanh(self.first(x)))).flatten(1))


class Wide(nn.Module):
    """Winograd's scheme beside a stride, which the pass for groups of channels does not take."""

    used = winograd.convolve_each

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.second = nn.Conv2d(shape[0], 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.third, self.head = nn.Conv2d(64, 16, 3, 2), nn.Linear(16, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))).mean((2, 3)))


@pytest.mark.parametrize("model", [Strided, Grouped, Patches, Wide])
def test_rewritten_step_trains_as_one_client_after_another(model, monkeypatch):
    rewritten = seen_after(monkeypatch, client_by_client)
    assert_trains_as_alone(f"{__name__}:{model.__name__}")
    assert all(model.used in targets for targets in rewritten)
    left = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    assert not any(target in left for targets in rewritten for target in targets)


class Folded(nn.Module):
    """Two first layers that read images of four channels, among convolutions that clients are folded for."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.beside = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(4, 16, 3, padding=1, bias=False)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, n_classes)

    def forward(self, x):
        x = pixel_unshuffle(x, 2)
        x = max_pool2d(torch.relu(self.first(x) + self.beside(x)), 2)
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


def test_first_layers_of_few_channels_run_client_by_client_among_folded_ones(monkeypatch):
    rewritten = seen_after(monkeypatch, client_by_client, "apply_to_first_layers")
    assert_trains_as_alone(f"{__name__}:Folded")
    (targets,) = rewritten
    assert targets.count(client_by_client.convolve_folded) == targets.count(client_by_client.kernel_gradients) == 2
    assert targets.count(torch.ops.aten.convolution.default) == 1  # the second layer's


@pytest.mark.parametrize("n, padding", [(1, (0, 0)), (3, (2, 1))])
def test_folded_convolution_is_a_convolution(n, padding):
    torch.manual_seed(0)
    x = torch.randn(n, 4, 3, 9, 8, dtype=torch.float64)
    kernels = torch.randn(n, 16, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(n, 16, dtype=torch.float64)
    wanted = torch.cat([conv2d(a, k, b, 1, padding) for a, k, b in zip(x, kernels, bias, strict=True)], 1)
    of_out = torch.randn_like(wanted)
    (right,) = torch.autograd.grad(wanted, kernels, of_out)
    with torch.no_grad():
        images = client_by_client.lay_channels_last(x)
        found = client_by_client.convolve_folded(images, kernels, bias.flatten(), padding)
        of_kernels = client_by_client.kernel_gradients(of_out, images, kernels, padding)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(of_kernels, right.flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_pass_can_be_switched_off(monkeypatch):
    def fail(*_):
        raise AssertionError("it was called")

    monkeypatch.setattr(client_by_client, "apply", fail)
    monkeypatch.setattr(client_by_client, "apply_to_first_layers", fail)
    with engine.using(engine.Engine.parse("traced:client-by-client=off")):
        found = trained(f"{__name__}:Strided", "vectorised")
    assert all(math.isfinite(x.abs().sum()) for x in found.values())
