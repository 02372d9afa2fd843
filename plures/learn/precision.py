"""Mixed precision: weights and all that is kept are float32, and the products inside a model are bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@contextmanager
def in_bf16(device: torch.device) -> Iterator[None]:
    """Torch's autocast. Weights are cast in every call: a cast that is kept would outlive the stack it belongs to."""
    with _Convolutions(), torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        yield


class _Convolutions(TorchFunctionMode):
    """Casts what convolutions read: stacked over clients, they are taken apart before autocast on the CPU sees them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in CONVOLUTIONS:
            args = [_cast(each) for each in args]
            kwargs = {name: _cast(each) for name, each in kwargs.items()}
        return function(*args, **kwargs)


def _cast(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) else value
