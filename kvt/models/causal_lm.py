"""Language models that predict the next token or masked tokens."""

from collections.abc import Sequence

from torch import Tensor, nn

from kvt.attention import Attention, KVCache
from kvt.models.blocks import STYLE, BlockStyle, Encoder, EncoderBlock, MakeAttention, factory_of, make_cache
from kvt.models.embedding import Embedding
from kvt.system import require_probability


class CausalLM(nn.Module):
    """A language model, by default of pre-norm blocks with causal attention, and with a linear head (Borji 2023, §3.3).

    First, x = embedding(tokens). With the default `style`, each of `depth` blocks computes x = x + Drop(Attn(LN(x)))
    and x = x + Drop(FF(LN(x))), with the feed-forward network FF: dim → 4 dim → ReLU → dim. The output is
    logits = LN(x) Wᵀ + b, or x Wᵀ + b without `final_norm`.

    >>> import torch
    >>> from kvt.models.embedding import LearnedPositions
    >>> model = CausalLM("kv", LearnedPositions(50, 16, max_len=32), heads=4, depth=2)
    >>> model(torch.zeros(5, 12, dtype=torch.long)).shape
    torch.Size([5, 12, 50])

    Args:
        attention: name or import path of the attention, such as "kv"; or a function from a width to a layer.
        embedding: determines the model width, the vocabulary size and the length of the longest sequence.
        heads: number of heads, if `attention` is a name or import path.
        dropout, feed_forward_dropout: probabilities of Drop after attention and after the feed-forward network.
        tied: whether the weight W of the head is the token embedding's weight.
        causal: whether a token attends only to itself and to earlier tokens. If False, the logits at a position predict
            the masked token there (Devlin et al. 2019, "BERT").
        share_layers: number of consecutive layers that share keys and values, as in `Encoder`.
    """

    def __init__(
        self,
        attention: str | MakeAttention,
        embedding: Embedding,
        *,
        heads: int | None = None,
        depth: int,
        dropout: float = 0.0,
        feed_forward_dropout: float = 0.0,
        final_norm: bool = True,
        tied: bool = False,
        style: BlockStyle = STYLE,
        causal: bool = True,
        share_layers: int = 1,
    ) -> None:
        super().__init__()
        require_probability(dropout=dropout, feed_forward_dropout=feed_forward_dropout)
        vocab_size, dim = embedding.tokens.weight.shape
        make_attention = factory_of(attention, heads, embedding.max_len)
        self.embedding, self.causal = embedding, causal
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(
                style.residual(dim, make_attention(dim), dropout), style.feed_forward(dim, feed_forward_dropout)
            ),
            share_layers,
        )
        self.norm = nn.LayerNorm(dim) if final_norm else nn.Identity()
        self.head = nn.Linear(dim, vocab_size)
        if tied:
            self.head.weight = embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits at every position: int64 (B, N) → (B, N, vocab_size)."""
        return self.head(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """Return the states from which the head computes logits: int64 (B, N) → (B, N, dim)."""
        return self.norm(self.encoder(self.embedding(tokens), causal=self.causal))

    def next_logits(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Return the logits of the token after the last of `tokens`: int64 (B, N) → (B, vocab_size).

        With `caches`, `tokens` continue the cached tokens, and are appended to the caches. None or [] means no caches.
        """
        x = self.embedding(tokens, start=caches[0].length if caches else 0)
        return self.head(self.norm(self.encoder(x, caches, token=-1, causal=True)))

    def make_caches(self) -> list[KVCache]:
        """Return a list of empty caches, one for each layer that computes keys. The caches slide if `is_endless`."""
        blocks = [*self.encoder][:: self.encoder.share_layers]
        return [make_cache(block, self.embedding.max_len, self.is_endless) for block in blocks]

    @property
    def is_endless(self) -> bool:
        """Whether generation with caches can exceed `max_len` tokens, with a sliding window of `max_len` tokens.

        False if there is a table of positions, if an attention has its own `forward`, `gain_and_bias`, `logits` or
        `attention_weights`, or if a class outside kvt has its own `rotate`, `merge` or `attend`. Such methods might use
        absolute positions.
        """

        def is_relative(attention: type) -> bool:
            base = ("forward", "gain_and_bias", "logits", "attention_weights")
            return all(getattr(attention, name, None) is getattr(Attention, name) for name in base) and all(
                getattr(attention, name).__module__.startswith("kvt.") for name in ("rotate", "merge", "attend")
            )

        attentions = {type(block.get_submodule("attention.layer")) for block in self.encoder}
        return not self.embedding.has_table and all(map(is_relative, attentions))
