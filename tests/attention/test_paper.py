"""The paper's claims about its attentions (Borji 2023, §2 and Table 1).

tests/attention/test_map_position.py compares KV+Pos with the paper's formula.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import ATTENTION
from tests.helpers.layers import cases

full = cases(groups=st.just(1))  # kv_heads = heads


def count(module):
    return sum(p.numel() for p in module.parameters())


def logits(case, name, **setting):
    layer, x = case.layer(name, **setting), case.input()
    q, k, _ = layer.project(x)
    return layer.logits(q, k)


@pytest.mark.parametrize("score", ["scaled_dot", "model_scaled_dot", "dot", "cosine"])
@pytest.mark.parametrize("name", ["kv", "k"])
@settings(max_examples=10)
@given(case=full)
def test_without_a_query_the_scores_are_symmetric(name, score, case):
    scores = logits(case, name, score=score)
    assert_close(scores, scores.mT)


@settings(max_examples=20)
@given(case=full, bias=st.booleans(), m=st.integers(3, 50))
def test_a_shared_projection_saves_its_parameters_and_positions_add_m_weights_and_a_bias(case, bias, m):
    d = case.dim
    size = {name: count(case.layer(name, bias=bias, pos_dim=m)) for name in ATTENTION}
    one = d * d + bias * d
    assert size["qkv"] - size["kv"] == size["qkv"] - size["q-kv"] == one
    assert size["qkv"] - size["k"] == 2 * one
    for name in ("qkv", "kv", "k"):
        assert size[f"{name}+pos"] - size[name] == m + 1
        per_head = count(case.layer(f"{name}+pos", bias=bias, pos_dim=m, per_head=True))
        assert per_head - size[name] == case.heads * (m + 1)
