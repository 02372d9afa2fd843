"""Public: a few rows of each class are among the training rows of every client."""

import numpy as np

import plures
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from tests.small import played, run_of

OPTIONS = {"data": "digits", "partition": "labels:2", "clients": 10, "seed": 3}


def test_every_client_has_its_rows_and_the_public_ones():
    plain, with_public = (
        make_scene(make_config(OPTIONS | {"method": name})).population
        for name in ("fedavg", "fedavg+public:rows_each=3")
    )
    public = sorted(set(with_public.train[0]).intersection(*map(set, with_public.train)))
    assert np.bincount(plain.y[public], minlength=10).tolist() == [3] * 10
    for before, after in zip(plain.train, with_public.train, strict=True):
        assert np.union1d(before, public).tolist() == after.tolist()
    assert [rows.tolist() for rows in plain.test] == [rows.tolist() for rows in with_public.test]


def test_training_meets_the_public_rows():
    one, other = (played(run_of(name, executor="one_by_one"), 1) for name in ("fedavg", "fedavg+public"))
    assert one.state.digest() != other.state.digest()
    # A shared model that sees all classes everywhere drifts less: it is better where clients have two classes each.
    few = {"data": "digits", "partition": "labels:2", "rounds": 5, "eval_every": 0}
    plain, helped = (plures.run(name, **few).summary["generic"]["accuracy"] for name in ("fedavg", "fedavg+public"))
    assert helped > plain + 0.1
