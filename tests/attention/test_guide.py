"""The attentions of the guide: their maps, their fast ways, their caches."""

import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import kvt
from kvt.attention import QKV, KVCache, record_maps
from kvt.attention.kernels import product
from kvt.models import CausalLM
from kvt.models.embedding import LearnedPositions
from kvt.models.generation import sample
from tests.conftest import REPOSITORY

GUIDE = (REPOSITORY / "docs/guides/attention.md").read_text()
NAMES: dict = {"__name__": "guide", "torch": torch, "kvt": kvt}
for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
    if re.search(r"^class (NearKV|Gated|Window|Linear|Sum|InTimm)", block, re.MULTILINE):
        exec(compile(block, "attention.md", "exec"), NAMES)
CLASSES = [NAMES[name] for name in ("NearKV", "Window", "Linear", "Recurrent")]
MASK = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[:, None, None]


@pytest.mark.parametrize("setting", [{}, {"causal": True}, {"mask": MASK}, {"mask": MASK, "causal": True}], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_the_output_is_the_map_times_the_values(cls, setting):
    torch.manual_seed(0)
    layer, x = cls(8, 2).double(), torch.randn(2, 7, 8, dtype=torch.double)
    with record_maps(layer) as maps:
        output = layer(x, **setting)
    assert_close(maps[0].weights.sum(-1), torch.ones(2, 2, 7, dtype=torch.double))
    _, _, v = layer.project(x)
    assert_close(output, layer.merge(product(maps[0].weights, v), 0))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_query_without_any_key_gets_zeros(cls):
    weights = cls(8, 2).weights(torch.randn(2, 7, 8), mask=MASK & (torch.arange(7) != 3).unsqueeze(-1))
    assert torch.equal(weights[:, :, 3], torch.zeros(2, 2, 7))
    assert weights.isfinite().all()


def test_a_gate_scales_every_channel_before_the_output_projection():
    torch.manual_seed(0)
    gated, x = NAMES["Gated"](8, 2), torch.randn(2, 7, 8)
    heads = (gated.weights(x) @ gated.project(x)[2]).transpose(1, 2).flatten(2)
    assert_close(gated(x), gated.output(gated.gate(x).sigmoid() * heads))


def test_a_window_of_all_tokens_is_qkv():
    torch.manual_seed(0)
    wide, x = NAMES["Window"](8, 2, window=7), torch.randn(2, 7, 8)
    plain = QKV(8, 2)
    plain.load_state_dict(wide.state_dict())
    assert_close(wide(x, causal=True), plain(x, causal=True))
    wide.window = 2
    assert (wide.weights(x)[0, 0].nonzero().diff().abs() <= 1).all()


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_written_does_not_depend_on_the_cache(cls):
    torch.manual_seed(0)
    model = CausalLM(lambda dim: cls(dim, 2), LearnedPositions(11, 8, 12), depth=2).double().eval()
    tokens = torch.randint(11, (3, 12))
    whole, caches = model(tokens), model.make_caches()
    for token in range(12):
        assert_close(model.next_logits(tokens[:, token : token + 1], caches), whole[:, token])
    for cache in caches:
        cache.select(torch.tensor([2, 0]))
        assert len(cache.buffers[0]) == 2
    written = torch.cat([*sample(model, tokens[:, :4], 20, temperature=0)], 1)  # beyond the window, too
    text = tokens[:, :4]
    for _ in range(20):
        text = torch.cat([text, model(text[:, -12:])[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, text[:, 4:])


def test_sums_take_the_same_room_however_long_the_text():
    layer = NAMES["Recurrent"](8, 2)
    cache = layer.make_cache(100)
    sizes = set()
    for _ in range(5):
        layer(torch.randn(1, 3, 8), causal=True, cache=cache)
        sizes.add(cache.nbytes)
    assert sizes == {2 * 4 * 5 * 4}  # heads, D, D + 1, bytes
    assert isinstance(QKV(8, 2).make_cache(100), KVCache)


class Block(nn.Module):
    """A block of a vision transformer with the attention of timm."""

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.num_heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x, attn_mask=None):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask).transpose(1, 2).flatten(2))

    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), self.Attention(dim, heads)

    def forward(self, x, attn_mask=None):
        return x + self.attn(self.norm(x), attn_mask=attn_mask)


def test_a_model_of_another_library_takes_any_attention():
    torch.manual_seed(0)
    model, x, mask = nn.ModuleList(Block(8, 2) for _ in range(2)), torch.randn(2, 5, 8), MASK[..., :5]
    expected = model[1](model[0](x), mask)
    NAMES["replace_attention"](model, "qkv")
    assert_close(model[1](model[0](x), mask), expected)
    model = nn.ModuleList([Block(8, 2)])
    NAMES["replace_attention"](model, "kv")
    model[0](x).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
