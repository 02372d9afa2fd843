"""Trees: what is finite, and what shares memory."""

import torch

from plures import tree


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
