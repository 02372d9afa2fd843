"""Add-ons: which hosts can take them, what they hand on, and refusals with a reason."""

import pytest
import torch

from plures import tree
from plures.errors import UsageError
from plures.learn.solver import Solver
from plures.methods.base import NO_TERMS, AddonTerms
from plures.methods.spec import make_method
from tests.small import played, run_of, scene_of, small_split


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("fedfomo+ala", "several models"),
        ("apple+ala", "several cores"),
        ("local+ala", "trains no shared model"),
        ("local+prox", "trains no shared model"),
        ("fedmeta+sam", "trains no shared model"),
        ("pfedla+scaffold", "none for all"),
        ("pfedhn+feddyn", "keeps no model for all"),
        ("fedrod+brm", "balanced loss already"),
        ("fedrod+sam", "could be sharpened"),
        ("scaffold+ala", "the other way round"),
        ("scaffold+prox", "the other way round"),
        ("scaffold+feddyn", "one correction"),
        ("feddyn+scaffold", "one correction"),
        ("feddyn+feddyn", "one correction"),
        ("fedala+ala", "already"),
        ("fedala+c", "says where training starts"),
        ("fedavg+brm+sam", "the other way round"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(spec, reason):
    with pytest.raises(UsageError, match=f"cannot take the add-on {spec.rpartition('+')[2]}: .*{reason}"):
        make_method(spec, {}, Solver())


@pytest.mark.parametrize("addon", ["ft", "c", "ala", "sam", "prox", "scaffold", "feddyn", "brm"])
def test_fedavg_takes_every_add_on(addon):
    run = played(run_of(f"fedavg+{addon}", executor="one_by_one"), 2)
    assert all(torch.isfinite(x).all() for x in tree.leaves(run.state.server))


@pytest.mark.parametrize("host", ["local", "fedmeta", "fedfomo", "apple", "mtl", "afml", "plgu-lf", "pfedhn"])
def test_all_can_take_fine_tuning(host):
    played(run_of(f"{host}+ft:ft_epochs=1", executor="one_by_one"), 1)


def test_the_server_of_scaffold_moves_a_share_of_the_way():
    """With server_lr 0.25 it goes a quarter of the way that it goes with 1."""
    whole, quarter = (
        played(run_of(f"scaffold:server_lr={rate}", executor="one_by_one"), 1).state.server.host
        for rate in ("1.0", "0.25")
    )
    start = scene_of().task.initial
    for name, x in start.items():
        torch.testing.assert_close(quarter[name] - x, 0.25 * (whole[name] - x), rtol=1e-4, atol=1e-7)


def test_a_host_that_keeps_a_part_at_home_starts_where_its_add_on_says():
    """FedPer around a given start: the shared part of it is taken, the own head stays."""
    scene = scene_of("fedper", split=small_split())
    method, task = scene.method.with_solver(Solver(lr=0.0, batch=5)), scene.task
    client = method.init_client(task, task.initial)
    client = client._replace(kept=tree.scale(2.0, client.kept))
    received = tree.scale(3.0, method.shared(task, task.initial))
    shard = scene.population.shards([3], "train", "train", 0)
    shard = type(shard)(shard.x, shard.y, *[part[0] for part in shard[2:]])
    start = tree.scale(5.0, method.shared(task, task.initial))
    for terms, expected in ((NO_TERMS, received), (AddonTerms(start=start), start)):
        after, upload, _ = method.train(task, received, client, shard, terms)
        assert all(torch.equal(upload[name], expected[name]) for name in expected)
        assert all(torch.equal(after.kept[name], client.kept[name]) for name in client.kept)


def test_private_parts_are_named_in_words():
    with pytest.raises(UsageError, match="private=tail: a part that can stay is one of head, body"):
        make_method("fedper:private=tail", {}, Solver())
