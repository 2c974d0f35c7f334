"""Attention without self: a token attends to itself only where it may attend to nothing else."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import KV, QKV, SCORES, KVCache, MultiheadAttention
from kvt.bench import allocations
from kvt.system import UserError
from tests.helpers.layers import MAX_LEN, SMALL, VARIANTS, Case, cases, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")
WITH_LOGITS = [(name, pos) for name, pos in VARIANTS if name != "identity"]


def keys_of(query, keys, allowed):
    """The formula: all allowed keys but oneself; oneself if these are none."""
    others = [key for key in range(keys) if key != query and allowed[key]]
    return others or [key for key in range(keys) if allowed[key]]


def literal(layer, x, mask=None, causal=False):
    """Maps and output, row by row: a softmax over the logits of the keys that the formula leaves."""
    q, k, v = map(layer._repeat_groups, layer.rotate(*layer.project(x), 0))
    logits, n = layer.logits(q, k), x.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril() if causal else torch.ones(n, n, dtype=torch.bool)
    allowed = (allowed & (True if mask is None else mask)).expand(logits.shape)
    maps = torch.zeros_like(logits)
    for place in torch.cartesian_prod(*map(torch.arange, logits.shape[:3])).tolist():
        kept = keys_of(place[2], n, allowed[tuple(place)].tolist())
        row = torch.zeros(n, dtype=x.dtype).index_put(
            (torch.tensor(kept, dtype=torch.long),), logits[tuple(place)][kept].softmax(0)
        )
        maps = maps.index_put(tuple(map(torch.tensor, place)), row)
    return maps, layer.merge(maps @ v, 0)


@pytest.mark.parametrize(("name", "pos"), WITH_LOGITS)
@settings(max_examples=15)
@given(
    case=cases(st.integers(1, 5)),
    score=st.sampled_from([*SCORES]),
    kind=kinds_of_mask,
    rope=st.sampled_from([0.0, 1.0]),
    per_head=st.booleans(),
)
@example(case=SMALL, score="scaled_dot", kind="causal", rope=1.0, per_head=True)
@example(case=SMALL, score="scaled_dot", kind="causal+padded", rope=0.0, per_head=True)
@example(case=SMALL, score="additive", kind="none", rope=0.0, per_head=False)
def test_it_is_the_literal_formula(name, pos, case, score, kind, rope, per_head):
    setting = {"score": score, "pos": pos, "rope": rope, "per_head": per_head, "attend_self": False}
    layer, x, masks = case.layer(name, **setting), case.input().requires_grad_(), case.mask(kind)
    if "pos" in name:  # a bias and a gain that matter
        torch.nn.init.normal_(layer.to_logit.weight)
    ours, (maps, theirs) = layer(x, **masks), literal(layer, x, **masks)
    assert_close(ours, theirs)
    assert_close(layer.weights(x, **masks), maps)
    of = [x, *layer.parameters()]
    used = partial(torch.autograd.grad, inputs=of, allow_unused=True, materialize_grads=True)
    weight = torch.linspace(-1, 2, ours.numel(), dtype=ours.dtype).view_as(ours)
    assert_close(used((ours * weight).sum()), used((theirs * weight).sum()))


def test_the_formula_in_small():
    """Of three tokens, the first attends to itself if causal; with a mask, who sees no other sees itself."""
    layer, x = KV(4, 1, score="dot", bias=False, attend_self=False).double(), torch.randn(1, 3, 4, dtype=torch.float64)
    s = layer.scores(x)[0, 0].exp()
    full = torch.stack([s[0] * torch.tensor([0, 1, 1]), s[1] * torch.tensor([1, 0, 1]), s[2] * torch.tensor([1, 1, 0])])
    assert_close(layer.weights(x)[0, 0], full / full.sum(-1, keepdim=True))
    share = (s[2, 0] / (s[2, 0] + s[2, 1])).item()
    causal = torch.tensor([[1, 0, 0], [1, 0, 0], [share, 1 - share, 0]], dtype=torch.float64)
    assert_close(layer.weights(x, causal=True)[0, 0], causal)
    padded = layer.weights(x, mask=torch.tensor([True, False, False])[None, None, None])[0, 0]
    assert padded.tolist() == [[1, 0, 0]] * 3
    nothing = layer.weights(x, mask=torch.tensor([[False, True, False], [False, True, False], [False] * 3])[None, None])
    assert nothing[0, 0].tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(("name", "pos"), WITH_LOGITS)
@settings(max_examples=5)
@given(
    case=cases(),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    rope=st.sampled_from([0.0, 1.0]),
    score=st.sampled_from(["scaled_dot", "additive"]),
)
@example(case=SMALL, chunks=[1, 1, 1, 1, 1], rope=1.0, score="scaled_dot")
@example(case=SMALL, chunks=[2, 3, 4], rope=0.0, score="scaled_dot")
def test_a_sequence_in_chunks_equals_the_whole(name, pos, case, chunks, rope, score):
    layer = case.layer(name, pos=pos, rope=rope, score=score, per_head=True, attend_self=False)
    x, cache = case.input(sum(chunks)), KVCache(MAX_LEN)
    pieces = [layer(chunk, causal=True, cache=cache) for chunk in x.split(chunks, dim=1)]
    assert_close(torch.cat(pieces, dim=1), layer(x, causal=True))
    assert_close(torch.cat(pieces, dim=1), literal(layer, x, causal=True)[1])


@pytest.mark.parametrize("name", ["kv", "kv+phase", "q-kv-deepseek"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_sliding_cache_is_a_band_mask(name, size):
    """With a window of one token, this token sees itself."""
    layer, x, cache = SMALL.layer(name, attend_self=False), SMALL.input(MAX_LEN), KVCache(size, slides=True)
    band = ~torch.ones(MAX_LEN, MAX_LEN).bool().tril(-size)[None, None]
    tokens = [layer(token, causal=True, cache=cache) for token in x.split(1, dim=1)]
    assert_close(torch.cat(tokens, dim=1), layer(x, causal=True, mask=band))


@pytest.mark.parametrize("name", ["qkv", "q-kv"])
@pytest.mark.parametrize("source", [3, SMALL.length])
def test_a_context_has_no_self(name, source):
    plain, ours = (SMALL.layer(name, attend_self=attend_self) for attend_self in (True, False))
    x, context = SMALL.input(), SMALL.input(source).flip(-1)
    for causal in (False, True):
        assert torch.equal(ours(x, context, causal=causal), plain(x, context, causal=causal))
        assert torch.equal(ours.weights(x, context, causal=causal), plain.weights(x, context, causal=causal))
    cache = KVCache(source)
    pieces = [ours(token, context, cache=cache) for token in x.split(1, dim=1)]
    assert_close(torch.cat(pieces, dim=1), plain(x, context))


def test_torchs_interface_leaves_self_out_of_self_attention_alone():
    layer = MultiheadAttention(8, 2, attn="qkv", batch_first=True, attend_self=False)
    x, other = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    output, weights = layer(x, x, x, average_attn_weights=False)
    assert (weights.diagonal(0, -2, -1) == 0).all()
    assert_close(output, literal(layer.attention, x)[1])
    future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert_close(layer(x, x, x, attn_mask=future)[0], literal(layer.attention, x, causal=True)[1])
    assert (layer(x, other, other)[1].diagonal(0, -2, -1) > 0).all()


@pytest.mark.parametrize("name", [name for name, _ in WITH_LOGITS])
def test_self_is_left_in_by_default_with_the_same_bits(name):
    x = SMALL.input()
    usual, stated = SMALL.layer(name), SMALL.layer(name, attend_self=True)
    assert (
        usual.state_dict().keys()
        == stated.state_dict().keys()
        == SMALL.layer(name, attend_self=False).state_dict().keys()
    )
    for masks in map(SMALL.mask, ("none", "causal", "padded")):
        assert torch.equal(usual(x, **masks), stated(x, **masks))
        assert (usual.weights(x, causal=True).diagonal(0, -2, -1) > 0).all()


class UniformMap(QKV):
    def attention_weights(self, q, k, mask, causal):
        return q.new_full((*q.shape[:3], k.shape[2]), 1 / k.shape[2])


@pytest.mark.parametrize("name", ["identity", f"{__name__}.UniformMap"])
def test_a_map_without_logits_has_none_to_leave_out(name):
    SMALL.layer(name, attend_self=True)
    with pytest.raises(UserError, match=r"attend_self=False: (Identity|UniformMap) has no logits"):
        SMALL.layer(name, attend_self=False)


class HalvedLogits(QKV):
    """A user's own logits, which know nothing of the option."""

    def logits(self, q, k):
        return super().logits(q, k) / 2


@settings(max_examples=10)
@given(case=cases(st.integers(1, 5)), kind=kinds_of_mask)
def test_logits_of_a_user_need_not_know_of_it(case, kind):
    layer, x, masks = case.layer(f"{__name__}.HalvedLogits", attend_self=False), case.input(), case.mask(kind)
    assert_close(layer(x, **masks), literal(layer, x, **masks)[1])


@pytest.mark.parametrize("name", ["qkv", "kv", "kv+pos", "kv+phase", "q-kv-deepseek"])
def test_causal_attention_makes_no_map(name):
    """It is the fused kernel's own causal attention, one token shorter: without a tensor of the map's size."""
    case = Case(heads=4, group=1, head_dim=8, batch=1, length=600, seed=0)
    layer, x = case.layer(name, attend_self=False, max_len=600), case.input()
    assert max(allocations(lambda: layer(x, causal=True))) < 600 * 600
    assert max(allocations(lambda: layer.weights(x, causal=True))) >= 600 * 600


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_drops_the_weight_of_the_first_token_too(causal):
    n, draws, p = 4, 4000, 0.25
    case = Case(heads=2, group=1, head_dim=n, batch=1, length=n, seed=0)
    layer = case.layer("kv", dropout=p, attend_self=False)
    q, k, _ = layer.project(case.input().expand(draws, -1, -1))
    one_hot = torch.eye(n, dtype=q.dtype).expand(draws, 2, n, n)  # as values, they return the map itself
    drawn, whole = layer.attend(q, k, one_hot, None, causal, False), layer.weights(case.input(), causal=causal)
    kept = drawn != 0
    assert_close(drawn[kept], (whole / (1 - p)).expand_as(drawn)[kept])
    assert_close(drawn.mean(0), whole[0], atol=5 * (p / (1 - p) / draws) ** 0.5, rtol=0)


@pytest.mark.parametrize("name", ["qkv", "kv+pos"])
def test_bfloat16_is_close_to_float32(name):
    layer, x = SMALL.layer(name, attend_self=False).float(), SMALL.input().float() / 3
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x, causal=True)
    assert output.dtype == torch.bfloat16
    assert_close(output.float(), layer(x, causal=True), atol=0.03, rtol=0.03)
