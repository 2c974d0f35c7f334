"""Rotary positions: the formula, what it keeps, and that scores depend on distances alone."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import AttentionFactory, asymmetry, symmetric_share
from kvt.attention.rotary import Rotary
from kvt.models.embedding import attention_settings
from tests.helpers.layers import POSITIONED, SMALL, VARIANTS, WITH_LOGITS, cases, kinds_of_mask

RELATIVE = [name for name, pos in WITH_LOGITS if name not in POSITIONED]
starts, bases = st.integers(0, 5000), st.sampled_from([10.0, 10_000.0, 1e6])
rotated = partial(cases, head_dims=st.sampled_from([4, 8]))


def complex_rotation(x, start, channels, base):
    """The oracle: pair i of token n is a complex number, multiplied by exp(i (start + n) base^(−2i / channels))."""
    z = torch.view_as_complex(x[..., :channels].unflatten(-1, (-1, 2)).contiguous())
    frequency = torch.tensor([base ** (-2 * i / channels) for i in range(channels // 2)], dtype=torch.float64)
    position = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    turned = z * torch.exp(1j * position[:, None] * frequency)
    return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., channels:]], dim=-1)


@given(case=rotated(), share=st.sampled_from([0.5, 1.0]), start=starts, base=bases)
def test_a_rotation_is_a_product_of_complex_numbers_and_keeps_norms_and_other_channels(case, share, start, base):
    x, rotary = case.input().unflatten(-1, (4, -1)).transpose(1, 2), Rotary(share, case.head_dim, base)
    channels, turned = int(share * case.head_dim), rotary(x, start)
    assert_close(turned, complex_rotation(x, start, channels, base))
    assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., channels:], x[..., channels:])
    assert_close(rotary.back(turned, start), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_result_and_not_the_angles(dtype):
    x, rotary = torch.randn(1, 1, 3, 8).to(dtype), Rotary(1.0, 8, 10_000)
    assert torch.equal(rotary(x, 12_345), rotary(x.float(), 12_345).to(dtype))


@pytest.mark.parametrize("name", ["qkv", "kv", "x-kv", "q-kv", "k"])
@settings(max_examples=8)
@given(case=rotated(), share=st.sampled_from([0.5, 1.0]), causal=st.booleans())
def test_queries_and_keys_are_rotated_and_values_are_not(name, case, share, causal):
    layer, x = case.layer(name, rope=share, rope_base=100.0), case.input()
    q, k, v = map(layer._repeat_groups, layer.project(x))
    q, k = (complex_rotation(t, 0, int(share * case.head_dim), 100.0) for t in (q, k))
    weights = layer.attention_weights(q, k, None, causal)
    assert_close(layer(x, causal=causal), layer.output((weights @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("name", RELATIVE)
@settings(max_examples=8)
@given(case=cases(), start=starts)
def test_only_the_distance_of_two_tokens_counts(name, case, start):
    layer, x = case.layer(name, rope=1.0), case.input()
    roles, outputs = layer.project(x), []
    for first in (0, start):
        q, k, v = map(layer._repeat_groups, layer.rotate(*roles, first))
        outputs.append((layer.logits(q, k), layer.merge(layer.attend(q, k, v, None, True), first, x)))
    assert_close(*outputs)


@pytest.mark.parametrize("name", ["kv", "k"])
@given(case=cases(), base=bases)
def test_keys_that_are_queries_keep_symmetric_scores(name, case, base):
    scores = case.layer(name, rope=1.0, rope_base=base).scores(case.input())
    assert asymmetry(scores).max() < 1e-12


@pytest.mark.parametrize("name", ["kv+phase", "k+phase"])
@pytest.mark.parametrize("phase", [0.7, "learned"])
def test_a_phase_is_added_to_the_angles(name, phase):
    case, angle = SMALL, 0.7
    layer, x = case.layer(name, rope=1.0, phase=phase), case.input()
    torch.nn.init.constant_(layer.angles, angle)
    k = layer._repeat_groups(layer.project(x)[1])
    z = torch.view_as_complex(complex_rotation(k, 0, 4, 10_000).unflatten(-1, (-1, 2)))
    expected = torch.einsum("bhnd,bhmd->bhnm", z.conj() * torch.exp(torch.tensor(1j * angle)), z).real / 2
    assert_close(layer.scores(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@given(kind=kinds_of_mask)
@settings(max_examples=5)
def test_off_is_the_attention_as_it_was(name, pos, kind):
    """No parameter more, no state, and the same numbers to the last bit; nor does attention without self change any."""
    ways = ({"rope": 0.0, "attend_self": True}, {}, {"rope": 1.0, "attend_self": False})
    off, usual, on = (SMALL.layer(name, pos=pos, **setting) for setting in ways)
    assert off.state_dict().keys() == usual.state_dict().keys() == on.state_dict().keys()
    if "-kv-" not in name:  # which rotate by default
        assert torch.equal(off(SMALL.input(), **SMALL.mask(kind)), usual(SMALL.input(), **SMALL.mask(kind)))


@pytest.mark.parametrize("name", ["qkv", "q-kv"])
def test_a_context_has_no_positions(name):
    case = SMALL
    plain, rotating = case.layer(name), case.layer(name, rope=1.0)
    x, context = case.input(), case.input(7).flip(-1)
    assert torch.equal(rotating(x, context), plain(x, context))
    assert torch.equal(rotating.weights(x, context), plain.weights(x, context))


def test_the_symmetric_share_leaves_positions_out():
    assert torch.equal(symmetric_share(SMALL.layer("qkv", rope=1.0)), symmetric_share(SMALL.layer("qkv")))


@pytest.mark.parametrize("attn", ["q-kv-gemma", "q-kv-deepseek"])
def test_rotary_positions_keep_the_share_of_channels_that_a_published_model_rotates(attn):
    own = AttentionFactory(attn, heads=2)(64)
    assert attention_settings(attn, "rotary", None) == {}
    assert attention_settings(attn, "rotary", {"rope": 0.5}) == {"rope": 0.5}
    assert 0 < own.rotary.channels < own.head_dim
