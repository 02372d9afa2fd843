"""Late: dense layers whose updates are added to their weights in the end, and until then are kept as what they are.

Clients of a stack start from the same weights W, [out, in]. A step of SGD adds a product of two thin matrices to the
weights of each, with as many rows as its batch: after some steps a client has W + L'R. So a layer gives x W' + (x R')L:
one product with the same W for all clients, which is read once for all of them, and two thin ones. Weights that are
larger than the cache are then neither read nor written client by client and step by step.
"""

import torch
from torch import Tensor

from plures.engine import onednn


class Late:
    """The weights of a stack of clients, [client, out, in], that are the same but for updates to come."""

    def __init__(self, start: Tensor, n: int, n_rows: int) -> None:
        n_out, n_in = start.shape
        self.start = start
        self.left = start.new_zeros(n, n_rows, n_out)  # L, and beyond `n_kept` rows nothing yet
        self.right = start.new_zeros(n, n_rows, n_in)  # R
        self.n_kept = 0

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, clients: slice) -> "Late":
        """Some of the clients; updates of theirs are kept here too."""
        some = Late(self.start, 0, 0)
        some.left, some.right, some.n_kept = self.left[clients], self.right[clients], self.n_kept
        return some

    def keep(self, left: Tensor, right: Tensor, factor: float) -> None:
        """Weights change by factor * left right, [client, out, row] and [client, row, in]."""
        end = self.n_kept + right.shape[1]
        torch.mul(left.transpose(1, 2), factor, out=self.left[:, self.n_kept : end])
        self.right[:, self.n_kept : end] = right
        self.n_kept = end

    def multiply(self, x: Tensor, turned: bool) -> Tensor:
        """[client, row, out] times the weights; turned: [client, row, in] times their transposes."""
        first, second = (self.right, self.left) if turned else (self.left, self.right)
        flat, right = x.reshape(-1, x.shape[2]), self.start.t() if turned else self.start
        found = onednn.multiply(flat, right) if onednn.takes(flat) else torch.mm(flat, right)
        found = found.view(len(x), x.shape[1], -1)
        if self.n_kept:
            thin = torch.bmm(x, first[:, : self.n_kept].transpose(1, 2))
            found.baddbmm_(thin, second[:, : self.n_kept])
        return found

    def settle(self, weights: Tensor) -> None:
        """Add all updates to the weights that clients started from, [client, out, in]."""
        if onednn.takes(weights):
            for own, left, right in zip(weights.unbind(), self.left.unbind(), self.right.unbind(), strict=True):
                own.add_(onednn.multiply(left.t(), right))
        else:
            weights.baddbmm_(self.left.transpose(1, 2), self.right)


Weights = Tensor | Late


def most_rows(n_out: int, n_in: int) -> int:
    """For how many rows in all it pays: the thin products are less than half of what they stand for."""
    return n_out * n_in // (2 * (n_out + n_in))


def multiply(x: Tensor, weights: Weights, turned: bool, by_onednn: bool) -> Tensor:
    """x times weights, or times their transposes."""
    if isinstance(weights, Late):
        return weights.multiply(x, turned)
    right = weights.transpose(1, 2) if turned else weights
    return onednn.multiply_each(x, right) if by_onednn else torch.bmm(x, right)


def add_multiply(to: Tensor, x: Tensor, weights: Weights, turned: bool, by_onednn: bool) -> Tensor:
    """The same, added to what can be spread to its shape."""
    if isinstance(weights, Late):
        return weights.multiply(x, turned).add_(to)
    right = weights.transpose(1, 2) if turned else weights
    return onednn.add_multiply_each(to, x, right) if by_onednn else torch.baddbmm(to, x, right)
