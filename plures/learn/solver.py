"""Solver: how a client trains and for how long, as plain values. It needs no torch: configs are read without it."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plateau:
    """A client stops after an epoch when its last losses hardly differ."""

    window: int = 10  # epochs looked at; at least one more must have passed
    threshold: float = 0.01  # standard deviation below which it stops
    loss_of: str = "last_batch"  # or epoch_mean


@dataclass(frozen=True)
class Solver:
    """How a tree is trained, and for how long. The state of the optimizer is new in every `fit`."""

    kind: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 1.0  # factor of the learning rate in every round
    batch: int = 10
    epochs: int = 1
    steps: int | None = None  # instead of epochs
    box: tuple[float, float] | None = None  # values are clipped into it after every step
    shuffle: bool = True  # False: every epoch meets the rows in the order of the shard, in the same batches
    stop: Plateau | None = None  # may end the training of a client before its last epoch
    pace: tuple[tuple[str, float], ...] = ()  # (name at the top of the tree, factor of its learning rate)

    def for_epochs(self, epochs: int) -> "Solver":
        """The same for so many epochs."""
        return dataclasses.replace(self, epochs=epochs, steps=None)

    def for_steps(self, steps: int) -> "Solver":
        """The same for so many steps."""
        return dataclasses.replace(self, steps=steps)

    def plain(self, lr: float) -> "Solver":
        """Gradient steps of one size and nothing else, for the same number of epochs or steps."""
        return dataclasses.replace(self, kind="sgd", lr=lr, momentum=0.0, weight_decay=0.0, decay=1.0)

    def rate(self, round: "Tensor") -> "Tensor":
        """The learning rate of a round."""
        return self.lr * self.decay**round
