"""Small language models and translators in float64, with predictions far from uniform."""

from typing import Any

import torch
from torch import Tensor

from kvt.attention import ATTENTION, KV, AttentionFactory
from kvt.models import CausalLM, Seq2Seq
from kvt.models.embedding import make_embedding

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ATTENTION},
    "qkv, grouped": ("qkv", {"kv_heads": 2}),
    "kv, grouped": ("kv", {"kv_heads": 1}),
    "kv+pos, each head": ("kv+pos", {"per_head": True}),
    "kv+pos, learned": ("kv+pos", {"pos": "learned", "per_head": True, "kv_heads": 2}),
    "qkv, rope": ("qkv", {"rope": 1.0, "kv_heads": 2}),
    "kv, rope": ("kv", {"rope": 1.0}),
    "kv+pos, rope": ("kv+pos", {"rope": 1.0}),
    "mla, rope": ("mla", {"rope": 1.0, "kv_heads": 2, "rank": 3}),
    "kv, no self": ("kv", {"rope": 1.0, "attend_self": False}),
    "kv+pos, no self": ("kv+pos", {"per_head": True, "attend_self": False}),
}
"""Attentions of a model: a name, and the user's settings."""
SYMBOLS, MAX_LEN, HEADS, DIM = 11, 8, 4, 8
PAD, BOS, EOS = 0, 1, 2


def factory(kind: str, **setting: Any) -> AttentionFactory:
    name, asked = KINDS[kind]
    return AttentionFactory(name, asked, **{"heads": HEADS, "max_len": MAX_LEN, "pos_dim": 6, **setting})


def language_model(
    kind: str, positions: str = "sinusoidal", *, seed: int = 0, depth: int = 2, share: int = 1
) -> CausalLM:
    embedding = make_embedding(positions, SYMBOLS, DIM, MAX_LEN)
    return opinionated(CausalLM(factory(kind), embedding, depth=depth, share_layers=share), seed)


def translator(kind: str, *, seed: int = 0, ends: float = 0, symbols: int = SYMBOLS, max_len: int = MAX_LEN) -> Seq2Seq:
    """Return a translator from `SYMBOLS` symbols to `symbols`; `ends` is added to the logit of <eos>."""
    sizes = {"source_vocab_size": SYMBOLS, "target_vocab_size": symbols, "pad": PAD, "dim": DIM, "depth": 2}
    attention = factory(kind, max_len=max(max_len, MAX_LEN))
    model = opinionated(Seq2Seq(attention, max_len=max_len, **sizes), seed)
    with torch.no_grad():
        model.generator.bias[EOS] += ends
    return model


@torch.no_grad()
def opinionated(model: Any, seed: int) -> Any:
    """Redraw every parameter, so large that maps and predictions are far from uniform."""
    torch.manual_seed(seed)
    for name, parameter in model.double().eval().named_parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            gain = 3 if name.startswith(("head", "generator")) else 2
            parameter.copy_(torch.randn_like(parameter) * gain * parameter.shape[-1] ** -0.5)
    return model


def some(*shape: int, seed: int = 0, lowest: int = 3) -> Tensor:
    """Return random symbols, none of them special."""
    return torch.randint(lowest, SYMBOLS, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], longest: int | None = None, seed: int = 0) -> Tensor:
    """Return a padded batch of sentences of these lengths."""
    sentences = some(len(lengths), longest or max(lengths), seed=seed)
    is_padding = torch.arange(sentences.shape[1]) >= torch.tensor(lengths)[:, None]
    return sentences.masked_fill(is_padding, PAD)


class Forgetful(KV):
    """An attention that ignores its cache."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, mask=mask, causal=causal)
