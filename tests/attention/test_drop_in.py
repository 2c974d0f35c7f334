"""`MultiheadAttention` with "qkv" equals torch's, and takes its place in torch's encoder and decoder layers."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, Attention, KVPos, MultiheadAttention
from kvt.system import UserError

B, N, M, DIM, HEADS = 3, 5, 4, 8, 2
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDED = torch.arange(N) >= torch.tensor([[N], [2], [4]])


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
        {"attn_mask": FUTURE, "key_padding_mask": PADDED, "average_attn_weights": False},
        {"attn_mask": as_numbers(FUTURE), "key_padding_mask": as_numbers(PADDED)},
        {"attn_mask": torch.randn(N, N), "key_padding_mask": torch.randn(B, N) + as_numbers(PADDED)},
    ],
    ids=lambda call: " ".join(call) or "plain",
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_equals_torchs(pair, call, batch_first):
    x = torch.randn(B, N, DIM)
    for layer in pair:
        layer.batch_first = batch_first
    tokens = x if batch_first else x.transpose(0, 1)
    (theirs, their_weights), (ours, our_weights) = (layer(tokens, tokens, tokens, **call) for layer in pair)
    assert_close(ours, theirs)
    assert (our_weights is None) == (their_weights is None)
    if our_weights is not None:
        assert_close(our_weights, their_weights)


@pytest.mark.parametrize("keys", [N, M])
@pytest.mark.parametrize("form", [torch.clone, as_numbers], ids=["booleans", "numbers"])
def test_cross_attention_equals_torchs(pair, keys, form):
    x, context = torch.randn(B, N, DIM), torch.randn(B, keys, DIM)
    call = {"attn_mask": form(FUTURE[:, :keys]), "is_causal": True, "key_padding_mask": form(PADDED[:, :keys])}
    assert_close(*(layer(x, context, context, **call) for layer in pair))


@pytest.mark.parametrize("settings", [{"score": "additive"}, {"attend_self": False}, {"attn": "identity"}, {}], ids=str)
def test_a_mask_of_numbers_excludes_what_a_boolean_one_does(settings):
    x, layer = torch.randn(B, N, DIM), MultiheadAttention(DIM, HEADS, batch_first=True, **settings)
    boolean, numbers = (
        layer(x, x, x, attn_mask=change(FUTURE), key_padding_mask=change(PADDED))
        for change in (lambda m: m, as_numbers)
    )
    assert_close(numbers, boolean)


@pytest.mark.parametrize("attn", ATTENTION)
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
@pytest.mark.parametrize("place", [0, 1])
def test_a_finished_encoder_that_would_pass_nested_tensors_is_refused(pair, place):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True), 2).eval()
    encoder.layers[place].self_attn = pair[1]
    with pytest.raises(UserError, match=r"in_proj_weight: replace|three dimensions"):
        encoder(torch.randn(B, N, DIM), src_key_padding_mask=PADDED)


def test_arguments_reach_the_attention():
    layer = MultiheadAttention(DIM, HEADS, 0.2, bias=False, attn="kv+pos", max_len=N, pos_dim=20).attention
    assert isinstance(layer, KVPos)
    assert (layer.dropout, layer.output.bias, layer.to_logit.in_features) == (0.2, None, 20)


class Own(Attention):
    """An attention with a forward of its own."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, context, mask=mask, causal=causal, cache=cache)


X, OTHER = torch.zeros(B, N, DIM), torch.zeros(B, M, DIM)


@pytest.mark.parametrize(
    ("attn", "inputs", "call", "message"),
    [
        ("qkv", [X[0]] * 3, {}, "key and value"),
        ("kv", [X, OTHER, OTHER], {}, "QKV"),
        ("qkv", [X, *[OTHER[:1]] * 2], {}, "key of shape"),
        ("qkv", [X, OTHER, OTHER], {"is_causal": True}, "attn_mask"),
        ("qkv", [X] * 3, {"attn_mask": FUTURE.expand(B * HEADS, N, N)}, "attn_mask"),
        ("qkv", [X] * 3, {"key_padding_mask": PADDED[:1]}, "key_padding_mask"),
        (f"{__name__}.Own", [X] * 3, {"attn_mask": as_numbers(FUTURE)}, "boolean"),
    ],
)
def test_what_it_cannot_compute_is_refused(attn, inputs, call, message):
    with pytest.raises(UserError, match=message):
        MultiheadAttention(DIM, HEADS, attn=attn, batch_first=True)(*inputs, **call)


def test_arguments_of_torchs_that_it_lacks_are_refused():
    with pytest.raises(UserError, match="'kdim'"):
        MultiheadAttention(DIM, HEADS, kdim=4)


def test_a_forward_of_its_own_takes_boolean_masks_and_one_context():
    layer = MultiheadAttention(DIM, HEADS, batch_first=True, attn=f"{__name__}.Own")
    x, other = torch.randn(B, N, DIM), torch.randn(B, M, DIM)
    assert_close(layer(x, other, other)[0], layer.attention(x, other))
    masked = layer(x, x, x, attn_mask=FUTURE, key_padding_mask=PADDED)[0]
    assert_close(masked, layer.attention(x, mask=~(FUTURE | PADDED[:, None, None])))


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


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [({"kdim": 4}, {}), ({"add_bias_kv": True}, {}), ({"add_zero_attn": True}, {}), ({}, {"attn": "mla"})],
    ids=str,
)
def test_a_layer_without_the_same_projections_is_refused(theirs, ours):
    with pytest.raises(UserError, match="from_torch"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(DIM, HEADS, **theirs), **ours)
