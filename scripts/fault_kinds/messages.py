"""Messages: hostile requests to an honest client and hostile answers to an honest server, from the tables of tests."""

from pathlib import Path

from scripts.fault_kinds.processes import Outcome, shorten
from tests.federate.hostile import try_answers, try_requests


def try_all(kind: str, work: Path) -> list[Outcome]:
    """Every hostile answer, or every hostile request."""
    tried = {"answers": try_answers, "requests": try_requests}[kind]
    found = []
    for one in tried(work / kind):
        outcome = "told" if one.refused and one.words.strip() else "silent"
        if "Traceback" in one.words:
            outcome = "traceback"
        found.append(Outcome(outcome, one.name, shorten(one.words)))
    return found
