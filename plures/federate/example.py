"""Writes example data for `plures federate`: an .npz file per client, with unequal shares of the bundled digits."""

import sys

import numpy as np

from plures import seeds
from plures.data import partition, sources


def write(paths: list[str]) -> None:
    """Write one file per path, each for one client."""
    data = sources.load("digits")
    split = partition.make_split(data, "dirichlet:0.5", len(paths), 0, 0.25, 1.0)
    for path, train, test in zip(paths, split.train, split.test, strict=True):
        rows = seeds.generator("example", path).permutation(np.r_[train, test])
        np.savez(path, x=data.x[rows], y=data.y[rows], is_test=np.isin(rows, test).astype(np.int64))
        print(f"{path}: {len(train)} training rows and {len(test)} test rows")


if __name__ == "__main__":
    write(sys.argv[1:])
