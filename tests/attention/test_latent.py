"""Multi-head latent attention is its formula, with keys and values made from the latent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import AttentionFactory, KVCache
from kvt.attention.kernels import masked_softmax
from kvt.bench import cache_bytes_per_token
from tests.attention.test_rotary import complex_rotation
from tests.helpers.layers import SMALL, cases, gradients, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")


def literal(layer, x, mask=None, causal=False):
    """Eq. 9 to 19 of DeepSeek-V2: keys [U c; R k'] and values W c of every head and token."""
    rotated, head_dim, group = layer.rotated, layer.head_dim, layer.heads // layer.kv_heads

    def heads(t, number):  # (B, number, N, channels)
        return t.unflatten(-1, (number, -1)).transpose(1, 2)

    def turned(t):
        return complex_rotation(t, 0, rotated, 100.0) if rotated else t

    projection = layer.projection
    q = heads(projection["q"](x), layer.heads)
    latent = heads(projection["k"](x), layer.kv_heads).repeat_interleave(group, 1)
    c = latent[..., rotated:]
    keys, values = (
        torch.stack([c[:, head] @ rows.mT for head, rows in enumerate(projection[name].weight.split(head_dim))], 1)
        for name in ("up_k", "up_v")
    )
    keys = torch.cat([turned(latent[..., :rotated]), keys], -1)
    queries = torch.cat([turned(q[..., :rotated]), q[..., rotated:]], -1)
    logits = queries @ keys.mT / (head_dim + rotated) ** 0.5
    return layer.output((masked_softmax(logits, mask, causal) @ values).transpose(1, 2).flatten(2))


@settings(max_examples=20)
@given(case=cases(), rank=st.integers(1, 9), rope=st.sampled_from([0.0, 1.0]), kind=kinds_of_mask)
def test_it_is_attention_to_keys_and_values_read_from_the_latent(case, rank, rope, kind):
    layer = case.layer("mla", rank=rank, rope=rope, rope_base=100.0)
    x, masks = case.input().requires_grad_(), case.mask(kind)
    ours, theirs = layer(x, **masks), literal(layer, x, **masks)
    assert_close(ours, theirs)
    of = (x, *layer.parameters())
    assert_close(gradients(ours, *of), gradients(theirs, *of))


@pytest.mark.parametrize(("kv_heads", "rope"), [(1, 0.0), (1, 1.0), (2, 0.5)])
def test_its_cache_is_the_latent_alone_and_decodes_as_the_whole(kv_heads, rope):
    layer, x, cache = (
        SMALL.layer("mla", kv_heads=kv_heads, rank=6, rope=rope, rope_base=100.0),
        SMALL.input(),
        KVCache(5),
    )
    pieces = [layer(token, causal=True, cache=cache) for token in x.split(1, dim=1)]
    assert_close(torch.cat(pieces, 1), literal(layer, x, causal=True))
    assert cache_bytes_per_token(layer, x[:1]) == 8 * kv_heads * (6 + rope * SMALL.head_dim)
    assert [buffer.shape[1:] for buffer in cache.buffers] == [(kv_heads, 5, 6 + rope * SMALL.head_dim)]


def test_by_default_it_caches_as_much_as_multi_query_attention():
    x = torch.randn(1, 3, 64)
    bytes_of = {
        name: cache_bytes_per_token(AttentionFactory(name, {"kv_heads": 1}, heads=4)(64), x) for name in ("qkv", "mla")
    }
    assert bytes_of["qkv"] == bytes_of["mla"]
    assert AttentionFactory("mla", heads=4)(64).rank == 32
