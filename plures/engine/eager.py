"""The eager step: vmap and autograd, kernel by kernel. It is the reference, and what is used in doubt."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plures import tree
from plures.data.batches import Batch
from plures.engine.gradients import Gradient

N_FIELDS = len(Batch._fields)
LossesAndGradients = tuple[Tensor, list[Gradient]]


class Signature(NamedTuple):
    """How the tensors of a step, in a row, are to be read: parameters, then a batch, then what is given besides."""

    params_spec: tree.Spec
    n_params: int
    given_spec: tree.Spec
    given_dims: tuple[int | None, ...]  # 0 for what is stacked, None for what all clients share
    alone: bool = False  # one client: its function is called as it is, without vmap

    @property
    def dims(self) -> list[int | None]:
        """Of every tensor: 0 if the number of clients, which may change from call to call, is its first axis."""
        n = self.n_params + N_FIELDS
        return [None] * (n + len(self.given_dims)) if self.alone else [*[0] * n, *self.given_dims]


def over_clients(fn: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """`fn(params, batch, *given)` as a function of the tensors of a stack of clients, in a row."""
    n = signature.n_params

    def one(params: list[Tensor], batch: Batch, given: list[Tensor]) -> Any:
        whole = tree.unflatten(params, signature.params_spec)
        return fn(whole, batch, *tree.unflatten(given, signature.given_spec))

    def alone(params: list[Tensor], batch: Batch, given: list[Tensor]) -> Any:
        own = [x[0] if d == 0 else x for x, d in zip(given, signature.given_dims, strict=True)]
        out = one([x[0] for x in params], Batch(*[x[0] for x in batch]), own)
        return tree.map(lambda x: x.unsqueeze(0), out)

    call = alone if signature.alone else torch.vmap(one, in_dims=(0, 0, list(signature.given_dims)))

    def stacked(*values: Tensor) -> Any:
        return call(list(values[:n]), Batch(*values[n : n + N_FIELDS]), list(values[n + N_FIELDS :]))

    return stacked


def step(losses_of: Callable[..., Tensor], n_params: int) -> Callable[[Sequence[Tensor]], LossesAndGradients]:
    """The losses of a stack of clients, and their gradients with respect to the first `n_params` tensors."""

    def run(tensors: Sequence[Tensor]) -> LossesAndGradients:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors[:n_params]]
            losses = losses_of(*leaves, *tensors[n_params:])
            wanted = [x for x in leaves if x.requires_grad]
            # For one loss torch makes the same ones itself; handed in, it would import SymPy to check them: 35 MB.
            ones = None if losses.numel() == 1 else torch.ones_like(losses)
            found = iter(torch.autograd.grad(losses, wanted, ones, allow_unused=True))
        return losses.detach(), [next(found) if x.requires_grad else None for x in leaves]

    return run
