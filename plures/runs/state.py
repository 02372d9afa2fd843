"""State: all that a run has to remember, whoever its clients are: what the server has, how far it is, and its numbers.

Nothing that happens between rounds is needed to resume but this state, and all of it is in every checkpoint: so a
run that stopped and was resumed ends as if it had not stopped.
"""

import math
import resource
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plures import devices, seeds, tree
from plures._version import __version__
from plures.engine import KernelCount, Usage
from plures.errors import DataError, RunFailed, UsageError
from plures.methods.base import Federation
from plures.methods.messages import Message, one_of, some_of
from plures.runs import checkpoint, older, results
from plures.runs.callbacks import Say
from plures.runs.results import Round
from plures.runs.scene import Scene
from plures.runs.signals import undisturbed
from plures.simulate import bounds, memory
from plures.simulate.client_store import ClientStore
from plures.simulate.drift import measure_drift
from plures.simulate.evaluate import Evaluation
from plures.simulate.executor import Trained
from plures.simulate.sampling import draw_cohort
from plures.simulate.shapes import Shapes, shapes_of
from plures.tree import Tree

CHANGED = {
    "rows": "the rows of {data} have changed",
    "split": "split.json, or how {data} is dealt, has changed",
    "frozen": "the frozen weights of {model} have changed",
}


MOST_REFUSALS = 1000  # that are named; all are counted


class Answers(NamedTuple):
    """What came back from the clients of a round."""

    asked: list[int]  # the clients that the message went to
    message: Message
    ids: list[int]  # those of them whose answers are in `trained`
    trained: Trained  # `clients` is what is kept of them here, `flops` all that was computed for the round so far
    refused: int  # answers that were refused before
    began: float  # when the round did, by time.perf_counter
    scores: Evaluation | None = None  # of the state that the clients were sent


class UpdateLimits(NamedTuple):
    """How far one client may move the others."""

    times_median: float = bounds.TIMES_MEDIAN  # largest update, in medians of the round
    most_share: float = 1.0  # largest share of the weight in a mean


class RunState:
    """The state of a run."""

    def __init__(
        self,
        scene: Scene,
        folder: Path | None,
        say: Say,
        kept: Tree = None,
        limits: UpdateLimits | None = None,
        device: torch.device = devices.CPU,
    ) -> None:
        """`kept` is what is kept here of a client before it has taken part; if left out, its state.

        All tensors are on the device, to which data and model of the scene are moved; on another one than the CPU, this
        and all that is done with the state stands inside `devices.here`.
        """
        self.folder, self.say = folder, say
        # Where attacks are studied, nothing stands in their way.
        self.limits = limits or UpdateLimits(times_median=math.inf if scene.attackers else bounds.TIMES_MEDIAN)
        with devices.here(devices.CPU):  # shapes are the same everywhere
            self.shapes: Shapes = shapes_of(scene.method, scene.task, scene.population.sizes())
        self.scene = scene = scene.on(device)
        config, task, method, population = scene.config, scene.task, scene.method, scene.population
        self.eligible = population.eligible()
        honest = [i for i in self.eligible if i not in scene.attackers]
        self.scored = [i for i in honest if len(population.test[i])]
        self.sizes = population.sizes()
        self.round = 0
        self.rows: list[Round] = []
        self.refused = 0
        self.refusals: list[dict[str, Any]] = []  # whose update was refused in which round, and why
        self.usage = Usage()  # before this process
        self.earlier, self.began = 0.0, time.perf_counter()  # seconds of the run before this process; when it began
        self.n_cohort = len(self.cohort())
        memory.refuse_too_large(memory.forecast(self.shapes, len(self.sizes), self.n_cohort))
        with torch.no_grad():
            federation = Federation(self.sizes, torch.tensor(seeds.key_of(config.seed, "server")))
            self.server: Tree = method.init_server(task, task.initial, federation)
            initial = method.init_client(task, task.initial) if kept is None else kept
        limit = config.memory_limit_mb << 20
        self.store = ClientStore(initial, len(self.sizes), limit, folder / "state" if folder else None, device)

    # One round

    def cohort(self, round: int | None = None) -> list[int]:
        """The clients of a round; of the next one, if none is named."""
        config = self.scene.config
        at = self.round if round is None else round
        return draw_cohort(self.eligible, config.participation, config.seed, at, self.scene.method.sampling)

    def send(self, ids: list[int]) -> tuple[Message, int]:
        """What the clients of a round are sent, and the FLOPs of making it."""
        with KernelCount() as kernels, torch.no_grad():
            message = self.scene.method.send(self.scene.task, self.server, torch.tensor(ids))
        return message, kernels.flops

    def merge(self, answers: Answers) -> Round:
        """End a round: check, merge, count. The state changes at the very end or not at all."""
        method, task = self.scene.method, self.scene.task
        asked, message, ids, trained = answers[:4]
        clients, uploads = trained.clients, trained.uploads
        came = message if ids == asked else some_of(message, [asked.index(i) for i in ids])
        with torch.no_grad():
            whys = bounds.reasons_to_refuse(came, clients, uploads, len(ids), self.limits.times_median)
        is_fine = torch.tensor([not why for why in whys])
        if not is_fine.any():
            raise RunFailed(f"round {self.round + 1}: every client's update has numbers that are not finite; lower lr")
        kept = torch.tensor(ids)[is_fine]
        losses = trained.metrics["loss"]
        if not is_fine.all():
            clients, uploads, losses = (tree.rows(x, is_fine) for x in (clients, uploads, losses))
        refusals = [self._refusal(i, why) for i, why in zip(ids, whys, strict=True) if why]
        weights = bounds.cap_weights(self.sizes[kept], self.limits.most_share)
        with torch.no_grad():
            with KernelCount() as merging:
                server = tree.apart(method.merge(task, self.server, kept, uploads, weights), uploads)
            if not bool(tree.all_finite(tree.map(lambda x: x[None], server), 1)):
                raise RunFailed(f"round {self.round + 1}: the server's state is no longer finite; lower lr")
            sent = message
            if len(kept) < len(asked):
                sent = some_of(message, [asked.index(i) for i in kept.tolist()])
            drift = measure_drift(task, sent, uploads)
        down, up = self._traffic(message, tree.row(uploads, 0), len(asked))
        row = Round(
            round=self.round + 1,
            clients=len(asked),
            loss=float(losses.mean()),
            bytes_down=down,
            bytes_up=up,
            refused=answers.refused + len(ids) - len(kept),
            update_norm=drift.norm,
            update_variance=drift.variance,
            flops=trained.flops + merging.flops,
            train_seconds=time.perf_counter() - answers.began,
        )
        for one in refusals:
            self.say(f"round {self.round + 1}: the update of {one['client']} is refused: {one['why']}")
        with undisturbed():
            self.server = server
            self.store.put(kept, clients)
            self.refusals += refusals
            self.refused += row.refused
            self.round += 1
            self.rows.append(row)
        return row

    def _refusal(self, client: int, why: str) -> dict[str, Any]:
        name = self.scene.names[client] if self.scene.names else client
        return {"round": self.round + 1, "client": name, "why": why}

    def _traffic(self, message: Message, upload: Tree, n: int) -> tuple[int, int]:
        """Bytes down and up of n clients."""
        method, task = self.scene.method, self.scene.task
        each = [method.n_bytes(task, one_of(message, i), upload) for i in range(n if self.shapes.is_each else 1)]
        times = 1 if self.shapes.is_each else n
        return times * sum(down for down, _ in each), times * sum(up for _, up in each)

    # Scores

    def is_due(self, round: int) -> bool:
        """Whether the state after a round is to be scored."""
        every = self.scene.config.eval_every
        return round > 0 and every > 0 and round % every == 0

    @property
    def lacks_scores(self) -> bool:
        """Whether the last row is to be scored and is not."""
        return bool(self.rows) and self.is_due(self.round) and self.rows[-1].personal_mean is None

    def add_scores(self, evaluation: Evaluation) -> None:
        """Write the scores of the state into its row."""
        self.rows[-1] = self.rows[-1].with_scores(evaluation)

    def complete_rows(self) -> list[Round]:
        """The rows to which nothing will be added."""
        return self.rows[:-1] if self.lacks_scores else self.rows

    # What is told in the end

    @property
    def seconds(self) -> float:
        """What the run has taken so far, in all processes that had it."""
        return self.earlier + time.perf_counter() - self.began

    def summary(self, evaluation: Evaluation, usage: Usage) -> dict[str, Any]:
        """The numbers of summary.json that every run has."""
        config = self.scene.config
        summary = results.summary(self.rows, evaluation, config, self.scene.method.personal_model_name)
        summary |= {
            "bytes": summary["bytes"] | self._traffic_by_group(),
            "flops": sum(row.flops for row in self.rows),
            "personal_flops": evaluation.personal_flops,
            "seconds": results.seconds(self.rows, evaluation, self.seconds),
            "peak_rss_mb": peak_rss_mb(),
            "refused_updates": self.refused,
            "engine": self.usage.plus(usage).to_json(),
            "digest": self.digest(),
        }
        more = results.metrics(evaluation, config.seed)
        if more:
            summary["metrics"] = more
        if config.goal is not None:
            cost = results.to_goal(self.rows, config.goal, evaluation.metric)
            summary["to_goal"] = {"goal": config.goal, "cost": cost}
        return summary

    def _traffic_by_group(self) -> dict[str, dict[str, int]]:
        """Bytes per client and round now, by what they are: the model's body and head, its statistics, and others."""
        method, task = self.scene.method, self.scene.task
        message, _ = self.send(self.eligible[:1])
        down, up = method.traffic(task, one_of(message, 0), self.shapes.upload)
        return {"down_each": results.bytes_by_group(task, down), "up_each": results.bytes_by_group(task, up)}

    @property
    def named_refusals(self) -> list[dict[str, Any]]:
        """Whose update was refused in which round, and why; not more than can be read."""
        return self.refusals[:MOST_REFUSALS]

    def digest(self) -> str:
        """SHA-256 of the state."""
        return checkpoint.digest(self.server, self.store)

    # State on disk

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Of the data, and of frozen weights, by which a checkpoint knows them again."""
        frozen = self.scene.task.frozen_fingerprint
        return self.scene.population.fingerprints() | ({"frozen": frozen} if frozen else {})

    def manifest(self, usage: Usage) -> dict[str, Any]:
        """What a checkpoint says of the run so far, besides its tensors."""
        return {
            "plures": __version__,
            "config": self.scene.config.identity(),
            "of_rounds": self.scene.config.rounds,
            "data": self.fingerprints if self.folder else {},  # where nothing is written, rows need not be read
            "seconds": self.seconds,
            "refused": self.refused,
            "refusals": self.named_refusals,
            "engine": self.usage.plus(usage),
            "rows": [row.to_json() for row in self.rows],
        }

    def save(self, manifest: dict[str, Any]) -> None:
        """Write a checkpoint, if there is a folder."""
        if self.folder is None:
            return
        with undisturbed():
            checkpoint.write(self.folder / "checkpoint", self.round, self.server, self.store, manifest)

    def load(self) -> dict[str, Any]:
        """Go back to the newest whole checkpoint, and return its manifest; without any, stay at the start."""
        assert self.folder is not None
        found, torn = checkpoint.read(self.folder / "checkpoint")
        for sentence in torn:
            self.say(sentence)
        if found is None:
            return {}
        older.refuse_newer(found.manifest["plures"])
        older.refuse_changed(self.scene.config.method, found.manifest["plures"])
        for what, known in found.manifest.get("data", {}).items():
            if known != self.fingerprints.get(what):
                config = self.scene.config
                words = CHANGED[what].format(data=config.data, model=config.model)
                raise DataError(f"{words} since the run in {self.folder} began")
        of_rounds = found.manifest.get("of_rounds", self.scene.config.rounds)  # it may have been given more since
        before = self.scene.config.model_copy(update={"rounds": of_rounds})
        if found.manifest["config"] != before.identity():
            raise UsageError(f"the checkpoint in {self.folder} is from another config than its config.toml")
        self.server = checkpoint.restore(self.server, found.server)
        checkpoint.restore_rows(self.store, found)
        self.round, self.refused = found.manifest["round"], found.manifest["refused"]
        self.refusals = found.manifest.get("refusals", [])
        self.usage = Usage(*found.manifest.get("engine", ()))
        self.earlier, self.began = found.manifest.get("seconds", 0.0), time.perf_counter()
        self.rows = [Round.from_json(row) for row in found.manifest["rows"]]
        return found.manifest


def peak_rss_mb() -> float:
    """The most memory that this process and its children have held."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    per_mb = 1024**2 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return round((own + children) / per_mb, 1)
