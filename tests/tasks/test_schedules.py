"""Learning-rate schedules against their formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvt.tasks.schedules import inverse_square_root


@given(dim=st.integers(1, 1024), warmup=st.integers(1, 5000), step=st.integers(0, 20_000))
def test_inverse_square_root_is_its_formula_and_peaks_after_the_warmup(dim, warmup, step):
    factor, t = inverse_square_root(dim, warmup), step + 1  # the first step is step 1 of the paper
    assert factor(step) == pytest.approx(min(1 / t**0.5, t / warmup**1.5) / dim**0.5)
    assert factor(warmup - 1) == pytest.approx((dim * warmup) ** -0.5)
    assert factor(step) <= factor(warmup - 1) * (1 + 1e-12)
