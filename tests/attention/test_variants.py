"""What the variants compute, what they own, and what they refuse."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import ATTENTION, KV, QKV, SCORES
from kvt.system.errors import UserError
from tests.helpers.layers import MASKS, POSITIONED, VARIANTS, Case, cases, gradients

ROLES = {"qkv": "qkv", "kv": "kkv", "q-kv": "qkk", "k": "kkk"}


def torch_attention(layer, roles, x, context=None, *, mask=None, causal=False):
    """PyTorch's own attention with the layer's weights, each key-value head repeated for its group."""
    group = layer.heads // layer.kv_heads

    def role(name):
        linear = layer.projection[name]
        repeats = 1 if name == "q" else group
        weight, bias = linear.weight.unflatten(0, (-1, layer.head_dim)), linear.bias.unflatten(0, (-1, layer.head_dim))
        return weight.repeat_interleave(repeats, 0).flatten(0, 1), bias.repeat_interleave(repeats, 0).flatten()

    weights, biases = zip(*map(role, roles), strict=True)
    x = x.transpose(0, 1)
    context = x if context is None else context.transpose(0, 1)
    n = x.shape[0]
    output, _ = F.multi_head_attention_forward(
        x, context, context, x.shape[-1], layer.heads, torch.cat(weights), torch.cat(biases),
        None, None, False, 0.0, layer.output.weight, layer.output.bias,
        key_padding_mask=None if mask is None else ~mask.flatten(1), need_weights=False,
        attn_mask=torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None,
    )  # fmt: skip
    return output.transpose(0, 1)


@pytest.mark.parametrize("kind", ["none", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize("name", ROLES)
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_a_variant_is_pytorchs_attention_with_its_roles_tied(name, kind, case):
    layer, x, told = case.layer(name), case.input().requires_grad_(), case.mask(kind)
    ours, theirs = layer(x, **told), torch_attention(layer, ROLES[name], x, **told)
    assert_close(ours, theirs)
    assert_close(gradients(ours, x), gradients(theirs, x))


@pytest.mark.parametrize("name", ["qkv", "q-kv"])
@settings(max_examples=10, deadline=None)
@given(case=cases(), source=st.integers(1, 8))
def test_an_attention_with_its_own_query_looks_at_a_context_of_any_length(name, case, source):
    layer, x, context = case.layer(name), case.input(), case.input(source).flip(-1)
    assert_close(layer(x, context), torch_attention(layer, ROLES[name], x, context))


@pytest.mark.parametrize("name", sorted(set(ATTENTION) - {"qkv", "q-kv"}))
def test_any_other_refuses_a_context(name):
    case = Case(heads=4, group=1, head_dim=2, batch=1, length=3, seed=0)
    with pytest.raises(UserError, match="use QKV"):
        case.layer(name)(case.input(), case.input())


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ATTENTION)
@settings(max_examples=3, deadline=None)
@given(case=cases())
def test_the_output_is_the_maps_applied_to_the_values(name, score, kind, case):
    x, told = case.input(), case.mask(kind)
    for group in (1, 2, 4):
        layer = replace(case, group=group).layer(name, score=score)
        values = layer.project(x)[2].repeat_interleave(group, 1)
        mixed = layer.weights(x, **told) @ values
        assert_close(layer(x, **told), layer.output(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", sorted(set(ATTENTION) - {"identity"}))
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_a_map_shares_one_among_the_keys_allowed(name, kind, case):
    told = case.mask(kind)
    maps = case.layer(name).weights(case.input(), **told)
    allowed = told.get("mask", torch.tensor(True)).expand_as(maps)
    if told.get("causal"):
        allowed = allowed.tril()
    assert (maps >= 0).all()
    assert (maps[~allowed] == 0).all()
    assert_close(maps.sum(-1), allowed.any(-1).double())


@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_identity_keeps_every_token_to_itself(case):
    layer, x = case.layer("identity"), case.input()
    assert_close(layer.weights(x), torch.eye(case.length).double().expand(case.batch, 4, -1, -1))
    assert_close(layer(x), torch.cat([layer(token) for token in x.split(1, dim=1)], dim=1))


@pytest.mark.parametrize("name", [*ROLES, "identity"])
@settings(max_examples=10, deadline=None)
@given(case=cases(), data=st.data())
def test_without_positions_the_order_of_tokens_means_nothing(name, case, data):
    order = data.draw(st.permutations(range(case.length)))
    layer, x = case.layer(name), case.input()
    assert_close(layer(x[:, order]), layer(x)[:, order])


@pytest.mark.parametrize("order", list(permutations(range(3)))[1:])
@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
def test_with_positions_it_means_something(name, pos, order):
    case = Case(heads=2, group=1, head_dim=4, batch=1, length=3, seed=0)
    layer, x = case.layer(name, pos=pos), case.input()
    assert not torch.allclose(layer(x[:, order]), layer(x)[:, order], rtol=1e-3)


@settings(max_examples=20, deadline=None)
@given(case=cases(), name=st.sampled_from(list(ATTENTION)), bias=st.booleans())
def test_grouped_heads_save_key_and_value_parameters_only(case, name, bias):
    def count(group):
        return sum(p.numel() for p in replace(case, group=group).layer(name, bias=bias).parameters())

    shared = len(set(case.layer(name).projections) - {"q"})
    saved = shared * (case.heads - case.kv_heads) * case.head_dim * (case.dim + bias)
    assert count(1) - count(case.group) == saved


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@pytest.mark.parametrize("name", ATTENTION)
def test_dropout_drops_whole_weights_and_keeps_their_expectation(name, score):
    n, draws, p = 4, 5000, 0.25
    case = Case(heads=2, group=1, head_dim=n, batch=1, length=n, seed=0)
    layer = case.layer(name, score=score, dropout=p)
    q, k, _ = layer.project(case.input().expand(draws, -1, -1))
    one_hot = torch.eye(n, dtype=q.dtype).expand(draws, 2, n, n)  # as values, they show the map itself
    drawn, whole = layer.attend(q, k, one_hot, None, False), layer.attention_weights(q, k, None, False)
    kept = drawn != 0
    assert_close(drawn[kept], whole[kept] / (1 - p))
    assert_close(drawn.mean(0), whole[0], atol=5 * (p / (1 - p) / draws) ** 0.5, rtol=0)
    assert_close(layer.eval().mix(q, k, one_hot, None, False), whole)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("name", "pos"), VARIANTS)
def test_bfloat16_is_close_to_float32(name, score, pos):
    case = Case(heads=4, group=2, head_dim=8, batch=2, length=8, seed=0)
    layer, x = case.layer(name, score=score, pos=pos).float(), case.input().float() / 3
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x, causal=True)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert_close(output.float(), layer(x, causal=True), atol=0.03, rtol=0.03)
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@settings(max_examples=10, deadline=None)
@given(case=cases(), name=st.sampled_from(list(ATTENTION)))
def test_xavier_bounds_the_weights_and_clears_the_biases(case, name):
    layer = case.layer(name)
    layer.init_xavier()
    for linear in [*layer.projection.values(), layer.output]:
        assert linear.weight.abs().max() <= (6 / sum(linear.weight.shape)) ** 0.5
        assert (linear.bias == 0).all()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dim": 8, "heads": 3}, "heads=3 must divide dim=8: choose heads from 1, 2, 4, 8"),
        ({"dim": 8, "heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"dim": 0, "heads": 1}, "dim=0"),
        ({"dim": -8, "heads": 2}, "dim=-8"),
        ({"dim": 8, "heads": 0}, "heads=0"),
        ({"dim": 8, "heads": 2, "kv_heads": 0}, "kv_heads=0"),
        ({"dim": 8, "heads": 2, "dropout": 1.0}, "dropout=1.0"),
        ({"dim": 8, "heads": 2, "dropout": -0.1}, "dropout=-0.1"),
        ({"dim": 8, "heads": 2, "dropout": float("nan")}, "dropout=nan"),
    ],
)
def test_impossible_sizes_are_named(sizes, says):
    with pytest.raises(UserError, match=says):
        QKV(**sizes)


def test_a_map_of_ones_own_is_the_one_that_is_used():
    class Uniform(KV):
        def attention_weights(self, q, k, mask, causal):
            return q.new_full((*q.shape[:3], k.shape[2]), 1 / k.shape[2])

    layer, x = Uniform(8, 2).double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x.mean(1, keepdim=True).expand_as(x)))
    usual = KV(8, 2).double()
    usual.load_state_dict(layer.state_dict())
    assert not torch.allclose(usual(x), layer(x))


class Flat(QKV):
    """Scores of its own: everybody alike."""

    def logits(self, q, k):
        return super().logits(q, k) * 0


class Forbidding(QKV):
    """A bias of pairs that leaves the second query nothing."""

    def gain_and_bias(self, n, m):
        bias = torch.zeros(n, m, dtype=torch.float64)
        bias[1] = float("-inf")
        return None, bias


def test_a_subclass_is_obeyed_whatever_the_kernel():
    layer, x = Flat(8, 2).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    mean = layer.project(x)[2].mean(2, keepdim=True).expand(-1, -1, 5, -1)
    assert_close(layer(x), layer.output(mean.transpose(1, 2).flatten(2)))
    layer = Forbidding(8, 2).double()
    assert layer(x).isfinite().all()
