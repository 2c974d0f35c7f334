"""Keys that also act as values in production: each attention is its formula, token by token."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from torch.testing import assert_close

from kvt.attention import AttentionFactory
from kvt.bench import cache_bytes_per_token
from tests.attention.test_rotary import complex_rotation
from tests.helpers.layers import SMALL, cases

NAMES = ["q-kv-gemma", "q-kv-deepseek"]


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def heads(layer, name, x):  # (B, heads, N, D), each key repeated for its group
    return layer._repeat_groups(layer.projection[name](x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2))


def redrawn(case, name, **setting):
    """The layer, with norms that are not the identity."""
    layer = case.layer(name, **setting)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@settings(max_examples=12)
@given(case=cases())
def test_gemmas_value_is_the_key_before_its_scale_and_rotation(case):
    layer, x = redrawn(case, "q-kv-gemma", rope=1.0, rope_base=1000.0), case.input()
    q, k = (rms(heads(layer, name, x)) for name in "qk")
    turned = [complex_rotation(t * norm.weight, 0, case.head_dim, 1000.0)
              for t, norm in ((q, layer.query_norm), (k, layer.key_norm))]  # fmt: skip
    weights = (turned[0] @ turned[1].mT / case.head_dim**0.5).softmax(-1)
    assert_close(layer(x), layer.output((weights @ k).transpose(1, 2).flatten(2)))


@settings(max_examples=12)
@given(case=cases())
def test_deepseeks_value_is_turned_by_the_distance(case):
    layer, x = redrawn(case, "q-kv-deepseek", rope=1.0, rope_base=1000.0), case.input()
    q, k = rms(heads(layer, "q", x)), rms(heads(layer, "k", x)) * layer.key_norm.weight
    outputs = []
    for i in range(case.length):
        turned = torch.cat(
            [complex_rotation(k[:, :, j : j + 1], j - i, case.head_dim, 1000.0) for j in range(case.length)], 2
        )
        weights = (turned @ q[:, :, i, :, None] / case.head_dim**0.5).softmax(2)
        outputs.append((weights * turned).sum(2).flatten(1))
    assert_close(layer(x), layer.output(torch.stack(outputs, 1)))


@pytest.mark.parametrize(("name", "channels"), [("q-kv-gemma", 16), ("q-kv-deepseek", 8)])
def test_the_models_share_of_channels_is_rotated(name, channels):
    assert AttentionFactory(name, heads=2)(128).rotary.channels == channels
    assert AttentionFactory(name, heads=32)(128).rotary.channels == 2  # of four, a pair at least
    assert AttentionFactory(name, {"rope": 0.5}, heads=2)(128).rotary.channels == 32


def test_gemmas_slowest_channels_turn_as_in_the_model():
    """Frequencies are 10⁶^(−2i/D) over all D channels of a head, of which the first quarter is rotated."""
    rotary = AttentionFactory("q-kv-gemma", heads=1)(512).rotary
    frequencies = torch.tensor([rotary.base ** (-2 * i / rotary.channels) for i in range(64)])
    assert_close(frequencies, torch.tensor([1e6 ** (-2 * i / 512) for i in range(64)]))


def test_deepseek_caches_one_tensor_and_gemma_two_which_rope_makes_of_q_kv():
    token, number = SMALL.input()[:1], 8 * SMALL.dim  # bytes of a tensor of one token
    layers = {name: SMALL.layer(name, kv_heads=4) for name in ("qkv", "q-kv", *NAMES)}
    layers["q-kv, rope"] = SMALL.layer("q-kv", kv_heads=4, rope=1.0)
    found = {name: cache_bytes_per_token(layer, token) / number for name, layer in layers.items()}
    assert found == {"qkv": 2, "q-kv": 1, "q-kv-gemma": 2, "q-kv-deepseek": 1, "q-kv, rope": 2}
    assert AttentionFactory("q-kv-deepseek", heads=4)(16).kv_heads == 1


@pytest.mark.parametrize("name", NAMES)
def test_under_autocast_the_norms_run_torchs_fused_kernel(name):
    """Torch warns where the types of an input and of a weight keep it from the fused kernel."""
    layer, x = SMALL.layer(name).float(), SMALL.input().float()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            layer(x)
    finally:
        torch.set_warn_always(False)
