"""Masked keys have no influence, and a query without any key gets zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import KV, SCORES, Attention, KVCache
from kvt.attention.kernels import allowed_pairs, leave_out
from kvt.system import UserError
from tests.helpers.layers import VARIANTS, WITH_LOGITS, cases, gradients, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")
exact = {"atol": 1e-12, "rtol": 0}
lengths = st.integers(2, 8)
scores = st.sampled_from(["scaled_dot", "additive"])  # with and without kernels


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=12)
@given(
    case=cases(lengths),
    score=scores,
    rope=st.sampled_from([0.0, 1.0]),
    later=st.booleans(),
    causal=st.booleans(),
    data=st.data(),
)
def test_later_tokens_and_masked_keys_have_no_influence_on_others(name, pos, score, rope, case, later, causal, data):
    if later:
        hidden = torch.arange(case.length) >= data.draw(st.integers(1, case.length - 1))
        masks = {"causal": True}
    else:
        hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=case.length, max_size=case.length)))
        masks = {"mask": ~hidden[None, None, None], "causal": causal}
    layer, x = case.layer(name, pos=pos, score=score, rope=rope), case.input().requires_grad_()

    def others(x):
        return layer(x, **masks)[:, ~hidden]

    assert_close(others(torch.where(hidden[:, None], 5 - 2 * x, x)), others(x), **exact)
    (gradient,) = torch.autograd.grad(others(x).sum(), x)
    assert (gradient[:, hidden] == 0).all()


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=6)
@given(
    case=cases(),
    score=scores,
    dtype=st.sampled_from([torch.float64, torch.float32]),
    causal=st.booleans(),
    data=st.data(),
)
def test_a_query_without_any_key_gets_zeros(name, pos, score, dtype, case, causal, data):
    layer, x = case.layer(name, pos=pos, score=score).to(dtype), case.input().to(dtype).requires_grad_()
    blind = data.draw(st.integers(0, case.length - 1))
    mask = torch.ones(1, 1, case.length, case.length, dtype=torch.bool)
    mask[..., blind, :] = False
    output = layer(x, mask=mask, causal=causal)
    output.sum().backward()
    assert (output[:, blind] == layer.output.bias).all()
    assert (layer.weights(x, mask=mask, causal=causal)[:, :, blind] == 0).all()
    for tensor in [output, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]:
        assert tensor.isfinite().all()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["qkv", "q-kv"])
@settings(max_examples=8)
@given(case=cases(), source=st.integers(1, 8), padded=st.booleans())
def test_the_last_query_stands_at_the_last_key_however_many_there_are(name, score, cached, case, source, padded):
    layer, x, context = case.layer(name, score=score), case.input().requires_grad_(), case.input(source).flip(-1)
    context.requires_grad_()
    mask = {"mask": torch.arange(source) < torch.arange(1, case.batch + 1).view(-1, 1, 1, 1)} if padded else {}
    q, k, v = layer.project(x, context)
    k, v = (t.repeat_interleave(case.group, 1) for t in (k, v))
    query, key = torch.arange(case.length)[:, None] + source - case.length, torch.arange(source)
    exponential = layer.score(q, k).exp() * ((key <= query) & mask.get("mask", torch.tensor(True)))
    total = exponential.sum(-1, keepdim=True)
    weights = exponential / torch.where(total == 0, 1, total)  # without a key: zeros
    formula = layer.merge(weights @ v, start=0)
    cache = {"cache": KVCache(source)} if cached else {}
    output = layer(x, context, causal=True, **mask, **cache)
    assert_close(output, formula)
    assert_close(layer.weights(x, context, causal=True, **mask), weights)
    assert_close(gradients(output, x, context), gradients(formula, x, context))


@pytest.mark.parametrize(("name", "pos"), WITH_LOGITS)
@settings(max_examples=8)
@given(
    case=cases(), score=scores, kind=kinds_of_mask, of_pairs=st.booleans(), attend_self=st.booleans(), data=st.data()
)
def test_a_bias_is_added_to_the_logits(name, pos, case, score, kind, of_pairs, attend_self, data):
    layer, x, masks = case.layer(name, pos=pos, score=score, attend_self=attend_self), case.input(), case.mask(kind)
    shape = (case.batch, 4, case.length, case.length) if of_pairs else (case.batch, 1, 1, case.length)
    generator = torch.Generator().manual_seed(case.seed)
    bias = torch.randn(shape, generator=generator, dtype=x.dtype)
    bias[torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0, 0.3]))] = float("-inf")
    allowed = allowed_pairs(case.length, case.length, masks.get("mask"), masks.get("causal", False), x.device)
    allowed = (bias > float("-inf")) if allowed is None else allowed & (bias > float("-inf"))
    if not attend_self:
        allowed = leave_out(torch.eye(case.length).bool(), allowed.expand(-1, -1, case.length, -1))
    exponential = (layer.scores(x) + bias).masked_fill(~allowed, float("-inf")).softmax(-1)
    weights = torch.where(allowed.any(-1, keepdim=True), exponential, 0)
    assert_close(layer.weights(x, bias=bias, **masks), weights)
    values = layer.rotate(*layer.project(x), start=0)[2].repeat_interleave(case.group, 1)
    assert_close(layer(x, bias=bias, **masks), layer.merge(weights @ values, start=0, x=x))


@pytest.mark.parametrize("call", [Attention.forward, Attention.weights])
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, 5, dtype=torch.bool),  # (B, N) where B is N: torch would broadcast it
        torch.ones(2, 1, 5, dtype=torch.bool),
        torch.ones(3, 1, 1, 5, dtype=torch.bool),
        torch.ones(1, 1, 5, 4, dtype=torch.bool),
        torch.zeros(1, 1, 5, 5),
    ],
    ids=lambda mask: f"{mask.dtype} {tuple(mask.shape)}",
)
def test_a_mask_of_another_shape_or_dtype_is_refused(call, mask):
    with pytest.raises(UserError, match=r"expected torch.bool, \(B, heads, N, M\) = \(2, 4, 5, 5\)"):
        call(KV(8, 4), torch.randn(2, 5, 8), mask=mask)
