"""One thread: tensors here are tiny, and two threads on a busy machine wait for each other at every step."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
