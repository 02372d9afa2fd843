"""What an engine does depends on the machine in one thing: whether oneDNN multiplies faster than MKL."""

import pytest

from plures import engine
from plures.engine import onednn


def _as_if(monkeypatch, faster):
    monkeypatch.setattr(onednn, "is_faster", lambda: faster)
    engine._steps.clear()
    yield
    engine._steps.clear()


@pytest.fixture
def by_onednn(monkeypatch):
    """As on a machine where oneDNN is faster."""
    yield from _as_if(monkeypatch, True)


@pytest.fixture
def by_mkl(monkeypatch):
    """As on a machine where MKL is as fast."""
    yield from _as_if(monkeypatch, False)
