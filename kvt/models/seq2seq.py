"""The translation model, a transformer with encoder and decoder."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvt.attention import AttentionFactory, KVCache
from kvt.models.blocks import (
    STYLE,
    BlockStyle,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    Residual,
    factory_of,
    make_cache,
)
from kvt.models.embedding import SinusoidalPositions
from kvt.models.init import xavier
from kvt.system import UserError, require_probability


@dataclass
class DecoderState:
    """The encoded source sentences and the caches from which the decoder continues a batch of translations."""

    memory: Tensor  # encoded source tokens, (B, M, dim)
    mask: Tensor  # False where a source token is padding, (B, 1, 1, M)
    caches: Sequence[tuple[KVCache, KVCache]]  # for each layer: caches of self-attention and of cross-attention

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sentences that `rows` selects, as indices, int64 (R,), or as a mask, bool (B,)."""
        self.memory, self.mask = self.memory[rows], self.mask[rows]
        for pair in self.caches:
            for cache in pair:
                cache.select(rows)


class Seq2Seq(nn.Module):
    """An encoder and a decoder, by default pre-norm, with final norms and sinusoidal positions (Borji 2023, §3.3).

    Cross-attention is `QKV` for every variant of self-attention (§2). The default `style` has the feed-forward network
    dim → 4 dim → ReLU → Drop → dim. Dropout is also applied to every residual branch and to the embeddings. `xavier`
    initialises all linear weights and embeddings.

    >>> import torch
    >>> sizes = {"source_vocab_size": 50, "target_vocab_size": 60, "pad": 0, "max_len": 32, "dim": 16, "depth": 2}
    >>> source, target = torch.ones(5, 12, dtype=torch.long), torch.ones(5, 9, dtype=torch.long)
    >>> Seq2Seq("kv", heads=4, **sizes)(source, target).shape
    torch.Size([5, 9, 60])

    Args:
        attention: name or import path of the attention, such as "kv"; or an `AttentionFactory`.
        heads: number of heads, if `attention` is a name or import path.
        pad: id of the padding token in both vocabularies. A mask excludes attention to padding in the source.
        max_len: number of tokens of the longest sentence.
        depth: number of blocks in the encoder, and in the decoder.
    """

    def __init__(
        self,
        attention: str | AttentionFactory,
        *,
        heads: int | None = None,
        source_vocab_size: int,
        target_vocab_size: int,
        pad: int,
        max_len: int,
        dim: int,
        depth: int,
        dropout: float = 0.0,
        style: BlockStyle = STYLE,
    ) -> None:
        super().__init__()
        require_probability(dropout=dropout)
        make_attention = factory_of(attention, heads, max_len)

        def residual(attention: nn.Module) -> Residual:
            return style.residual(dim, attention, dropout)

        def feed_forward() -> nn.Module:
            return style.feed_forward(dim, dropout, dropout)

        self.pad, self.max_len = pad, max_len
        self.source_embedding = SinusoidalPositions(source_vocab_size, dim, max_len, dropout)
        self.target_embedding = SinusoidalPositions(target_vocab_size, dim, max_len, dropout)
        self.encoder = Encoder(depth, lambda: EncoderBlock(residual(make_attention(dim)), feed_forward()))
        self.decoder = Decoder(
            depth,
            lambda: DecoderBlock(residual(make_attention(dim)), residual(make_attention.cross(dim)), feed_forward()),
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.generator = nn.Linear(dim, target_vocab_size)
        xavier(self)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of the token after each target token: int64 (B, M), (B, N) → (B, N, target_vocab_size)."""
        return self.generator(self.states(source, target))

    def states(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the states from which the last layer computes logits: int64 (B, M), (B, N) → (B, N, dim)."""
        memory, mask = self._encode(source)
        return self.decoder_norm(self.decoder(self.target_embedding(target), memory, mask))

    def encode(self, source: Tensor) -> DecoderState:
        """Encode padded source sentences, int64 (B, M); return the state for `next_logits`, with empty caches."""
        memory, mask = self._encode(source)
        caches = [(make_cache(block, self.max_len), KVCache(source.shape[1])) for block in self.decoder]
        return DecoderState(memory, mask, caches)

    def next_logits(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Append tokens, int64 (B, 1), to the caches of the state; return next-token logits, (B, target_vocab_size)."""
        start = state.caches[0][0].length
        x = self.target_embedding(tokens, start)
        x = self.decoder(x, state.memory, state.mask, state.caches)
        if state.caches[0][0].length == start:
            raise UserError("this attention ignores its cache, so it cannot decode: call KVCache.append in its forward")
        return self.generator(self.decoder_norm(x[:, -1]))

    def _encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        mask = (source != self.pad)[:, None, None, :]
        return self.encoder_norm(self.encoder(self.source_embedding(source), mask=mask)), mask
