"""The audit log: one line of JSON for each request, at the server and at each client: when, who asked what, the answer.

It has no data and no tensor, and a line is never changed once it is written.
"""

import datetime
import json
import os
from pathlib import Path
from typing import Any

FILE = "audit.jsonl"


def write(path: Path, who: str, asked: str, answered: str) -> None:
    """Append a line, whole or not at all."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"at": now, "who": who, "asked": asked, "answered": answered}) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line.encode())  # one call: lines of several processes do not mix
    finally:
        os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines that are whole."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the disk was full
    return found
