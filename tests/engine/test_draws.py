"""Random numbers that are drawn a block at a time are those of `seeds`, bit for bit."""

import pytest
import torch

from plures import engine, seeds
from plures.engine.passes import draws
from tests.engine.stacks import assert_trains_as_alone


@pytest.mark.parametrize("n_keys, n_numbers", [(1, 7), (5, 100), (3, draws.BLOCK + 5), (40, 1000)])
@pytest.mark.parametrize("bound", [(1 << 62) + 12345, (3 << 39) - 1, (1 << 33) - 1, (1 << 33) - 2])
def test_same_bits(n_keys, n_numbers, bound):
    keys = torch.tensor([seeds.key_of("draws", k) * (-1) ** k for k in range(n_keys)])  # some are negative
    found = draws.draw(keys.view(-1, 1, 1), n_numbers, bound, [n_keys, n_numbers])
    for key, own in zip(keys, found, strict=True):
        assert torch.equal(own, seeds.mix(key, torch.arange(n_numbers)) > bound)


def test_a_bound_in_the_low_bits_needs_the_last_round():
    """The bound is a number that only the last round brings above it."""
    key = torch.tensor(seeds.key_of("draws"))
    for number in seeds.mix(key, torch.arange(64)).tolist():
        found = draws.draw(key.view(1, 1), 64, number - 1, [64])
        assert torch.equal(found, seeds.mix(key, torch.arange(64)) > number - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [0.9, 0.5, 1 - 0.3])
def test_divisors(dtype, kept):
    stays = torch.arange(50) % 3 > 0
    expected = torch.where(stays, torch.tensor(kept, dtype=dtype), torch.tensor(torch.inf, dtype=dtype))
    assert torch.equal(draws.divisors(stays, kept, dtype), expected)


class WithDropout(torch.nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.hidden, self.drop = torch.nn.Linear(shape[-2] * shape[-1], 20), torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(20, n_classes)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.hidden(x.flatten(1)))))


def test_dropout_of_a_step_is_drawn_so(monkeypatch):
    seen = []
    real = draws.draw
    monkeypatch.setattr(draws, "draw", lambda *args: seen.append(args[1]) or real(*args))
    assert_trains_as_alone(f"{__name__}:WithDropout")
    assert seen and set(seen) == {10 * 20}  # a number for each unit of each row of a batch
    engine._steps.clear()
