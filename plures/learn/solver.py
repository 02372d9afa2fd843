"""Solver: how a client trains and for how long, as plain values. It needs no torch: configs are read without it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["sgd", "adam", "adamw"]
Decline = Literal["constant", "exponential", "step", "cosine"]


@dataclass(frozen=True)
class Plateau:
    """A client stops after an epoch when its last losses hardly differ."""

    window: int = 10  # epochs looked at; at least one more must have passed
    threshold: float = 0.01  # standard deviation below which it stops
    loss_of: str = "last_batch"  # or epoch_mean


@dataclass(frozen=True)
class Solver:
    """How a tree is trained, and for how long. The state of the optimizer is new in every `fit`."""

    kind: Kind = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0  # gradients of a client are shortened to this norm; 0: they are not
    schedule: Decline = "exponential"
    decay: float = 1.0  # factor of the learning rate in every round, or in every `decay_every` rounds of step
    decay_every: int = 1
    rounds: int = 1  # after which cosine is at zero
    batch: int = 10
    epochs: int = 1
    steps: int | None = None  # instead of epochs
    varied: bool = False  # clients do different amounts of work: each shard has its own number of epochs or steps
    box: tuple[float, float] | None = None  # values are clipped into it after every step
    shuffle: bool = True  # False: every epoch meets the rows in the order of the shard, in the same batches
    stop: Plateau | None = None  # may end the training of a client before its last epoch
    pace: tuple[tuple[str, float], ...] = ()  # (name at the top of the tree, factor of its learning rate)

    def for_epochs(self, epochs: int) -> "Solver":
        """The same for so many epochs."""
        return dataclasses.replace(self, epochs=epochs, steps=None, varied=False)

    def for_steps(self, steps: int) -> "Solver":
        """The same for so many steps."""
        return dataclasses.replace(self, steps=steps, varied=False)

    def plain(self, lr: float) -> "Solver":
        """Gradient steps of one size and nothing else, for the same number of epochs or steps."""
        return dataclasses.replace(
            self, kind="sgd", lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0, clip=0.0, schedule="constant"
        )

    def with_rate(self, lr: float) -> "Solver":
        """The same at another learning rate; at its own, if `lr` is 0."""
        return dataclasses.replace(self, lr=lr) if lr else self

    def rate_of(self, round: int) -> float:
        """The learning rate of a round, counted from 0."""
        return float(self._rate(round, math.cos))

    def rate(self, round: "Tensor") -> "Tensor":
        """The same for a number of a round that is a tensor."""
        return self._rate(round, lambda x: x.cos())

    def _rate(self, round: Any, cos: Any) -> Any:
        if self.schedule == "constant":
            return self.lr * 1.0**round
        if self.schedule == "cosine":
            return self.lr * (0.5 + 0.5 * cos(math.pi / self.rounds * round))
        return self.lr * self.decay ** (round // self.decay_every if self.schedule == "step" else round)
