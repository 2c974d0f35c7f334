"""Attention without self: a token attends to itself only where it may attend to nothing else."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import KV, QKV, SCORES, KVCache
from tests.helpers.layers import SMALL, WITH_LOGITS, cases, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")


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
    return maps, layer.merge(maps @ v, 0, x)


class HalvedLogits(QKV):
    """A user's own logits, which know nothing of the option."""

    def logits(self, q, k):
        return super().logits(q, k) / 2


@pytest.mark.parametrize(("name", "pos"), [*WITH_LOGITS, (f"{__name__}.HalvedLogits", "sinusoid")])
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
    if "+pos" in name:  # a bias and a gain that matter
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
