"""`MultiheadAttention` with "qkv" equals torch's, and takes its place in torch's encoder layers."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, Attention, KVPos, MultiheadAttention
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


@pytest.mark.parametrize("need_weights", [True, False])
def test_every_projection_is_called_so_that_adapters_of_it_take_effect(pair, need_weights):
    """torch's layer reads the weights of its output projection without a call."""
    x = torch.randn(B, N, DIM)
    called = set()
    for layer, number in zip(pair, (0, 4), strict=True):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, *_: called.add(module))
        layer(x, x, x, need_weights=need_weights)
        assert len(called) == number


def test_arguments_reach_the_attention():
    layer = MultiheadAttention(DIM, HEADS, 0.2, bias=False, attn="kv+pos", max_len=N, pos_dim=20).attention
    assert isinstance(layer, KVPos)
    assert (layer.dropout, layer.output.bias, layer.to_logit.in_features) == (0.2, None, 20)


BIASES = {"attn_mask": torch.randn(N, N), "key_padding_mask": torch.randn(B, N) + as_numbers(PADDED)}


@pytest.mark.parametrize("names", [["attn_mask"], ["key_padding_mask"], ["attn_mask", "key_padding_mask"]], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_numbers_are_added_to_the_logits(pair, names, per_head):
    x = torch.randn(B, N, DIM)
    masks = {name: BIASES[name] for name in names}
    if per_head and "attn_mask" in masks:
        masks["attn_mask"] = torch.randn(B * HEADS, N, N)
    masks = {name: mask.clone().requires_grad_() for name, mask in masks.items()}
    (ours, our_weights), (theirs, their_weights) = (layer(x, x, x, **masks) for layer in reversed(pair))
    assert_close((ours, our_weights), (theirs, their_weights))
    wanted = [*masks.values()]
    assert_close(*(torch.autograd.grad(output.square().sum(), wanted) for output in (ours, theirs)))


@pytest.mark.parametrize("settings", [{"score": "additive"}, {"attend_self": False}, {}], ids=str)
def test_a_mask_of_numbers_excludes_what_a_boolean_one_does(settings):
    x, layer = torch.randn(B, N, DIM), MultiheadAttention(DIM, HEADS, batch_first=True, **settings)
    for mask in (FUTURE, PER_HEAD):
        boolean, numbers = (layer(x, x, x, attn_mask=m, key_padding_mask=PADDED) for m in (mask, as_numbers(mask)))
        assert_close(numbers, boolean)


@pytest.mark.parametrize("attn", ATTENTION)
def test_equal_inputs_are_one_sequence_by_whatever_name(attn):
    settings = {"max_len": N} | ({"attend_self": False} if attn != "identity" else {}) | {"rope": 1.0}
    layer = MultiheadAttention(DIM, HEADS, attn=attn, batch_first=True, **settings).double()
    x = torch.randn(B, N, DIM, dtype=torch.float64)
    expected = layer(x, x, x, attn_mask=FUTURE)
    assert_close(layer(x, x.clone(), x.clone(), attn_mask=FUTURE), expected)
    assert_close(layer(*[x.transpose(0, 1).transpose(0, 1) for _ in "qkv"], attn_mask=FUTURE), expected)
    assert_close(torch.vmap(lambda x: layer(x, x, x, attn_mask=FUTURE))(x), expected)
    assert layer.to("meta")(*[x.to("meta")] * 3, attn_mask=FUTURE.to("meta"))[0].shape == x.shape


def test_vmap_takes_three_inputs(pair):
    x, key, value = torch.randn(3, B, N, DIM)
    assert_close(torch.vmap(pair[1])(x, key, value), pair[1](x, key, value))


@pytest.mark.parametrize("settings", [{"rope": 1.0}, {"attend_self": False}], ids=str)
@pytest.mark.parametrize("keys", [N, M])
def test_cross_attention_has_neither_positions_nor_self(settings, keys):
    """Also if there are as many keys as queries."""
    x, other = torch.randn(B, N, DIM), torch.randn(B, keys, DIM)
    layer = MultiheadAttention(DIM, HEADS, batch_first=True, attn="qkv", **settings)
    plain = MultiheadAttention(DIM, HEADS, batch_first=True, attn="qkv")
    plain.load_state_dict(layer.state_dict())
    assert_close(layer(x, other, other), plain(x, other, other))
    assert_close(layer(x, other, other + 1), plain(x, other, other + 1))


@pytest.mark.parametrize("keys", [N, M])
def test_keys_and_values_may_be_projected_from_different_inputs(pair, keys):
    query, key, value = torch.randn(B, N, DIM), torch.randn(B, keys, DIM), torch.randn(B, keys, DIM)
    assert_close(*(layer(query, key, value) for layer in pair))


@pytest.mark.parametrize("attn", ["kv", "kv+pos", "kv+phase"])
def test_a_query_with_positions_has_keys_with_positions(attn):
    """As in DETR: query and key are x + positions, the value is x."""
    layer, x = MultiheadAttention(DIM, HEADS, attn=attn, batch_first=True, max_len=N).double(), torch.randn(B, N, DIM)
    k, x = (x + torch.randn(N, DIM)).double(), x.double()
    inner = layer.attention
    weights, value = inner.weights(k), inner.project(x)[2]
    assert_close(layer(k, k, x), (inner.merge(weights @ value, 0), weights.mean(1)))


def test_without_a_batch(pair):
    x, context = torch.randn(N, DIM), torch.randn(M, DIM)
    padded = torch.tensor([False, True, False, False])
    per_head = torch.rand(HEADS, N, M) < 0.3
    for call in ({}, {"key_padding_mask": padded}, {"attn_mask": per_head}, {"average_attn_weights": False}):
        assert_close(*(layer(x, context, context, **call) for layer in pair))


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_it_compiles_whole_and_exports_with_numbers(pair, mask):
    x, numbers = torch.randn(B, N, DIM), {mask: as_numbers({"attn_mask": FUTURE, "key_padding_mask": PADDED}[mask])}
    ours = pair[1]
    expected = ours(x, x, x, **numbers)
    assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x, x.clone(), x, **numbers), expected)
    assert_close(torch.export.export(ours, (x, x, x), kwargs=numbers).module()(x, x, x, **numbers), expected)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_with_padding_compiles_whole():
    block = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
    block.self_attn = MultiheadAttention(DIM, HEADS, batch_first=True)
    encoder = nn.TransformerEncoder(block, 2).eval()
    x = torch.randn(B, N, DIM)
    with torch.no_grad():
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)(x, src_key_padding_mask=PADDED)
        assert_close(compiled, encoder(x, src_key_padding_mask=PADDED))


def test_what_it_cannot_compute_is_refused(pair):
    x, other = torch.randn(B, N, DIM), torch.randn(B, N, DIM)

    def layer(attn, **settings):
        return MultiheadAttention(DIM, HEADS, batch_first=True, attn=attn, max_len=N, **settings)

    with pytest.raises(UserError, match="one projection for query and key, so these inputs must be equal: use QKV"):
        layer("kv")(x, other, other)
    for attn in ("q-kv", "k", "mla", "q-kv-deepseek"):
        with pytest.raises(UserError, match=r"one projection for (key|query) and value"):
            layer(attn)(x, x, other)
    with pytest.raises(UserError, match="use QKV"):
        layer("qkv+pos")(x, other[:, :M], other[:, :M])
    with pytest.raises(UserError, match="in a compiled graph pass one tensor as query and key"):
        torch.vmap(layer("qkv", rope=1.0))(x, x, x)
    with pytest.raises(UserError, match=r"value of shape \(3, 4, 8\)"):
        pair[1](x, x, other[:, :M])
    with pytest.raises(UserError, match=r"attn_mask of torch.int64"):
        pair[1](x, x, x, attn_mask=FUTURE.long())


class Own(Attention):
    """An attention with a forward of its own."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, context, mask=mask, causal=causal, cache=cache)


def test_a_forward_of_its_own_takes_one_context():
    layer = MultiheadAttention(DIM, HEADS, batch_first=True, attn=f"{__name__}.Own", rope=1.0)
    x, other = torch.randn(B, N, DIM), torch.randn(B, N, DIM)
    assert_close(layer(x, x.clone(), x.clone()), layer(x, x, x))
    assert_close(layer(x, other, other.clone())[0], layer.attention(x, other))
    mask = {"attn_mask": FUTURE, "key_padding_mask": PADDED}
    numbers = {name: as_numbers(one) for name, one in mask.items()}
    assert_close(layer(x, x, x, **numbers), layer(x, x, x, **mask))
    with pytest.raises(UserError, match="its own forward: pass the same tensor as key and value"):
        layer(x, x, other)
    with pytest.raises(UserError, match="in a compiled graph pass one tensor three times"):
        torch.vmap(layer)(x, other, other)


@pytest.mark.parametrize(
    ("shape", "call", "message"),
    [
        ((HEADS, N, DIM), {"attn_mask": (HEADS, N, N)}, r"attn_mask .*\(2, 5, 5\).*expected \(5, 5\) or \(4, 5, 5\)"),
        ((B, N, DIM), {"attn_mask": (1, N)}, r"attn_mask of shape \(1, 5\)"),
        ((B, N, DIM), {"attn_mask": (B, 1, N, N)}, r"attn_mask of shape \(3, 1, 5, 5\)"),
        ((B, N, DIM), {"key_padding_mask": (B, 1)}, r"key_padding_mask of shape \(3, 1\): expected \(3, 5\)"),
        ((B, N, DIM), {"key_padding_mask": (1, N)}, r"key_padding_mask of shape \(1, 5\)"),
        ((DIM,), {}, r"query of shape \(8,\): expected \(B, N, 8\)"),
        ((1, B, N, DIM), {}, r"query of shape \(1, 3, 5, 8\): expected \(B, N, 8\)"),
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
    with pytest.raises(UserError, match="5 queries and 4 keys: also pass an attn_mask"):
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
    with pytest.raises(UserError, match="from_torch does not support a layer with kdim"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(DIM, HEADS, **settings))


def test_the_constructor_takes_torchs_arguments_in_torchs_order():
    theirs, ours = (inspect.signature(cls.__init__).parameters for cls in (nn.MultiheadAttention, MultiheadAttention))
    assert [*ours][: len(theirs)] == [*theirs]
    assert {name: ours[name].default for name in theirs} == {name: theirs[name].default for name in theirs}
    layer = MultiheadAttention(DIM, HEADS, 0.25, True, False, False, DIM, None, True, "meta", torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize("setting", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4}, {"vdim": 4}], ids=str)
def test_an_argument_of_torchs_that_is_not_supported_is_named(setting):
    with pytest.raises(UserError, match=f"{next(iter(setting))}=.* is not supported"):
        MultiheadAttention(DIM, HEADS, **setting)


def test_attributes_are_torchs(pair):
    theirs, ours = pair
    names = ("embed_dim", "kdim", "vdim", "num_heads", "dropout", "batch_first", "head_dim", "bias_k", "bias_v")
    for name in (*names, "add_zero_attn"):
        assert getattr(ours, name) == getattr(theirs, name)
    for use in (nn.init.xavier_uniform_, nn.init.normal_, torch.sum):
        with pytest.raises(UserError, match=r"its weights are in attention.projection"):
            use(ours.in_proj_weight)


@pytest.mark.parametrize("bias", [True, False])
def test_initial_weights_are_drawn_as_torchs(bias):
    torch.manual_seed(0)
    layers = [cls(256, 8, bias=bias) for cls in (nn.MultiheadAttention, MultiheadAttention)]
    theirs, ours = layers[0].in_proj_weight.chunk(3)[1], layers[1].attention.projection["k"].weight
    for measure in (torch.std, torch.max, torch.min):
        assert_close(measure(ours), measure(theirs), rtol=0.01, atol=0)
    assert_close(layers[1].attention.output.weight.std(), layers[0].out_proj.weight.std(), rtol=0.01, atol=0)
    assert not any(p.any() for name, p in layers[1].named_parameters() if "bias" in name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("attn", ["qkv", "kv", "q-kv", "k"])
def test_torchs_layer_computes_the_same(attn, bias):
    ours = MultiheadAttention(DIM, HEADS, 0.25, bias, attn=attn, batch_first=True, dtype=torch.float64).eval()
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs, x = ours.to_torch(), torch.randn(B, N, DIM, dtype=torch.float64)
    assert (theirs.dropout, theirs.training, theirs.batch_first) == (0.25, False, True)
    assert_close(theirs(x, x, x, key_padding_mask=PADDED), ours(x, x, x, key_padding_mask=PADDED))
    if attn == "qkv":
        back = MultiheadAttention.from_torch(theirs).state_dict()
        assert all(torch.equal(back[name], p) for name, p in ours.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [{"attn": "kv+pos"}, {"attn": "mla"}, {"rope": 1.0}, {"score": "dot"}, {"kv_heads": 1}, {"attend_self": False}],
    ids=str,
)
def test_what_torchs_layer_cannot_compute_is_refused(settings):
    with pytest.raises(UserError, match="torch"):
        MultiheadAttention(DIM, HEADS, **{"attn": "qkv", "max_len": N, **settings}).to_torch()
