"""What several test files set up."""

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread():
    """As in a worker: the threads of many small kernels would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def docs_script():
    """A script of the docs, by its name, as a module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "docs" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
