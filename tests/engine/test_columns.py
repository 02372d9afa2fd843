"""Convolutions as products of columns are convolutions, and so are their gradients."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from plures.engine.passes import client_by_client, columns
from tests.engine.stacks import assert_trains_as_alone, seen_after

# clients, rows, in, out, height, width, window, stride, padding
SHAPES = [
    (3, 4, 5, 6, 9, 8, (3, 3), (2, 2), (1, 1)),
    (2, 3, 4, 8, 7, 7, (7, 7), (2, 2), (3, 3)),
    (1, 2, 6, 6, 6, 9, (3, 2), (1, 2), (0, 1)),
    (2, 2, 3, 4, 10, 11, (2, 3), (3, 3), (1, 0)),
]


pytestmark = pytest.mark.usefixtures("by_mkl")  # where more convolutions are rewritten


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n, rows, n_in, n_out, height, width, window, stride, padding", SHAPES)
def test_is_a_convolution(n, rows, n_in, n_out, height, width, window, stride, padding, with_bias):
    torch.manual_seed(0)
    x = torch.randn(n, rows, n_in, height, width, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(n, n_out, n_in, *window, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(n, n_out, dtype=torch.float64) if with_bias else None
    each = [conv2d(x[i], kernels[i], None if bias is None else bias[i], stride, padding) for i in range(n)]
    wanted = torch.stack(each)
    of_out = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, (x, kernels), of_out)
    with torch.no_grad():
        out, matrices = columns.convolve_each(x, kernels, bias, stride, padding)
        both = columns.gradients_each(of_out, x, matrices, kernels, stride, padding, [True, True])
        nothing, of_kernels = columns.gradients_each(of_out, x, matrices, kernels, stride, padding, [False, True])
    for found, exact in zip((out, *both), (wanted, *right), strict=True):
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-12)
    assert nothing is None and torch.equal(of_kernels, both[1])


def test_rows_of_the_matrix_are_windows():
    """Of 3 x 3 pixels, 0 to 8, windows of two by two, one channel after another."""
    x = torch.stack([torch.arange(9.0), 10 * torch.arange(9.0)]).view(1, 2, 3, 3)
    found = columns.windows_of(x, (2, 2), (1, 1), (0, 0)).reshape(4, 8)
    assert found[0].tolist() == [0, 1, 3, 4, 0, 10, 30, 40] and found[3].tolist() == [4, 5, 7, 8, 40, 50, 70, 80]


class Many(nn.Module):
    """So many channels come out of the second and the third layer that they are products; clients stay apart."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 12, 3, 2)
        self.second, self.third = nn.Conv2d(12, 256, 3, padding=1), nn.Conv2d(256, 260, 2, 2, bias=False)
        self.fourth, self.head = nn.Conv2d(260, 256, 1), nn.Linear(256, n_classes)

    def forward(self, x):
        x = torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))))
        return self.head(torch.relu(self.fourth(x)).mean((2, 3)))


def test_step_with_many_channels_trains_as_one_client_after_another(monkeypatch):
    rewritten = seen_after(monkeypatch, client_by_client)
    assert_trains_as_alone(f"{__name__}:Many")
    # Windows of the third layer lie side by side, and that of the fourth is one place: they are done otherwise.
    assert all(
        targets.count(columns.convolve_each) == targets.count(columns.gradients_each) == 1 for targets in rewritten
    )
