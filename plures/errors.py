"""What can go wrong, each with the exit code that the command line gives it."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_NAMES = 50  # that are told in a sentence


class PluresError(Exception):
    """A mistake or a failure that is told to the user in words, without a traceback."""

    exit_code = 4


class UsageError(PluresError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(PluresError):
    """Data that cannot be read or is not fit for use."""

    exit_code = 3


class RunFailed(PluresError):
    """A run that cannot continue: it diverged, or no client is left."""

    exit_code = 4


class Interrupted(PluresError):
    """A run that was asked to stop, with its state on disk."""

    exit_code = 130


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not `known`, with the nearest one if any is near."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    allowed = ", ".join(names) if names else "none"
    if len(names) > MOST_NAMES:
        allowed = f"{len(names)} names, which `plures list {kind}s` prints"
    return UsageError(f"unknown {kind} {name!r}{hint} Known: {allowed}.")
