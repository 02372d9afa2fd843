"""A small product beside a large one, as LoRA has it, is added by the kernel that makes it."""

import pytest
import torch

from plures.engine.passes import clean, join_products
from plures.engine.record import record

aten = torch.ops.aten


def lora(base, a, b):
    return [(base + 1).view(2, 3, 5, 4) + torch.bmm(a, b).view(2, 3, 5, 4) * 1.0]


def read_twice(base, a, b):
    product = torch.bmm(a, b)
    return [(base + 1).view(2, 3, 5, 4) + product.view(2, 3, 5, 4), product]


def other_shapes(base, a, b):
    return [(base + 1).view(2, 3, 5, 4) + torch.bmm(a, b).view(2, 1, 15, 4)[:, :, :5]]


def no_product(base, a, b):
    return [(base + 1).view(2, 3, 5, 4) + (base * 2).view(2, 3, 5, 4)]


@pytest.mark.parametrize("fn, n_joined", [(lora, 1), (read_twice, 0), (other_shapes, 0), (no_product, 0)])
def test_sum_of_views_is_one_kernel_with_the_product(fn, n_joined):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 15, 4), torch.randn(2, 15, 3), torch.randn(2, 3, 4)]
    wanted = fn(*tensors)
    module = record(fn, [(x.shape, x.dtype) for x in tensors])
    clean.apply(module.graph, 10007)
    join_products.apply(module.graph, 10007)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten.baddbmm.default) == n_joined
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(module(*tensors), wanted, strict=True))


def test_one_is_left_out_where_it_makes_no_other_type():
    module = record(lambda x: [x * 1.0, x / 1, x * 2.0], [((2, 3), torch.int64)])
    clean.apply(module.graph, 10007)
    assert sum(node.op == "call_function" for node in module.graph.nodes) == 3
    module = record(lambda x: [x * 1.0, x / 1, x * 2.0], [((2, 3), torch.float32)])
    clean.apply(module.graph, 10007)
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [aten.mul.Tensor]
