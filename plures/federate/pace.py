"""When to ask for a message again.

Messages come once in a round. Asking all the time costs the server more than the messages themselves. A client that
has answered knows roughly how long the others take, from the last round: it does not ask before most of that time is
over, and then some times until the message is there; the longer there is none, the more rarely.
"""

import time
from collections.abc import Callable

EARLY = 0.7  # share of the wait of the last round that is slept through
SHARE = 12  # of the wait so far is slept until the next question


class Pace:
    """The times of messages and answers, and the delay that follows from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.since, self.wait = clock, clock(), 0.0

    def note_message(self) -> None:
        """A message has come."""
        self.wait = self.clock() - self.since

    def note_answer(self) -> None:
        """It has been answered: now the wait for the next one begins."""
        self.since = self.clock()

    def delay(self, least: float, most: float) -> float:
        """Seconds to sleep."""
        waited = self.clock() - self.since
        return min(most, max(least, EARLY * self.wait - waited, waited / SHARE))
