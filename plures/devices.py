"""Devices: where tensors are. A run lives on one of them: its data and its state move there once.

Inside `here` every tensor that torch makes is made on the device, so that methods need not know of it. What comes from
numpy, or from a file, is moved by the few places that read it. On the CPU nothing of this happens.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plures.errors import UsageError
from plures.files import in_bytes

CPU = torch.device("cpu")
WITHOUT_DOUBLE = {"mps"}  # types of devices that have no float64


def find(name: str) -> torch.device:
    """The device of that name. Raises if this machine does not have it, or torch cannot use it."""
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(_missing(name, "CUDA"))
        n = torch.cuda.device_count()
        if (device.index or 0) >= n:
            known = ", ".join(f"cuda:{k}" for k in range(n))
            raise UsageError(f"device {name}: there is none of that number; this machine has {known}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(_missing(name, "Metal (MPS)"))
    return device


def _missing(name: str, kind: str) -> str:
    return f"device {name}: torch {torch.__version__} finds no {kind} device on this machine; use --device cpu"


def in_words(device: torch.device) -> str:
    """What it is, for people to read."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{device}: {found.name}, {in_bytes(found.total_memory)}"
    return str(device)


def here(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which new tensors are made on the device; where they are made there anyway, it changes nothing."""
    if device.type == "cpu" and torch.empty(0).device.type == "cpu":
        return nullcontext()
    return device


def in_double(x: Tensor) -> Tensor:
    """A few numbers in double precision: on the CPU, if their device has no such numbers."""
    return x.to(CPU, torch.float64) if x.device.type in WITHOUT_DOUBLE else x.to(torch.float64)
