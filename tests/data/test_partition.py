import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plures
from plures.data import partition
from plures.data.dataset import Dataset
from plures.data.partition import PARTITIONS, Split, make_split, parse, read_split, relabel, split_to_json
from plures.errors import DataError, UsageError
from plures.runs import results as tables
from plures.runs.config import make_config
from plures.runs.folders import open_scene
from plures.runs.scene import make_scene

DEALT = ["iid", "dirichlet:0.1", "dirichlet-class:0.3", "pathological:2", "labels:2", "main:1", "relabel:0.5"]
DEALT += ["dirichlet-client:0.3", "shards:2", "quantity:0.5"]
EXAMPLES = [*DEALT, "longtail:3", "longtail:3,0.6"]
seeds = st.integers(0, 2**32)


def labelled(counts, test_counts=()) -> Dataset:
    """A data set with so many rows of each class, and so many in its test part."""
    train = np.repeat(np.arange(len(counts)), counts)
    test = np.repeat(np.arange(len(test_counts)), test_counts)
    y = np.concatenate([train, test]).astype(np.int64)
    return Dataset("made", np.zeros((len(y), 1), np.float32), y, len(counts), len(train), None)


def owned(client, n_test: int = 0, names=()) -> Dataset:
    """A data set of one class whose rows have these clients; the last `n_test` rows are its test part."""
    n = len(client)
    y, x = np.zeros(n, np.int64), np.zeros((n, 1), np.float32)
    return Dataset("made", x, y, 1, n - n_test, np.array(client), client_names=names)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def all_rows(split: Split) -> list[int]:
    return sorted(np.concatenate([*split.train, *split.test]).tolist())


def clients(split: Split) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(split.train, split.test, strict=True)]


def classes_of(y: np.ndarray, rows: list[np.ndarray]) -> list[list[int]]:
    return [np.unique(y[r]).tolist() for r in rows]


# --- parse ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iid", ("iid", None)),
        ("dirichlet:0.1", ("dirichlet", 0.1)),
        ("dirichlet-class:1e-3", ("dirichlet-class", 0.001)),
        ("pathological:2", ("pathological", 2.0)),
        ("labels:10", ("labels", 10.0)),
        ("main:2", ("main", 2.0)),
        ("relabel:0", ("relabel", 0.0)),
        ("relabel:1", ("relabel", 1.0)),
        ("longtail:1", ("longtail", (1.0, 0.3))),
        ("longtail:50,0.6", ("longtail", (50.0, 0.6))),
        ("natural", ("natural", None)),
    ],
)
def test_parse_gives_name_and_value(text, expected):
    assert parse(text) == expected


def test_parse_of_an_unknown_name_names_the_nearest_one():
    with pytest.raises(UsageError, match=r"unknown partition 'dirichle'.*'dirichlet'"):
        parse("dirichle:0.1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, kind in PARTITIONS.items()
        if kind.needs_value
        for value in ["", ":", ":many", ":0", ":-1", ":nan", ":inf", ":1:2"]
        if (name, value) != ("relabel", ":0")
    ],
)
def test_parse_of_a_wrong_value_gives_an_example(name, value):
    with pytest.raises(UsageError, match=rf"{name}{value}'.* e\.g\. {name}:[0-9.]+"):
        parse(name + value)


@pytest.mark.parametrize(
    "text", ["relabel:1.01", "longtail:0.99", "shards:2.5", "longtail:10,0", "longtail:10,x", "longtail:10,1,2"]
)
def test_parse_refuses_a_value_beyond_the_range_of_a_partition(text):
    with pytest.raises(UsageError, match=r"needs a (whole )?number"):
        parse(text)


@pytest.mark.parametrize("text", ["pathological:1.5", "labels:0.5", "main:1.5"])
def test_parse_refuses_a_fraction_of_a_class(text):
    with pytest.raises(UsageError, match="a whole number of classes"):
        parse(text)


@pytest.mark.parametrize("name", ["iid", "natural"])
def test_parse_refuses_a_value_for_a_partition_that_takes_none(name):
    with pytest.raises(UsageError, match=f"{name} takes no value"):
        parse(f"{name}:3")


def test_every_example_in_the_value_help_can_be_parsed():
    examples = {name: kind.value_help.split("e.g. ")[1] for name, kind in PARTITIONS.items() if kind.needs_value}
    assert [parse(example)[0] for example in examples.values()] == list(examples)


def test_every_partition_has_a_description_of_one_line():
    assert [*PARTITIONS][-4:] == ["main", "relabel", "longtail", "natural"]
    assert all(kind.description and "\n" not in kind.description for kind in PARTITIONS.values())


# --- make_split ---


@pytest.mark.parametrize("text", EXAMPLES)
@given(
    counts=st.lists(st.integers(16, 40), min_size=2, max_size=5),
    n_clients=st.integers(1, 8),
    seed=seeds,
    share=st.floats(0.01, 0.99),
)
@settings(max_examples=25, deadline=None)
def test_split_uses_no_row_twice_and_sorts_them(text, counts, n_clients, seed, share):
    split = make_split(labelled(counts), text, n_clients, seed, share)
    rows = all_rows(split)
    assert len(rows) == len(set(rows)) and 0 <= rows[0] and rows[-1] < sum(counts)
    assert len(split.train) == len(split.test) == n_clients
    for part in [*split.train, *split.test]:
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.1", "dirichlet-class:0.3", "relabel:0.5"])
@given(
    counts=st.lists(st.integers(4, 40), min_size=1, max_size=5),
    test_counts=st.lists(st.integers(0, 9), max_size=5),
    n_clients=st.integers(1, 2),
    seed=seeds,
)
@settings(max_examples=25, deadline=None)
def test_split_uses_every_row_of_both_parts(text, counts, test_counts, n_clients, seed):
    data = labelled(counts, test_counts[: len(counts)])
    assert all_rows(make_split(data, text, n_clients, seed)) == list(range(len(data.y)))


@pytest.mark.parametrize("text", EXAMPLES)
def test_split_depends_on_the_seed_alone(text):
    data = labelled([50, 60, 70])
    first, again, other = (split_to_json(make_split(data, text, 5, seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("text", DEALT)
def test_test_share_does_not_change_which_rows_a_client_has(text):
    data = labelled([50, 60, 70])
    some, more = (clients(make_split(data, text, 5, 3, share)) for share in (0.2, 0.6))
    assert [sorted(rows) for rows in some] == [sorted(rows) for rows in more]


@pytest.mark.parametrize("text", ["iid", "dirichlet:1", "dirichlet-class:1", "pathological:1", "labels:1"])
def test_rows_of_a_class_are_dealt_in_random_order(text):
    kind, value = PARTITIONS[parse(text)[0]], parse(text)[1]
    dealt = [kind.make(labelled([40]), 2, value, rng(seed))[0] for seed in range(5)]
    assert any((np.diff(rows) > 1).any() for rows in dealt)


@pytest.mark.parametrize("text", EXAMPLES)
def test_split_of_70000_rows_is_fast(text):
    data = labelled([7000] * 10)
    start = time.perf_counter()
    make_split(data, text, 100, 0)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("text", EXAMPLES)
def test_split_has_20_clients_if_nobody_says_how_many(text):
    assert len(make_split(labelled([100, 100, 100]), text, None, 0).train) == 20


@pytest.mark.parametrize("text", [text for text in EXAMPLES if text not in ("iid", "quantity:0.5")])
def test_rows_with_many_labels_are_not_dealt_by_class(text):
    data = owned([0] * 50)._replace(y=np.zeros((50, 7), np.int64))
    with pytest.raises(UsageError, match=r"each row of the data has 7 labels.* natural or iid"):
        make_split(data, text, 2, 0)


@pytest.mark.parametrize("text", ["iid", "natural"])
def test_rows_with_many_labels_are_tested_on_a_random_share(text):
    data = owned([0] * 8 + [1] * 8)._replace(y=np.arange(16 * 3).reshape(16, 3))
    split = make_split(data, text, 2, 0)
    assert [len(rows) for rows in split.train] == [6, 6] and [len(rows) for rows in split.test] == [2, 2]
    assert all_rows(split) == list(range(16))


@pytest.mark.parametrize("n_clients", [0, -3])
def test_split_refuses_fewer_than_one_client(n_clients):
    with pytest.raises(UsageError, match=f"number of clients is {n_clients}; .* at least 1"):
        make_split(labelled([10]), "iid", n_clients, 0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_split_refuses_a_test_share_outside_zero_to_one(share):
    with pytest.raises(UsageError, match=rf"share of rows for testing is {share}"):
        make_split(labelled([10]), "iid", 2, 0, share)


# --- iid ---


@given(n_rows=st.integers(2, 200), n_clients=st.integers(1, 100), seed=seeds)
@settings(max_examples=50, deadline=None)
def test_iid_sizes_differ_by_at_most_one_or_it_refuses_fewer_than_two_rows_a_client(n_rows, n_clients, seed):
    y = np.zeros(n_rows, np.int64)
    if n_rows < 2 * n_clients:
        with pytest.raises(UsageError, match=f"{n_rows} rows to {n_clients} clients.* at most {n_rows // 2} clients"):
            partition.iid(y, n_clients, rng(seed))
    else:
        sizes = [len(rows) for rows in partition.iid(y, n_clients, rng(seed))]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == n_rows


# --- dirichlet ---


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    n_clients=st.integers(1, 30),
    beta=st.sampled_from([5e-324, 1e-300, 1e-9, 0.01, 0.1, 1.0, 100.0, 1e300, 1.7e308]),
    seed=seeds,
)
@settings(max_examples=100, deadline=None)
def test_dirichlet_gives_every_client_the_least_number_or_refuses(counts, n_clients, beta, seed):
    y, total = labelled(counts).y, sum(counts)
    if total < 2 * n_clients:
        with pytest.raises(UsageError, match=f"{total} rows to {n_clients} clients: each needs at least 2"):
            partition.dirichlet(y, n_clients, beta, rng(seed))
    else:
        sizes = [len(rows) for rows in partition.dirichlet(y, n_clients, beta, rng(seed))]
        assert min(sizes) >= max(1, min(40, int(total / n_clients / 2))) and sum(sizes) == total


def test_dirichlet_never_asks_for_more_than_40_rows():
    # Tiny beta: a class of 5,000 goes to one client, the other one of 100 to another, the rest is filled up to 40.
    rows = partition.dirichlet(labelled([5000, 100]).y, 5, 1e-9, rng())
    assert sorted(len(r) for r in rows)[:3] == [40, 40, 40]


@pytest.mark.parametrize("seed", range(10))
def test_dirichlet_gives_nothing_more_to_a_client_with_an_equal_part(seed):
    # Tiny beta: each class goes to one client. Whoever has the first class has half of all rows.
    rows = partition.dirichlet(labelled([5, 5]).y, 2, 1e-9, rng(seed))
    assert sorted(r.tolist() for r in rows) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_dirichlet_with_large_beta_gives_every_client_every_class_equally():
    y = labelled([100, 200]).y
    for rows in partition.dirichlet(y, 4, 1e12, rng()):
        counts = np.bincount(y[rows])
        assert abs(counts[0] - 25) <= 1 and abs(counts[1] - 50) <= 1


def test_dirichlet_with_small_beta_is_less_even_than_with_large_beta():
    y = labelled([100] * 5).y

    def largest(beta: float) -> float:
        return float(
            np.mean([np.bincount(y[rows]).max() / len(rows) for rows in partition.dirichlet(y, 5, beta, rng())])
        )

    assert largest(0.05) > 0.6 and largest(100.0) < 0.3  # all alike would be 0.2


def test_fill_up_takes_from_the_largest_client():
    # Client 2 lacks two rows: the first and the second one come from client 0, which goes 6, 5, 4.
    owner = np.repeat([0, 1], [6, 3])
    partition._fill_up(owner, 3, 2, rng())
    assert np.bincount(owner).tolist() == [4, 3, 2]


def test_fill_up_leaves_clients_alone_that_have_enough():
    owner = np.repeat([0, 1], [6, 3])
    partition._fill_up(owner, 2, 3, rng())
    assert owner.tolist() == [0] * 6 + [1] * 3


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8), seed=seeds)
@settings(max_examples=100, deadline=None)
def test_fill_up_gives_the_sizes_of_taking_rows_one_by_one(sizes, seed):
    least = sum(sizes) // len(sizes) // 2
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if len(owner) == 0:
        return
    partition._fill_up(owner, len(sizes), least, rng(seed))
    expected = list(sizes)
    while min(expected) < least:
        expected[expected.index(max(expected))] -= 1
        expected[expected.index(min(expected))] += 1
    assert sorted(np.bincount(owner, minlength=len(sizes)).tolist()) == sorted(expected)


def test_fill_up_takes_random_rows():
    taken = set()
    for seed in range(40):
        owner = np.zeros(6, np.int64)
        partition._fill_up(owner, 2, 1, rng(seed))
        taken.add(int(owner.argmax()))
    assert taken == set(range(6))


def test_fill_up_settles_by_lot_who_gives_the_odd_row():
    found = set()
    for seed in range(20):
        owner = np.repeat([0, 1], [5, 5])
        partition._fill_up(owner, 3, 3, rng(seed))
        found.add(tuple(np.bincount(owner).tolist()))
    assert found == {(3, 4, 3), (4, 3, 3)}


def test_fill_up_mixes_the_rows_of_those_who_give():
    givers = set()
    for seed in range(20):
        owner = np.repeat([0, 1], [5, 5])
        partition._fill_up(owner, 4, 1, rng(seed))  # one row each of clients 0 and 1 to clients 2 and 3
        givers.add(int(owner.tolist().index(2) // 5))
    assert givers == {0, 1}


@pytest.mark.parametrize(
    ("n", "shares", "expected"),
    [
        (10, [0.5, 0.3, 0.2], [5, 3, 2]),
        (9, [1 / 9] * 9, [1] * 9),  # although some of the cumulative shares come out too small
        (3, [0.5, 0.5], [1, 2]),
        (7, [0.3, 0.3, 0.0], [3, 4, 0]),  # shares of 1/2
        (0, [0.5, 0.5], [0, 0]),
    ],
)
def test_cut_gives_rows_between_cumulative_shares(n, shares, expected):
    assert partition._cut(n, np.array(shares)).tolist() == expected


class Broken:
    """A generator whose Dirichlet draws underflow to NaN."""

    def dirichlet(self, concentrations: np.ndarray) -> np.ndarray:
        return np.full(len(concentrations), np.nan)

    def integers(self, n: int) -> int:
        return n - 1


def test_shares_that_are_not_numbers_go_to_one_client_if_the_concentration_is_small():
    assert partition._draw_shares(3, 1e-9, Broken()).tolist() == [0, 0, 1]  # type: ignore[arg-type]


def test_shares_that_overflow_are_equal():
    assert partition._draw_shares(4, 1.7e308, rng()).tolist() == [0.25] * 4


# --- dirichlet-class ---


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_class_trains_on_the_train_part_and_tests_on_the_test_part(seed):
    split = make_split(labelled([30, 20], [6, 4]), "dirichlet-class:0.3", 4, seed)
    assert sorted(np.concatenate(split.train).tolist()) == list(range(50))
    assert sorted(np.concatenate(split.test).tolist()) == list(range(50, 60))


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_class_gives_test_rows_in_the_shares_of_the_train_rows(seed):
    # Both are cut at the same shares, 10 to 1; each end of a piece is rounded down, so it is off by less than 1.
    data = labelled([1000, 2000], [100, 200])
    split = make_split(data, "dirichlet-class:0.5", 6, seed)
    for train, test in zip(split.train, split.test, strict=True):
        for c in (0, 1):
            assert abs((data.y[test] == c).sum() - (data.y[train] == c).sum() / 10) < 1.1


def test_dirichlet_class_splits_each_client_if_there_is_no_test_part():
    split = make_split(labelled([400, 400]), "dirichlet-class:1", 4, 0)
    assert all(len(test) == round(0.25 * (len(test) + len(train))) for train, test in zip(*split[:2], strict=True))


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-12])
def test_dirichlet_class_with_tiny_alpha_gives_each_class_to_one_client(alpha):
    y = labelled([10, 20, 30]).y
    rows = partition.dirichlet_class(y, 5, alpha, rng())
    held = [c for classes in classes_of(y, rows) for c in classes]
    assert sorted(held) == [0, 1, 2]


def test_dirichlet_class_may_leave_clients_without_rows():
    assert [len(r) for r in partition.dirichlet_class(labelled([10]).y, 3, 1e-12, rng())].count(0) == 2


def test_dirichlet_class_takes_more_clients_than_rows():
    split = make_split(labelled([3]), "dirichlet-class:1", 10, 0)
    assert len(split.train) == 10 and all_rows(split) == [0, 1, 2]


# --- pathological ---


def test_pathological_walks_the_classes_so_that_clients_form_groups():
    # 4 clients of 2 of 4 classes: each class goes to 4 * 2 / 4 = 2 clients, the first two with room.
    y = labelled([20] * 4).y
    assert classes_of(y, partition.pathological(y, 4, 2, rng())) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_pathological_gives_clients_that_the_walk_left_over_the_classes_that_fewest_have():
    # ceil(10 * 3 / 10) = 3 takers: classes 0 1 2 fill clients 0 1 2 and so on; class 9 meets client 9 alone,
    # which then takes two of the others, all with 3 takers, in their order.
    y = labelled([20] * 10).y
    classes = classes_of(y, partition.pathological(y, 10, 3, rng()))
    assert classes[:3] == [[0, 1, 2]] * 3 and classes[6:9] == [[6, 7, 8]] * 3 and classes[9] == [0, 1, 9]


def test_pathological_counts_what_clients_that_the_walk_left_over_have_taken():
    # 4 takers a class: classes 0 and 1 fill clients 0 to 3, class 2 meets clients 4 and 5. Client 4 takes
    # class 0, so that client 5 finds class 1 with fewer takers.
    y = labelled([20] * 3).y
    assert classes_of(y, partition.pathological(y, 6, 2, rng())) == [[0, 1]] * 4 + [[0, 2], [1, 2]]


def test_pathological_deals_unequal_sizes_and_the_rest_to_the_last():
    # 100 rows, 4 takers: an equal part is 25, so the first three get 2 to 25 each.
    sizes = np.array([[len(r) for r in partition.pathological(labelled([100]).y, 4, 1, rng(s))] for s in range(300)])
    assert sizes[:, :3].min() == 2 and sizes[:, :3].max() == 25
    assert (sizes.sum(1) == 100).all()


def test_pathological_leaves_out_classes_that_the_walk_does_not_reach():
    # 3 clients of 2 of 5 classes: ceil(6 / 5) = 2 takers a class. Classes 0 and 1 fill clients 0 and 1,
    # classes 2 and 3 fill client 2, and nobody has room for class 4.
    y = labelled([4] * 5).y
    assert classes_of(y, partition.pathological(y, 3, 2, rng())) == [[0, 1], [0, 1], [2, 3]]


@given(
    counts=st.lists(st.integers(30, 60), min_size=1, max_size=8),
    n_clients=st.integers(1, 30),
    k=st.integers(1, 8),
    seed=seeds,
)
@settings(max_examples=100, deadline=None)
def test_pathological_gives_every_client_exactly_k_classes(counts, n_clients, k, seed):
    y = labelled(counts).y
    k = min(k, len(counts))
    rows = partition.pathological(y, n_clients, k, rng(seed))
    assert [len(classes) for classes in classes_of(y, rows)] == [k] * n_clients
    held = np.unique(y[np.concatenate(rows)])
    assert sorted(np.concatenate(rows).tolist()) == np.flatnonzero(np.isin(y, held)).tolist()


@pytest.mark.parametrize("name", ["pathological", "labels"])
def test_more_classes_a_client_than_there_are_is_refused(name):
    with pytest.raises(UsageError, match=rf"{name}:3 .* has 2, so use 1 to 2"):
        make_split(labelled([9, 9]), f"{name}:3", 2, 0)


@pytest.mark.parametrize("function", [partition.pathological, partition.labels])
def test_no_class_a_client_is_refused(function):
    with pytest.raises(UsageError, match="asks for 0 classes"):
        function(labelled([9, 9]).y, 2, 0, rng())


@pytest.mark.parametrize("name", ["pathological", "labels"])
def test_class_with_fewer_rows_than_clients_that_need_it_is_refused(name):
    with pytest.raises(UsageError, match=rf"{name} cannot deal the 3 rows of class 1 to the 4 clients"):
        make_split(labelled([9, 3]), f"{name}:2", 4, 0)


def test_number_of_classes_is_that_of_labels_that_occur():
    data = labelled([9, 0, 9])
    assert classes_of(data.y, partition.pathological(data.y, 2, 2, rng())) == [[0, 2], [0, 2]]


# --- labels ---


def test_labels_gives_every_client_k_labels_and_equal_sizes():
    # 5 clients of 2 of 4 classes are 10 places: classes have 2 or 3 clients, so 12 // 3 = 4 rows for each.
    y = labelled([12] * 4).y
    for rows in partition.labels(y, 5, 2, rng()):
        assert sorted(np.bincount(y[rows], minlength=4).tolist()) == [0, 0, 4, 4]


def test_labels_is_limited_by_the_scarcest_class():
    # 4 clients of both classes: class 1 has 9 // 4 = 2 rows for each, so class 0 gives 2 as well.
    y = labelled([100, 9]).y
    assert [np.bincount(y[rows]).tolist() for rows in partition.labels(y, 4, 2, rng())] == [[2, 2]] * 4


@given(
    counts=st.lists(st.integers(30, 60), min_size=1, max_size=8),
    n_clients=st.integers(1, 15),
    k=st.integers(1, 8),
    seed=seeds,
)
@settings(max_examples=100, deadline=None)
def test_labels_uses_classes_equally_often_and_gives_equal_shares(counts, n_clients, k, seed):
    y = labelled(counts).y
    k = min(k, len(counts))
    table = np.array([np.bincount(y[r], minlength=len(counts)) for r in partition.labels(y, n_clients, k, rng(seed))])
    used = (table > 0).sum(0)
    assert ((table > 0).sum(1) == k).all() and used.max() - used.min() <= 1
    assert len(set(table[table > 0].tolist())) == 1


def test_labels_mixes_the_pairs_of_classes():
    y = labelled([100] * 10).y
    pairs = {tuple(classes) for classes in classes_of(y, partition.labels(y, 50, 2, rng()))}
    assert len(pairs) > 20  # of 45; windows over a fixed order of the classes would give 5


def test_labels_with_fewer_places_than_classes_leaves_some_out():
    y = labelled([10] * 6).y
    classes = classes_of(y, partition.labels(y, 2, 2, rng()))
    assert len({c for held in classes for c in held}) == 4


def test_labels_refuses_one_row_a_client():
    with pytest.raises(UsageError, match=r"labels:1 has one row for each of the 6 clients.* fewer clients"):
        make_split(labelled([5, 5]), "labels:1", 6, 0)


# --- main ---


def table_of(y: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    """[client, class], rows of each."""
    return np.array([np.bincount(y[r], minlength=int(y.max()) + 1) for r in rows])


def test_main_uses_all_rows_of_classes_that_are_equal():
    # 5 clients of 20 rows: 6 of each of 2 main classes and 1 of each of 8 others. Each class is main for one
    # client, which has 6 rows of it, and the 4 others have one each.
    y = labelled([10] * 10).y
    table = table_of(y, partition.main(y, 5, 2, rng()))
    assert (np.sort(table) == [1] * 8 + [6, 6]).all() and (table.sum(0) == 10).all()


def test_main_takes_two_classes():
    y = labelled([30, 30]).y
    table = table_of(y, partition.main(y, 6, 1, rng()))
    assert sorted(table.tolist()) == [[4, 6]] * 3 + [[6, 4]] * 3


def test_main_is_limited_by_the_scarcest_class():
    # Both clients have the same size. One has 60 % of class 1, the other 40 %: together one client's size, which
    # the 12 rows of class 1 allow to be 12. The first has 7 of them (7.2), the second 5 (4.8).
    y = labelled([500, 12]).y
    assert sorted(table_of(y, partition.main(y, 2, 1, rng())).tolist()) == [[5, 7], [7, 5]]


@given(
    counts=st.lists(st.integers(40, 80), min_size=2, max_size=8),
    n_clients=st.integers(1, 15),
    k=st.integers(1, 4),
    seed=seeds,
)
@settings(max_examples=100, deadline=None)
def test_main_gives_equal_sizes_all_classes_and_60_percent_of_k(counts, n_clients, k, seed):
    y = labelled(counts).y
    k = min(k, (3 * len(counts) - 1) // 5)
    table = table_of(y, partition.main(y, n_clients, k, rng(seed)))
    size = int(table[0].sum())
    assert (table.sum(1) == size).all() and table.min() >= 1
    of_main = (6 * size + 5) // 10  # 60 per cent, rounded
    expected = [
        part // n + (i < part % n) for part, n in ((of_main, k), (size - of_main, len(counts) - k)) for i in range(n)
    ]
    assert (np.sort(table, axis=1) == np.sort(expected)).all()
    is_main = np.zeros(table.shape, bool)
    ordered = np.argsort(-table, axis=1, kind="stable")
    np.put_along_axis(is_main, ordered[:, :k], True, axis=1)
    # As large as can be, but for rounding: a client has at most one row of each class less.
    shares = np.where(is_main, 0.6 / k, 0.4 / (len(counts) - k)).sum(0)
    assert size > min((np.array(counts) - n_clients) / shares) - 1


def test_main_deals_main_classes_equally_often():
    y = labelled([200] * 10).y
    table = table_of(y, partition.main(y, 25, 2, rng()))
    often = (table > 20).sum(0)  # 80 rows a client: 24 of a main class, 4 of another
    assert often.sum() == 50 and often.max() - often.min() <= 1


@pytest.mark.parametrize(("k", "n_classes", "most"), [(2, 2, 1), (3, 5, 2), (6, 10, 5), (1, 1, 0)])
def test_main_refuses_main_classes_that_would_not_be_larger(k, n_classes, most):
    with pytest.raises(UsageError, match=rf"main:{k} .* has {n_classes} classes\. Use at most {most}\."):
        make_split(labelled([50] * n_classes), f"main:{k}", 2, 0)


def test_main_refuses_clients_that_cannot_have_all_classes():
    with pytest.raises(UsageError, match=r"main:1 cannot give each of 4 clients .* has 3 rows\. Use fewer clients"):
        make_split(labelled([90, 3, 90]), "main:1", 4, 0)


# --- relabel ---


def test_relabel_deals_rows_as_dirichlet_does():
    data = labelled([50, 60, 70])
    split, plain = make_split(data, "relabel:0", 5, 3), make_split(data, "dirichlet:0.5", 5, 3)
    assert split_to_json(split._replace(labels=None)) == split_to_json(plain)


def test_relabel_with_zeta_one_is_plain():
    data = labelled([50, 60, 70])
    assert split_to_json(make_split(data, "relabel:1", 5, 3)) == split_to_json(make_split(data, "dirichlet:0.5", 5, 3))


@pytest.mark.parametrize(
    ("zeta", "n_clients", "expected"), [("0", 6, 6), ("0.5", 5, 3), ("0.9", 5, 1), ("0.91", 5, 0), ("0.3", 20, 14)]
)
def test_relabel_renames_at_a_share_of_the_clients(zeta, n_clients, expected):
    # With 30 classes, that a random permutation is the identity does not happen.
    split = make_split(labelled([20] * 30), f"relabel:{zeta}", n_clients, 0)
    names = split.labels or [np.arange(30)] * n_clients
    assert [sorted(own.tolist()) for own in names] == [list(range(30))] * n_clients
    assert sum((own != np.arange(30)).any() for own in names) == expected


def test_relabel_gives_each_client_names_of_its_own():
    split = make_split(labelled([20] * 30), "relabel:0", 6, 0)
    assert split.labels is not None and len({tuple(own) for own in split.labels}) == 6


def test_relabel_chooses_clients_by_the_seed():
    def chosen(seed: int) -> tuple[bool, ...]:
        split = make_split(labelled([20] * 10), "relabel:0.5", 6, seed)
        return tuple(bool((own != np.arange(10)).any()) for own in split.labels or [])

    assert len({chosen(seed) for seed in range(10)}) > 3 and chosen(2) == chosen(2)


def test_relabelled_names_the_classes_of_train_and_test_rows_alike():
    y = np.array([0, 1, 2, 0, 1, 2, 0])
    turned, same = np.array([1, 2, 0]), np.arange(3)
    split = Split([np.array([0, 1]), np.array([3])], [np.array([2]), np.array([4, 5])], [turned, same])
    assert relabel(y, split).tolist() == [1, 2, 0, 0, 1, 2, 0]
    assert relabel(y, split._replace(labels=None)) is y


# --- longtail ---


@pytest.mark.parametrize("seed", range(3))
def test_longtail_falls_by_the_same_factor_from_class_to_class(seed):
    data = labelled([900, 900, 900], [30, 30, 30])
    split = make_split(data, "longtail:9", 4, seed)
    assert np.bincount(data.y[np.concatenate(split.train)]).tolist() == [900, 300, 100]
    assert np.bincount(data.y[np.concatenate(split.test)]).tolist() == [30, 10, 3]  # in the same shares


def test_longtail_is_limited_by_the_class_that_is_scarce_for_its_place():
    # 500 to 50 would need 158 rows of class 1 between them, but it has 79: half of all numbers.
    data = labelled([500, 79, 500], [1, 1, 1])
    assert np.bincount(data.y[np.concatenate(make_split(data, "longtail:10", 3, 0).train)]).tolist() == [249, 79, 24]


def test_longtail_with_ratio_one_balances_the_classes():
    data = labelled([50, 80, 60], [1, 1, 1])
    assert np.bincount(data.y[np.concatenate(make_split(data, "longtail:1", 3, 0).train)]).tolist() == [50, 50, 50]


@pytest.mark.parametrize("ratio", ["1e9", "1.7e308"])
def test_longtail_leaves_at_least_one_row_of_a_class(ratio):
    data = labelled([50, 50, 50], [1, 1, 1])
    assert np.bincount(data.y[np.concatenate(make_split(data, f"longtail:{ratio}", 3, 0).train)])[2] == 1


def test_longtail_of_one_class_uses_all_rows():
    assert len(np.concatenate(make_split(labelled([50], [5]), "longtail:10", 2, 0).train)) == 50


def test_longtail_keeps_the_shares_of_the_clients():
    data = labelled([1000] * 3, [10] * 3)
    plain, tail = (make_split(data, text, 5, 0) for text in ("dirichlet-class:0.3", "longtail:10"))
    before, after = table_of(data.y, plain.train), table_of(data.y, tail.train)
    np.testing.assert_allclose(after / after.sum(0), before / 1000, atol=1 / 100)  # less than a row of the last class


@pytest.mark.parametrize("n_tests", [None, [400] * 10], ids=["set aside", "given"])
def test_longtail_tests_a_client_on_the_mix_of_classes_that_it_trains_on(n_tests):
    data = labelled([4000] * 10, n_tests or ())
    split = make_split(data, "longtail:100", 5, 0)
    trained, tested = table_of(data.y, split.train), table_of(data.y, split.test)
    distance = abs(trained / trained.sum(1, keepdims=True) - tested / tested.sum(1, keepdims=True)).sum(1) / 2
    assert distance.max() < 0.1, distance  # total variation; of unthinned test rows it is 0.42


def test_longtail_takes_an_alpha_of_its_own():
    data = labelled([1000] * 4)
    even, uneven = (table_of(data.y, make_split(data, f"longtail:1,{a}", 6, 0).train).std() for a in (100, 0.1))
    assert even < 0.3 * uneven


# --- the plain partitions of the field ---


def test_dirichlet_client_gives_equal_sizes_and_shares_of_its_own_to_everyone():
    data = labelled([300] * 4)
    tables = {
        alpha: table_of(data.y, clients(make_split(data, f"dirichlet-client:{alpha}", 10, 1))) for alpha in (0.1, 1e6)
    }
    for table in tables.values():
        assert table.sum(1).tolist() == [120] * 10 and table.sum(0).tolist() == [300] * 4
    assert tables[0.1].max(1).mean() > 85  # of 120
    assert abs(tables[1e6] - 30).max() < 20  # binomial around 30


def test_dirichlet_client_goes_on_when_a_class_is_used_up():
    data = labelled([5, 195])
    split = make_split(data, "dirichlet-client:0.01", 20, 3)
    assert [len(rows) for rows in clients(split)] == [10] * 20 and len(all_rows(split)) == 200


def test_dirichlet_client_and_shards_say_how_many_rows_they_leave_out():
    data = labelled([51, 52])
    assert make_split(data, "dirichlet-client:1", 10, 0).notes == (
        "dirichlet-client:1 with 10 clients leaves out 3 of 103 rows",
    )
    assert make_split(data, "shards:2", 10, 0).notes == ("shards:2 with 10 clients leaves out 3 of 103 rows",)


def test_shards_are_pieces_of_the_rows_sorted_by_class():
    data = labelled([100] * 10)
    split = make_split(data, "shards:2", 50, 0)
    sizes = [len(rows) for rows in clients(split)]
    assert sizes == [20] * 50
    assert max(map(len, classes_of(data.y, clients(split)))) == 2  # a piece of ten rows lies within a class here
    assert len({tuple(found) for found in classes_of(data.y, clients(split))}) > 20


def test_shards_refuses_more_pieces_than_rows():
    with pytest.raises(UsageError, match="cuts 40 pieces, and the data has 30 rows"):
        make_split(labelled([30]), "shards:4", 10, 0)


def test_quantity_gives_like_classes_and_unlike_sizes():
    data = labelled([1000, 1000])
    split = make_split(data, "quantity:0.3", 10, 0)
    sizes = np.array([len(rows) for rows in clients(split)])
    assert sizes.sum() == 2000 and sizes.min() >= 2 and sizes.max() > 5 * np.median(sizes)
    largest = clients(split)[int(sizes.argmax())]
    assert abs((data.y[largest] == 0).mean() - 0.5) < 0.1
    even = make_split(data, "quantity:1e6", 10, 0)
    assert max(abs(len(rows) - 200) for rows in clients(even)) < 10


def test_longtail_takes_the_concentration_of_its_clients():
    data = labelled([400] * 4, [40] * 4)
    plain, tail = make_split(data, "dirichlet-class:0.6", 5, 0), make_split(data, "longtail:1,0.6", 5, 0)
    assert [rows.tolist() for rows in plain.test] == [rows.tolist() for rows in tail.test]


def test_pathological_says_which_classes_it_drops():
    data = labelled([30] * 10)
    [note] = make_split(data, "pathological:2", 12, 0).notes
    assert note == "pathological:2 with 12 clients leaves out 60 of 300 rows, and all rows of classes 8, 9"


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.3", "dirichlet-class:0.3", "quantity:1"])
def test_partitions_that_use_every_row_have_nothing_to_say(text):
    assert make_split(labelled([60] * 3), text, 5, 0).notes == ()


def test_clients_with_too_few_rows_are_left_out_and_counted():
    data = labelled([200] * 3)
    whole = make_split(data, "quantity:0.3", 10, 0)
    large = make_split(data, "quantity:0.3", 10, 0, min_rows=30)
    kept = [rows.tolist() for rows in whole.train if len(rows) >= 30]
    assert [rows.tolist() for rows in large.train] == kept and 0 < len(kept) < 10
    assert large.notes == (
        f"{10 - len(kept)} of 10 clients have fewer than 30 training rows (--min-rows) and are left out",
    )
    with pytest.raises(UsageError, match="min_rows 1000 leaves no client: the largest has"):
        make_split(data, "quantity:0.3", 10, 0, min_rows=1000)


def test_a_run_says_what_its_split_leaves_out(tmp_path):
    plures.run("fedavg", partition="pathological:2", clients=12, rounds=0, out=tmp_path / "run")
    said = []
    from plures.runs.simulation import start

    start(make_scene(make_config({"partition": "pathological:2", "clients": 12, "rounds": 0})), None, said.append)
    assert "leaves out" in said[0] and "classes 8, 9" in said[0]


# --- natural ---


def test_natural_gives_the_datas_own_clients():
    split = make_split(owned([7, 3, 7, 3, 7, 3, 3, 7]), "natural", None, 0)
    assert [sorted(rows) for rows in clients(split)] == [[1, 3, 5, 6], [0, 2, 4, 7]]
    assert [len(rows) for rows in split.test] == [1, 1]


def test_natural_of_a_share_of_the_rows_has_the_clients_that_are_left():
    data = owned([*[0] * 50, *range(1, 30)])
    split = make_split(data, "natural", None, 0, share=0.2)
    assert 1 < len(split.train) < 30
    used = np.concatenate([*split.train, *split.test])
    assert len(used) == len(set(used.tolist())) <= 17


def test_natural_keeps_the_datas_own_test_rows():
    split = make_split(owned([0, 1, 0, 1, 0, 1], n_test=2), "natural", None, 0)
    assert [rows.tolist() for rows in split.train] == [[0, 2], [1, 3]]
    assert [rows.tolist() for rows in split.test] == [[4], [5]]


def test_natural_leaves_out_clients_without_rows_to_train_on():
    split = make_split(owned([0, 2, 1, 2, 3], n_test=3), "natural", None, 0)
    assert [rows.tolist() for rows in split.train] == [[0], [1]]
    assert [rows.tolist() for rows in split.test] == [[], [3]]


@given(
    client=st.lists(st.integers(-5, 5), min_size=1, max_size=40),
    n_clients=st.integers(1, 11),
    seed=seeds,
)
@settings(max_examples=60, deadline=None)
def test_natural_draws_some_clients_in_their_order_or_refuses(client, n_clients, seed):
    data, own = owned(client), sorted(set(client))
    if n_clients > len(own):
        with pytest.raises(UsageError, match=f"make {n_clients} clients: made has {len(own)} .*at most {len(own)}"):
            make_split(data, "natural", n_clients, seed)
    else:
        rows = clients(make_split(data, "natural", n_clients, seed))
        whose = [set(np.array(client)[r].tolist()) for r in rows]
        assert all(len(ids) == 1 for ids in whose)
        drawn = [ids.pop() for ids in whose]
        assert drawn == sorted(set(drawn)) and len(drawn) == n_clients
        assert [len(r) for r in rows] == [client.count(c) for c in drawn]


def test_natural_draws_by_the_seed():
    data = owned(np.repeat(np.arange(10), 2))
    drawn = {tuple(np.concatenate(clients(make_split(data, "natural", 3, seed)))) for seed in range(10)}
    assert len(drawn) > 5


@pytest.mark.parametrize("n_clients", [None, 2])
def test_natural_is_refused_if_the_data_has_no_clients(n_clients):
    with pytest.raises(UsageError, match="natural needs data with clients of its own, and made has none"):
        make_split(labelled([10, 10]), "natural", n_clients, 0)


def test_clients_are_named_like_the_datas_own():
    data = owned([0, 1, 2] * 4, names=("ann", "bob", "cat"))
    assert partition.names_of_clients(data, make_split(data, "natural", None, 0)) == ("ann", "bob", "cat")
    some = make_split(data, "natural", 2, 0)
    expected = tuple(data.client_names[rows[0] % 3] for rows in some.train)
    assert partition.names_of_clients(data, some) == expected


def test_clients_of_data_without_names_are_named_by_their_numbers():
    data = owned([12, 40, 12, 40])
    assert partition.names_of_clients(data, make_split(data, "natural", None, 0)) == ("12", "40")


@pytest.mark.parametrize("data", [owned([0, 1] * 8, names=("a", "b")), labelled([8, 8])], ids=["mixed", "none"])
def test_clients_that_are_not_the_datas_own_have_no_names(data):
    assert partition.names_of_clients(data, make_split(data, "iid", 2, 0)) == ()


def test_two_clients_with_rows_of_one_own_client_have_no_names():
    data = owned([0, 0, 0, 0], names=("a",))
    assert partition.names_of_clients(data, make_split(data, "iid", 2, 0)) == ()


# --- train and test rows of a client ---


def n_test_of_each_class(counts, share=0.25, seed=0) -> list[int]:
    y = labelled(counts).y
    _, test = partition.split_train_test(np.arange(len(y)), y, share, rng(seed))
    return np.bincount(y[test], minlength=len(counts)).tolist()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([8, 4], 0.25, [2, 1]),
        ([7, 5], 0.25, [2, 1]),  # 1.75 and 1.25: the third row goes to the larger remainder
        ([1, 7], 0.25, [0, 2]),  # 0.25 and 1.75
        ([1, 1, 3], 0.4, [0, 0, 2]),  # 0.4, 0.4 and 1.2: two rows, single ones stay in training
        ([2, 20], 0.9, [1, 19]),  # 1.8 and 18 of 20: class 0 keeps a row for training
        ([2], 0.01, [1]),  # at least one
        ([2], 0.99, [1]),  # at most all but one
        ([100], 0.29, [29]),  # although 0.29 * 100 is 28.999...
        ([1], 0.5, [0]),
    ],
)
def test_client_is_tested_on_its_mix_of_labels(counts, share, expected):
    assert n_test_of_each_class(counts, share) == expected


def test_client_of_single_rows_gives_one_of_them_to_testing():
    assert sorted(n_test_of_each_class([1, 1, 1, 1])) == [0, 0, 0, 1]


def test_equal_remainders_are_settled_by_lot():
    assert {tuple(n_test_of_each_class([2, 2], seed=seed)) for seed in range(20)} == {(0, 1), (1, 0)}


def test_remainders_that_differ_by_rounding_errors_are_equal():
    # 0.1 * 3 and 0.1 * 23 both leave 0.3, as floats 0.30000000000000004 and 0.30000000000000027.
    assert {tuple(n_test_of_each_class([3, 23], 0.1, seed)) for seed in range(20)} == {(1, 2), (0, 3)}


def test_test_rows_of_a_client_are_random_ones():
    rows = np.arange(8)
    found = {tuple(partition.split_train_test(rows, rows * 0, 0.25, rng(seed))[1]) for seed in range(200)}
    assert {row for pair in found for row in pair} == set(range(8)) and len(found) > 20  # of 28


@given(counts=st.lists(st.integers(1, 20), min_size=1, max_size=10), share=st.floats(1e-6, 1 - 1e-12), seed=seeds)
@settings(max_examples=150, deadline=None)
def test_client_has_the_rounded_share_of_test_rows_and_at_least_one_of_each_kind(counts, share, seed):
    y = labelled(counts).y
    rows = np.arange(len(y)) * 3  # rows need not be consecutive
    train, test = partition.split_train_test(rows, y, share, rng(seed))
    assert sorted([*train, *test]) == rows.tolist()
    assert len(test) == (0 if len(y) == 1 else min(max(round(share * len(y)), 1), len(y) - 1))


@given(counts=st.lists(st.integers(2, 20), min_size=1, max_size=10), seed=seeds)
@settings(max_examples=50, deadline=None)
def test_every_label_with_two_rows_is_trained_on(counts, seed):
    tested = n_test_of_each_class(counts, 0.25, seed)
    assert all(test < count for test, count in zip(tested, counts, strict=True))


# --- split files ---


def write(tmp_path: Path, content) -> Path:
    path = tmp_path / "split.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_split_file_text_is_one_list_a_client():
    split = Split([np.array([0, 2]), np.array([3])], [np.array([1]), np.array([], np.int64)])
    assert json.loads(split_to_json(split)) == {"train": [[0, 2], [3]], "test": [[1], []]}


def test_split_file_has_names_of_classes_only_if_clients_rename_them():
    split = Split([np.array([0])], [np.array([1])], [np.array([1, 0])])
    assert json.loads(split_to_json(split)) == {"train": [[0]], "test": [[1]], "labels": [[1, 0]]}


@pytest.mark.parametrize("text", EXAMPLES)
def test_split_file_is_read_as_it_was_written(tmp_path, text):
    split = make_split(labelled([40, 40, 40], [4, 4, 4]), text, 5, 0)
    again = read_split(write(tmp_path, split_to_json(split)), 132, 3)
    assert (split.labels is None) == (again.labels is None)
    both = [[*s.train, *s.test, *(s.labels or [])] for s in (split, again)]
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_split_file_rows_are_sorted_when_read(tmp_path):
    split = read_split(write(tmp_path, {"train": [[5, 1]], "test": [[]]}), 6, 2)
    assert split.train[0].tolist() == [1, 5] and split.test[0].dtype == np.int64


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([[1], [2]], "holds a list; it must be"),
        ({"train": [[1]]}, r"holds the keys \['train'\]"),
        ({"train": [[1]], "test": [[2]], "more": []}, r"holds the keys \['more', 'test', 'train'\]"),
        ({"train": [1], "test": [[2]]}, "'train' is not a list of lists"),
        ({"train": [[1]], "test": {"0": [2]}}, "'test' is not a list of lists"),
        ({"train": [[1], [2]], "test": [[3]]}, "2 clients in 'train' and 1 in 'test'"),
        ({"train": [], "test": []}, "0 clients in 'train'.* at least one"),
        ({"train": [[1], [2.0]], "test": [[], []]}, r"'train' of client 1 has row 2\.0; .*from 0 to 9"),
        ({"train": [[1]], "test": [[True]]}, "'test' of client 0 has row True"),
        ({"train": [["1"]], "test": [[]]}, "'train' of client 0 has row 1;"),
        ({"train": [[-1]], "test": [[]]}, "'train' of client 0 has row -1"),
        ({"train": [[1]], "test": [[10]]}, "'test' of client 0 has row 10; the data set has 10 rows"),
        ({"train": [[1], [1]], "test": [[], []]}, "row 1 is in 'train' of client 0 and in 'train' of client 1"),
        ({"train": [[1]], "test": [[1]]}, "row 1 is in 'train' of client 0 and in 'test' of client 0"),
        ({"train": [[1], []], "test": [[], [1]]}, "row 1 is in 'train' of client 0 and in 'test' of client 1"),
        ({"train": [[1, 1]], "test": [[]]}, "row 1 is in 'train' of client 0 and in 'train' of client 0"),
        ({"train": [[], []], "test": [[4], [4]]}, "row 4 is in 'test' of client 0 and in 'test' of client 1"),
        ({"train": [[1]], "test": [[]], "labels": 3}, "'labels' is not a list of lists"),
        ({"train": [[1]], "test": [[]], "labels": []}, "1 clients in 'train' and 0 in 'labels'"),
        ({"train": [[1]], "test": [[]], "labels": [[0, 1]]}, r"'labels' of client 0 is \[0, 1\]; .*from 0 to 2 once"),
        ({"train": [[1]], "test": [[]], "labels": [[0, 1, 1]]}, "'labels' of client 0 is"),
        ({"train": [[1]], "test": [[]], "labels": [[0, 2, True]]}, "'labels' of client 0 is"),
        ({"train": [[1]], "test": [[]], "labels": [[0, 2, "1"]]}, "'labels' of client 0 is"),
        ({"train": [[1]], "labels": [[0, 1, 2]]}, r"holds the keys \['labels', 'train'\]"),
    ],
)
def test_split_file_error_names_the_file_and_the_fault(tmp_path, content, words):
    with pytest.raises(DataError, match=rf"split\.json.*{words}"):
        read_split(write(tmp_path, content), 10, 3)


def test_split_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "split.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"split\.json is not JSON"):
        read_split(tmp_path / "split.json", 10, 3)


def test_split_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match=r"split\.json cannot be read: No such file"):
        read_split(tmp_path / "split.json", 10, 3)


# --- in a run ---


def test_scene_without_a_number_of_clients_has_20_or_all_natural_ones(tmp_path):
    for name in ("ann", "bob", "cat"):
        (tmp_path / f"{name}.csv").write_text("1,2,0\n3,4,1\n5,6,1\n")
    scene = make_scene(make_config({"data": str(tmp_path), "partition": "natural"}))
    assert scene.config.clients == 3 and scene.names == ("ann", "bob", "cat")
    assert make_scene(make_config({"data": str(tmp_path), "partition": "iid", "clients": 2})).names == ()
    assert make_scene(make_config({})).config.clients == 20


def test_run_folder_is_opened_with_the_clients_names_for_classes_and_for_themselves(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(60, 3)), "y": rng.integers(0, 4, 60), "client": np.repeat([5, 7, 9], 20)}
    np.savez(tmp_path / "d.npz", **arrays)
    split = {"train": [[*range(10)], [*range(20, 30)]], "test": [[11], [31]], "labels": [[1, 2, 3, 0], [0, 1, 2, 3]]}
    (tmp_path / "given.json").write_text(json.dumps(split))
    options = {"data": str(tmp_path / "d.npz"), "split": str(tmp_path / "given.json"), "rounds": 1}
    result = plures.run("fedavg", out=tmp_path / "run", **options)
    assert [row["name"] for row in result.clients] == ["5", "7"]
    assert json.loads((tmp_path / "run" / "split.json").read_text()) == split
    scene = open_scene(tmp_path / "run")
    assert scene.population.y[:10].tolist() == [(label + 1) % 4 for label in arrays["y"][:10]]
    assert scene.population.y[20:30].tolist() == arrays["y"][20:30].tolist() and scene.names == ("5", "7")


def test_rows_of_clients_count_the_classes_of_all_positions():
    labels = np.array([[0, 1], [1, 1], [2, 0]])
    none = tables.Evaluation([], {}, None, 0.0)
    found = tables.clients([np.array([0, 1]), np.array([2])], [np.array([], np.int64)] * 2, labels, none, ("a", "b"))
    assert [(row["name"], row["n_classes"]) for row in found] == [("a", 2), ("b", 2)]
