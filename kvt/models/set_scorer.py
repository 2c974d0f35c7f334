"""One score for every image of a set."""

from torch import Tensor, nn

from kvt.attention.dropout import Dropout
from kvt.models.blocks import MakeAttention
from kvt.models.tagger import Tagger
from kvt.system.errors import require_positive


class SetScorer(Tagger):
    """One score for every image of a set, from its features (Borji 2023, §3.2): a `Tagger` without positions.

    x = Drop(features) W + b;  then encoder and head of `Tagger`, with one output. Of the images' order it knows what
    its attention knows: nothing, and the scores move with the images, unless the attention has positions of its own.

    Args:
        make_attention: makes the self-attention layers.
        feature_dim: width of an image's features.
        dim: width of the model.
        depth: number of blocks.
        dropout: of features, residual branches, feed-forward networks and head.
    """

    def __init__(
        self, make_attention: MakeAttention, *, feature_dim: int, dim: int, depth: int, dropout: float = 0.0
    ) -> None:
        require_positive(feature_dim=feature_dim, dim=dim)
        super().__init__(nn.Linear(feature_dim, dim), make_attention, outputs=1, depth=depth, dropout=dropout)
        self.dropout = Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """(B, S, feature_dim) → logits (B, S)."""
        return self.label(self.embed(self.dropout(features))).squeeze(-1)
