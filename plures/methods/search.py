"""Ranges in which settings and options are searched for better values. Each is written beside what it is a range of."""

from typing import Any, NamedTuple

from plures.errors import UsageError

DIGITS = 3  # of a number that is tried, so that it can be read and typed


class Search(NamedTuple):
    """Numbers from low to high, or some values."""

    low: float = 0.0
    high: float = 0.0
    is_log: bool = False  # equal steps are equal factors
    values: tuple[Any, ...] = ()  # instead of a range
    factor: float = 0.0  # instead of low and high: from a value / factor to the value * factor
    must_be_named: bool = False  # searched only where a user asks for it by name

    def if_named(self) -> "Search":
        """The same, for what makes it another method, or seldom matters: searched only if a user names it."""
        return self._replace(must_be_named=True)

    def including(self, default: Any) -> "Search":
        """The same, wide enough for the default, which is always tried first."""
        if self.values:
            return self if default in self.values else self._replace(values=(default, *self.values))
        if self.factor:
            low, high = default / self.factor, default * self.factor
            if isinstance(default, int):
                low, high = max(1, round(low)), round(high)
            if not default > 0:
                raise UsageError(f"{default} has no range around it; give low and high")
            return self._replace(low=low, high=high, factor=0.0)
        return self._replace(low=min(self.low, default), high=max(self.high, default))


def log(low: float, high: float) -> Search:
    """From low to high by equal factors."""
    return Search(low, high, is_log=True)


def linear(low: float, high: float) -> Search:
    """From low to high by equal differences."""
    return Search(low, high)


def among(*values: Any) -> Search:
    """Some values."""
    return Search(values=values)


def around(factor: float) -> Search:
    """From a value divided by the factor to the value times the factor, by equal factors."""
    return Search(is_log=True, factor=factor)


def rounded(value: Any) -> Any:
    """A number with few digits; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
