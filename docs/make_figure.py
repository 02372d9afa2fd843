"""Draw docs/demo.png from the folder of a comparison with Local and FedAvg: python docs/make_figure.py runs/compare-...

What each method's clients gain, in points of accuracy, over training alone and over one model for all: the mean over
clients, each in the mean over its seeds, with a 95 % interval.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from plures.report.looks import COLOURS
from plures.runs.folders import read_config
from plures.runs.results import read_csv

BASELINES = {"local": "over training alone", "fedavg": "over FedAvg"}


def accuracies(comparison: Path) -> dict[str, dict[int, list[float]]]:
    """Method -> client -> accuracy of its own model with each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for folder in sorted(path.parent for path in comparison.rglob("clients.csv")):
        of_method = found.setdefault(read_config(folder).method, {})
        for row in read_csv(folder / "clients.csv"):
            if row["personal_accuracy"] is not None:
                of_method.setdefault(int(row["client"]), []).append(float(row["personal_accuracy"]))
    return found


def main() -> None:
    found = accuracies(Path(sys.argv[1]))
    mean = {method: np.mean([np.mean(each) for each in of_method.values()]) for method, of_method in found.items()}
    methods = sorted(set(found) - set(BASELINES), key=lambda method: mean[method])
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for place, (base, words) in enumerate(BASELINES.items()):
        axes = figure.add_subplot(1, 2, place + 1, sharex=figure.axes[0] if figure.axes else None)
        for k, method in enumerate(methods):
            clients = sorted(set(found[method]) & set(found[base]))
            gains = 100 * np.array([np.mean(found[method][i]) - np.mean(found[base][i]) for i in clients])
            half = 1.96 * gains.std(ddof=1) / np.sqrt(len(gains))
            axes.errorbar(gains.mean(), k, xerr=half, fmt="o", ms=6, capsize=3, color=COLOURS[k])
        axes.axvline(0, color="0.4", lw=1)
        axes.set_yticks(range(len(methods)), [f"{m}  {100 * mean[m]:.1f} %" for m in methods] if place == 0 else [])
        axes.set_xlabel(f"gain {words} ({100 * mean[base]:.1f} %), points")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(Path(__file__).parent / "demo.png", dpi=110)


if __name__ == "__main__":
    main()
