"""Positional encodings against their formula, and against the package positional-encodings."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from positional_encodings.torch_encodings import PositionalEncoding2D
from torch.testing import assert_close

from kvt.attention.literal import map_sinusoid
from kvt.attention.positions import map_sinusoids, sinusoid
from kvt.system import UserError

channels = st.one_of(st.sampled_from([10, 20, 50]), st.integers(3, 70))


@settings(max_examples=20)
@given(length=st.integers(1, 100), half=st.integers(1, 20))
def test_the_sinusoid_is_its_formula(length, half):
    expected = [
        [f(p / 10_000 ** (2 * i / (2 * half))) for i in range(half) for f in (math.sin, math.cos)]
        for p in range(length)
    ]
    assert_close(sinusoid(length, 2 * half), torch.tensor(expected))


@settings(max_examples=20)
@given(n=st.integers(1, 12), m=channels)
def test_the_encoding_of_the_map_is_the_published_one_and_splits_into_rows_and_columns(n, m):
    published = PositionalEncoding2D(m)(torch.zeros(1, n, n, m))[0]
    assert_close(map_sinusoid(n, m), published, atol=1e-5, rtol=0)  # the package's angles are in float32
    rows, columns = map_sinusoids(n, m)
    row_part, column_part = published.split([rows.shape[1], columns.shape[1]], dim=-1)
    assert torch.equal(row_part, row_part[:, :1].expand_as(row_part))
    assert torch.equal(column_part, column_part[:1].expand_as(column_part))


def test_an_odd_dimension_is_refused():
    with pytest.raises(UserError, match="dim=7 must be even"):
        sinusoid(4, 7)
