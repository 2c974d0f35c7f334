"""`MultiheadAttention` with "qkv" equals torch's, and takes its place in torch's encoder layers."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import KVPos, MultiheadAttention
from kvt.system.errors import UserError

B, N, M, DIM, HEADS = 3, 5, 4, 8, 2
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDED = torch.arange(N) >= torch.tensor([[N], [2], [4]])
PER_HEAD = (torch.rand(B * HEADS, N, N, generator=torch.Generator().manual_seed(1)) < 0.3) & ~torch.eye(N).bool()


def as_numbers(mask):
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


@pytest.fixture
def pair():
    """A layer of torch's and ours with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    return theirs, MultiheadAttention.from_torch(theirs)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"average_attn_weights": False},
        {"need_weights": False},
        {"key_padding_mask": PADDED},
        {"attn_mask": FUTURE},
        {"attn_mask": FUTURE, "is_causal": True},
        {"attn_mask": PER_HEAD},
        {"attn_mask": FUTURE, "key_padding_mask": PADDED, "average_attn_weights": False},
        {"attn_mask": as_numbers(FUTURE), "key_padding_mask": as_numbers(PADDED)},
    ],
    ids=lambda call: " ".join(call) or "plain",
)
def test_it_equals_torchs(pair, call):
    x = torch.randn(B, N, DIM)
    (theirs, their_weights), (ours, our_weights) = (layer(x, x, x, **call) for layer in pair)
    assert_close(ours, theirs)
    assert (our_weights is None) == (their_weights is None)
    if our_weights is not None:
        assert_close(our_weights, their_weights)


@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"key_padding_mask": PADDED[:, :M]}], ids=list)
def test_the_hint_that_a_mask_is_causal_means_what_it_means_in_torch_with_more_queries_than_keys(pair, call):
    x, context = torch.randn(B, N, DIM), torch.randn(B, M, DIM)
    outputs = [layer(x, context, context, attn_mask=FUTURE[:, :M], is_causal=True, **call)[0] for layer in pair]
    assert_close(*outputs)


def test_cross_attention_and_the_batch_in_the_second_dimension(pair):
    x, context = torch.randn(N, B, DIM), torch.randn(M, B, DIM)
    for layer in pair:
        layer.batch_first = False
    assert_close(*(layer(x, context, context) for layer in pair))


@pytest.mark.parametrize("attn", ["kv", "kv+pos", "q-kv"])
def test_it_trains_in_torchs_encoder(attn):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
    layer.self_attn = MultiheadAttention(DIM, HEADS, 0.1, batch_first=True, attn=attn, max_len=N)
    encoder, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(B, N, DIM)
    encoder(x, mask=FUTURE, src_key_padding_mask=PADDED).square().sum().backward()
    assert all(p.grad is not None for name, p in encoder.named_parameters())
    with torch.no_grad():
        output = encoder.eval()(x, mask=FUTURE, is_causal=True)
    assert_close(output[:, :2], encoder(x[:, :2], mask=FUTURE[:2, :2]))


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 1])
def test_it_takes_its_place_in_a_finished_encoder(pair, count):
    """With padded input in eval mode, torch's layers fuse, and ours are as before."""
    theirs, ours = pair
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True), 2).eval()
    x, real = torch.randn(B, N, DIM), ~PADDED[..., None]
    for layer in encoder.layers:
        layer.self_attn = theirs
    expected = encoder(x, src_key_padding_mask=PADDED)
    encoder.layers[count].self_attn = ours
    if count:
        with pytest.raises(UserError, match="enable_nested_tensor=False"):
            encoder(x, src_key_padding_mask=PADDED)
        encoder.use_nested_tensor = False
    assert_close(encoder(x, src_key_padding_mask=PADDED) * real, expected * real)


def test_arguments_reach_the_attention():
    layer = MultiheadAttention(DIM, HEADS, 0.2, bias=False, attn="kv+pos", max_len=N, pos_dim=20).attention
    assert isinstance(layer, KVPos)
    assert (layer.dropout, layer.output.bias, layer.to_logit.in_features) == (0.2, None, 20)


def test_what_it_cannot_compute_is_refused(pair):
    x, other = torch.randn(B, N, DIM), torch.randn(B, N, DIM)
    with pytest.raises(UserError, match="use QKV"):
        MultiheadAttention(DIM, HEADS, batch_first=True)(x, other, other)
    with pytest.raises(UserError, match="key and value must be the same tensor"):
        pair[1](x, x, other)
    with pytest.raises(UserError, match="only hold 0 and -inf"):
        pair[1](x, x, x, attn_mask=torch.randn(N, N))


@pytest.mark.parametrize(
    ("shape", "call", "message"),
    [
        ((HEADS, N, DIM), {"attn_mask": (HEADS, N, N)}, r"attn_mask .*\(2, 5, 5\).*expected \(5, 5\) or \(4, 5, 5\)"),
        ((B, N, DIM), {"attn_mask": (1, N)}, r"attn_mask of shape \(1, 5\)"),
        ((B, N, DIM), {"attn_mask": (B, 1, N, N)}, r"attn_mask of shape \(3, 1, 5, 5\)"),
        ((B, N, DIM), {"key_padding_mask": (B, 1)}, r"key_padding_mask of shape \(3, 1\): expected \(3, 5\)"),
        ((B, N, DIM), {"key_padding_mask": (1, N)}, r"key_padding_mask of shape \(1, 5\)"),
        ((N, DIM), {}, r"query of shape \(5, 8\): expected \(B, N, 8\)"),
        ((B, N, DIM - 1), {}, r"query of shape \(3, 5, 7\): expected \(B, N, 8\)"),
    ],
)
def test_wrong_shapes_are_refused(pair, shape, call, message):
    x = torch.randn(shape)
    with pytest.raises(UserError, match=message):
        pair[1](x, x, x, **{name: torch.zeros(size, dtype=torch.bool) for name, size in call.items()})


def test_a_context_must_fit_its_queries(pair):
    x = torch.randn(B, N, DIM)
    with pytest.raises(UserError, match=r"key of shape \(1, 4, 8\)"):
        pair[1](x, *[torch.randn(1, M, DIM)] * 2)
    with pytest.raises(UserError, match="5 queries and 4 keys: pass an attn_mask"):
        pair[1](x, *[torch.randn(B, M, DIM)] * 2, is_causal=True)


@pytest.mark.parametrize("bias", [True, False])
def test_another_attention_takes_the_weights_that_it_has(bias):
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=bias, dropout=0.25).double().eval()
    ours = MultiheadAttention.from_torch(theirs, attn="kv")
    assert (ours.training, ours.batch_first, ours.attention.dropout) == (False, False, 0.25)
    query, key, value = theirs.in_proj_weight.chunk(3)
    assert torch.equal(ours.attention.projection["k"].weight, key)
    assert torch.equal(ours.attention.projection["v"].weight, value)
    with torch.no_grad():  # with equal queries and keys, QKV is KV
        query.copy_(key)
        if bias:
            theirs.in_proj_bias.normal_()
            theirs.in_proj_bias[:DIM] = theirs.in_proj_bias[DIM : 2 * DIM]
    ours = MultiheadAttention.from_torch(theirs, attn="kv")
    x = torch.randn(N, B, DIM, dtype=torch.double)
    assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{"kdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_has_no_equal_here_is_said(settings):
    with pytest.raises(UserError, match="no equal here"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(DIM, HEADS, **settings))
