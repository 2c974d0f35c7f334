"""Whole models: tokens or images in, logits out."""

from kvt.models.causal_lm import CausalLM
from kvt.models.list_tagger import ListTagger
from kvt.models.seq2seq import Seq2Seq
from kvt.models.vit import ViT, count_tokens

__all__ = ["CausalLM", "ListTagger", "Seq2Seq", "ViT", "count_tokens"]
