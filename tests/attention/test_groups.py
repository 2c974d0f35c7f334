"""Grouped heads: the same numbers as if keys and values were repeated for every head, without repeating them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import ATTENTION, QKV, SCORES, AttentionFactory, KVCache
from kvt.bench import allocations
from tests.helpers.layers import MAX_LEN, VARIANTS, cases, gradients, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")
grouped = cases(groups=st.sampled_from([2, 4]))


def pair(case, name, **setting):
    """A layer with grouped heads, and one whose heads have keys and values of their own, with equal weights."""
    layer, full = case.layer(name, **setting), replace(case, group=1).layer(name, **setting)
    shared = {
        key: weight.unflatten(0, (case.kv_heads, -1)).repeat_interleave(case.group, 0).flatten(0, 1)
        for key, weight in layer.state_dict().items()
        if key.startswith(("projection.k.", "projection.v."))
    }
    full.load_state_dict(layer.state_dict() | shared)
    return layer, full


class HalvedKeys(QKV):
    """A user's logits, which need a key for each head."""

    def logits(self, q, k):
        return torch.einsum("bhnd,bhmd->bhnm", q, k / 2)


@pytest.mark.parametrize(("name", "pos"), [*VARIANTS, (f"{__name__}.HalvedKeys", "sinusoid")])
@settings(max_examples=20)
@given(
    case=grouped,
    score=st.sampled_from([*SCORES]),
    kind=kinds_of_mask,
    rope=st.sampled_from([0.0, 1.0]),
    per_head=st.booleans(),
)
def test_a_group_is_heads_with_equal_keys_and_values(name, pos, case, score, kind, rope, per_head):
    layer, full = pair(case, name, score=score, pos=pos, rope=rope, per_head=per_head)
    x, masks = case.input().requires_grad_(), case.mask(kind)
    ours, theirs = layer(x, **masks), full(x, **masks)
    assert_close(ours, theirs)
    assert_close(gradients(ours, x), gradients(theirs, x))
    assert_close(layer.weights(x, **masks), full.weights(x, **masks))
    if layer.has_logits:
        assert_close(layer.scores(x), full.scores(x))


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=8)
@given(case=grouped, score=st.sampled_from([*SCORES]), per_head=st.booleans(), data=st.data())
def test_a_group_reads_a_cache_as_its_heads_would(name, pos, case, score, per_head, data):
    layers = pair(case, name, score=score, pos=pos, per_head=per_head)
    x, caches = case.input(MAX_LEN), (KVCache(MAX_LEN), KVCache(MAX_LEN))
    for chunk in x.split([MAX_LEN - 4, 3, 1], dim=1):
        m = caches[0].length + chunk.shape[1]
        mask = torch.rand(case.batch, case.heads, 1, m, generator=torch.Generator().manual_seed(case.seed)) < 0.8
        ours, theirs = (
            layer(chunk, causal=True, mask=mask, cache=cache) for layer, cache in zip(layers, caches, strict=True)
        )
        assert_close(ours, theirs)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("score", ["scaled_dot", "bilinear"])
@pytest.mark.parametrize("name", ATTENTION)
def test_a_decoded_token_copies_no_cache(name, score, kv_heads):
    n, d = 1024, 512
    asked = {"kv_heads": kv_heads} | ({} if name == "mla" else {"score": score})
    layer = AttentionFactory(name, asked, heads=8, per_head=True, max_len=n)(d)
    x, cache = torch.randn(2, n, d), KVCache(max_len=n)
    with torch.no_grad():
        layer(x[:, :-1], causal=True, cache=cache)
        token = x[:, -1:].clone()
        assert max(allocations(lambda: layer(token, causal=True, cache=cache))) < cache.buffers[0].nbytes
