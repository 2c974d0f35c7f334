"""The language model."""

from collections.abc import Sequence

from torch import Tensor, nn

from kvt.attention import KVCache
from kvt.models.blocks import Encoder, EncoderBlock, FeedForward, MakeAttention, PreNorm
from kvt.models.embedding import Embedding
from kvt.system.errors import require_probability


class CausalLM(nn.Module):
    """A language model (Borji 2023, §3.4): pre-norm blocks of causal attention, a linear head.

    x = embedding(tokens);  x = x + Drop(Attn(LN(x))), x = x + Drop(FF(LN(x))) `depth` times, FF = dim → 4 dim → ReLU →
    dim;  logits = LN(x) Wᵀ + b, or x Wᵀ + b without `final_norm`. If `tied`, W is the embedding's table, which also
    sets the width, the vocabulary and the longest sequence.
    """

    def __init__(
        self,
        make_attention: MakeAttention,
        embedding: Embedding,
        *,
        depth: int,
        dropout: float = 0.0,
        feed_forward_dropout: float = 0.0,
        final_norm: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        require_probability(dropout=dropout, feed_forward_dropout=feed_forward_dropout)
        vocab_size, dim = embedding.tokens.weight.shape
        self.embedding = embedding
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(
                PreNorm(dim, make_attention(dim), dropout),
                PreNorm(dim, FeedForward(dim, 4 * dim, nn.ReLU), feed_forward_dropout),
            ),
        )
        self.norm = nn.LayerNorm(dim) if final_norm else nn.Identity()
        self.head = nn.Linear(dim, vocab_size)
        if tied:
            self.head.weight = embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each token: int64 (B, N) → (B, N, vocab_size)."""
        return self.head(self.norm(self.encoder(self.embedding(tokens), causal=True)))

    def next_logits(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Return the logits after the last token, (B, vocab_size); caches hold those before, and these are appended."""
        x = self.embedding(tokens, start=caches[0].length if caches else 0)
        return self.head(self.norm(self.encoder.forward_token(x, -1, caches, causal=True)))

    def make_caches(self) -> list[KVCache]:
        return [KVCache(self.embedding.max_len) for _ in self.encoder]
