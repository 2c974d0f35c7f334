"""Recording attention maps changes nothing else."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, QKV, KVCache, MultiheadAttention, record_maps
from tests.helpers.layers import MAX_LEN, SMALL


@pytest.mark.parametrize("name", ATTENTION)
def test_each_layers_map_is_recorded_and_the_output_is_unchanged(name):
    first, second, x = SMALL.layer(name), SMALL.layer(name), SMALL.input()
    model = nn.Sequential(first, nn.ReLU(), second)
    with record_maps(model) as maps:
        output = model(x)
    weights = [first.weights(x), second.weights(first(x).relu())]
    assert_close([map_.weights for map_ in maps], weights, check_stride=False)
    assert [map_.layer for map_ in maps] == ["0", "2"]
    if not first.has_logits:
        assert all(map_.scores is None for map_ in maps)
    else:
        assert_close([map_.scores.softmax(-1) for map_ in maps], weights, check_stride=False)
    assert torch.equal(output, model(x))
    assert len(maps) == 2  # recording has ended


@pytest.mark.parametrize("name", ATTENTION)
def test_maps_of_cached_decoding_are_the_rows_of_the_whole_map(name):
    layer, x, cache = SMALL.layer(name), SMALL.input(), KVCache(MAX_LEN)
    with record_maps(layer) as maps:
        for chunk in x.split([3, 1, 1], dim=1):
            layer(chunk, causal=True, cache=cache)
    rows = [nn.functional.pad(m.weights, (0, SMALL.length - m.weights.shape[-1])) for m in maps]
    assert_close(torch.cat(rows, dim=2), layer.weights(x, causal=True))


@pytest.mark.parametrize("call", [lambda layer, x: layer(x, None), lambda layer, x: layer(x=x, context=None)])
def test_self_attention_has_scores_however_it_is_called(call):
    layer, x = QKV(8, 2), torch.randn(1, 3, 8)
    with record_maps(layer) as maps:
        call(layer, x)
        layer(x, torch.randn(1, 4, 8))
    assert torch.equal(maps[0].scores, layer.scores(x))
    assert maps[1].scores is None  # its map is not square


@pytest.mark.parametrize("length", [3, 4])
def test_the_maps_of_torchs_interface_are_those_that_it_returns(length):
    layer = MultiheadAttention(8, 2, attn="qkv", batch_first=True)
    x, bias = torch.randn(2, 3, 8), torch.randn(3, length)
    other = x if length == 3 else torch.randn(2, length, 8)
    with record_maps(layer) as maps:
        _, weights = layer(x, other, other, attn_mask=bias, average_attn_weights=False)
    torch.testing.assert_close(maps[0].weights, weights)
    assert (maps[0].scores is None) == (length == 4)
    if length == 3:
        torch.testing.assert_close((maps[0].scores + bias).softmax(-1), weights)
