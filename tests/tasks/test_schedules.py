"""Learning-rate schedules against their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.tasks.schedules import cosine_warmup, inverse_square_root


@given(dim=st.integers(1, 1024), warmup=st.integers(1, 5000), step=st.integers(0, 20_000))
def test_inverse_square_root_is_its_formula_and_peaks_after_the_warmup(dim, warmup, step):
    factor, t = inverse_square_root(dim, warmup), step + 1  # the first step is step 1 of the paper
    assert factor(step) == pytest.approx(min(1 / t**0.5, t / warmup**1.5) / dim**0.5)
    assert factor(warmup - 1) == pytest.approx((dim * warmup) ** -0.5)
    assert factor(step) <= factor(warmup - 1) * (1 + 1e-12)


def test_cosine_warmup_is_the_papers_factor():
    factor = cosine_warmup(5, 780)
    assert factor(0) == 0
    for t in (1, 3, 5, 6, 400, 779):
        cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * t / 780, dtype=torch.float64))).item()
        assert factor(t) == pytest.approx(cosine * min(1, t / 5))
    assert factor(780) == pytest.approx(0)
