"""The models, by name. Each takes the shape of a row and the number of classes; models of text take
the number of tokens too.

A model's head is its last linear layer, unless the class says otherwise with `head_name`. Its layers
are the modules that own tensors; a deep model may group them with `block_names`, from the input to
the head, for methods that count in blocks.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .errors import UsageError, unknown

Shape = tuple[int, ...]


class Mlp(nn.Module):
    """One hidden layer of 64."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(int(torch.tensor(shape).prod()), 64)
        self.head = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def _after(side: int, *steps: str) -> int:
    """The side of an image after 5x5 and 3x3 convolutions without padding, and 2x2 pooling."""
    for step in steps:
        side = {"5": side - 4, "3": side - 2, "pool": side // 2}[step]
    return side


def _image(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UsageError(
            f"model {name} needs images of at least {least}x{least}, got rows of shape {tuple(shape)}; "
            "choose another model, e.g. mlp, or other data"
        )
    return shape


class Cnn4(nn.Module):
    """FedALA's 4-layer CNN: 5x5 convolutions of 32 and 64 channels with pooling, 512, classes."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = _image("cnn4", shape, 16)
        size = 64 * _after(height, "5", "pool", "5", "pool") * _after(width, "5", "pool", "5", "pool")
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(size, 512)
        self.head = nn.Linear(512, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = torch.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class RodCnn(nn.Module):
    """Fed-RoD's networks: two 5x5 convolutions and 50 features for grey images, three 3x3 and 64 for colour."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = _image("rod-cnn", shape, 16)
        if channels == 1:
            size = 64 * _after(height, "5", "pool", "5", "pool") * _after(width, "5", "pool", "5", "pool")
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
            self.conv3 = None
            self.hidden, self.head = nn.Linear(size, 50), nn.Linear(50, n_classes, bias=False)
        else:
            steps = ("3", "pool", "3", "pool", "3")
            size = 64 * _after(height, *steps) * _after(width, *steps)
            self.conv1, self.conv2 = nn.Conv2d(channels, 32, 3), nn.Conv2d(32, 64, 3)
            self.conv3 = nn.Conv2d(64, 64, 3)
            self.hidden, self.head = nn.Linear(size, 64), nn.Linear(64, n_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = torch.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        if self.conv3 is not None:
            x = torch.relu(self.conv3(x))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class HnCnn(nn.Module):
    """The CNN of pFedHN and pFedLA: 5x5 convolutions of 16 and 32 channels, 120, 84, classes."""

    batch_norm = False

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        channels, height, width = _image("hncnn", shape, 16)
        size = 32 * _after(height, "5", "pool", "5", "pool") * _after(width, "5", "pool", "5", "pool")
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.norm1 = nn.BatchNorm2d(16) if self.batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.norm2 = nn.BatchNorm2d(32) if self.batch_norm else nn.Identity()
        self.hidden1 = nn.Linear(size, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        x = torch.relu(self.hidden2(torch.relu(self.hidden1(x.flatten(1)))))
        return self.head(x)


class HnCnnBn(HnCnn):
    """hncnn with BatchNorm after its convolutions, as pFedLA has it on CIFAR."""

    batch_norm = True


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "cnn4": Cnn4,
    "rod-cnn": RodCnn,
    "hncnn": HnCnn,
    "hncnn-bn": HnCnnBn,
}


def maker(name: str, shape: Shape, n_classes: int, n_tokens: int = 0) -> Callable[[], nn.Module]:
    """A function that makes the named model, or the user's own given as `module:Class`."""
    made: Callable[..., nn.Module]
    if ":" in name:
        made = _imported(name)
    elif name in MODELS:
        made = MODELS[name]
    else:
        raise unknown("model", name, MODELS)
    accepted = inspect.signature(made).parameters
    known = {"shape": shape, "n_classes": n_classes, "n_tokens": n_tokens}
    return lambda: made(**{key: value for key, value in known.items() if key in accepted})


def _imported(name: str) -> Callable[..., nn.Module]:
    module_name, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise UsageError(f"model {name!r}: cannot import {module_name!r} ({error}); is it in this folder?") from error
    except AttributeError as error:
        raise UsageError(f"model {name!r}: {module_name!r} has no {class_name!r}") from error
