"""Stock layers of torch as plain functions that can be stacked over clients, and whose random numbers can be repeated.

torch's recurrent layers and attention call kernels that cannot be stacked, and dropout draws from a hidden generator.
Here they are written with plain operations on the same tensors under the same names. Dropout draws from the key of a
batch. What a module's own text calls (`F.dropout`, `F.scaled_dot_product_attention`) is met by `PlainFunctions`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plures import seeds
from plures.errors import UsageError
from plures.models.recurrent import LayerTensors, gru_layer, lstm_layer, plain_layer

_INSIDE = 1 << 21  # random numbers inside layers and functions: beside those of modules and of augmentation


def drop(x: Tensor, p: float, key: Tensor, stream: int, whole_channels: bool = False) -> Tensor:
    """Dropout whose zeros come from a key."""
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if whole_channels else x.shape
    stays = seeds.at_least(key, shape, p, stream)
    # One division, by what does not depend on weights, rounds as `x * stays / (1 - p)` does.
    return x / torch.where(stays, 1 - p, math.inf).to(x.dtype)


class Dropout(nn.Module):
    """Dropout whose zeros come from the key of the batch."""

    key: Tensor

    def __init__(self, p: float, stream: int, whole_channels: bool = False) -> None:
        super().__init__()
        self.p, self.stream, self.whole_channels = float(p), stream, whole_channels
        self.key = torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        """In inference, what it is given."""
        return x if not self.training or self.p == 0 else drop(x, self.p, self.key, self.stream, self.whole_channels)


def replacement(module: nn.Module, stream: int) -> nn.Module | None:
    """The same layer in plain operations, with the same tensors; None if it needs none.

    `stream` tells the random numbers of one layer from those of another.
    """
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return Dropout(module.p, stream, not isinstance(module, nn.Dropout))
    if isinstance(module, nn.RNNBase):
        return _Recurrent(module, _INSIDE + 64 * stream)
    if isinstance(module, nn.MultiheadAttention):
        return _Attention(module, _INSIDE + 64 * stream)
    if type(module).__name__ == "_WeightNorm":  # which torch does not name in public
        return _WeightNorm(int(module.dim))  # type: ignore[arg-type]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise UsageError("an embedding with max_norm changes its weights when it is read; leave max_norm out")
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.sparse):
        return _Embedding(module)
    return None


def keeps_output(module: nn.Module) -> bool:
    """Whether it is a layer, whose outputs are in memory until gradients are taken, and no container of layers."""
    return isinstance(module, _Recurrent) or not list(module.children())


class _Embedding(nn.Module):
    """nn.Embedding with a row for padding, which no gradient reaches: stacked, torch's own would forget that."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding = original.weight, original.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.weight)
        return found if self.padding is None else torch.where((x == self.padding).unsqueeze(-1), found.detach(), found)


class _Recurrent(nn.Module):
    """nn.LSTM, nn.GRU or nn.RNN."""

    def __init__(self, original: nn.RNNBase, stream: int) -> None:
        super().__init__()
        if original.proj_size:
            raise UsageError("nn.LSTM with proj_size is not supported; use a linear layer after it")
        self.mode, self.n_layers, self.batch_first = original.mode, original.num_layers, original.batch_first
        self.suffixes = ("", "_reverse") if original.bidirectional else ("",)
        for name, weight in original.named_parameters(recurse=False):
            self.register_parameter(name, weight)
        between = range(original.num_layers - 1)
        self.drops = nn.ModuleList(Dropout(original.dropout, stream + k) for k in between)

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        if not isinstance(x, Tensor):
            raise UsageError("packed sequences are not supported; give a recurrent layer padded rows and a mask")
        alone = x.dim() == 2
        if alone:
            x = x.unsqueeze(0 if self.batch_first else 1)
        x = x if self.batch_first else x.transpose(0, 1)
        starts = self._starts(hx, alone)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.n_layers):
            ways = []
            for suffix in self.suffixes:
                found, end = self._run(x.flip(1) if suffix else x, f"_l{layer}{suffix}", next(starts))
                ways.append(found.flip(1) if suffix else found)
                ends.append(end)
            x = ways[0] if len(ways) == 1 else torch.cat(ways, -1)
            if layer < self.n_layers - 1:
                x = self.drops[layer](x)
        x = x if self.batch_first else x.transpose(0, 1)
        last = [torch.stack(each) for each in zip(*ends, strict=True)]
        if alone:
            x, last = x.squeeze(0 if self.batch_first else 1), [each.squeeze(1) for each in last]
        return x, tuple(last) if self.mode == "LSTM" else last[0]

    def flatten_parameters(self) -> None:
        """Of no use here; some modules call it."""

    def _starts(self, hx: Any, alone: bool) -> Iterator[tuple[Tensor, ...] | None]:
        """The states that each layer and direction begins with; None for zeros."""
        n = self.n_layers * len(self.suffixes)
        if hx is None:
            return iter([None] * n)
        states = hx if isinstance(hx, tuple) else (hx,)
        if alone:
            states = tuple(state.unsqueeze(1) for state in states)
        return iter([tuple(state[k] for state in states) for k in range(n)])

    def _run(self, x: Tensor, suffix: str, start: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        found: list[Any] = [getattr(self, f"{kind}{suffix}", None) for kind in kinds]
        tensors = LayerTensors(*found)
        if self.mode == "LSTM":
            return lstm_layer(x, tensors, start)
        if self.mode == "GRU":
            return gru_layer(x, tensors, start)
        return plain_layer(x, tensors, start, torch.tanh if self.mode == "RNN_TANH" else torch.relu)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention with plain products, and its weights; a row that may look at nothing gives zeros."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    if is_causal:
        scores = scores.masked_fill(_later(scores), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(nothing, 0.0)
    return (weights if dropout is None else dropout(weights)) @ value, weights


def _later(scores: Tensor) -> Tensor:
    """[place, place]: whether the second comes after the first."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


class _Attention(nn.Module):
    """nn.MultiheadAttention."""

    def __init__(self, original: nn.MultiheadAttention, stream: int) -> None:
        super().__init__()
        if original.bias_k is not None or original.add_zero_attn:
            raise UsageError("nn.MultiheadAttention with add_bias_kv or add_zero_attn is not supported")
        self.embed_dim, self.num_heads, self.batch_first = original.embed_dim, original.num_heads, original.batch_first
        for name, weight in original.named_parameters(recurse=False):
            self.register_parameter(name, weight)
        self.out_proj = original.out_proj
        self.adapter = getattr(original, "adapter", None)  # two small matrices beside its weight
        self.drop = Dropout(original.dropout, stream)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        bias = getattr(self, "in_proj_bias", None)
        whole = getattr(self, "in_proj_weight", None)
        if whole is not None and self.adapter is not None:
            whole = whole + self.adapter.product()
        if whole is not None and query is key and key is value:
            # Rows that lie otherwise, as patches of an image do, would each be multiplied with a copy of the weights.
            return list(F.linear(query.contiguous(), whole, bias).chunk(3, -1))
        weights = whole.chunk(3) if whole is not None else [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        alone = query.dim() == 2
        parts = self._projected(query, key, value)
        if alone:
            parts = [x.unsqueeze(0) for x in parts]
        elif not self.batch_first:
            parts = [x.transpose(0, 1) for x in parts]
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)  # [row, head, place, width]
        mask = _as_numbers(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        hidden = _as_numbers(key_padding_mask, q)
        if hidden is not None:
            hidden = hidden.reshape(-1, 1, 1, hidden.shape[-1])
            mask = hidden if mask is None else mask + hidden
        found, weights = attend(q, k, v, mask, dropout=self.drop)
        found = self.out_proj(found.transpose(1, 2).flatten(2))
        if alone:
            found, weights = found.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            found = found.transpose(0, 1)
        if not need_weights:
            return found, None
        return found, weights.mean(-3) if average_attn_weights else weights


def _as_numbers(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask in which True hides a place, as numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)


class _WeightNorm(nn.Module):
    """Length times direction, as `torch.nn.utils.parametrizations.weight_norm` has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        axes = [i for i in range(direction.dim()) if self.dim == -1 or i != self.dim % direction.dim()]
        return direction * (length / direction.square().sum(axes, keepdim=True).sqrt())


# Functions that a module calls

_DROPOUTS = {F.dropout: False, torch.dropout: False, F.dropout1d: True, F.dropout2d: True, F.dropout3d: True}


class PlainFunctions(TorchFunctionMode):
    """Inside it, dropout draws from a key, and attention is made of plain products."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.n_met = key, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            self.n_met += 1
            return self._dropout(function, *args, **kwargs)
        if function is F.scaled_dot_product_attention:
            self.n_met += 1
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(
        self, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0:
            return input
        return drop(input, p, self.key, _INSIDE - self.n_met, _DROPOUTS[function])

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
        stream = _INSIDE - self.n_met
        dropout = (lambda x: drop(x, dropout_p, self.key, stream)) if dropout_p else None
        return attend(query, key, value, attn_mask, is_causal, scale, dropout)[0]


def calls_functions(run: Callable[[], Any]) -> bool:
    """Whether it calls a function that has to be met."""
    with PlainFunctions(torch.tensor(0)) as functions:
        run()
    return functions.n_met > 0


def has_fast_path(module: nn.Module) -> bool:
    """Whether a layer of it has a path of its own in inference: see `without_fast_path`."""
    return any(isinstance(child, nn.TransformerEncoderLayer) for child in module.modules())


@contextmanager
def without_fast_path() -> Iterator[None]:
    """torch's encoder layers take a path of their own in inference, which cannot be stacked; here they do not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
