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
    ours = MultiheadAttention(DIM, HEADS, batch_first=True, attn="qkv")
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        for role, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
            ours.attention.projection[role].weight.copy_(weight)
            ours.attention.projection[role].bias.copy_(bias)
    ours.attention.output.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


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
