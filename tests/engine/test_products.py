"""Products by oneDNN are products, however matrices lie; large ones are rewritten, and those that share a matrix."""

import pytest
import torch
from torch import nn

from plures import engine
from plures.engine import onednn, private
from plures.engine.gradients import LargeProduct, Product
from plures.engine.passes import columns, products, winograd
from tests.engine.stacks import assert_trains_as_alone, seen_after

needs_onednn = pytest.mark.skipif(not private.has_onednn, reason="this torch lacks kernels of oneDNN")


def matrices(*shapes):
    """Of each shape one that lies in rows, and one that lies in columns, as a transpose does."""
    torch.manual_seed(0)
    rows = [torch.randn(shape) for shape in shapes]
    return rows, [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in rows]


def are_close(found, exact):
    """To the rounding of single precision, as a share of the largest number."""
    return bool((found - exact).abs().max() <= 2e-6 * exact.abs().max())


@needs_onednn
@pytest.mark.parametrize("rows, inner, wide", [(1, 1, 1), (10, 7, 33), (37, 64, 5), (3, 500, 130)])
def test_products_however_matrices_lie(rows, inner, wide):
    for a in matrices((2, rows, inner)):
        for b in matrices((2, inner, wide)):
            left, right = a[0], b[0]
            exact = left.double() @ right.double()
            assert are_close(onednn.multiply_each(left, right), exact)
            assert are_close(onednn.multiply_each(left[:1], right[:1]), exact[:1])
            assert are_close(onednn.multiply(left[1], right[1]), exact[1])
            for shape in ((1, 1, wide), (2, 1, wide), (2, rows, wide)):
                to = torch.randn(shape)
                before = to.clone()
                assert are_close(onednn.add_multiply_each(to, left, right), to.double() + exact)
                assert torch.equal(to, before)
            assert are_close(onednn.add_multiply(torch.ones(wide), left[0], right[0]), 1 + exact[0])
            assert are_close(onednn.add_multiply(exact[0].float(), left[0], right[0]), 2 * exact[0])


@needs_onednn
def test_large_gradient_is_added_as_any_other():
    left, right = torch.randn(3, 20, 4), torch.randn(3, 4, 30)
    weights = torch.randn(3, 20, 30)
    plain, large = weights.clone(), weights.clone()
    Product(left, right).add_to(plain, -0.1)
    LargeProduct(left, right).add_to(large, -0.1)
    assert are_close(large, plain.double())
    assert are_close(LargeProduct(left, right).dense(), torch.bmm(left.double(), right.double()))


class Wide(nn.Module):
    """A dense layer of 4.9 million FLOPs for a batch of eight, and a small one."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.head = nn.Linear(shape[0] * shape[1] * shape[2], 600), nn.Linear(600, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.first(x.flatten(1))))


@needs_onednn
def test_large_products_of_a_step_are_rewritten_and_train_as_one_client_after_another(monkeypatch, by_onednn):
    graphs = seen_after(monkeypatch, products)
    monkeypatch.setattr(products, "LARGE", 2 * 8 * 64 * 600)  # the first layer with a batch of eight; not the head
    assert_trains_as_alone(f"{__name__}:Wide")
    of_step = graphs[0]
    assert onednn.add_multiply_each in of_step and LargeProduct in of_step
    assert torch.ops.aten.baddbmm.default in of_step and Product in of_step  # the head


@needs_onednn
def test_nothing_is_rewritten_where_torch_is_as_fast_or_in_double_precision(monkeypatch, by_onednn):
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    out = graph.call_function(torch.ops.aten.bmm.default, (a, b))
    graph.output(out)
    for dtype, faster, target in (
        (torch.float64, True, torch.ops.aten.bmm.default),
        (torch.float32, False, torch.ops.aten.bmm.default),
        (torch.float32, True, onednn.multiply_each),
    ):
        out.target = torch.ops.aten.bmm.default
        a.meta["val"], b.meta["val"] = torch.empty(7, 300, 300, dtype=dtype), torch.empty(7, 300, 300, dtype=dtype)
        monkeypatch.setattr(onednn, "is_faster", lambda faster=faster: faster)
        products.apply(graph, 7)
        assert out.target is target


def test_size_is_that_of_one_client():
    """2 x 10 x 30 x 40 for each of seven clients, whether they are an axis of their own or lie in the rows."""
    graph = torch.fx.Graph()
    nodes = {shape: graph.placeholder("x") for shape in ((7, 10, 30), (7, 30, 40), (70, 30), (30, 40))}
    for shape, node in nodes.items():
        node.meta["val"] = torch.empty(shape)
    assert products.flops(nodes[7, 10, 30], nodes[7, 30, 40], 7) == 24_000
    assert products.flops(nodes[70, 30], nodes[30, 40], 7) == 24_000
    assert products.flops(nodes[70, 30], graph.placeholder("unknown"), 7) == 0


@needs_onednn
def test_convolutions_as_products_are_done_by_onednn_too():
    torch.manual_seed(0)
    x, kernels, bias = torch.randn(2, 3, 5, 9, 8), torch.randn(2, 6, 5, 3, 3), torch.randn(2, 6)
    plain, matrices_ = columns.convolve_each(x, kernels, bias, (2, 2), (1, 1))
    found, _ = columns.convolve_each(x, kernels, bias, (2, 2), (1, 1), by_onednn=True)
    assert are_close(found, plain.double())
    of_out = torch.randn_like(plain)
    options = (of_out, x, matrices_, kernels, (2, 2), (1, 1), [True, True])
    pairs = zip(columns.gradients_each(*options), columns.gradients_each(*options, by_onednn=True), strict=True)
    assert all(are_close(ours, exact.double()) for exact, ours in pairs)


def test_the_maker_decides(monkeypatch):
    """A processor without the widest registers, of Intel, or unknown: MKL is as fast there."""
    real = onednn.is_faster.__wrapped__
    monkeypatch.setattr(private, "has_onednn", True)
    for capability, maker, faster in (
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX512", "", False),
        ("AVX2", "AuthenticAMD", False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(onednn, "_maker", lambda maker=maker: maker)
        assert real() is faster
    monkeypatch.setattr(private, "has_onednn", False)
    assert real() is False


@needs_onednn
@pytest.mark.parametrize("n, rows, inner, wide", [(3, 10, 16, 64), (1, 4, 8, 3), (2, 1, 7, 5)])
def test_products_with_a_packed_matrix(n, rows, inner, wide):
    for a in matrices((n, rows, inner)):
        for b in matrices((n, inner, wide)):
            left, right = a[0], b[0]
            exact = left.double() @ right.double()
            packed = onednn.pack(right, rows)
            found = onednn.multiply_packed(left, packed)
            assert are_close(found, exact)
            assert are_close(
                onednn.multiply_packed(found @ right.transpose(1, 2), packed),
                exact @ right.mT.double() @ right.double(),
            )
            for to in (torch.randn(n, rows, wide), torch.randn(n, 1, wide)):
                assert are_close(onednn.add_multiply_packed(to, left, packed), to.double() + exact)


class Recurrent(nn.Module):
    """An LSTM over the rows of an image: its state meets the same weights eight times."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.lstm, self.head = nn.LSTM(shape[2], 24, batch_first=True), nn.Linear(24, n_classes)

    def forward(self, x):
        return self.head(self.lstm(x[:, 0])[0][:, -1])


@needs_onednn
def test_weights_of_a_recurrent_net_are_packed_once(monkeypatch, by_onednn):
    graphs = seen_after(monkeypatch, products)
    monkeypatch.setattr(products, "NOT_TINY", 1)
    monkeypatch.setattr(products, "USES", 7)  # the first of eight positions has no state
    assert_trains_as_alone(f"{__name__}:Recurrent")
    assert graphs[0].count(onednn.pack) == 2  # forth and back
    assert graphs[0].count(onednn.add_multiply_packed) + graphs[0].count(onednn.multiply_packed) == 14


def test_where_convolutions_are_faster_than_products_fewer_are_rewritten(monkeypatch):
    """Windows of five with 32 channels in, 64 out, 8 x 8 outputs of ten rows: more than a quarter."""
    args = (10, 32, 64, (5, 5), (8, 8))
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    assert winograd.pays(*args)
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    assert not winograd.pays(*args)


@needs_onednn
def test_large_dense_layers_of_a_module_run_by_onednn(monkeypatch, by_onednn):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 3, bias=False))
    x = torch.randn(4, 6, 50)
    wanted, called = module.double()(x.double()), []
    module.float()
    real = onednn.multiply
    monkeypatch.setattr(onednn, "multiply", lambda a, *others: called.append(tuple(a.shape)) or real(a, *others))
    monkeypatch.setattr(onednn, "LARGE", 2 * 24 * 50 * 200)
    with torch.no_grad(), engine.DenseLayers():
        assert are_close(module(x), wanted)
        assert are_close(module.double()(x.double()), wanted)
    with engine.DenseLayers():
        module.float()(x).sum().backward()
    assert module[0].weight.grad is not None
    assert called == [(24, 50)]  # the first layer alone, in single precision, and without gradients
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    with torch.no_grad(), engine.DenseLayers():
        module.float()(x)
    assert len(called) == 1
