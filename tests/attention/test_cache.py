"""Attention with a cache equals attention without one."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import AttentionFactory, KVCache
from kvt.attention.kernels import dot_product_attention, explicit_maps
from kvt.system import UserError
from tests.helpers.layers import MAX_LEN, SMALL, VARIANTS, cases

pytestmark = pytest.mark.usefixtures("kernel")


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=5)
@given(
    case=cases(),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    rope=st.sampled_from([0.0, 1.0]),
    score=st.sampled_from(["scaled_dot", "additive"]),
    attend_self=st.booleans(),
)
@example(case=SMALL, chunks=[1, 1, 1, 1, 1], rope=1.0, score="scaled_dot", attend_self=False)
@example(case=SMALL, chunks=[5, 1, 1], rope=0.5, score="scaled_dot", attend_self=True)
@example(case=SMALL, chunks=[2, 3, 4], rope=0.0, score="scaled_dot", attend_self=False)
def test_a_sequence_in_chunks_equals_the_whole(name, pos, case, chunks, **setting):
    layer, x, cache = case.layer(name, pos=pos, **setting), case.input(sum(chunks)), KVCache(MAX_LEN)
    pieces = [layer(chunk, causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert_close(torch.cat(pieces, dim=1), layer(x, causal=True))


def test_a_full_cache_is_an_error_and_keeps_its_tokens():
    layer, cache = SMALL.layer("kv"), KVCache(4)
    layer(SMALL.input(3), causal=True, cache=cache)
    with pytest.raises(UserError, match="max_len=4"):
        layer(SMALL.input(2), causal=True, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize(
    ("name", "tensors"), [("qkv", 2), ("kv", 2), ("q-kv", 1), ("k", 1), ("k+pos", 1), ("k+phase", 1)]
)
@settings(max_examples=5)
@given(case=cases())
def test_a_key_that_is_the_value_is_stored_once_in_whatever_rows_are_kept(name, tensors, case):
    layer, x, cache = case.layer(name), case.input(3), KVCache(MAX_LEN)
    rows = torch.arange(case.batch).flip(0).repeat(2)
    whole = layer(x[rows], causal=True)[:, 2:]
    layer(x[:, :2], causal=True, cache=cache)
    cache.select(rows)
    assert_close(layer(x[rows, 2:], causal=True, cache=cache), whole)
    of_a_token = layer.kv_heads * layer.head_dim * x.element_size()
    assert cache.nbytes == tensors * len(rows) * MAX_LEN * of_a_token


@pytest.mark.parametrize("name", ["kv", "kv+phase", "q-kv", "q-kv-gemma", "q-kv-deepseek", "mla"])
@pytest.mark.parametrize("rope", [0.0, 0.5])
@pytest.mark.parametrize(("attend_self", "size"), [(True, 4), (False, 4), (False, 1)])
def test_a_sliding_cache_is_a_band_mask(name, rope, attend_self, size):
    """With a window of one token, this token sees itself."""
    layer, x = SMALL.layer(name, rope=rope, attend_self=attend_self), SMALL.input(MAX_LEN)
    band, cache = ~torch.ones(MAX_LEN, MAX_LEN).bool().tril(-size)[None, None], KVCache(size, slides=True)
    whole, maps = layer(x, causal=True, mask=band), layer.weights(x, causal=True, mask=band)
    first = min(3, size)
    for place, token in enumerate(x.split([first, *[1] * (MAX_LEN - first)], dim=1), start=first - 1):
        rows = layer.weights(token, causal=True, cache=cache)  # changes nothing
        assert_close(rows[:, :, -1], maps[:, :, place, max(0, place - size + 1) : place + 1])
        assert_close(layer(token, causal=True, cache=cache)[:, -1], whole[:, place])
    assert (cache.length, cache.read()[0].shape[2]) == (MAX_LEN, size)
    with pytest.raises(UserError, match="do not fit"):  # the first of two would miss a token
        layer(x[:, :2], causal=True, cache=cache)


@pytest.mark.parametrize("name", ["qkv", "kv+pos"])
@settings(max_examples=10)
@given(case=cases(), source=st.integers(1, 8))
def test_a_cached_context_is_projected_once(name, case, source):
    torch.manual_seed(case.seed)
    cross = AttentionFactory(name, heads=4, max_len=MAX_LEN).cross(case.dim).double()
    x, context, cache = case.input(), case.input(source).flip(-1), KVCache(source)
    mask = torch.arange(source) <= torch.arange(case.batch)[:, None, None, None]
    whole, whole_maps = cross(x, context, mask=mask), cross.weights(x, context, mask=mask)
    maps, pieces = [], []
    for token in x.split(1, dim=1):
        maps.append(cross.weights(token, context, mask=mask, cache=cache))
        assert cache.length == (source if pieces else 0)
        pieces.append(cross(token, context, mask=mask, cache=cache))
        context = torch.full_like(context, float("nan"))  # is not read again
    assert_close(torch.cat(pieces, dim=1), whole)
    assert_close(torch.cat(maps, dim=2), whole_maps)
    assert cache.length == source


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [None, (1, 1, 7), (4, 1, 7), (2, 1, 1, 7)])
@torch.no_grad()
def test_one_query_is_the_same_by_the_fused_kernel_and_by_its_map(kv_heads, masked, shape):
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, kv_heads, 7, 8), torch.randn(2, kv_heads, 7, 8)
    mask = torch.arange(7).expand(2, 1, 1, 7) < torch.tensor([3, 0]).view(2, 1, 1, 1) if masked else None
    bias = None if shape is None else torch.randn(shape)
    settings = {"scale": 0.3, "gain": torch.full((1, 1, 1), 1.5), "bias": bias, "p": 0.0}
    fused = dot_product_attention(q, k, v, mask, True, True, **settings)
    with explicit_maps():
        assert_close(fused, dot_product_attention(q, k, v, mask, True, True, **settings))
