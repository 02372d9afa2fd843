"""Trees: how they are taken apart and put together, what is finite, and what shares memory."""

from typing import NamedTuple

import pytest
import torch

from plures import tree


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)


def test_a_tree_is_taken_apart_and_put_together_again():
    given = {"p": Pair(A, {"x": B}), "t": (C, ()), "l": [A]}
    leaves, spec = tree.flatten(given)
    assert [id(x) for x in leaves] == [id(x) for x in (A, B, C, A)] == [id(x) for x in tree.leaves(given)]
    assert tree.names(given) == ["p/left", "p/right/x", "t/0", "l/0"]
    again = tree.unflatten(iter(leaves), spec)
    assert type(again["p"]) is Pair and again["p"].right["x"] is B and again["t"] == (C, ()) and again["l"] == [A]
    assert tree.flatten(again)[1] == spec != tree.flatten({"p": A})[1]
    for wrong in (leaves[:-1], [*leaves, A]):
        with pytest.raises(ValueError, match="tensors than the tree has places"):
            tree.unflatten(wrong, spec)


def test_trees_meet_by_name_and_not_by_order():
    made = tree.map(lambda x, y: x + y, Pair(A, {"x": B, "y": C}), Pair(A, {"y": C, "x": B}))
    assert made.right["x"].tolist() == [2, 2] and list(made.right) == ["x", "y"]
    assert [x.tolist() for x in tree.leaves_like({"x": 0, "y": 0}, {"y": C, "x": B})] == [[1, 1], [2, 2, 2]]
    assert tree.map(lambda _, y: y, {"x": A}, {"x": (B, C)})["x"] == (B, C)  # a whole tree where the first has a tensor


@pytest.mark.parametrize("other", [{"x": A}, {"x": A, "z": A}, (A, A), A])
def test_trees_that_differ_are_told_apart(other):
    with pytest.raises(ValueError, match=r"trees differ: \['x', 'y'\] here"):
        tree.map(lambda x, y: x, {"x": A, "y": A}, other)
    with pytest.raises(ValueError, match="trees differ"):
        tree.map(lambda x, y: x, (A, A, A), other)


def test_rows_are_finite_if_every_number_is_and_sums_that_overflow_do_not_matter():
    rows = torch.zeros(4, 3)
    rows[1, 2] = torch.nan
    rows[2, 0], rows[2, 1] = torch.inf, -torch.inf
    rows[3] = 3e38
    other = {"n": torch.arange(4), "x": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    assert tree.all_finite((rows, other), 4).tolist() == [True, False, False, True]


def test_apart_copies_what_shares_memory_and_nothing_else():
    table = torch.arange(6.0).reshape(3, 2)
    mine = torch.ones(2)
    new = tree.apart({"view": table[1], "mine": mine, "made": table.mean(0)}, {"up": table})
    table.fill_(-1)
    assert new["view"].tolist() == [2.0, 3.0] and new["made"].tolist() == [2.0, 3.0]
    assert new["mine"] is mine
