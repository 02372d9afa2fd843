"""What a run will need is told before it is taken."""

import resource
import sys

import pytest
import torch

from plures import tree
from plures.cli.main import call
from plures.errors import UsageError
from plures.methods import METHODS
from plures.simulate import memory, shapes
from tests.small import run_of, scene_of


@pytest.mark.parametrize("name", METHODS)
def test_the_forecast_is_what_a_run_holds(name):
    run = run_of(name, "norm", executor="one_by_one")
    run.close()
    method, task = run.state.scene.method, run.state.scene.task
    told = memory.forecast(run.state.shapes, 6, 6)

    def size(of):
        return sum(x.numel() * x.element_size() for x in tree.leaves(of))

    message = method.send(task, run.state.server, torch.arange(6))
    assert told.server == size(run.state.server)
    assert told.messages == size(message.tree)
    assert told.clients == 6 * size(method.init_client(task, task.initial))


def test_a_forecast_takes_no_memory(monkeypatch):
    """A hypernetwork of 20 GB is told and not made."""
    scene = scene_of("pfedhn:width=4000000", "mlp")
    sizes = scene.population.sizes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(shapes, "_trained_on_one_row", lambda method, task, received: ({}, {}, {}))
    told = memory.forecast(shapes.shapes_of(scene.method, scene.task, sizes), 6, 6)
    assert told.server > 10 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kilobytes


def test_too_large_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    with pytest.raises(UsageError, match=r"would need about .* and 10.0 kB are free. Choose fewer clients"):
        run_of("apple")


def test_doctor_tells_that_it_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    assert call(["doctor", "pfedla"]) == 0
    assert "it does not fit" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted, and glibc is told, on Linux only")
def test_memory_that_is_freed_comes_again_without_fresh_pages():
    memory.keep_freed_memory()
    x = torch.ones(2 << 20)  # 8 MB, 2048 pages

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            (x * 2 + x).sum()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(3)) < 2048  # a heap in pieces may take one more piece, once
