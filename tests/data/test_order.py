"""An order that is too long for memory is a permutation, too, as random as one may expect, and read in any slices."""

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.data.order import LARGE, FeistelOrder, random_order

SEEDS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 1000), SEEDS, st.integers(1, 500))
def test_every_row_comes_once_however_the_order_is_sliced(rows, seed, size):
    order = FeistelOrder(rows, seed)
    parts = torch.cat([order[start : start + size] for start in range(0, rows, size)])
    assert parts.sort().values.tolist() == list(range(rows))
    assert torch.equal(parts, order[0:rows])


@pytest.mark.parametrize("seed", range(5))
def test_neither_places_nor_neighbours_are_correlated(seed):
    rows = 10**5
    order = FeistelOrder(rows, seed)[0:rows].double()
    for one, other in ((torch.arange(rows).double(), order), (order[:-1], order[1:])):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / sqrt(rows)


def test_above_ten_million_rows_no_order_is_held():
    assert len(random_order(LARGE, 0)) == LARGE
    batch = random_order(10**12, 0)[5 * 10**11 : 5 * 10**11 + 8]
    assert len(set(batch.tolist())) == 8
    assert 0 <= batch.min() <= batch.max() < 10**12
