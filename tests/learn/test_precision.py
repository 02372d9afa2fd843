"""Mixed precision: models compute in bfloat16, and all that is kept is float32."""

import pytest
import torch
from torch import nn

import plures
from plures import tree
from plures.data.batches import Batch
from plures.learn.precision import in_bf16
from plures.learn.task import build
from tests.small import TinyNorm

SHORT = {"data": "digits", "clients": 6, "rounds": 3, "model": "mlp:32", "lr": 0.1}


def run(method, **options):
    return plures.run(method, **SHORT | options)


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_bf16_is_as_good_as_float32_and_its_digest_repeats(method):
    single, mixed, again = (run(method, precision=name) for name in ("float32", "bf16", "bf16"))
    assert mixed.summary["digest"] == again.summary["digest"] != single.summary["digest"]
    assert mixed.summary["personal"]["mean"] == pytest.approx(single.summary["personal"]["mean"], abs=0.03)
    assert all(x.dtype == torch.float32 for model in mixed.models.values() for x in tree.leaves(model))
    assert mixed.summary["engine"]["traced"] == 0
    assert mixed.summary["engine"]["why"] == ["the fast engine is for float32 and float64, and precision is bf16"]


def test_products_and_convolutions_are_bf16_stacked_and_alone_and_gradients_are_float32():
    task = build(lambda: TinyNorm((1, 8, 8), 10), torch.zeros(1, 8, 8), 10, 0).in_bf16()
    seen = []

    def note(module, inputs, output):
        seen.append((type(module).__name__, output.dtype))

    for module in task._training.module.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(note)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 1, 8, 8, generator=generator)
    batch = Batch(x, torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5), torch.ones(3, 10), torch.arange(3))
    params = tree.repeat(task.initial, 3)
    stacked = torch.vmap(torch.func.grad(task.loss))(params, batch)
    alone = torch.func.grad(task.loss)(task.initial, Batch(*[part[1] for part in batch]))
    assert seen == [("Conv2d", torch.bfloat16), ("Linear", torch.bfloat16)] * 2
    largest = max(float(x.norm()) for x in alone.values())
    for name, x in stacked.items():  # a bias before BatchNorm has no gradient but rounding
        assert x.dtype == torch.float32
        assert float((x[1] - alone[name]).norm()) <= 0.05 * float(alone[name].norm()) + 0.02 * largest, name
    assert task.logits(task.initial, batch.x[0]).dtype == torch.float32
    assert task.features(task.initial, batch.x[0]).dtype == torch.float32


def test_outside_nothing_is_cast():
    with in_bf16(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
