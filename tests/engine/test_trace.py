"""Gradients that are products of matrices are left as factors, and are added to the weights as if they were not."""

import pytest
import torch

from plures.engine import Engine, eager, trace
from plures.engine.gradients import Product, Scattered, dense
from plures.engine.passes import client_by_client
from plures.engine.trace import trace_step


def traced(losses, n_params, tensors, dims, roles=(), repeats=False):
    return trace_step(eager.step(losses, n_params), tensors, dims, roles, repeats, Engine())


def losses(weight, bias, x):
    """Of stacked clients: a linear layer, squared."""
    return (torch.bmm(x, weight.mT) + bias[:, None]).square().sum((1, 2))


def step_and_tensors():
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 5), torch.randn(3, 4), torch.randn(3, 6, 5)]
    return traced(losses, 2, tensors, [0, 0, 0]), tensors


def test_gradient_of_a_weight_is_left_as_its_factors_and_that_of_a_bias_is_not():
    step, tensors = step_and_tensors()
    _, (weight, bias) = step.run(tensors)
    _, (whole, whole_bias) = eager.step(losses, 2)(tensors)
    assert isinstance(weight, Product) and isinstance(bias, torch.Tensor)
    assert torch.allclose(weight.dense(), whole, rtol=1e-5) and torch.allclose(bias, whole_bias, rtol=1e-5)


def test_factors_serve_another_number_of_clients():
    step, tensors = step_and_tensors()
    more = [torch.cat([x, 2 * x]) for x in tensors]
    _, (weight, _) = step.run(more)
    assert weight.dense().shape == (6, 4, 5)
    _, (whole, _) = eager.step(losses, 2)(more)
    assert torch.allclose(weight.dense(), whole, rtol=1e-5)


def test_gradient_with_another_term_is_whole():
    def penalised(weight, bias, x):
        return losses(weight, bias, x) + weight.square().sum((1, 2))

    _, tensors = step_and_tensors()
    step = traced(penalised, 2, tensors, [0, 0, 0])
    _, (weight, _) = step.run(tensors)
    _, (whole, _) = eager.step(penalised, 2)(tensors)
    assert isinstance(weight, torch.Tensor) and torch.allclose(weight, whole, rtol=1e-5)


def test_gradient_of_an_embedding_is_left_as_the_rows_that_were_looked_up():
    def losses(table, words):
        return torch.vmap(lambda t, w: torch.nn.functional.embedding(w, t).sum(1).square().sum())(table, words)

    torch.manual_seed(0)
    tensors = [torch.randn(3, 50, 4), torch.randint(0, 50, (3, 6, 7))]
    step = traced(losses, 1, tensors, [0, 0])
    _, (gradient,) = step.run(tensors)
    _, (whole,) = eager.step(losses, 1)(tensors)
    assert isinstance(gradient, Scattered)
    assert torch.allclose(gradient.dense(), whole, rtol=1e-5, atol=1e-6)
    moved = tensors[0].clone()
    gradient.add_to(moved, -0.1)
    assert torch.allclose(moved, tensors[0] - 0.1 * whole, rtol=1e-5, atol=1e-6)
    few = [x[:2] for x in tensors]
    assert torch.allclose(step.run(few)[1][0].dense(), whole[:2], rtol=1e-5, atol=1e-6)


def test_weights_that_are_used_again_and_again_get_one_product():
    def losses(weight, x):
        h = x
        for _ in range(5):
            h = torch.bmm(h, weight).tanh()
        return h.square().sum((1, 2))

    torch.manual_seed(0)
    tensors = [0.5 * torch.randn(3, 4, 4), torch.randn(3, 6, 4)]
    step = traced(losses, 1, tensors, [0, 0])
    _, (gradient,) = step.run(tensors)
    _, (whole,) = eager.step(losses, 1)(tensors)
    assert isinstance(gradient, Product)
    assert gradient.left.shape == (3, 4, 5 * 6)
    assert torch.allclose(gradient.dense(), whole, rtol=1e-5, atol=1e-6)


def test_a_step_in_two_parts_is_the_whole_step_and_the_early_one_sees_nothing_that_moves():
    def losses(head, x, body):
        return (torch.bmm(torch.bmm(x, body).tanh(), head)).square().sum((1, 2))

    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 2), torch.randn(3, 6, 5), torch.randn(5, 4).expand(3, 5, 4).clone()]
    step = traced(losses, 1, tensors, [0, 0, 0], ["trained", "batch", "given"], True)
    assert step.repeat is not None
    kept = step.repeat.early(tensors)
    assert [tuple(x.shape) for x in kept] == [(3, 6, 4)]
    moved = [tensors[0] + 1, *tensors[1:]]
    found, gradient = step.repeat.late(moved, kept, step.repeat.views(moved))
    expected, (whole,) = eager.step(losses, 1)(moved)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(dense(gradient), whole, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, kept, step.repeat.early(moved)))


def words_of_texts(n, table_rows=50):
    """Texts of unlike length in tokens, padded with 0, and a table for each of n clients."""
    torch.manual_seed(0)
    length = torch.randint(0, 8, (n, 6, 1))
    words = torch.randint(1, table_rows, (n, 6, 7)) * (torch.arange(7) < length)
    return [torch.randn(n, table_rows, 4), words]


def mean_of_words(table, words):
    def one(table, words):
        counts = (words != 0).float()
        vectors = torch.nn.functional.embedding(words, table) * counts.unsqueeze(-1)
        return (vectors.sum(1) / counts.sum(1, keepdim=True).clamp(min=1)).square().sum()

    return torch.vmap(one)(table, words)


def test_words_of_a_text_are_added_up_without_the_padding():
    tensors = words_of_texts(3)
    step = traced(mean_of_words, 1, tensors, [0, 0], ["trained", "batch"])
    found, (gradient,) = step.run(tensors)
    expected, (whole,) = eager.step(mean_of_words, 1)(tensors)
    assert isinstance(gradient, Scattered)
    assert len(gradient.at) == int((tensors[1] != 0).sum()) < tensors[1].numel()
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(gradient.dense(), whole, rtol=1e-5, atol=1e-6)
    moved = tensors[0].clone()
    gradient.add_to(moved, -0.1)
    assert torch.allclose(moved, tensors[0] - 0.1 * whole, rtol=1e-5, atol=1e-6)


def test_texts_of_padding_alone_have_no_gradient():
    tensors = [x[:2] for x in words_of_texts(3)]
    tensors[1] = torch.zeros_like(tensors[1])
    step = traced(mean_of_words, 1, tensors, [0, 0], ["trained", "batch"])
    losses, (gradient,) = step.run(tensors)
    assert losses.tolist() == [0, 0] and not gradient.dense().any()


def test_weights_of_words_that_are_no_mask_are_not_taken_for_one():
    def losses(table, words, weights):
        def one(table, words, weights):
            return (torch.nn.functional.embedding(words, table) * weights.unsqueeze(-1)).sum(1).square().sum()

        return torch.vmap(one)(table, words, weights)

    tensors = [*words_of_texts(3), torch.rand(3, 6, 7)]
    step = traced(losses, 1, tensors, [0, 0, 0])
    found, (gradient,) = step.run(tensors)
    expected, (whole,) = eager.step(losses, 1)(tensors)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(dense(gradient), whole, rtol=1e-5, atol=1e-5)


def test_what_is_computed_ahead_meets_no_weight_and_serves_any_clients():
    """Ahead, rows of many steps stand beside each other: which client a row is of must not be counted there."""
    tensors = words_of_texts(3)
    step = traced(mean_of_words, 1, tensors, [0, 0], ["trained", "batch"])
    many = words_of_texts(11)[1]
    nothing = torch.empty(0)
    kept = step.look_ahead.early([nothing, many])
    assert kept and all(len(x) == 11 for x in kept)
    for at in ([0, 1], [9, 4, 10]):
        tables = torch.randn(len(at), 50, 4)
        *left, gradient = step.look_ahead.late(
            [tables, many[at]], [x[at] for x in kept], step.look_ahead.views([tables, many[at]])
        )
        expected, (whole,) = eager.step(mean_of_words, 1)([tables, many[at]])
        assert torch.allclose(step.look_ahead.after([nothing, many[at]], left), expected, rtol=1e-5)
        assert torch.allclose(gradient.dense(), whole, rtol=1e-5, atol=1e-6)


def test_losses_of_many_steps_at_once_are_those_of_each():
    tensors = words_of_texts(3)
    step = traced(mean_of_words, 1, tensors, [0, 0], ["trained", "batch"])
    texts = words_of_texts(5)[1]
    tables = [torch.randn(3, 50, 4), torch.randn(2, 50, 4)]  # of two steps; one client was done after the first
    kept = step.look_ahead.early([torch.empty(0), texts])
    left, expected = [], []
    for table, rows in zip(tables, (slice(3), slice(3, 5)), strict=True):
        *some, _ = step.look_ahead.late(
            [table, texts[rows]], [x[rows] for x in kept], step.look_ahead.views([table, texts[rows]])
        )
        assert len(some) == step.look_ahead.n_after
        left.append(some)
        expected.append(eager.step(mean_of_words, 1)([table, texts[rows]])[0])
    losses = step.look_ahead.after([torch.empty(0), texts], [torch.cat(each) for each in zip(*left, strict=True)])
    assert torch.allclose(losses, torch.cat(expected), rtol=1e-5)


def test_views_of_weights_see_what_is_written_to_them():
    def losses(weight, bias, x):
        return (torch.baddbmm(bias.unsqueeze(1), x.sin(), weight.transpose(1, 2))).square().sum((1, 2))

    tensors = [torch.randn(3, 2, 5), torch.randn(3, 2), torch.randn(3, 6, 5)]
    roles = ["trained", "trained", "batch"]
    step = traced(losses, 2, tensors, [0, 0, 0], roles)
    views, kept = step.look_ahead.views(tensors), step.look_ahead.early(tensors)
    assert len(views) == 2
    tensors[0] += 1
    tensors[1] -= 1
    with_old = step.look_ahead.late(tensors, kept, views)
    expected, gradients = eager.step(losses, 2)(tensors)
    assert torch.allclose(step.look_ahead.after(tensors, with_old[: step.look_ahead.n_after]), expected, rtol=1e-5)
    for found, gradient in zip(with_old[step.look_ahead.n_after :], gradients, strict=True):
        assert torch.allclose(dense(found), gradient, rtol=1e-4, atol=1e-5)


def test_losses_that_read_weights_of_their_own_are_not_left_for_later():
    def losses(table, words):
        def one(table, words):
            return torch.nn.functional.embedding(words, table).sum(1).square().sum() + table.square().sum()

        return torch.vmap(one)(table, words)

    tensors = words_of_texts(3)
    step = traced(losses, 1, tensors, [0, 0], ["trained", "batch"])
    assert step.look_ahead is None or step.look_ahead.after is None


def test_places_in_tables_are_not_kept_from_one_stack_for_another():
    """The first clients of a stack may be done before the others, which then stand in other places."""
    tensors = words_of_texts(4)
    roles = ["trained", "batch"]
    step = traced(mean_of_words, 1, tensors, [0, 0], roles, repeats=True)
    kept, rest = step.repeat.early(tensors), [x[2:] for x in tensors]
    found, gradient = step.repeat.late(rest, [x[2:] for x in kept], step.repeat.views(rest))
    expected, (whole,) = eager.step(mean_of_words, 1)(rest)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.allclose(gradient.dense(), whole, rtol=1e-5, atol=1e-6)


def test_numbers_that_differ_by_rounding_alone_are_compared_in_double_precision(monkeypatch):
    """A deep net may be on either side of a ReLU's bend in single precision; a wrong trace is wrong in double, too."""
    real = trace._are_close
    monkeypatch.setattr(trace, "_are_close", lambda a, b: a.dtype == torch.float64 and real(a, b))
    step, tensors = step_and_tensors()
    _, (weight, _) = step.run(tensors)
    assert weight.dense().dtype == torch.float32
    monkeypatch.setattr(trace, "_are_close", lambda a, b: a.dtype == torch.float32 and b.sum() < 0)
    with pytest.raises(trace.NotTraced, match="other numbers"):
        step_and_tensors()


def test_a_pass_that_is_wrong_is_found_in_double_precision_too(monkeypatch):
    """A step that fails in single precision is compared again in double with the same passes, not with fewer."""

    def losses(kernels, x):
        convolve = torch.vmap(lambda k, own: torch.nn.functional.conv2d(own, k, stride=2))
        return convolve(kernels, x).square().sum((1, 2, 3, 4))

    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 2, 3, 3), torch.randn(3, 5, 2, 9, 9)]
    assert traced(losses, 1, tensors, [0, 0]).run(tensors)[0].shape == (3,)
    right = client_by_client.convolve_each
    monkeypatch.setattr(client_by_client, "convolve_each", lambda *args: 1.5 * right(*args))
    with pytest.raises(trace.NotTraced, match="other numbers"):
        traced(losses, 1, tensors, [0, 0])


def test_values_too_are_compared_in_double_precision_where_they_differ(monkeypatch):
    """An evaluation of a deep net stays traced; one that is wrong in double precision does not."""

    def values(tensors):
        weights, x = tensors
        return [torch.bmm(x, weights).relu().sum((1, 2))]

    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 2), torch.randn(3, 5, 4)]
    real = trace._are_close
    monkeypatch.setattr(trace, "_are_close", lambda a, b: a.dtype == torch.float64 and real(a, b))
    run = trace.trace_values(values, tensors, [0, 0], Engine())
    assert torch.allclose(run(tensors)[0], values(tensors)[0])
    monkeypatch.setattr(trace, "_are_close", lambda a, b: False)
    with pytest.raises(trace.NotTraced, match="other numbers"):
        trace.trace_values(values, tensors, [0, 0], Engine())
