"""A mistake in the settings or the input of an attention is a UserError that names it."""

import pytest
import torch

from kvt.attention import ATTENTION, MLA, QKV, AttentionFactory, KVPhase, KVPos
from kvt.attention.rotary import Rotary
from kvt.models import ViT
from kvt.system import UserError


class Mean(QKV):
    """Overrides `attend` without a map."""

    def attend(self, q, k, v, mask, causal, attend_self=True):
        return v.mean(2, keepdim=True).expand_as(q)


X, LAYER = torch.zeros(3, 5, 8), QKV(8, 2)
OWN = """
from kvt.attention import KV

class Sloped(KV):
    def __init__(self, dim, heads, *, slope=1.0, **kwargs):
        super().__init__(dim, heads, **kwargs)
"""


def make(attn, **attn_kwargs):
    return lambda: AttentionFactory(attn, attn_kwargs, heads=2, max_len=8)(8)


WITHOUT_CONTEXT = [name for name, attention in ATTENTION.items() if attention.projections[0] != "q"]
WITHOUT_CONTEXT += ["q-kv-deepseek", "q-kv-gemma", "qkv+pos"]
MISTAKES = [
    (lambda: QKV(8, 3), ["heads=3", "dim=8"]),
    (lambda: QKV(8, 4, kv_heads=3), ["kv_heads=3"]),
    (lambda: QKV(8, 2, dropout=1.0), ["dropout=1.0"]),
    (lambda: QKV(8, 2, init="symetric"), ["'symmetric'"]),
    (lambda: KVPos(8, 2, max_len=4, pos_dim=2), ["pos_dim=2"]),
    (lambda: KVPos(8, 2, max_len=4, pos="sinusoids"), ["'sinusoid'"]),
    (lambda: KVPhase(8, 8), ["heads=8"]),
    (lambda: KVPhase(8, 2, phase="learnt"), ["phase=learnt", "learned"]),
    (lambda: KVPhase(8, 4, phase=[0.1, 0.2, 0.3]), ["3", "heads=4"]),
    (lambda: MLA(8, 2, score="cosine"), ["score=cosine", "scaled_dot"]),
    (lambda: Rotary(0.3, 4, 10_000), ["rope=0.3", "0.5"]),
    (lambda: Rotary(1.0, 5, 10_000), ["rope=1", "0.8"]),
    (lambda: Rotary(1.0, 4, 0), ["rope_base="]),
    (make("kv+po"), ["kv+po", "'kv+pos'", "qkv"]),
    (make("nowhere.at.all.Mean"), ["nowhere"]),
    (make("sloped_own.Slope"), ["sloped_own", "Slope"]),
    (make("sloped_own.Sloped", slop=1), ["'slope'"]),
    (make("kv", heads=4), ["heads"]),
    (make("kv", pos_dims=3), ["pos_dims"]),
    (make("kv", score="cosin"), ["'cosine'"]),
    (make("kv", bias="maybe"), ["bias"]),
    (make("identity", attend_self=False), ["attend_self=False"]),
    (lambda: AttentionFactory("kv+pos", heads=2)(8), ["kv+pos", "max_len"]),
    (lambda: ViT("kv", channels=1, height=4, width=4, classes=3, patch=2, dim=8, depth=1), ["heads"]),
    (lambda: LAYER(X, mask=torch.ones(1, 1, 5, 5, dtype=torch.long)), ["mask"]),
    (lambda: LAYER(X[0]), ["x", "(5, 8)"]),
    (lambda: Mean(8, 2).weights(X), ["Mean overrides attend", "attention_weights"]),
    (lambda: LAYER(X[..., :7]), ["x", "(3, 5, 7)"]),
    (lambda: LAYER(X, X[..., :7]), ["context", "(3, 5, 7)"]),
    *((lambda name=name: make(name)()(X, X), ["QKV"]) for name in WITHOUT_CONTEXT),
]


@pytest.mark.parametrize(("call", "named"), MISTAKES)
def test_a_mistake_is_named(tmp_path, monkeypatch, call, named):
    (tmp_path / "sloped_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        call()
    assert [word for word in named if word not in str(error.value)] == []
