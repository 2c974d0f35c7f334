"""Looking at the maps changes nothing else."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, KVCache, record_maps
from tests.helpers.layers import MAX_LEN, Case

case = Case(heads=4, group=2, head_dim=3, batch=2, length=5, seed=0)


@pytest.mark.parametrize("name", ATTENTION)
def test_recorded_maps_are_those_of_each_layer_and_the_output_is_untouched(name):
    first, second, x = case.layer(name), case.layer(name), case.input()
    model = nn.Sequential(first, nn.ReLU(), second)
    with record_maps(model) as maps:
        output = model(x)
    inputs = [x, first(x).relu()]
    weights = [layer.weights(seen) for layer, seen in zip((first, second), inputs, strict=True)]
    assert_close([map_.weights for map_ in maps], weights, check_stride=False)
    assert [map_.layer for map_ in maps] == ["0", "2"]
    if name == "identity":
        assert all(map_.scores is None for map_ in maps)
    else:
        assert_close([map_.scores.softmax(-1) for map_ in maps], weights, check_stride=False)
    assert torch.equal(output, model(x))
    assert len(maps) == 2  # the recording is over


@pytest.mark.parametrize("name", ATTENTION)
def test_maps_of_cached_decoding_are_the_rows_of_the_whole_map(name):
    layer, x, cache = case.layer(name), case.input(), KVCache(MAX_LEN)
    with record_maps(layer) as maps:
        chunks = [layer(chunk, causal=True, cache=cache) for chunk in x.split([3, 1, 1], dim=1)]
    assert_close(torch.cat(chunks, dim=1), layer(x, causal=True))
    rows = [nn.functional.pad(m.weights, (0, case.length - m.weights.shape[-1])) for m in maps]
    assert_close(torch.cat(rows, dim=2), layer.weights(x, causal=True))


def test_the_recording_ends_even_with_an_error():
    layer = case.layer("kv")
    with pytest.raises(RuntimeError), record_maps(layer) as maps:
        layer(case.input()[..., 1:])
    layer(case.input())
    assert maps == []
