"""A linear map of positions for each head, as its formula says; and a context that is read once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory, KVCache
from tests.attention.test_map_position import sinusoid_2d
from tests.helpers.layers import MAX_LEN, POSITIONED, VARIANTS, Case, cases, gradients

small = Case(heads=4, group=2, head_dim=3, batch=2, length=5, seed=0)


def literal(layer, roles, x, *, mask=None, causal=False):
    """For each head: its own Linear_{m→1} of (Q Kᵀ / √D broadcast to m channels + P), softmax, times V."""
    n, channels = x.shape[1], layer.to_logit.in_features
    table = getattr(layer.positions, "table", None)
    encoding = sinusoid_2d(n, channels) if table is None else table[:n, :n]
    allowed = torch.ones(n, n, dtype=torch.bool) if mask is None else mask[:, 0].expand(len(x), n, n)
    allowed = allowed.tril() if causal else allowed
    mixed = []
    for head in range(layer.heads):
        served = head * layer.kv_heads // layer.heads

        def project(role, served=served, head=head):
            first = (head if role == "q" else served) * layer.head_dim
            return layer.projection[role](x)[..., first : first + layer.head_dim]

        q, k, v = map(project, roles)
        score = (q @ k.mT / layer.head_dim**0.5).unsqueeze(-1).expand(-1, -1, -1, channels)
        weight, bias = layer.to_logit.weight[head : head + 1], layer.to_logit.bias[head : head + 1]
        logits = nn.functional.linear(score + encoding, weight, bias).squeeze(-1)
        mixed.append(logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v)
    return layer.output(torch.cat(mixed, dim=-1))


@pytest.mark.parametrize("kind", ["none", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
@settings(max_examples=8, deadline=None)
@given(case=cases(), pos_dim=st.sampled_from([10, 20, 50]))
def test_each_head_is_the_formula_in_value_and_every_gradient(name, pos, kind, case, pos_dim):
    layer = case.layer(name, pos_dim=pos_dim, pos=pos, per_head=True)
    x, told = case.input().requires_grad_(), case.mask(kind)
    ours, plain = layer(x, **told), literal(layer, POSITIONED[name], x, **told)
    assert_close(ours, plain)
    learned = dict(layer.named_parameters())
    for parameter, our, their in zip(
        ["x", *learned],
        gradients(ours, x, *learned.values()),
        gradients(plain, x, *learned.values()),
        strict=True,
    ):
        assert_close(our, their, atol=1e-10, rtol=1e-6, msg=lambda difference, p=parameter: f"{p}: {difference}")


@pytest.mark.parametrize("name", POSITIONED)
@settings(max_examples=10, deadline=None)
@given(case=cases(), m=st.integers(3, 50))
def test_it_takes_m_weights_and_a_bias_a_head(name, case, m):
    def parameters(attention, **setting):
        return sum(p.numel() for p in case.layer(attention, pos_dim=m, **setting).parameters())

    assert parameters(name, per_head=True) - parameters(name.removesuffix("+pos")) == case.heads * (m + 1)


@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
def test_heads_of_equal_maps_are_the_one_they_share(name, pos):
    own, shared = small.layer(name, pos=pos, per_head=True), small.layer(name, pos=pos)
    state = shared.state_dict()
    repeated = {key: state[key].repeat_interleave(small.heads, 0) for key in ("to_logit.weight", "to_logit.bias")}
    own.load_state_dict(state | repeated)
    assert_close(own(small.input(), causal=True), shared(small.input(), causal=True))


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@pytest.mark.parametrize("rows", [[1, 0, 1, 1], [1], [False, True], [False, False]], ids=str)
def test_selected_examples_go_on_from_their_own_past(name, pos, rows):
    setting = {"per_head": True} if name in POSITIONED else {}
    layer, x, cache, rows = small.layer(name, pos=pos, **setting), small.input(), KVCache(MAX_LEN), torch.tensor(rows)
    cache.select(rows)  # of nothing
    layer(x[:, :3], causal=True, cache=cache)
    cache.select(rows)
    rest = layer(x[rows, 3:], causal=True, cache=cache)
    assert_close(rest, layer(x[rows], causal=True)[:, 3:])
    assert all(buffer.shape == (len(x[rows]), small.kv_heads, MAX_LEN, small.head_dim) for buffer in cache.buffers)


@pytest.mark.parametrize("name", ATTENTION)
@settings(max_examples=5, deadline=None)
@given(case=cases(), source=st.integers(1, 8))
def test_a_context_is_projected_once_and_looked_at_as_if_anew(name, case, source):
    torch.manual_seed(case.seed)
    cross, calls = AttentionFactory(name, heads=4, max_len=MAX_LEN).cross(case.dim).double(), []
    x, context, cache = case.input(), case.input(source).flip(-1), KVCache(source)
    mask = torch.arange(source) <= torch.arange(case.batch)[:, None, None, None]
    whole = cross(x, context, mask=mask)
    for role in "qkv":
        cross.projection[role].register_forward_hook(lambda *_, role=role: calls.append(role))
    maps, pieces = [], []
    for token in x.split(1, dim=1):
        maps.append(cross.weights(token, context, mask=mask, cache=cache))
        assert cache.length == (source if pieces else 0)
        pieces.append(cross(token, context, mask=mask, cache=cache))
    assert_close(torch.cat(pieces, dim=1), whole)
    assert_close(torch.cat(maps, dim=2), cross.weights(x, context, mask=mask))
    assert cache.length == source
    calls.clear()
    for token in x.split(1, dim=1):
        assert_close(cross(token, context, mask=mask, cache=cache), cross(token, context, mask=mask))
    assert calls.count("q") == 2 * case.length
    assert calls.count("k") == calls.count("v") == case.length  # those without the cache
