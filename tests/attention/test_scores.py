"""Every score against its formula, for one query and one key at a time."""

from itertools import product
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import SCORES

HEADS = 3
FORMULAS = {  # of the score's module, the head, its query q and its key k, both (D)
    "scaled_dot": lambda s, h, q, k: (q * k).sum() / sqrt(len(q)),
    "model_scaled_dot": lambda s, h, q, k: (q * k).sum() / sqrt(HEADS * len(q)),
    "dot": lambda s, h, q, k: (q * k).sum(),
    "cosine": lambda s, h, q, k: (q * k).sum() / sqrt((q * q).sum() * (k * k).sum()),
    "bilinear": lambda s, h, q, k: (q * torch.mv(s.weight[h], k)).sum(),
    "additive": lambda s, h, q, k: (
        s.weight[h, :, 0] * torch.tanh(torch.mv(s.query[h], q) + torch.mv(s.key[h], k))
    ).sum(),
}


@st.composite
def sides(draw):
    """q (B, HEADS, N, D) and k (B, HEADS, M, D)."""
    b, n, m, d = (draw(st.integers(1, most)) for most in (2, 4, 4, 6))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return torch.randn(b, HEADS, n, d).double(), torch.randn(b, HEADS, m, d).double()


@pytest.mark.parametrize("name", SCORES)
@settings(max_examples=15)
@given(qk=sides())
def test_a_score_is_its_formula(name, qk):
    q, k = qk
    score = SCORES[name](HEADS, q.shape[-1]).double()
    expected = torch.empty(*q.shape[:-1], k.shape[-2]).double()
    for b, h, i, j in product(*map(range, expected.shape)):
        expected[b, h, i, j] = FORMULAS[name](score, h, q[b, h, i], k[b, h, j])
    assert_close(score(q, k), expected)
