"""Draw docs/demo.png from the run folders of a comparison: python docs/make_figure.py runs/compare-digits-0001"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from plures.report.looks import COLOURS
from plures.runs.results import read_csv


def main() -> None:
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if (path / "clients.csv").exists())
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for folder, colour in zip(folders, COLOURS, strict=True):
        rows = read_csv(folder / "clients.csv")
        values = sorted(100 * float(row["personal_accuracy"]) for row in rows if row["personal_accuracy"])
        axes.plot(range(1, len(values) + 1), values, marker="o", ms=3, lw=1, color=colour, label=folder.name)
    axes.set_xlabel("clients, worst served first")
    axes.set_ylabel("accuracy of its own model, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(Path(__file__).parent / "demo.png", dpi=110)


if __name__ == "__main__":
    main()
