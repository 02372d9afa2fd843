"""The models by name. Each takes the shape of a row and the number of classes; text models also the number of tokens.

The head of a model is its last linear layer, unless its class names another with `head_name`. Its layers are the
modules that have tensors of their own. A deep model may group them with `block_names`, from the input to the head, for
methods that count blocks. A class may have a function `tokenizer`, which takes the sizes in its name and says how it
reads text, if it has tokens of its own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from plures.data.text import Tokenizer
from plures.errors import UsageError
from plures.registry import Registry, load

if TYPE_CHECKING:
    from torch import nn

    from plures.models.inputs import Shape

HF = "hf:"  # begins the name of a model that is a Hugging Face folder
PRETRAINED = "plures.models.pretrained"  # which needs torch, and is imported when it is asked for
MOST_UNITS = 65_536  # of a layer whose size is in the name of a model

MODELS: "Registry[Callable[..., nn.Module]]" = Registry(
    "model",
    "plures.models",
    {
        "linear": "plures.models.tables:Linear",
        "mlp": "plures.models.small:Mlp",
        "tabular": "plures.models.tables:Tabular",
        "resnet1d": "plures.models.tables:ResNet1d",
        "cnn4": "plures.models.small:Cnn4",
        "rod-cnn": "plures.models.small:RodCnn",
        "hncnn": "plures.models.small:HnCnn",
        "hncnn-bn": "plures.models.small:HnCnnBn",
        "resnet8": "plures.models.resnet:ResNet8",
        "resnet8-gn": "plures.models.resnet:ResNet8Gn",
        "resnet20": "plures.models.resnet:ResNet20",
        "resnet20-gn": "plures.models.resnet:ResNet20Gn",
        "resnet18": "plures.models.resnet:ResNet18",
        "resnet18-gn": "plures.models.resnet:ResNet18Gn",
        "resnet18-small": "plures.models.resnet:ResNet18Small",
        "resnet18-small-gn": "plures.models.resnet:ResNet18SmallGn",
        "resnet50": "plures.models.resnet:ResNet50",
        "wrn28-10": "plures.models.resnet:WideResNet28",
        "vgg11": "plures.models.resnet:Vgg11",
        "vgg11-bn": "plures.models.resnet:Vgg11Bn",
        "fasttext": "plures.models.text:FastText",
        "charlstm": "plures.models.text:CharLstm",
        "minilm": "plures.models.pretrained:MiniLm",
        "efficientnet-lite0": "plures.models.efficientnet:EfficientNetLite0",
    },
)


def model_maker(name: str, shape: "Shape", n_classes: int, n_tokens: int = 0) -> "Callable[[], nn.Module]":
    """A function that makes the named model, perhaps with sizes, or a user's own, which is named as `module:Class`."""
    if name.startswith(HF):
        folder_class = load(f"{PRETRAINED}:HfFolder", "model")
        return bind_arguments(partial(folder_class, name.removeprefix(HF)), shape, n_classes, n_tokens)
    name, sizes = split_sizes(name)
    model_class = MODELS.find(name)
    if not callable(model_class):
        raise UsageError(f"model {name!r} is no class or function that makes a model, but {model_class!r:.60}")
    accepted = inspect.signature(model_class).parameters
    if n_tokens and name in MODELS and "n_tokens" not in accepted:
        text = [other for other, model in MODELS.items() if "n_tokens" in inspect.signature(model).parameters]
        raise UsageError(
            f"model {name} reads images or numbers, and the rows hold tokens; "
            f"choose a text model ({', '.join(text)}) or other data"
        )
    if sizes and "sizes" not in accepted:
        raise UsageError(f"model {name} takes no sizes; write {name!r}")
    return bind_arguments(model_class, shape, n_classes, n_tokens, sizes)


def tokenizer_of(name: str | None) -> Tokenizer | None:
    """How the named model reads text, if it has tokens of its own; None if the data's words become its tokens."""
    if name is None:
        return None
    if name.startswith(HF):
        return load(f"{PRETRAINED}:folder_tokenizer", "model")(name.removeprefix(HF))
    base, sizes = split_sizes(name)
    declared = getattr(MODELS[base], "tokenizer", None) if base in MODELS else None
    return None if declared is None else declared(sizes)


def folder_of(name: str) -> str | None:
    """The Hugging Face folder of a named model; None if it is none."""
    if not name.startswith(HF) and split_sizes(name)[0] != "minilm":
        return None
    if name.startswith(HF):
        return str(load(f"{PRETRAINED}:split_length", "model")(name.removeprefix(HF))[0])
    return str(load(f"{PRETRAINED}:minilm_folder", "model")())


def is_of_ours(name: str) -> bool:
    """Whether it names a model of the table above, perhaps with sizes."""
    return split_sizes(name)[0] in MODELS


def split_sizes(name: str) -> tuple[str, tuple[int, ...]]:
    """The name of one of our models and its sizes, as in mlp:64,64; any other name as it is."""
    base, colon, text = name.partition(":")
    if not colon or base not in MODELS:
        return name, ()
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= MOST_UNITS for size in sizes):
        raise UsageError(f"model {name!r}: sizes are whole numbers from 1 to {MOST_UNITS} with commas, as in mlp:64,64")
    return base, sizes


def bind_arguments(
    make: "Callable[..., nn.Module]", shape: "Shape", n_classes: int, n_tokens: int, sizes: tuple[int, ...] = ()
) -> "Callable[[], nn.Module]":
    """A function without arguments that makes the model; `make` gets those of the arguments that it accepts."""
    accepted = inspect.signature(make).parameters
    known = {"shape": shape, "n_classes": n_classes, "n_tokens": n_tokens, "sizes": sizes}
    return lambda: make(**{key: value for key, value in known.items() if key in accepted})
