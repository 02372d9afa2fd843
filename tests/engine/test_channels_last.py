"""Traced convolutions with channels last give what the untraced step gives, and no pass copies what it need not."""

import pytest
import torch
from torch import nn

from plures import engine
from plures.engine.passes import channels_last
from tests.engine.stacks import assert_trains_as_alone, seen_after, trained


class Plain(nn.Module):
    """Convolutions with and without a bias and padding, pooling after and before a kink, a mean over the picture."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, bias=False)
        self.third = nn.Conv2d(32, 16, 1)
        self.head = nn.Linear(16, n_classes)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.relu(torch.nn.functional.max_pool2d(self.second(x), 2, 1))
        return self.head(torch.tanh(self.third(x)).mean((2, 3)))


class Strided(nn.Module):
    """Overlapping pooling, an average, and a tensor that is used twice."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 16, 3)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(144, n_classes)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(self.first(x), 3, stride=1, padding=1)
        x = x + torch.relu(self.second(x))
        return self.head(torch.nn.functional.avg_pool2d(x, 2).flatten(1))


class Residual(nn.Module):
    """A pooled tensor that is used twice, so that its gradient is a sum."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 16, 3, padding=1)
        self.norm = nn.GroupNorm(2, 16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, n_classes)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        return self.head((x + self.second(x)).mean((2, 3)))


@pytest.mark.parametrize("name, n_pools", [("Plain", 2), ("Strided", 1), ("Residual", 1)])
def test_rewritten_step_trains_as_one_client_after_another(name, n_pools, monkeypatch):
    rewritten = seen_after(monkeypatch, channels_last)
    assert_trains_as_alone(f"{__name__}:{name}")
    (targets,) = rewritten
    assert (
        channels_last.fold in targets and targets.count(channels_last.unfold) == 2 * n_pools
    )  # of pools and of their gradients


class Odd(nn.Module):
    """Kernels that were not tried with channels last."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 6, 3, stride=2)
        self.head = nn.Linear(54, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.first(x)).flatten(1))


def test_other_convolutions_are_left_as_they_are(monkeypatch):
    rewritten = seen_after(monkeypatch, channels_last)
    engine._steps.clear()
    trained(f"{__name__}:Odd", "vectorised")
    (targets,) = rewritten
    assert channels_last.fold not in targets


def test_folding_puts_stacked_clients_last_and_back_without_a_copy():
    x = torch.arange(2 * 3 * 4 * 5 * 6.0).reshape(2, 3, 4, 5, 6)
    folded = channels_last.fold(x)
    assert folded.shape == (3, 8, 5, 6) and folded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(folded[1, 4:], x[1, 1])
    back = channels_last.unfold(folded, 2)
    assert torch.equal(back, x) and back.data_ptr() == folded.data_ptr()
    assert channels_last.fold(back).data_ptr() == folded.data_ptr()


@pytest.mark.parametrize("x_last", [True, False])
@pytest.mark.parametrize("gradient_last", [True, False])
def test_gradients_of_a_group_norm_do_not_depend_on_how_tensors_lie(x_last, gradient_last):
    torch.manual_seed(0)
    x = torch.randn(10, 16, 8, 8, requires_grad=True)
    weight, bias = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
    of_output = torch.randn(10, 16, 8, 8)
    wanted = torch.autograd.grad(nn.functional.group_norm(x, 4, weight, bias), (x, weight, bias), of_output)
    own, gradient = (
        (each.contiguous(memory_format=torch.channels_last) if last else each)
        for each, last in ((x.detach(), x_last), (of_output, gradient_last))
    )
    with torch.no_grad():
        _, mean, scale = torch.ops.aten.native_group_norm.default(own, weight, bias, 10, 16, 64, 4, 1e-5)
        sizes = (10, 16, 64, 4, [True, True, True])
        found = channels_last.group_norm_gradients(gradient, own, mean, scale, weight, *sizes)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, wanted, strict=True))
