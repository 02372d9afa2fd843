"""How long to wait before asking for a message again. It needs nothing: `watchdog` loads it by its path.

Messages come once in a round. Asking all the time costs the server more than the messages themselves, so a client asks
some times in the time that a round has taken lately, and more rarely the longer there was none.
"""

import time
from collections.abc import Callable

SHARE = 8  # of the time between the last two messages, or since the last one, is waited


class Pace:
    """The times of messages, and the delay that follows from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.last, self.gap = clock, clock(), 0.0

    def note_message(self) -> None:
        """A message has come."""
        now = self.clock()
        self.gap, self.last = now - self.last, now

    def delay(self, least: float, most: float) -> float:
        """Seconds to wait."""
        since = self.clock() - self.last
        return min(most, max(least, self.gap / SHARE, since / (2 * SHARE)))
