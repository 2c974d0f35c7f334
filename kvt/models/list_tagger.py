"""The model of lists of symbols."""

from torch import Tensor, nn

from kvt.attention.positions import sinusoid
from kvt.models.blocks import MakeAttention
from kvt.models.tagger import Tagger
from kvt.system.errors import require_positive


class ListTagger(Tagger):
    """One label for every symbol of a list (Borji 2023, §3.1): a `Tagger` with sinusoidal positions P.

    x = onehot(symbols) W + b + P;  then the encoder and head of `Tagger`, with `vocab_size` outputs per symbol.

    Args:
        vocab_size: number of symbols, of input and output alike.
        length: of the longest list.
        dim: model width, even.
        dropout: of residual branches, feed-forward networks and head.
    """

    def __init__(
        self, make_attention: MakeAttention, *, vocab_size: int, length: int, dim: int, depth: int, dropout: float = 0.0
    ) -> None:
        require_positive(length=length, dim=dim)
        super().__init__(nn.Linear(vocab_size, dim), make_attention, outputs=vocab_size, depth=depth, dropout=dropout)
        self.register_buffer("positions", sinusoid(length, dim), persistent=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 (B, N) → logits (B, N, vocab_size)."""
        x = nn.functional.embedding(symbols, self.embed.weight.T) + self.embed.bias  # onehot(symbols) W + b
        return self.label(x + self.get_buffer("positions")[: symbols.shape[1]])
