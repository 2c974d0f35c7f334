"""Decoding with a memory is decoding without one."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import ATTENTION, KVCache
from kvt.system.errors import UserError
from tests.helpers.layers import MAX_LEN, VARIANTS, Case, cases

COPIES = {"qkv": 2, "qkv+pos": 2, "kv": 2, "kv+pos": 2, "q-kv": 1, "k": 1, "k+pos": 1, "identity": 1}
small = Case(heads=4, group=2, head_dim=3, batch=2, length=1, seed=0)


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=10, deadline=None)
@given(case=cases(), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4))
@example(case=small, chunks=[1, 1, 1, 1, 1])
@example(case=small, chunks=[5, 1, 1])
@example(case=small, chunks=[2, 3, 4])
def test_any_chunks_give_what_the_whole_gives(name, pos, case, chunks):
    layer, x, cache = case.layer(name, pos=pos), case.input(sum(chunks)), KVCache(MAX_LEN)
    pieces = [layer(chunk, causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert_close(torch.cat(pieces, dim=1), layer(x, causal=True))


@pytest.mark.parametrize("name", ATTENTION)
@settings(max_examples=5, deadline=None)
@given(case=cases())
def test_it_holds_each_shared_tensor_once(name, case):
    cache = KVCache(MAX_LEN)
    case.layer(name)(case.input(), causal=True, cache=cache)
    assert [b.shape for b in cache.buffers] == COPIES[name] * [(case.batch, case.kv_heads, MAX_LEN, case.head_dim)]


def test_a_full_cache_is_an_error_that_leaves_it_as_it_was():
    layer, cache = small.layer("kv"), KVCache(4)
    layer(small.input(3), causal=True, cache=cache)
    with pytest.raises(UserError, match="5 tokens do not fit a cache of max_len=4"):
        layer(small.input(2), causal=True, cache=cache)
    assert cache.length == 3
