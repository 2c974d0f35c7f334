"""Positions against their formula, one entry at a time, and the 2-D encoding against the published package."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from positional_encodings.torch_encodings import PositionalEncoding2D
from torch.testing import assert_close

from kvt.attention.positions import column_sinusoid, map_channels, sinusoid
from kvt.system.errors import UserError

channels = st.one_of(st.sampled_from([10, 20, 50]), st.integers(3, 70))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 300), half=st.integers(1, 20))
def test_the_sinusoid_is_its_formula(length, half):
    expected = [
        [f(p / 10_000 ** (2 * i / (2 * half))) for i in range(half) for f in (math.sin, math.cos)]
        for p in range(length)
    ]
    assert_close(sinusoid(length, 2 * half), torch.tensor(expected))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 12), m=channels)
def test_every_channel_of_the_map_belongs_to_its_row_or_its_column(n, m):
    rows, columns = map_channels(m)
    encoding = PositionalEncoding2D(m)(torch.zeros(1, n, n, m))[0]
    row_part, column_part = encoding.split([rows, columns], dim=-1)
    assert torch.equal(row_part, row_part[:, :1].expand_as(row_part))
    assert torch.equal(column_part, column_part[:1].expand_as(column_part))
    assert_close(column_sinusoid(n, m), column_part[0], atol=1e-5, rtol=0)  # the package's angles are in float32


@pytest.mark.parametrize("dim", [1, 7, 33])
def test_an_odd_dimension_is_refused(dim):
    with pytest.raises(UserError, match=f"dim={dim} must be even"):
        sinusoid(4, dim)


@pytest.mark.parametrize("m", [-1, 0, 1, 2])
def test_a_map_without_column_channels_is_refused(m):
    with pytest.raises(UserError, match=f"pos_dim={m} must be at least 3"):
        column_sinusoid(4, m)
