"""Adapters: a frozen model with few weights that train, beside its layers.

An adapter is made by changing the module before it becomes a task: linear and convolution layers, and the products of
attention, get small matrices or factors of their own, and all other weights but the head's are frozen. So every method,
add-on and executor meets a model like any other. `merged` turns adapters into plain weights again.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plures import tree
from plures.errors import UsageError, unknown
from plures.learn.frozen import matches
from plures.tree import Params

KINDS = ("lora", "bias", "scale", "head")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Adapter(NamedTuple):
    """Which adapter, and how large."""

    kind: str
    rank: int | None = 4  # None: full
    alpha: float | None = None  # the product is scaled by alpha / rank; None: by 1
    layers: str = "*"  # names of layers, with * for anything, joined by /
    start: str = "random"  # of A: random, or the identity
    fixed: str = "none"  # a: A stays as it starts

    @property
    def scale(self) -> float:
        """The factor of the product of both matrices."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank


def parse(text: str) -> Adapter:
    """`lora`, `lora:rank=4,alpha=8,layers=layer4*/fc,fixed=a`, `scale:layers=conv*`, `bias`, `head`."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("adapter", kind, KINDS)
    values: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        allowed = ("layers",) if kind == "scale" else Adapter._fields[1:] if kind == "lora" else ()
        if key not in allowed or not equals:
            raise unknown(f"setting of the adapter {kind}", key, allowed)
        values[key] = value
    found = Adapter(kind, layers=values.get("layers", "*"))
    try:
        if "rank" in values:
            found = found._replace(rank=None if values["rank"] == "full" else int(values["rank"]))
        if "alpha" in values:
            found = found._replace(alpha=float(values["alpha"]))
    except ValueError:
        raise UsageError(f"adapter {text!r}: rank is a whole number or full, and alpha a number") from None
    if found.rank is not None and found.rank < 1:
        raise UsageError(f"adapter {text!r}: rank must be 1 or more")
    for key, choices in (("start", ("random", "identity")), ("fixed", ("none", "a"))):
        if values.get(key, choices[0]) not in choices:
            raise unknown(f"{key} of the adapter", values[key], choices)
    return found._replace(start=values.get("start", "random"), fixed=values.get("fixed", "none"))


class _Lora(nn.Module):
    """Two small matrices, whose product is added to a weight [out, ...]. Their names are those of `peft`."""

    def __init__(self, weight: Tensor, adapter: Adapter) -> None:
        super().__init__()
        n_out, n_in = len(weight), weight[0].numel()
        rank = n_in if adapter.rank is None else adapter.rank
        if adapter.start == "identity":
            start = torch.eye(rank, n_in, dtype=weight.dtype)
        else:
            start = nn.init.kaiming_uniform_(torch.empty(rank, n_in, dtype=weight.dtype), a=math.sqrt(5))
        self.scale = adapter.scale
        self.lora_A = nn.Parameter(start, requires_grad=adapter.fixed != "a")
        self.lora_B = nn.Parameter(weight.new_zeros(n_out, rank))

    def product(self) -> Tensor:
        """What is added to the weight, [out, in]."""
        return self.scale * (self.lora_B @ self.lora_A)


class _Scale(nn.Module):
    """A factor for each output of a layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(weight.new_ones(len(weight)))


class _Linear(nn.Linear):
    """A linear layer with an adapter: the frozen product is one for all clients, and theirs are small."""

    adapter: _Lora | _Scale

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(self.adapter, _Scale):
            product = F.linear(input, self.weight) * self.adapter.scale
            return product if self.bias is None else product + self.bias
        small = F.linear(F.linear(input, self.adapter.lora_A), self.adapter.lora_B)
        return F.linear(input, self.weight, self.bias) + self.adapter.scale * small


class _Conv1d(nn.Conv1d):
    """With an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv1d(input, _adapted_kernel(self), self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Conv2d(nn.Conv2d):
    """With an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, _adapted_kernel(self), self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Conv3d(nn.Conv3d):
    """With an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv3d(input, _adapted_kernel(self), self.bias, self.stride, self.padding, self.dilation, self.groups)


_BY_DIMENSIONS: dict[int, Any] = {3: _Conv1d, 4: _Conv2d, 5: _Conv3d}


def _adapted_kernel(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    adapter = layer.adapter
    if isinstance(adapter, _Scale):
        return layer.weight * adapter.scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
    assert isinstance(adapter, _Lora)
    return layer.weight + adapter.product().reshape(layer.weight.shape)


def adapted(module: nn.Module, adapter: Adapter, head: str) -> nn.Module:
    """The module with adapters; what trains has `requires_grad`, and nothing else does."""
    for name, weight in module.named_parameters():
        is_bias = adapter.kind == "bias" and name.rpartition(".")[2].startswith("bias")
        weight.requires_grad_(name.startswith(head + ".") or is_bias)
    if adapter.kind in ("bias", "head"):
        return module
    found = 0
    for path, layer in list(module.named_modules()):
        if path == head or not any(matches(pattern, path) for pattern in adapter.layers.split("/")):
            continue
        own = weight_of(layer, adapter.kind)
        if own is None:
            continue
        small = _Lora(own, adapter) if adapter.kind == "lora" else _Scale(own)
        found += 1
        layer.adapter = small
        # The layer stays the same object, for a model may read its attributes, such as kernel_size.
        if isinstance(layer, CONVOLUTIONS):
            if layer.padding_mode != "zeros":
                raise UsageError("an adapter cannot stand beside a convolution that pads with anything but zeros")
            layer.__class__ = _BY_DIMENSIONS[layer.weight.dim()]
        elif isinstance(layer, nn.Linear):
            layer.__class__ = _Linear
    if not found:
        fit = [path for path, layer in module.named_modules() if weight_of(layer, adapter.kind) is not None]
        raise unknown("layer for an adapter", adapter.layers, [path for path in fit if path != head])
    return module


def weight_of(layer: nn.Module, kind: str) -> Tensor | None:
    """The weight of a layer that an adapter of this kind can stand beside; None if it has none."""
    if isinstance(layer, nn.MultiheadAttention):  # which reads its adapter itself: see `stock`
        return layer.in_proj_weight if kind == "lora" else None
    return layer.weight if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) else None


def merged(params: Params, scale: float) -> Params:
    """A whole model with its adapters turned into plain weights, under the names of the model without them."""
    out = {name: x for name, x in params.items() if ".adapter." not in name}
    for name, x in params.items():
        layer, _, part = name.partition(".adapter.")
        if part == "lora_B":
            own = f"{layer}.weight" if f"{layer}.weight" in out else f"{layer}.in_proj_weight"
            weight = out[own]
            out[own] = weight + (scale * (x @ params[f"{layer}.adapter.lora_A"])).reshape(weight.shape)
        elif part == "scale":
            weight = out[f"{layer}.weight"]
            out[f"{layer}.weight"] = weight * x.reshape(-1, *[1] * (weight.dim() - 1))
    return tree.map(Tensor.contiguous, out)
