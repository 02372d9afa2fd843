"""Callbacks: those who are told what happens in a run, as progress bars and loggers. They change nothing of it."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from plures.runs.results import Round
    from plures.runs.state import RunState

Say = Callable[[str], None]  # tell the user a line


def say_nothing(line: str) -> None:
    """For those who want no lines."""


class Callback:
    """Is told what happens in a run. As it stands here it does nothing."""

    def started(self, state: "RunState") -> None:
        """The run starts, or is resumed at some round."""

    def played(self, state: "RunState", row: "Round") -> None:
        """A round is over, and scored if its turn had come."""

    def ended(self) -> None:
        """The run is over, however it ended. It may be told more than once."""


class Callbacks(Callback):
    """Several callbacks as one."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks

    def started(self, state: "RunState") -> None:
        for one in self.callbacks:
            one.started(state)

    def played(self, state: "RunState", row: "Round") -> None:
        for one in self.callbacks:
            one.played(state, row)

    def ended(self) -> None:
        for one in self.callbacks:
            one.ended()


class ProgressLine(Callback):
    """A line that is written again and again, in terminals and notebooks: how far, how well, and how long still."""

    WIDTH = 24  # of the bar, in characters

    def __init__(self, name: str, out: TextIO | None = None) -> None:
        self.name, self.out = name, out or sys.stderr
        self.length = 0

    def started(self, state: "RunState") -> None:
        self.began, self.first = time.monotonic(), state.round
        self._write(state, "")

    def played(self, state: "RunState", row: "Round") -> None:
        score = "" if row.personal_mean is None else f"personal {state.scene.metric.text(row.personal_mean)}  "
        done = row.round - self.first
        left = (time.monotonic() - self.began) / done * (state.scene.config.rounds - row.round) if done else 0.0
        self._write(state, f"{score}{left:.0f} s left")

    def _write(self, state: "RunState", words: str) -> None:
        rounds = max(1, state.scene.config.rounds)
        full = self.WIDTH * state.round // rounds
        bar = "█" * full + "░" * (self.WIDTH - full)
        line = f"{self.name}  {bar}  round {state.round}/{state.scene.config.rounds}  {words}"
        self.out.write("\r" + line.ljust(self.length))
        self.out.flush()
        self.length = len(line)

    def ended(self) -> None:
        if self.length:
            self.out.write("\n")
            self.length = 0
