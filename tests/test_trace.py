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


def test_weights_that_are_used_again_and_again_get_one_product():
    def losses(weight, x):
        h = x
        for _ in range(5):
            h = torch.bmm(h, weight).tanh()
        return h.square().sum((1, 2))

    torch.manual_seed(0)
    tensors = [0.5 * torch.randn(3, 4, 4), torch.randn(3, 6, 4)]
    step = trace.step_of(("test of a recurrent net", losses), losses, 1, tensors, [0, 0])
    _, (slope,) = step(tensors)
    _, (whole,) = trace.untraced(losses, 1)(tensors)
    assert step.traced and isinstance(slope, trace.Product)
    assert slope.left.shape == (3, 4, 5 * 6)
    assert torch.allclose(slope.dense(), whole, rtol=1e-5, atol=1e-6)


def test_a_step_in_halves_is_the_whole_step_and_the_first_half_sees_nothing_that_moves():
    def losses(head, x, body):
        return (torch.bmm(torch.bmm(x, body).tanh(), head)).square().sum((1, 2))

    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 2), torch.randn(3, 6, 5), torch.randn(5, 4).expand(3, 5, 4).clone()]
    step = trace.step_of(("test of halves", losses), losses, 1, tensors, [0, 0, 0], ["moves", "repeats", "stays"])
    assert step.halves is not None
    kept = step.halves.fixed(tensors)
    assert [tuple(x.shape) for x in kept] == [(3, 1, 6, 4)]
    moved = [tensors[0] + 1, *tensors[1:]]
    found, (slope,) = step.halves.moving(moved, kept)
    expected, (whole,) = trace.untraced(losses, 1)(moved)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(trace.dense(slope), whole, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, kept, step.halves.fixed(moved)))
