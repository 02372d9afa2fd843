"""Convolutions by Winograd's scheme are convolutions, and so are their gradients; it is used only where it pays."""

import pytest
import torch
from torch.nn.functional import conv2d

from plures import engine, tree
from plures.engine import costs
from plures.engine.passes import winograd
from plures.methods.messages import Same
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.simulate.stacking import run_group
from plures.simulate.work import train_function

# rows, clients, in, out, height, width, window, padding
SHAPES = [
    (10, 3, 32, 64, 12, 12, 5, (0, 0)),  # whole tiles
    (3, 2, 5, 7, 7, 9, 3, (1, 1)),  # tiles that are cut off
    (4, 1, 16, 32, 11, 6, 5, (2, 0)),  # padded on two sides only
    (2, 2, 16, 16, 4, 5, 3, (0, 1)),  # less than a tile
]


pytestmark = pytest.mark.usefixtures("by_mkl")  # where more convolutions are rewritten


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-5)])
@pytest.mark.parametrize("rows, n, n_in, n_out, height, width, k, padding", SHAPES)
def test_is_a_convolution(rows, n, n_in, n_out, height, width, k, padding, dtype, tolerance):
    torch.manual_seed(0)
    x = torch.randn(rows, n * n_in, height, width, dtype=dtype)
    kernels = torch.randn(n, n_out, n_in, k, k, dtype=dtype)
    bias = torch.randn(n * n_out, dtype=dtype)
    exact = [v.double().requires_grad_() for v in (x, kernels)]
    wanted = conv2d(exact[0], exact[1].flatten(0, 1), bias.double(), padding=padding, groups=n)
    of_out = torch.randn(wanted.shape, dtype=dtype)
    wanted_gradients = torch.autograd.grad(wanted, exact, of_out.double())

    out, *at_points = winograd.convolve(x, kernels, bias, padding, n)
    gradients = winograd.gradients(of_out, *at_points, (k, k), padding, n)
    for found, right in zip((out, *gradients), (wanted.detach(), *wanted_gradients), strict=True):
        assert found.shape == right.shape
        assert (found - right).abs().max() <= tolerance * right.abs().max()


def test_one_output_by_hand():
    """Windows of 3 over 0, 1, ... 5 in one row: the first of four outputs is 0 * 1 + 1 * 10 + 2 * 100."""
    x = torch.zeros(1, 1, 6, 6)
    x[0, 0, 0] = torch.arange(6.0)
    kernel = torch.zeros(1, 1, 1, 3, 3)
    kernel[0, 0, 0, 0] = torch.tensor([1.0, 10.0, 100.0])
    out, _, _ = winograd.convolve(x, kernel, torch.tensor([1000.0]), (0, 0), 1)
    assert torch.allclose(out[0, 0, 0], torch.tensor([1210.0, 1321.0, 1432.0, 1543.0]), rtol=1e-5)
    assert torch.allclose(out[0, 0, 1:], torch.full((3, 4), 1000.0), rtol=1e-5)


def test_order_in_memory_changes_no_number():
    kernels = torch.randn(2, 16, 8, 3, 3)
    laid = winograd.taps_first(kernels)
    assert torch.equal(laid, kernels) and laid.permute(0, 3, 4, 2, 1).is_contiguous()
    x = torch.randn(3, 16, 6, 6)
    assert torch.equal(
        winograd.convolve(x, laid, None, (1, 1), 2)[0], winograd.convolve(x, kernels, None, (1, 1), 2)[0]
    )


def test_pays_for_many_channels_and_whole_tiles():
    assert winograd.pays(10, 32, 64, (5, 5), (8, 8))
    assert not winograd.pays(10, 1, 32, (5, 5), (24, 24))  # one channel: all transforms, no product
    assert not winograd.pays(10, 32, 64, (1, 1), (8, 8))  # no window
    assert not winograd.pays(10, 32, 64, (5, 3), (8, 8))
    assert not winograd.pays(10, 256, 512, (3, 3), (4, 4))  # ten tiles
    assert not winograd.pays(10, 64, 64, (3, 3), (2, 2))  # of a tile of 4 x 4 a quarter is used


def pictures(model, style, n, options):
    scene = make_scene(make_config({"model": model, "clients": n, "partition": "iid", "steps": 4, **options}))
    task, method = scene.task, scene.method
    state = tree.map(lambda x: torch.stack([x] * n), method.init_client(task, task.initial))
    shards = scene.population.shards(range(n), "train", "train", 0)
    return run_group(style, train_function(method, task), Same(task.initial), state, shards)[1]


class Wide(torch.nn.Module):
    """A second convolution with many channels, by Winograd's scheme, on pictures of 8 x 8."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first = torch.nn.Conv2d(shape[0], 32, 3, padding=1)
        self.second = torch.nn.Conv2d(32, 64, 5, padding=2)
        self.head = torch.nn.Linear(64, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stack_trains_by_it_as_one_client_after_another(n, momentum):
    options = {"method": "fedavg", "momentum": momentum}
    engine._steps.clear()
    stacked = pictures(f"{__name__}:Wide", "vectorised", n, options)
    (step,) = engine._steps.values()
    names = list(stacked)
    assert [names[i] for i in step.taps_first] == ["second.weight"]
    alone = pictures(f"{__name__}:Wide", "one_by_one", n, options)
    for name, x in alone.items():
        assert torch.allclose(x, stacked[name], rtol=1e-4, atol=1e-6), name


def test_kernels_that_something_else_reads_stay_as_they_lie():
    engine._steps.clear()
    stacked = pictures(f"{__name__}:Wide", "vectorised", 2, {"method": "fedprox"})
    assert [step.taps_first for step in engine._steps.values()] == [[]]
    alone = pictures(f"{__name__}:Wide", "one_by_one", 2, {"method": "fedprox"})
    assert all(torch.allclose(x, stacked[name], rtol=1e-4, atol=1e-6) for name, x in alone.items())


def test_clients_with_large_convolutions_train_alone_and_are_tested_together(monkeypatch):
    task = make_scene(
        make_config({"method": "fedavg", "model": f"{__name__}:Wide", "clients": 2, "partition": "iid"})
    ).task
    together = costs.cost_of(task.size, 10, 3, 100).most
    monkeypatch.setattr(costs, "WEIGHT_BYTES", tree.n_bytes(task.initial))
    assert costs.cost_of(task.size, 10, 3, 100).most == 1
    assert costs.cost_of(task.size, 10, 1, 100).most == together > 1
