"""What several test files set up."""

import importlib.util
from pathlib import Path

import pytest
import torch

# Left out by `make test-fast`: real processes and browsers, and what trains every method.
SLOW = """federate simulate/test_ray.py simulate/test_new_clients.py simulate/test_attack.py report
methods/test_every_method.py methods/test_catalog.py methods/ingredients/test_sharpness.py methods/test_fedrod_hyper.py
methods/test_afml.py engine/test_engines.py engine/test_channels_last.py runs/test_loop.py runs/test_results.py
studies/test_presets.py studies/test_tune.py studies/test_claims.py models/test_models.py test_surface.py
test_add_a_method.py test_devices.py""".split()


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here)
        if any(place.is_relative_to(slow) for slow in SLOW):
            item.add_marker(pytest.mark.slow)


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
