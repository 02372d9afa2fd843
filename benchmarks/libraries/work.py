"""What the drivers share: the case, its plain models, the count of steps, and the line that is printed.

Nothing here imports plures: it is not installed in the environments of the other libraries.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]

EVALUATION_BATCH = 512  # rows of an evaluation: most clients have fewer, so that each is one batch


@dataclass(frozen=True)
class Case:
    """The rows of every client that has some to train on, and the settings that all libraries get."""

    train: list[Rows]
    test: list[Rows]
    model: str
    batch: int
    epochs: int
    lr: float
    evaluate: bool
    n_classes: int

    @property
    def n_steps(self) -> int:
        """SGD steps that a round has to make."""
        return sum(self.epochs * math.ceil(len(y) / self.batch) for _, y in self.train)

    @property
    def n_test(self) -> int:
        return sum(len(y) for _, y in self.test)


@lru_cache(maxsize=1)
def read_case(path: str) -> Case:
    """The case in the file; read once by a process, so that rounds find the rows in memory."""
    with np.load(path, allow_pickle=False) as file:
        settings = json.loads(str(file["settings"]))
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
        train, test = (_clients(x, y, file[f"{part}_rows"], file[f"{part}_offsets"]) for part in ("train", "test"))
    kept = [client for client, (_, labels) in enumerate(train) if len(labels)]
    return Case([train[client] for client in kept], [test[client] for client in kept], **settings)


def _clients(x: Tensor, y: Tensor, rows: np.ndarray, offsets: np.ndarray) -> list[Rows]:
    indices = [torch.from_numpy(rows[start:end]) for start, end in pairwise(offsets)]
    return [(x[index], y[index]) for index in indices]


class Mlp(nn.Module):
    """One hidden layer of 64."""

    def __init__(self, shape: torch.Size, n_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(math.prod(shape), 64)
        self.head = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class Cnn4(nn.Module):
    """Two 5x5 convolutions of 32 and 64 channels, each with pooling, a layer of 512, and the classes."""

    def __init__(self, shape: torch.Size, n_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        size = 64 * math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(size, 512)
        self.head = nn.Linear(512, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        x = torch.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


def make_model(case: Case) -> nn.Module:
    """The model of the case, with the same first weights in every library."""
    torch.manual_seed(0)
    made = {"mlp": Mlp, "cnn4": Cnn4}[case.model]
    return made(case.train[0][0].shape[1:], case.n_classes)


class CountedSgd(torch.optim.SGD):
    """Plain SGD that counts the steps of its process: what was done is reported, not what was asked for."""

    steps = 0

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.register_step_post_hook(_count_step)  # an overridden step() would be wrapped for the profiler twice


def _count_step(*_: object) -> None:
    CountedSgd.steps += 1


@torch.no_grad()
def count_right(model: nn.Module, rows: Rows) -> int:
    """How many rows the model gets right."""
    batches = zip(*(part.split(EVALUATION_BATCH) for part in rows), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)


def all_test(case: Case) -> Rows:
    """The test rows of all clients, as one set."""
    return torch.cat([x for x, _ in case.test]), torch.cat([y for _, y in case.test])


@dataclass
class Clock:
    """The time, and what was done so far, at the end of every round; the first round warms up."""

    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)

    def end_round(self, steps: int, evaluated: int) -> None:
        """Takes the numbers of steps and of evaluated rows since the start."""
        self.times.append(time.perf_counter())
        self.steps.append(steps)
        self.evaluated.append(evaluated)


def arguments(description: str, workers: int, methods: Sequence[str] = ("fedavg",)) -> argparse.Namespace:
    """The command line, which is the same for all libraries."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("case", type=os.path.abspath, help="the .npz file with rows and settings")
    parser.add_argument("--method", choices=methods, default="fedavg")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to time, after one that warms up")
    parser.add_argument("--workers", type=int, default=workers, help="processes that train, if the library has them")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each process")
    parser.add_argument(
        "--central", action="store_true", help="evaluate all test rows at once at the server, not client by client"
    )
    return parser.parse_args()


def report(
    library: str,
    version: str,
    given: argparse.Namespace,
    case: Case,
    clock: Clock,
    model: nn.Module,
    workers: int,
    n_optimizers: int = 1,
) -> None:
    """Prints the JSON line, once the work of every round is what the case asks for."""
    expected = case.n_test if case.evaluate else 0
    steps, evaluated = ({b - a for a, b in pairwise(done)} for done in (clock.steps, clock.evaluated))
    assert len(clock.times) == given.rounds + 1, f"{len(clock.times)} rounds were played"
    made = n_optimizers * case.n_steps
    assert steps == {made}, f"steps of the rounds: {steps}; expected {made}"
    assert evaluated == {expected}, f"rows evaluated in the rounds: {evaluated}; expected {expected}"
    line = {
        "library": library,
        "version": version,
        "seconds": [round(end - start, 6) for start, end in pairwise(clock.times)],
        "method": given.method,
        "steps": made,
        "evaluated": expected,
        "accuracy": round(count_right(model, all_test(case)) / case.n_test, 4),
        "torch": torch.__version__,
        "clients": len(case.train),
        "workers": workers,
        "threads": given.threads,
        "evaluation": ("server" if given.central else "clients") if case.evaluate else "none",
    }
    print(json.dumps(line), flush=True)
