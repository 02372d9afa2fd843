"""What a benchmark found, as a table in benchmarks/results, under the command that found it and its conditions."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def conditions() -> str:
    """Of the machine, now: to be asked before anything is measured."""
    return f"{os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} when it began"


def write(name: str, command: str, conditions: str, rows: Sequence[dict[str, Any]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
        file.write(f"# python benchmarks/{command}\n# {conditions}\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
