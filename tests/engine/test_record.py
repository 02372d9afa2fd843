"""What is recorded is what torch's own tracer records, and what would not be the same in a graph is refused."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from plures.engine import eager
from plures.engine.record import CannotRecord, record

SHAPES = [((7, 5, 3), torch.float32), ((7, 5), torch.float32), ((7, 4, 3), torch.float32)]
PASSED_ON = ("aten.detach.default", "aten.lift_fresh_copy.default", "aten.alias.default")


def kernels(graph: fx.Graph) -> list[str]:
    graph.eliminate_dead_code()
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in called if name not in PASSED_ON]


def step(weights, bias, x):
    def loss(weights, bias, x):
        return (torch.relu(x @ weights.T + bias) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).square().mean()

    losses, gradients = eager.step(torch.vmap(loss), 2)([weights, bias, x])
    return [losses, *gradients]


def test_the_kernels_of_a_step_are_those_of_torchs_own_tracer():
    expected = make_fx(step, tracing_mode="fake")(*[torch.ones(shape) for shape, _ in SHAPES])
    found = record(step, SHAPES)
    assert len(kernels(found.graph)) > 10 and kernels(found.graph) == kernels(expected.graph)


def test_the_graph_computes_what_was_recorded():
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape, _ in SHAPES]
    for a, b in zip(record(step, SHAPES)(*values), step(*values), strict=True):
        assert torch.equal(a, b)


def test_what_is_made_on_the_device_of_an_input_is_made_there_in_the_graph():
    graph = record(lambda x: [x + torch.arange(3, device=x.device)], [((2, 3), torch.float32)])
    assert graph(torch.zeros(2, 3))[0].tolist() == [[0, 1, 2]] * 2


def test_a_kernel_with_several_results_and_one_that_changes_its_input():
    def fn(x):
        top, at = x.clone().add_(1).max(0)
        return [top, at]

    [top, at] = record(fn, [((2, 3), torch.float32)])(torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]]))
    assert top.tolist() == [5, 6, 4] and at.tolist() == [1, 0, 1]


def test_a_number_in_a_constant_may_be_read_and_one_in_an_input_may_not():
    graph = record(lambda x: [x * torch.tensor(2.0).item()], [((2,), torch.float32)])
    assert graph(torch.ones(2))[0].tolist() == [2, 2]
    with pytest.raises(RuntimeError):
        record(lambda x: [x * x[0].item()], [((2,), torch.float32)])


def test_a_change_of_a_tensor_that_was_there_before_is_refused():
    total = torch.zeros(2)
    with pytest.raises(CannotRecord, match="changes a tensor that was there before"):
        record(lambda x: [total.add_(x)], [((2,), torch.float32)])
