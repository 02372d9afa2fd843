"""Seconds of a round for many models against a plain PyTorch loop: is any model slower than what one writes first?

    python benchmarks/models.py [--repeats 3] [--only MODEL]

Both sides train FedAvg on the same clients for the same steps, as in `speed.py`: the plain loop with two threads in a
process of its own, Plures with two workers of one thread each and `--executor auto`. They take turns in one run, so
that a slow minute of the machine hits both. Images, words and characters are random: time does not depend on them.
Of MiniLM two adapters are measured, LoRA in the attention of all layers and of the last layer alone; the plain loop has
them from `peft`. Frozen layers below the first adapter Plures runs once for a row, before the rounds that are measured.
Writes benchmarks/results/models.csv, one line for each model, with what was chosen and what the time goes to.
"""

import argparse
import multiprocessing
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import record
import speed
import torch
from package import Simulation, make_config, make_scene
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from plures.runs.simulation import settle
from plures.simulate.workers import one_thread

FIELDS = ["model", "data", "clients", "steps", "loop_ms", "ours_ms", "faster_by", "executor", "stack", "goes_to"]


class PatchEncoder(nn.Module):
    """A transformer encoder of two layers, 32 wide, on patches of 7x7 pixels, with torch's default dropout."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.embed = nn.Conv2d(channels, 32, 7, stride=7)
        self.place = nn.Parameter(0.02 * torch.randn(height // 7 * (width // 7), 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(patches + self.place).mean(1))


class Case(NamedTuple):
    """A model, its rows, and how it is adapted."""

    model: str
    kind: str  # of rows
    clients: int
    rows: int  # of all clients; three quarters of each client's are trained on, in whole batches
    adapter: str | None = None


CASES: dict[str, Case] = {
    "mlp": Case("mlp", "grey", 50, 4000),
    "cnn4": Case("cnn4", "grey", 20, 1600),
    "hncnn": Case("hncnn", "colour", 20, 1600),
    "resnet8": Case("resnet8", "colour", 20, 800),
    "resnet18-small": Case("resnet18-small", "colour", 4, 160),
    "resnet20-gn": Case("resnet20-gn", "colour", 10, 400),
    "PatchEncoder": Case("models:PatchEncoder", "grey", 20, 1600),
    "charlstm": Case("charlstm", "characters", 10, 400),
    "fasttext": Case("fasttext", "words", 20, 1600),
    "minilm, LoRA in all layers": Case("minilm", "words", 4, 160, "lora:rank=4,layers=*attention.self*"),
    "minilm, LoRA in the last layer": Case("minilm", "words", 4, 160, "lora:rank=4,layers=*layer.5.attention.self*"),
}


def write_rows(kind: str, n: int, path: Path) -> None:
    """Random rows of a kind, with labels; a quarter is for tests."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, n)
    if kind == "words":
        np.savez(path, x=rng.integers(1, 5000, (n, 64)), y=y)
    elif kind == "characters":
        text = rng.integers(1, 80, (n, 81))
        np.savez(path, x=text[:, :-1], y=text[:, 1:])
    else:
        shape = {"grey": (1, 28, 28), "colour": (3, 32, 32)}[kind]
        np.savez(path, x=rng.normal(0, 1, (n, *shape)).astype(np.float32), y=y)


def measured(name: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Both sides in turns."""
    model, kind, n_clients, n_rows, adapter = CASES[name]
    path = folder / f"{kind}-{n_rows}.npz"
    write_rows(kind, n_rows, path)
    options: dict[str, Any] = {"method": "fedavg", "data": str(path), "model": model, "clients": n_clients}
    options |= {} if adapter is None else {"adapter": adapter}
    options |= {"partition": "iid", "batch": 10, "epochs": 1, "lr": 0.01, "workers": 2, "last_batch": "keep"}
    scene = settle(make_scene(make_config(options)))
    ours = Simulation(scene, None, print)
    our_round = speed.rounds_of(ours, False)
    spawn = multiprocessing.get_context("spawn")  # so that it has nothing of how ours handles memory and threads
    here, there = spawn.Pipe()
    loop = spawn.Process(target=speed.play_plain_rounds, args=(there, options, False), daemon=True)
    loop.start()
    n_steps = speed.n_steps_of(scene, "fedavg")
    seconds: dict[str, list[float]] = {"loop": [], "ours": []}
    for turn in range(repeats + 1):  # the first compiles, and is not counted
        here.send(None)
        took, steps = here.recv()
        assert steps == n_steps, (steps, n_steps)
        own = speed.turn_of(our_round, took)
        if turn:
            seconds["loop"].append(took)
            seconds["ours"] += own
    ours.close()
    loop.kill()
    of_loop, of_ours = (1e3 * statistics.median(each) for each in seconds.values())
    found = [name, kind, n_clients, n_steps, round(of_loop, 1), round(of_ours, 1)]
    chosen = [round(of_loop / of_ours, 2), scene.config.executor, scene.config.stack or "", kernels_of(scene)]
    return dict(zip(FIELDS, [*found, *chosen], strict=True))


def kernels_of(scene: Any) -> str:
    """The kernels that a round of one worker spends most of its time in, with their shares."""
    config = scene.config.model_copy(update={"workers": 1})
    with one_thread():
        run = Simulation(scene._replace(config=config), None, print)
        run.play_round()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.play_round()
        run.close()
    each = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in seen.key_averages()}
    total = sum(each.values())
    largest = sorted(each, key=lambda name: -each[name])[:4]
    return ", ".join(f"{name} {100 * each[name] / total:.0f} %" for name in largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    arguments = parser.parse_args()
    rows, conditions = [], record.conditions()
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            if arguments.only in name:
                rows.append(measured(name, arguments.repeats, Path(folder)))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if not arguments.only:
        factors = [row["faster_by"] for row in rows]
        print(f"median {statistics.median(factors):.2f}x, lowest {min(factors):.2f}x")
        record.write("models", f"models.py --repeats {arguments.repeats}", conditions, rows)


if __name__ == "__main__":
    main()
