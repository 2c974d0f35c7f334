"""The shared part of models that label every element of a list or a set."""

from torch import Tensor, nn

from kvt.attention import Attention
from kvt.attention.dropout import Dropout
from kvt.models.blocks import Encoder, EncoderBlock, FeedForward, MakeAttention, PostNorm
from kvt.system.errors import require_probability


class Tagger(nn.Module):
    """A post-norm encoder between an embedding and a head that labels every element (Borji 2023, §3.1, §3.2).

    x = LN(x + Drop(Attn(x))), x = LN(x + Drop(FF(x))) `depth` times, FF = dim → 2 dim → ReLU → dim;  head = dim → dim
    → LN → ReLU → Drop → outputs. Attention projections are Xavier-uniform, without initial biases. A subclass defines
    `embed` and `forward`, which ends with `label`.

    Args:
        embed: maps an element to the model width.
        outputs: number of outputs of the head per element.
        dropout: of residual branches, feed-forward networks and head.
    """

    def __init__(
        self, embed: nn.Linear, make_attention: MakeAttention, *, outputs: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        require_probability(dropout=dropout)
        self.embed, dim = embed, embed.out_features
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(
                PostNorm(dim, make_attention(dim), dropout),
                PostNorm(dim, FeedForward(dim, 2 * dim, nn.ReLU, dropout), dropout),
            ),
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, outputs)
        )
        for module in self.encoder.modules():
            if isinstance(module, Attention):
                module.init_xavier()

    def label(self, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, N, outputs)."""
        return self.head(self.encoder(x))
