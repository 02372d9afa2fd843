"""What a client remembers of the requests that it has answered, on its own disk.

The state of an experiment is bound to a fingerprint of all that was asked for when the experiment began: its method
with all settings, model, number of clients, and the shapes of what travels. The client computes it by itself. Another
request under the same number is refused: it could make another method upload what the first one keeps.
"""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plures.federate import wire
from plures.federate.policy import Policy
from plures.federate.wire import Refused
from plures.files import write_text
from plures.runs import checkpoint
from plures.runs.callbacks import Say
from plures.simulate.shapes import Shapes

ABOUT = "experiment.json"  # in the folder of an experiment
HOUR, DAY = 3600.0, 86400.0
MOST_VERSIONS = 20  # of a state of which the server says that it accepted none


def fingerprint(experiment: wire.Experiment, client: int, shapes: Shapes) -> str:
    """A hash of what an experiment is, as far as this client is concerned."""
    values = [experiment.model_dump(), client, wire.manifest(shapes)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Ledger:
    """Counts what was asked, and refuses what the policy does not allow."""

    def __init__(self, folder: Path, policy: Policy, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.policy, self.clock = folder, policy, clock
        self._requests: deque[float] = deque()

    def place(self, experiment: str) -> Path:
        """The folder of an experiment: what the client keeps of it."""
        return self.folder / "state" / experiment

    # How often

    def count_request(self) -> None:
        """Refuse a request if there were too many in the last minute."""
        now = self.clock()
        while self._requests and self._requests[0] <= now - 60:
            self._requests.popleft()
        if len(self._requests) >= self.policy.requests_per_minute:
            raise Refused(f"more than requests_per_minute = {self.policy.requests_per_minute} requests", "rate")
        self._requests.append(now)

    def count_start(self, what: str) -> None:
        """Refuse the start of an experiment, or another question about our rows, if there were too many."""
        now, path = self.clock(), self.folder / "starts.json"
        found = _read(path)
        starts = {name: at for name, at in found.get("starts", {}).items() if at > now - HOUR}
        if what not in starts and len(starts) >= self.policy.starts_per_hour:
            raise Refused(f"more than starts_per_hour = {self.policy.starts_per_hour} starts", "starts")
        write_text(path, json.dumps(found | {"starts": {what: now} | starts}))

    def count_training(self) -> None:
        """Note that a round was trained."""
        if self.policy.rounds_between_starts:
            path = self.folder / "starts.json"
            found = _read(path)
            write_text(path, json.dumps(found | {"trained": found.get("trained", 0) + 1}))

    def count_scoring(self, experiment: str, round: int | str) -> None:
        """Refuse to score a round once more, if it was scored too often."""
        path = self.place(experiment) / ABOUT
        about = _read(path)
        scorings = about.setdefault("scorings", {})
        most = self.policy.scorings_per_round
        if scorings.get(str(round), 0) >= most:
            raise Refused(f"models of round {round} were scored {most} times already (scorings_per_round)", "scorings")
        scorings[str(round)] = scorings.get(str(round), 0) + 1
        write_text(path, json.dumps(about))

    # Experiments

    def bind(self, experiment: wire.Experiment, client: int, shapes: Shapes) -> None:
        """Note what an experiment is, when it begins; refuse another one under its number."""
        place, own = self.place(experiment.id), fingerprint(experiment, client, shapes)
        known = _read(place / ABOUT).get("fingerprint")
        if known == own:
            return
        if known is not None or checkpoint.folders(place):
            raise Refused(
                f"the request has the number of experiment {experiment.id}, but another method, model, setting or "
                "client; what we keep of that experiment is not used for it",
                "experiment",
            )
        self._check_between_starts()
        self.count_start(f"experiment {experiment.id}")
        about: dict[str, Any] = {"fingerprint": own, "began": self.clock(), "config": experiment.config}
        write_text(place / ABOUT, json.dumps(about))

    def _check_between_starts(self) -> None:
        needed, path = self.policy.rounds_between_starts, self.folder / "starts.json"
        if not needed:
            return
        found = _read(path)
        if found.get("any") and found.get("trained", 0) < needed:
            raise Refused(
                f"{found.get('trained', 0)} rounds were trained since the last start; rounds_between_starts = {needed}",
                "starts",
            )
        write_text(path, json.dumps(found | {"trained": 0, "any": True}))

    def forget_old(self, current: str, say: Say) -> None:
        """Delete the state of experiments that are too old, or too many, by the client's own clock and rules."""
        now, found = self.clock(), []
        for place in (self.folder / "state").glob("*") if (self.folder / "state").is_dir() else []:
            if place.is_dir() and place.name != current:
                versions = checkpoint.folders(place)
                newest = max((path.stat().st_mtime for path in [*versions, place]), default=0.0)
                found.append((max(newest, _read(place / ABOUT).get("began", 0.0)), place))
        found.sort(reverse=True)
        for number, (used, place) in enumerate(found):
            is_old = used < now - self.policy.keep_days * DAY
            if is_old or number >= self.policy.keep_experiments - 1:
                shutil.rmtree(place, ignore_errors=True)
                say(f"our state of experiment {place.name} is deleted: {'too old' if is_old else 'too many others'}")


def prune_versions(place: Path, version: int) -> None:
    """Delete versions of a state that nobody needs: neither the accepted one, nor the one before it, nor the newest.

    A server that lost its last checkpoint goes back to the one before it. The number of the accepted version comes from
    the server: if we have no such version, only what is older than the newest MOST_VERSIONS is deleted.
    """
    have = sorted(checkpoint.folders(place), key=lambda path: path.stat().st_mtime)
    older = [path for path in have if int(path.name) < version]
    needed = {*have[-2:], *older[-1:], *[path for path in have if int(path.name) == version]}
    if not any(int(path.name) == version for path in have):
        needed = set(have[-MOST_VERSIONS:])
    for path in set(have) - needed:
        shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return {}
