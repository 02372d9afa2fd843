"""Signals: Ctrl-C and SIGTERM end a run after its round, and never in the middle of a change of its state.

The program `plures` answers them at any moment with one sentence and exit code 130: `Interrupts` says how. Programs
that use Plures as a library keep their own handlers; only `StopRequest` takes their place, while rounds are played.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from plures.runs.callbacks import Say

NUMBERS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODE = 130
GRACE_SECONDS = 5.0  # in which more signals are ignored, so that nothing disturbs how a command ends


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def leave(number: int, frame: FrameType | None) -> None:
    """A handler that ends the program at once. Files are written whole or not at all, and children notice."""
    os.write(2, b"plures: interrupted\n")
    os._exit(EXIT_CODE)


class Interrupts:
    """How the program `plures` handles signals within a command: the first one raises KeyboardInterrupt.

    Those that follow are ignored while the command ends. One that comes much later ends the program: a library may have
    caught the first one.
    """

    def __init__(self) -> None:
        self.began: float | None = None

    def begin(self) -> None:
        """The command has been asked to end."""
        self.began = time.monotonic() if self.began is None else self.began

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.began is None:
            self.begin()
            raise KeyboardInterrupt
        if time.monotonic() > self.began + GRACE_SECONDS:
            leave(number, frame)


def set_handler(handler: Any) -> None:
    """Let a handler have Ctrl-C and SIGTERM."""
    for number in NUMBERS:
        signal.signal(number, handler)


@contextmanager
def leaving() -> Iterator[None]:
    """While modules are imported: some of them would catch an exception, or tell it as an error of theirs."""
    own = signal.getsignal(signal.SIGINT)
    if not isinstance(own, Interrupts):
        yield
        return
    set_handler(leave)
    try:
        yield
    finally:
        set_handler(own)


_left_to_parent = False


def leave_to_parent() -> None:
    """In a forked process whose parent ends it: a terminal sends signals to both, and the parent decides."""
    global _left_to_parent
    _left_to_parent = True
    set_handler(signal.SIG_IGN)


class StopRequest:
    """Ctrl-C or SIGTERM: the first asks to stop after the round, the second stops at once."""

    def __init__(self, say: Say) -> None:
        self.is_asked, self.say = False, say
        self.old: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread() and not _left_to_parent:
            for number in NUMBERS:
                self.old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)
        handler = self.old.get(signal.SIGINT)
        if self.is_asked and isinstance(handler, Interrupts):
            if kind is None:  # it came in the last round: the run is whole, and the command ends all the same
                handler(signal.SIGINT, None)
            handler.begin()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        handler = self.old[number]
        if not self.is_asked:
            self.is_asked = True
            self.say("stopping after this round; press Ctrl-C again to stop at once")
        elif isinstance(handler, Interrupts):
            handler(number, frame)
        else:
            raise KeyboardInterrupt
