"""Taggers, ViT and blocks against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from kvt.attention import AttentionFactory, KVCache
from kvt.attention.positions import sinusoid
from kvt.models import ListTagger, ViT
from kvt.models.blocks import Encoder, EncoderBlock, FeedForward, PreNorm


@pytest.fixture
def tagger() -> ListTagger:
    model = ListTagger(AttentionFactory("kv", heads=2), vocab_size=10, length=6, dim=8, depth=2, dropout=0.3)
    return model.double().eval()


@pytest.fixture(params=["class", "mean"])
def vit(request) -> ViT:
    make = AttentionFactory("kv", heads=2, bias=False)
    sizes = {"channels": 3, "height": 8, "width": 12, "classes": 5, "patch": 4, "dim": 16, "depth": 2}
    return ViT(make, **sizes, pool=request.param).double().eval()


def test_the_tagger_is_the_one_hot_formula(tagger):
    symbols = torch.randint(10, (4, 6))
    x = tagger.embed(F.one_hot(symbols, 10).double()) + sinusoid(6, 8).double()
    for block in tagger.encoder:
        attention, feed_forward = block.attention, block.feed_forward
        x = attention.norm(x + attention.layer(x))
        hidden = F.relu(feed_forward.layer[0](x))
        x = feed_forward.norm(x + feed_forward.layer[3](hidden))
    torch.testing.assert_close(tagger(symbols), tagger.head(x))


def test_the_tagger_starts_with_xavier_projections_and_zero_biases(tagger):
    for block in tagger.encoder:
        for linear in [*block.attention.layer.projection.values(), block.attention.layer.output]:
            assert not linear.bias.any()
            assert linear.weight.abs().max() <= (6 / sum(linear.weight.shape)) ** 0.5


def test_vit_reads_the_class_token_or_the_mean_of_the_patches_after_pre_norm_blocks(vit, request):
    image = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    patches = F.unfold(image, 4, stride=4).unflatten(1, (3, 4, 4)).permute(0, 4, 2, 3, 1).flatten(2)
    x = torch.cat([vit.class_token.expand(2, 1, -1), vit.embed(patches)], 1) + vit.positions
    for block in vit.encoder:
        x = x + block.attention.layer(block.attention.norm(x))
        network = block.feed_forward.layer
        x = x + network[3](F.gelu(network[0](block.feed_forward.norm(x))))
    pooled = {"class": x[:, 0], "mean": x[:, 1:].mean(1)}[request.node.callspec.params["vit"]]
    torch.testing.assert_close(vit(image), vit.head(pooled))


def test_an_exported_vit_takes_any_batch(vit):
    images = torch.randn(5, 3, 8, 12, dtype=torch.float64)
    exported = torch.export.export(vit, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(exported.module()(images), vit(images))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("token", [0, -1])
def test_one_token_alone_equals_that_token_of_all(token, causal):
    make = AttentionFactory("kv+pos", heads=2, max_len=7, pos_dim=5)
    encoder = Encoder(
        3, lambda: EncoderBlock(PreNorm(8, make(8)), PreNorm(8, FeedForward(8, 16, torch.nn.ReLU)))
    ).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(encoder(x, token=token, causal=causal), encoder(x, causal=causal)[:, token])
    caches = [KVCache(7) for _ in encoder]
    encoder(x[:, :4], caches, token=-1, causal=True)
    torch.testing.assert_close(encoder(x[:, 4:], caches, token=-1, causal=True), encoder(x, causal=True)[:, -1])
