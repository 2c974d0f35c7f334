"""What the variants compute, which parameters they own, and what they refuse."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, KV, QKV, SCORES
from tests.helpers.layers import MASKS, SMALL, VARIANTS, Case, any_head_dim, cases, gradients, kinds_of_mask
from tests.helpers.small_tasks import TASKS, small_task

pytestmark = pytest.mark.usefixtures("kernel")

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


@pytest.mark.parametrize("name", ROLES)
@settings(max_examples=12)
@given(case=cases(head_dims=any_head_dim), kind=st.sampled_from(MASKS[:4]))
def test_a_variant_is_pytorchs_attention_with_tied_projections(name, case, kind):
    layer, x, masks = case.layer(name), case.input().requires_grad_(), case.mask(kind)
    ours, theirs = layer(x, **masks), torch_attention(layer, ROLES[name], x, **masks)
    assert_close(ours, theirs)
    assert_close(gradients(ours, x), gradients(theirs, x))


@pytest.mark.parametrize("name", ["qkv", "q-kv"])
@settings(max_examples=10)
@given(case=cases(), source=st.integers(1, 8))
def test_a_variant_with_a_query_attends_to_a_context_of_any_length(name, case, source):
    layer, x, context = case.layer(name), case.input(), case.input(source).flip(-1)
    assert_close(layer(x, context), torch_attention(layer, ROLES[name], x, context))


@pytest.mark.parametrize(("name", "pos"), VARIANTS)
@settings(max_examples=12)
@given(case=cases(), score=st.sampled_from([*SCORES]), kind=kinds_of_mask, rope=st.sampled_from([0.0, 1.0]))
def test_the_kernels_equal_the_reference(name, pos, case, score, kind, rope):
    layer, x, masks = case.layer(name, score=score, pos=pos, rope=rope), case.input(), case.mask(kind)
    values = layer.rotate(*layer.project(x), start=0)[2].repeat_interleave(case.group, 1)
    assert_close(layer(x, **masks), layer.merge(layer.weights(x, **masks) @ values, start=0, x=x))


@settings(max_examples=10)
@given(case=cases())
def test_identity_exchanges_nothing_between_tokens(case):
    layer, x = case.layer("identity"), case.input()
    assert_close(layer.weights(x), torch.eye(case.length).double().expand(case.batch, 4, -1, -1))
    assert_close(layer(x), torch.cat([layer(token) for token in x.split(1, dim=1)], dim=1))


@pytest.mark.parametrize(
    ("name", "score", "causal", "attend_self"),
    [
        *((name, score, False, True) for name in ATTENTION for score in ("scaled_dot", "additive")),
        *(("kv", "scaled_dot", causal, False) for causal in (False, True)),
    ],
)
def test_dropout_drops_weights_and_keeps_their_expectation(name, score, causal, attend_self):
    n, draws, p = 4, 2000, 0.25
    case = Case(heads=2, group=1, head_dim=n, batch=1, length=n, seed=0)
    layer = case.layer(name, score=score, dropout=p, attend_self=attend_self)
    q, k, _ = layer.project(case.input().expand(draws, -1, -1))
    one_hot = torch.eye(n, dtype=q.dtype).expand(draws, 2, n, n)  # as values, they return the map itself
    drawn, whole = layer.attend(q, k, one_hot, None, causal, attend_self), layer.attention_weights(q, k, None, causal)
    if not attend_self:
        whole = layer.weights(case.input(), causal=causal).expand(draws, -1, -1, -1)
    kept = drawn != 0
    assert_close(drawn[kept], whole[kept] / (1 - p))
    assert_close(drawn.mean(0), whole[0], atol=5 * (p / (1 - p) / draws) ** 0.5, rtol=0)
    assert_close(layer.eval().attend(q, k, one_hot, None, causal, attend_self), whole)


@pytest.mark.parametrize(
    ("name", "pos", "score", "attend_self"),
    [
        *((*variant, "scaled_dot", True) for variant in VARIANTS),
        *(("kv+pos", "sinusoid", score, True) for score in SCORES),
        *((name, "sinusoid", "scaled_dot", False) for name in ("qkv", "kv+pos")),
    ],
)
def test_bfloat16_is_close_to_float32(name, pos, score, attend_self):
    case = Case(heads=4, group=2, head_dim=8, batch=2, length=8, seed=0)
    layer, x = case.layer(name, score=score, pos=pos, attend_self=attend_self).float(), case.input().float() / 3
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x, causal=True)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert_close(output.float(), layer(x, causal=True), atol=0.03, rtol=0.03)
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


class UniformMap(QKV):
    def attention_weights(self, q, k, mask, causal):
        return q.new_full((*q.shape[:3], k.shape[2]), 1 / k.shape[2])


class EqualLogits(QKV):
    def logits(self, q, k):
        return super().logits(q, k) * 0


class NoKey(QKV):
    """A bias of pairs that leaves the second query no key."""

    def gain_and_bias(self, n, m):
        return None, torch.zeros(n, m).index_fill(0, torch.tensor(1), float("-inf"))


@pytest.mark.parametrize("attention", [UniformMap, EqualLogits])
def test_what_a_users_attention_overrides_is_used(attention):
    layer, x = attention(8, 2).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    mean = layer.project(x)[2].mean(2, keepdim=True).expand(-1, -1, 5, -1).transpose(1, 2).flatten(2)
    assert_close(layer(x), layer.output(mean))


def test_a_users_bias_may_leave_a_query_no_key():
    assert NoKey(8, 2)(torch.randn(2, 5, 8)).isfinite().all()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", ["qkv", "qkv+pos"])
def test_queries_may_start_as_the_keys(name, group):
    case = replace(SMALL, group=group)
    layer, x = case.layer(name, init="symmetric"), case.input()
    q, k, _ = layer.project(x)
    assert_close(q, k.repeat_interleave(group, 1))
    assert layer.projection["q"].weight is not layer.projection["k"].weight


@pytest.mark.parametrize("task", TASKS)
def test_models_that_initialise_the_weights_keep_a_symmetric_start(task):
    model = small_task(task, attn="qkv", attn_kwargs={"init": "symmetric"}).model
    layers = [layer for name, layer in model.named_modules() if isinstance(layer, QKV) and "cross" not in name]
    assert layers
    for layer in layers:
        assert torch.equal(layer.projection["q"].weight, layer.projection["k"].weight)


@settings(max_examples=10)
@given(case=cases(head_dims=any_head_dim), kind=kinds_of_mask)
def test_the_token_itself_may_be_the_query(case, kind):
    own, usual, x = case.layer("x-kv"), case.layer("qkv"), case.input()
    usual.load_state_dict(usual.state_dict() | own.state_dict())
    with torch.no_grad():
        usual.projection["q"].weight.copy_(torch.eye(case.dim))
        usual.projection["q"].bias.zero_()
    assert_close(own(x, **case.mask(kind)), usual(x, **case.mask(kind)))


def test_the_entry_of_a_class_is_all_that_a_variant_needs(monkeypatch):
    monkeypatch.setattr("kvt.attention.base.ATTENTION", known := {})

    class Sharp(KV, name="sharp", label="Sharp", colour="#123456"):
        """softmax(2 α K Kᵀ) V: twice as sharp."""

    class Own(Sharp):
        """Of a user: it enters nothing."""

    assert known == {"sharp": Sharp}
    assert (Sharp.formula, Sharp.label, Sharp.colour) == ("softmax(2 α K Kᵀ) V", "Sharp", "#123456")


class Wide:
    """Values of twice the width of the keys."""

    def __init__(self, dim, heads, **kwargs):
        super().__init__(dim, heads, **kwargs)
        self.widths["v"] = 2 * self.head_dim
        self.projection["v"], self.output = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)


class WideQKV(Wide, QKV):
    pass


class WideKVPos(Wide, ATTENTION["kv+pos"]):
    """With a bias of the keys."""


@pytest.mark.parametrize("length", [20, 300])  # an explicit map; a fused kernel
@pytest.mark.parametrize("layer", [WideQKV(8, 2), WideKVPos(8, 2, max_len=300)], ids=["qkv", "kv+pos"])
def test_values_wider_than_keys_keep_their_width(layer, length):
    x = torch.randn(1, length, 8, dtype=torch.double)
    values = layer.double().projection["v"](x).unflatten(-1, (2, 8)).transpose(1, 2)
    values = (layer.weights(x) @ values).transpose(1, 2).flatten(2)
    assert_close(layer(x), layer.output(values))
