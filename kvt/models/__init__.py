"""Models that map tokens, images or features to logits."""

from kvt.models.causal_lm import CausalLM
from kvt.models.seq2seq import Seq2Seq
from kvt.models.tagger import ListTagger, SetScorer
from kvt.models.vit import ViT, count_tokens

__all__ = ["CausalLM", "ListTagger", "Seq2Seq", "SetScorer", "ViT", "count_tokens"]
