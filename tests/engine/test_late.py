"""Weights whose updates are added in the end are, at every step, the weights with their updates added."""

import pytest
import torch
from torch import nn

from plures import api, engine
from plures.engine import steps
from plures.engine.gradients import LargeProduct, Product
from plures.engine.late import Late, most_rows
from plures.engine.passes import late_updates
from plures.learn import fit as fits
from tests.engine.stacks import assert_trains_as_alone, trained


@pytest.mark.parametrize("machine", ["by_onednn", "by_mkl"])
@pytest.mark.parametrize(
    "product, dtype", [(Product, torch.float32), (LargeProduct, torch.float32), (Product, torch.float64)]
)
def test_multiplies_as_weights_that_have_changed(machine, product, dtype, request):
    request.getfixturevalue(machine)
    torch.manual_seed(0)
    start, n = torch.randn(6, 5, dtype=dtype), 3
    weights = Late(start, n, 8)
    plain = start.repeat(n, 1, 1)
    some = weights
    for step in range(3):
        if step == 2:  # the last client has stopped
            some, plain = some[:2], plain.clone()
        live = len(some)
        x, d = torch.randn(live, 2, 5, dtype=dtype), torch.randn(live, 2, 6, dtype=dtype)
        assert torch.allclose(some.multiply(x, True), x @ plain[:live].mT, rtol=1e-5, atol=1e-5)
        assert torch.allclose(some.multiply(d, False), d @ plain[:live], rtol=1e-5, atol=1e-5)
        gradient = product(d.mT, x)
        gradient.add_to(some, -0.1)
        plain[:live] -= 0.1 * gradient.dense()
    settled = start.repeat(n, 1, 1)
    weights.settle(settled)
    assert torch.allclose(settled, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(weights.start, start)


def test_pays_while_thin_products_are_less_than_half_of_the_layer():
    """Of 512 x 1024 weights: 170 rows are 170 x 1536 numbers, of 524,288 half is 262,144."""
    assert most_rows(512, 1024) == 170
    assert 170 * 1536 <= 262_144 < 171 * 1536


class Dense(nn.Module):
    """A layer of a hundred thousand weights, and a head."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.first, self.head = nn.Linear(shape[0] * shape[1] * shape[2], 1600), nn.Linear(1600, n_classes)

    def forward(self, x):
        return self.head(torch.relu(self.first(x.flatten(1))))


class Read(Dense):
    """The weights of the layer are read otherwise too."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-3 * self.first.weight.square().mean())


@pytest.fixture
def started(monkeypatch):
    """How many layers each fit keeps late."""
    found = []
    real = fits._Training._start_late

    def start(self, step):
        found.append(real(self, step))
        return found[-1]

    monkeypatch.setattr(fits._Training, "_start_late", start)
    engine._steps.clear()
    yield found
    engine._steps.clear()


def test_stack_trains_as_one_client_after_another(started):
    assert_trains_as_alone(f"{__name__}:Dense")
    assert [list(late) for late in started if late] == [[0]]


def test_weights_that_are_read_otherwise_are_not_late(started):
    assert_trains_as_alone(f"{__name__}:Read")
    assert not any(started)
    assert [step.late for step in engine._steps.values()] == [[]]


SHARED = {"data": "digits", "model": f"{__name__}:Dense", "clients": 6, "rounds": 2, "eval_every": 0, "batch": 8}


@pytest.mark.parametrize(
    "changes, is_late",
    [
        ({"steps": 2}, True),
        ({"steps": 2, "momentum": 0.9}, False),
        ({"steps": 2, "weight_decay": 0.1}, False),
        ({"steps": 2, "engine": "traced:late-updates=off"}, False),
        ({"steps": 9}, False),  # 72 rows; of 64 x 1600 weights 30 pay
        ({"steps": 2, "method": "local"}, False),  # in its second round clients start from weights of their own
    ],
)
def test_is_late_where_steps_only_add_and_clients_start_alike(started, changes, is_late):
    options = SHARED | {"method": "fedavg"} | changes
    api.run(**options)
    assert bool(started[-1]) is is_late


def test_clients_with_fewer_batches_keep_what_they_have(started, monkeypatch):
    """Clients of very different sizes: some stop after a few steps, others go on."""
    monkeypatch.setattr(steps, "most_rows", lambda n_out, n_in: 10**6)
    options = SHARED | {"method": "fedavg", "partition": "dirichlet:0.1", "epochs": 1}
    late = api.run(**options)
    largest = max((weights for found in started for weights in found.values()), key=len)
    assert len(largest.left.any(2).sum(1).unique()) > 1  # how many rows of each client are kept
    plain = api.run(**options, engine="traced:late-updates=off")
    for client, model in plain.models.items():
        for name, x in model.items():
            assert torch.allclose(x, late.models[client][name], rtol=1e-3, atol=1e-5), name


def test_what_may_be_late_is_found_and_said(started):
    trained(f"{__name__}:Dense", "vectorised")
    (step,) = engine._steps.values()
    assert step.late == [0]


def test_small_layers_stay_as_they_are(started, monkeypatch):
    monkeypatch.setattr(late_updates, "LARGE", 64 * 1600 + 1)
    trained(f"{__name__}:Dense", "vectorised")
    assert [step.late for step in engine._steps.values()] == [[]]
    assert not any(started)
