"""Tokens as vectors that know their position."""

from math import sqrt

from torch import Tensor, nn

from kvt.attention.dropout import Dropout
from kvt.attention.positions import sinusoid
from kvt.system.errors import UserError, require_positive, require_probability


class Embedding(nn.Module):
    """Tokens as vectors, E[token], to which a subclass adds their positions.

    Args:
        vocab_size: size of the vocabulary.
        dim: width.
        max_len: the longest sequence.
    """

    def __init__(self, vocab_size: int, dim: int, max_len: int) -> None:
        super().__init__()
        require_positive(vocab_size=vocab_size, dim=dim, max_len=max_len)
        self.max_len = max_len
        self.tokens = nn.Embedding(vocab_size, dim)

    def places(self, tokens: Tensor, start: int) -> slice:
        """The positions of tokens (B, N), the first of them at `start`.

        Raises:
            UserError: they go beyond `max_len`.
        """
        stop = start + tokens.shape[1]
        if stop > self.max_len:
            raise UserError(f"a sequence of {stop} tokens is longer than max_len={self.max_len}")
        return slice(start, stop)


class LearnedPositions(Embedding):
    """E[token] + P[position], both learned, both drawn from N(0, 1)."""

    def __init__(self, vocab_size: int, dim: int, max_len: int) -> None:
        super().__init__(vocab_size, dim, max_len)
        self.positions = nn.Embedding(max_len, dim)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """int64 (B, N), the first of them at position `start` → (B, N, dim)."""
        return self.tokens(tokens) + self.positions.weight[self.places(tokens, start)]


class SinusoidalPositions(Embedding):
    """Drop(√dim · E[token] + P[position]) with the fixed sinusoid P (Vaswani et al. 2017, §3.4 and §3.5).

    E is drawn from N(0, 1/dim): √dim · E is then as large as P, and a head that shares E begins with logits of unit
    size.

    Args:
        vocab_size: size of the vocabulary.
        dim: width, even.
        max_len: the longest sequence.
        dropout: of the sum.
    """

    def __init__(self, vocab_size: int, dim: int, max_len: int, dropout: float = 0.0) -> None:
        super().__init__(vocab_size, dim, max_len)
        require_probability(dropout=dropout)
        nn.init.normal_(self.tokens.weight, std=dim**-0.5)
        self.dropout = Dropout(dropout)
        self.register_buffer("positions", sinusoid(max_len, dim), persistent=False)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """int64 (B, N), the first of them at position `start` → (B, N, dim)."""
        positions: Tensor = self.get_buffer("positions")[self.places(tokens, start)]
        return self.dropout(sqrt(self.tokens.embedding_dim) * self.tokens(tokens) + positions)
