"""One label for every symbol of a list."""

from torch import Tensor, nn

from kvt.attention import Attention
from kvt.errors import require_positive, require_probability
from kvt.positions import sinusoid
from kvt.transformer import Encoder, EncoderBlock, FeedForward, MakeAttention, PostNorm


class ListTagger(nn.Module):
    """One label for every symbol of a list (Borji 2023, §3.1): a post-norm encoder with sinusoidal positions.

    x = onehot(symbols) W + b + P;  x = LN(x + Drop(Attn(x))), x = LN(x + Drop(FF(x))) `depth` times, FF = dim → 2 dim
    → ReLU → dim;  head = dim → dim → LN → ReLU → Drop → symbols. Xavier-uniform attention projections, zero biases.

    Args:
        make_attention: makes the self-attention layers.
        symbols: size of the alphabet, of input and output alike.
        length: the longest list.
        dim: width, even.
        depth: number of blocks.
        dropout: of residual branches, feed-forward networks and head.
    """

    def __init__(
        self, make_attention: MakeAttention, *, symbols: int, length: int, dim: int, depth: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_positive(length=length, dim=dim, depth=depth)
        require_probability(dropout=dropout)
        self.embed = nn.Linear(symbols, dim)
        self.register_buffer("positions", sinusoid(length, dim), persistent=False)
        self.encoder = Encoder(
            EncoderBlock(
                PostNorm(dim, make_attention(dim), dropout),
                PostNorm(dim, FeedForward(dim, 2 * dim, nn.ReLU, dropout), dropout),
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, symbols)
        )
        for module in self.encoder.modules():
            if isinstance(module, Attention):
                module.init_xavier()

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 (B, N) → logits (B, N, symbols)."""
        x = nn.functional.embedding(symbols, self.embed.weight.T) + self.embed.bias  # onehot(symbols) W + b
        x = x + self.get_buffer("positions")[: symbols.shape[1]]
        return self.head(self.encoder(x))
