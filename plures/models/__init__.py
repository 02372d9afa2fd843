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

from torch import nn

from ..errors import UsageError, unknown
from .cnn import Cnn4, HnCnn, HnCnnBn, Mlp, RodCnn
from .deep import (
    ResNet8,
    ResNet8Gn,
    ResNet18,
    ResNet18Gn,
    ResNet18Small,
    ResNet18SmallGn,
    ResNet20,
    ResNet20Gn,
    ResNet50,
    Vgg11,
    Vgg11Bn,
    WideResNet28,
)
from .shapes import Shape
from .text import CharLstm, FastText

__all__ = ["MODELS", "Shape", "maker"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "cnn4": Cnn4,
    "rod-cnn": RodCnn,
    "hncnn": HnCnn,
    "hncnn-bn": HnCnnBn,
    "resnet8": ResNet8,
    "resnet8-gn": ResNet8Gn,
    "resnet20": ResNet20,
    "resnet20-gn": ResNet20Gn,
    "resnet18": ResNet18,
    "resnet18-gn": ResNet18Gn,
    "resnet18-small": ResNet18Small,
    "resnet18-small-gn": ResNet18SmallGn,
    "resnet50": ResNet50,
    "wrn28-10": WideResNet28,
    "vgg11": Vgg11,
    "vgg11-bn": Vgg11Bn,
    "fasttext": FastText,
    "charlstm": CharLstm,
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
    if n_tokens and name in MODELS and "n_tokens" not in accepted:
        text = [other for other, model in MODELS.items() if "n_tokens" in inspect.signature(model).parameters]
        raise UsageError(
            f"model {name} reads images or numbers, and the rows hold tokens; "
            f"choose a model of text ({', '.join(text)}) or other data"
        )
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
