"""A key turned where it asks: the formula, between symmetric and skew scores, at the cost of `kv`."""

from functools import partial
from math import cos, pi, sin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import make_attention
from kvt.bench import cache_bytes_per_token, count_flops
from tests.helpers.layers import SMALL, cases, gradients, kinds_of_mask

BASES = {"kv+phase": "kv", "k+phase": "k"}
phases = st.floats(-10, 10) | st.just(pi / 2)  # then symmetric scores have become skew


@pytest.mark.parametrize("name", BASES)
@settings(max_examples=20)
@given(case=cases(), phase=phases)
def test_scores_are_the_formula(name, case, phase):
    layer, x = case.layer(name, phase=phase), case.input()
    k = layer.projection["k"](x).unflatten(-1, (-1, case.head_dim)).transpose(1, 2).repeat_interleave(case.group, 1)
    quarter = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * (case.head_dim // 2)).double()
    symmetric, skew = k @ k.mT, k @ quarter @ k.mT
    assert_close(layer.scores(x) * case.head_dim**0.5, cos(phase) * symmetric + sin(phase) * skew, atol=1e-5, rtol=1e-5)


@settings(max_examples=20)
@given(case=cases())
def test_learned_angles_turn_each_pair_of_each_head(case):
    layer, x = case.layer("kv+phase", phase="learned"), case.input()
    with torch.no_grad():
        layer.angles.copy_(torch.randn_like(layer.angles))
    k = layer.project(x)[1].repeat_interleave(case.group, 1)
    pairs = k.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(layer.angles), -layer.angles)
    expected = torch.view_as_real(turned).flatten(-2) @ k.mT / case.head_dim**0.5
    assert_close(layer.scores(x), expected)


@pytest.mark.parametrize("name", BASES)
@settings(max_examples=12)
@given(case=cases(), kind=kinds_of_mask)
def test_an_angle_of_zero_is_the_attention_without(name, case, kind):
    turned, plain = case.layer(name, phase=0), case.layer(BASES[name])
    x, masks = case.input().requires_grad_(), case.mask(kind)
    ours, theirs = turned(x, **masks), plain(x, **masks)
    assert_close(ours, theirs)
    assert_close(gradients(ours, x, *turned.parameters()), gradients(theirs, x, *plain.parameters()))


def test_a_fixed_angle_has_all_digits_of_its_type():
    layer = SMALL.layer("kv+phase", phase=[0.1, pi / 3]).float()
    turned = layer.double().angles
    assert turned[:, 0, 0].tolist() == [0.1, pi / 3] * (len(turned) // 2)
    assert layer.bfloat16().double().angles.equal(turned)
    assert layer.float().angles.equal(turned.float())


@pytest.mark.parametrize("name", BASES)
def test_a_fixed_angle_costs_nothing_and_a_learned_one_a_number_for_each_pair(name):
    plain, fixed, learned = SMALL.layer(BASES[name]), SMALL.layer(name), SMALL.layer(name, phase="learned")
    assert_close(fixed(SMALL.input()), learned(SMALL.input()))  # both start at π/4
    weights = [sum(p.numel() for p in layer.parameters()) for layer in (plain, fixed, learned)]
    assert weights == [weights[0], weights[0], weights[0] + SMALL.dim // 2]
    token = SMALL.input()[:1]
    assert cache_bytes_per_token(fixed, token) == cache_bytes_per_token(plain, token)
    assert count_flops(partial(fixed, token)) == count_flops(partial(plain, token))


@pytest.mark.parametrize("name", BASES)
def test_heads_have_the_angles_of_a_list_in_turn(name):
    """The maps of head h are those of a layer whose heads all have its angle."""
    x, angles = torch.randn(2, 5, 16), [0.5, -1.0]
    layer = make_attention(name, dim=16, heads=4, phase=angles)
    for number, angle in enumerate(angles):
        alone = make_attention(name, dim=16, heads=4, phase=angle)
        alone.load_state_dict(layer.state_dict())
        torch.testing.assert_close(alone.weights(x)[:, number::2], layer.weights(x)[:, number::2])
        assert not torch.allclose(alone.weights(x)[:, 1 - number :: 2], layer.weights(x)[:, 1 - number :: 2])
