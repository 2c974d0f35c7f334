"""Attention variants, their scores and caches, and functions that record and measure attention maps."""

from kvt.attention.base import ATTENTION, Attention
from kvt.attention.cache import KVCache
from kvt.attention.drop_in import MultiheadAttention
from kvt.attention.factory import FORMULAS, AttentionFactory, AttentionSettings, make_attention
from kvt.attention.inspect import (
    AttentionMap,
    asymmetry,
    cycle_lengths,
    eigenvalues,
    looked_at,
    record_maps,
    row_entropy,
    symmetric_share,
)
from kvt.attention.latent import MLA
from kvt.attention.scores import SCORES
from kvt.attention.shared_keys import QSharedKVDeepSeek, QSharedKVGemma
from kvt.attention.variants import KV, QKV, XKV, Identity, K, KPhase, KPos, KVPhase, KVPos, QKVPos, QSharedKV

__all__ = ["ATTENTION", "FORMULAS", "SCORES", "Attention", "AttentionFactory", "AttentionMap", "AttentionSettings"]
__all__ += ["KV", "QKV", "XKV", "Identity", "K", "KPhase", "KPos", "KVCache", "KVPhase", "KVPos", "MultiheadAttention"]
__all__ += ["MLA", "QKVPos", "QSharedKV", "QSharedKVDeepSeek", "QSharedKVGemma", "asymmetry", "cycle_lengths"]
__all__ += ["eigenvalues", "looked_at", "make_attention", "record_maps", "row_entropy", "symmetric_share"]
