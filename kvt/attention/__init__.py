"""The pluggable heart: attention variants, their scores, their cache. It knows no task."""

from kvt.attention.base import Attention
from kvt.attention.cache import KVCache
from kvt.attention.factory import ATTENTION, AttentionFactory, AttentionSettings
from kvt.attention.inspect import AttentionMap, asymmetry, record_maps, row_entropy
from kvt.attention.scores import SCORES
from kvt.attention.variants import KV, QKV, Identity, K, KPos, KVPos, QKVPos, QSharedKV

__all__ = [
    "ATTENTION",
    "KV",
    "QKV",
    "SCORES",
    "Attention",
    "AttentionFactory",
    "AttentionMap",
    "AttentionSettings",
    "Identity",
    "K",
    "KPos",
    "KVCache",
    "KVPos",
    "QKVPos",
    "QSharedKV",
    "asymmetry",
    "record_maps",
    "row_entropy",
]
