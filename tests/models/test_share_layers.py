"""Layers that share keys and values: the formula, caches that are counted once, and what cannot share."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from kvt.attention import AttentionFactory, record_maps, symmetric_share
from kvt.models import CausalLM
from kvt.models.embedding import make_embedding
from kvt.system import UserError
from kvt.tasks import LanguageModelTask
from tests.helpers.layers import gradients
from tests.helpers.small_models import DIM, HEADS, MAX_LEN, SYMBOLS, language_model, some

KINDS = ["qkv", "qkv, grouped", "qkv, rope", "q-kv", "q-kv-gemma", "q-kv-deepseek", "qkv+pos", "mla", "mla, rope"]
BYTES = {"spec": {"tokenizer": "bytes", "length": 8}, "dim": 16, "depth": 4, "heads": 2, "dropout": 0.0}


def fed(block, x):
    network = block.feed_forward.layer
    return x + network[3](F.relu(network[0](block.feed_forward.norm(x))))


@pytest.mark.parametrize(("depth", "share"), [(3, 2), (4, 2), (3, 3), (2, 5)])
def test_layers_attend_to_the_keys_and_values_of_the_lowest_of_their_group(depth, share):
    """Layer by layer, head by head, from the weights alone; gradients of all weights, too."""
    model, tokens = language_model("qkv", depth=depth, share=share), some(3, 6)
    past = torch.ones(6, 6, dtype=torch.bool).tril()
    x = model.embedding(tokens)
    for place, block in enumerate(model.encoder):
        layer, normed = block.attention.layer, block.attention.norm(x)
        if place % share == 0:
            keys, values = (layer.projection[name](normed).chunk(HEADS, -1) for name in "kv")
        heads = []
        for query, key, value in zip(layer.projection["q"](normed).chunk(HEADS, -1), keys, values, strict=True):
            logits = query @ key.mT / (DIM / HEADS) ** 0.5
            heads.append(logits.masked_fill(~past, float("-inf")).softmax(-1) @ value)
        x = fed(block, x + layer.output(torch.cat(heads, -1)))
    expected, weights = model.head(model.norm(x)), [*model.parameters()]
    assert_close(model(tokens), expected)
    assert_close(gradients(model(tokens), *weights), gradients(expected, *weights))


@pytest.mark.parametrize("kind", KINDS)
def test_any_attention_with_a_query_of_its_own_shares(kind):
    model, tokens = language_model(kind, depth=3, share=2), some(3, 6)
    x = model.embedding(tokens)
    for place, block in enumerate(model.encoder):
        layer, normed = block.attention.layer, block.attention.norm(x)
        query = layer.query(normed)
        if place % 2 == 0:
            _, keys, values = layer.rotate(*layer.project(normed), 0)
        query, *_ = layer.rotate(query, query, query, 0)
        weights = layer.attention_weights(query, layer._repeat_groups(keys), None, True)
        x = fed(block, x + layer.merge(weights @ layer._repeat_groups(values), 0))
    assert_close(model(tokens), model.head(model.norm(x)))


@pytest.mark.parametrize("chunks", [[1] * MAX_LEN, [3, 1, 4]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_each_group_is_as_good_as_the_whole(kind, chunks):
    model, alone, tokens = language_model(kind, depth=3, share=2), language_model(kind, depth=3), some(3, MAX_LEN)
    whole, caches, read = model(tokens), model.make_caches(), 0
    for chunk in tokens.split(chunks, dim=1):
        read += chunk.shape[1]
        assert_close(model.next_logits(chunk, caches), whole[:, read - 1])
    of_a_layer = alone.make_caches()
    alone.next_logits(tokens, of_a_layer)
    assert sum(cache.nbytes for cache in caches) == 2 * of_a_layer[0].nbytes


def test_maps_are_those_of_each_layer_and_the_cache_stays_as_it_is():
    model, tokens = language_model("qkv, rope", depth=2, share=2), some(2, 5)
    with record_maps(model) as maps:
        logits = model(tokens)
    assert_close(logits, model(tokens))
    assert [tuple(of_layer.weights.shape) for of_layer in maps] == [(2, HEADS, 5, 5)] * 2
    caches = model.make_caches()
    model.next_logits(tokens[:, :-1], caches)
    with record_maps(model) as rows:
        model.next_logits(tokens[:, -1:], caches)
    for row, whole in zip(rows, maps, strict=True):
        assert_close(row.weights, whole.weights[:, :, -1:])
    first, second = (block.attention.layer for block in model.encoder)
    assert symmetric_share(first).isfinite().all()
    assert symmetric_share(second).isnan().all()  # its keys are of another layer's tokens


@pytest.mark.parametrize("share", [1, 2])
def test_recomputed_layers_have_the_same_gradients(share):
    """Dropout draws the same numbers again."""
    found, settings = [], {**BYTES, "attn": "qkv", "positions": "rotary", "share_layers": share, "dropout": 0.3}
    for recompute in (False, True):
        torch.manual_seed(0)
        task = LanguageModelTask(**settings, recompute=recompute).train()
        found.append(gradients(task(torch.arange(16).view(2, 8)), *task.parameters()))
    assert_close(*found)


def test_a_layer_that_borrows_has_fewer_weights_and_starts_symmetric_where_it_can():
    settings = {**BYTES, "attn": "qkv", "attn_kwargs": {"init": "symmetric"}}
    one, two = (LanguageModelTask(**settings, share_layers=share) for share in (1, 2))
    assert one.num_parameters - two.num_parameters == 2 * 2 * 16 * 17
    assert torch.equal(*(two.model.encoder[0].attention.layer.projection[name].weight for name in "qk"))


@pytest.mark.parametrize(
    ("attn", "share", "message"),
    [
        ("kv", 2, "share_layers: KV has no query projection: use qkv, q-kv or mla"),
        ("tests.bench.test_bench.Mean", 2, "share_layers: Mean is not a kvt.attention.Attention"),
        ("qkv", 0, "share_layers=0"),
    ],
)
def test_what_cannot_share_is_named(attn, share, message):
    make = AttentionFactory(attn, heads=2)
    with pytest.raises(UserError, match=message):
        CausalLM(make, make_embedding("none", SYMBOLS, DIM, MAX_LEN), depth=2, share_layers=share)
