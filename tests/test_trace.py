"""Slopes that are products of matrices are left as factors, and are added to the weights as if they were not."""

import torch

from plures import trace


def losses(weight, bias, x):
    """Of stacked clients: a linear layer, squared."""
    return (torch.bmm(x, weight.mT) + bias[:, None]).square().sum((1, 2))


def step_and_tensors():
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 5), torch.randn(3, 4), torch.randn(3, 6, 5)]
    return trace.step_of(("test of products", losses), losses, 2, tensors, [0, 0, 0]), tensors


def test_slope_of_a_weight_is_left_as_its_factors_and_that_of_a_bias_is_not():
    step, tensors = step_and_tensors()
    _, (weight, bias) = step(tensors)
    _, (whole, whole_bias) = trace.untraced(losses, 2)(tensors)
    assert isinstance(weight, trace.Product) and isinstance(bias, torch.Tensor)
    assert torch.allclose(weight.dense(), whole, rtol=1e-5) and torch.allclose(bias, whole_bias, rtol=1e-5)


def test_factors_serve_another_number_of_clients():
    step, tensors = step_and_tensors()
    more = [torch.cat([x, 2 * x]) for x in tensors]
    _, (weight, _) = step(more)
    assert weight.dense().shape == (6, 4, 5)
    _, (whole, _) = trace.untraced(losses, 2)(more)
    assert torch.allclose(weight.dense(), whole, rtol=1e-5)


def test_slope_with_another_term_is_whole():
    def pulled(weight, bias, x):
        return losses(weight, bias, x) + weight.square().sum((1, 2))

    _, tensors = step_and_tensors()
    step = trace.step_of(("test of a pull", pulled), pulled, 2, tensors, [0, 0, 0])
    _, (weight, _) = step(tensors)
    _, (whole, _) = trace.untraced(pulled, 2)(tensors)
    assert isinstance(weight, torch.Tensor) and torch.allclose(weight, whole, rtol=1e-5)


def test_slope_of_an_embedding_is_left_as_the_rows_that_were_looked_up():
    def losses(table, words):
        return torch.vmap(lambda t, w: torch.nn.functional.embedding(w, t).sum(1).square().sum())(table, words)

    torch.manual_seed(0)
    tensors = [torch.randn(3, 50, 4), torch.randint(0, 50, (3, 6, 7))]
    step = trace.step_of(("test of rows", losses), losses, 1, tensors, [0, 0])
    _, (slope,) = step(tensors)
    _, (whole,) = trace.untraced(losses, 1)(tensors)
    assert isinstance(slope, trace.Scattered)
    assert torch.allclose(slope.dense(), whole, rtol=1e-5, atol=1e-6)
    moved = tensors[0].clone()
    slope.add_to(moved, -0.1)
    assert torch.allclose(moved, tensors[0] - 0.1 * whole, rtol=1e-5, atol=1e-6)
    few = [x[:2] for x in tensors]
    assert torch.allclose(step(few)[1][0].dense(), whole[:2], rtol=1e-5, atol=1e-6)
