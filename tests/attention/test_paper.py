"""The paper's claims about its attentions (Borji 2023, §2 and Table 1).

tests/attention/test_map_position.py compares KV+Pos with the paper's formula.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory
from tests.helpers.layers import MAX_LEN, cases

several, alone = st.integers(2, 8), st.just(1)
full = cases(groups=alone)  # kv_heads = heads


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


@pytest.mark.parametrize("name", ["qkv", "kv+pos", "k+pos"])
@settings(max_examples=10)
@given(case=cases(several, alone))
def test_a_query_or_a_position_makes_them_asymmetric(name, case):
    scores = logits(case, name)
    assert (scores - scores.mT).abs().max() > 1e-9


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


@pytest.mark.parametrize(
    ("name", "computed"),
    [("qkv", "qkv"), ("kv", "kv"), ("kv+pos", "kv"), ("q-kv", "qk"), ("k", "k"), ("k+pos", "k")],
)
def test_each_projection_is_computed_once_and_no_other(name, computed):
    layer, calls = AttentionFactory(name, heads=2, max_len=MAX_LEN)(8), []
    names = {linear: path for path, linear in layer.named_modules() if isinstance(linear, nn.Linear)}
    for linear in names:
        linear.register_forward_hook(lambda called, *_: calls.append(names[called]))
    layer(torch.zeros(1, 3, 8))
    assert sorted(calls) == ["output", *(f"projection.{role}" for role in sorted(computed))]


@settings(max_examples=20)
@given(case=cases(several), data=st.data())
def test_the_rows_of_the_map_cancel_in_the_softmax(case, data):
    """Of the row weights of Linear(m, 1) only the sum matters, and its bias does not matter."""
    m = data.draw(st.sampled_from([10, 20, 50]))
    layer, x = case.layer("kv+pos", pos_dim=m), case.input()
    before, rows = layer(x), layer.positions.row_channels
    with torch.no_grad():
        layer.to_logit.weight[0, :rows] = layer.to_logit.weight[0, :rows].flip(0)
        layer.to_logit.bias += 3
    assert_close(layer(x), before)


@settings(max_examples=20)
@given(case=full, source=st.integers(1, 8), name=st.sampled_from(list(ATTENTION)))
def test_cross_attention_keeps_its_query_in_every_variant(case, source, name):
    torch.manual_seed(case.seed)
    cross = AttentionFactory(name, heads=case.heads, max_len=MAX_LEN).cross(case.dim).double()
    for length in (source, case.length):
        x, context = case.input(), case.input(length).flip(-1)
        q, k, v = (
            linear(t).unflatten(-1, (case.heads, -1)).transpose(1, 2)
            for linear, t in zip((cross.projection[r] for r in "qkv"), (x, context, context), strict=True)
        )
        weighted = F.softmax(q @ k.mT / case.head_dim**0.5, dim=-1) @ v
        assert_close(cross(x, context), cross.output(weighted.transpose(1, 2).flatten(2)))
