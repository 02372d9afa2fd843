"""Gradients as a step gives them: tensors, or what they are made of, where adding that to the weights is cheaper."""

from typing import NamedTuple

import torch
from torch import Tensor

from plures.engine import onednn
from plures.engine.late import Late, Weights


class Product(NamedTuple):
    """A gradient that is a product of matrices, not yet computed: it is added to the weights while it is computed."""

    left: Tensor  # [client, i, k]
    right: Tensor  # [client, k, j]

    def dense(self) -> Tensor:
        """The gradient as a tensor."""
        return torch.bmm(self.left, self.right)

    def add_to(self, weights: Weights, factor: float) -> None:
        """weights += factor * gradient"""
        if isinstance(weights, Late):
            weights.keep(self.left, self.right, factor)
        else:
            weights.baddbmm_(self.left, self.right, alpha=factor)


class LargeProduct(Product):
    """A large product, which oneDNN computes faster."""

    __slots__ = ()

    def dense(self) -> Tensor:
        return onednn.multiply_each(self.left, self.right)

    def add_to(self, weights: Weights, factor: float) -> None:
        if isinstance(weights, Late):
            weights.keep(self.left, self.right, factor)
            return
        for own, left, right in zip(weights.unbind(), self.left.unbind(), self.right.unbind(), strict=True):
            own.add_(onednn.multiply(left, right), alpha=factor)


class Scattered(NamedTuple):
    """A gradient that is zero except in some rows: of an embedding, those that a batch looked up."""

    rows: Tensor  # [row, width]
    at: Tensor  # [place], where they belong, counted through the tables of all clients
    n_clients: int
    n_rows: int  # of a table
    which: Tensor | None = None  # [place], which of `rows` belongs there; None: one for each place

    def dense(self) -> Tensor:
        """The gradient as a tensor."""
        width = self.rows.shape[-1]
        whole = self.rows.new_zeros(self.n_clients, self.n_rows, width)
        self.add_to(whole, 1.0)
        return whole

    def add_to(self, weights: Tensor, factor: float) -> None:
        """weights += factor * gradient"""
        rows = factor * self.rows
        if self.which is not None:
            rows = rows.index_select(0, self.which)
        # The same as index_add_, which is much slower here.
        weights.view(-1, rows.shape[1]).scatter_add_(0, self.at.unsqueeze(1).expand_as(rows), rows)


Gradient = Tensor | Product | Scattered | None  # None: the loss does not depend on this tensor


def dense(gradient: Gradient) -> Tensor | None:
    """A gradient as a tensor."""
    return gradient.dense() if isinstance(gradient, (Product, Scattered)) else gradient
