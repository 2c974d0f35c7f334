"""Token embeddings with positions."""

from math import sqrt

from torch import Tensor, nn

from kvt.attention.kernels import Dropout
from kvt.attention.positions import sinusoid
from kvt.system.errors import UserError, require_positive, require_probability


class Embedding(nn.Module):
    """Token embeddings E[token], to which a subclass adds positions from `start` on: int64 (B, N) → (B, N, dim)."""

    def __init__(self, vocab_size: int, dim: int, max_len: int) -> None:
        super().__init__()
        require_positive(vocab_size=vocab_size, dim=dim, max_len=max_len)
        self.max_len = max_len
        self.tokens = nn.Embedding(vocab_size, dim)

    def position_slice(self, tokens: Tensor, start: int) -> slice:
        """Return the positions of tokens (B, N), the first at `start`; raise UserError if they exceed `max_len`."""
        stop = start + tokens.shape[1]
        if stop > self.max_len:
            raise UserError(f"a sequence of {stop} tokens is longer than max_len={self.max_len}")
        return slice(start, stop)


class NoPositions(Embedding):
    """E[token] without positions, initialised from N(0, 1)."""

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        return self.tokens(tokens)


class LearnedPositions(Embedding):
    """E[token] + P[position], both learned, initialised from N(0, 1)."""

    def __init__(self, vocab_size: int, dim: int, max_len: int) -> None:
        super().__init__(vocab_size, dim, max_len)
        self.positions = nn.Embedding(max_len, dim)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[self.position_slice(tokens, start)]


class SinusoidalPositions(Embedding):
    """Drop(√dim · E[token] + P[position]) with the fixed sinusoid P (Vaswani et al. 2017, §3.4 and §3.5).

    E is initialised from N(0, 1/dim): √dim · E is then as large as P, and the first logits of a head that shares E
    have unit size. `dim` must be even.
    """

    def __init__(self, vocab_size: int, dim: int, max_len: int, dropout: float = 0.0) -> None:
        super().__init__(vocab_size, dim, max_len)
        require_probability(dropout=dropout)
        nn.init.normal_(self.tokens.weight, std=dim**-0.5)
        self.dropout = Dropout(dropout)
        self.register_buffer("positions", sinusoid(max_len, dim), persistent=False)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        positions = self.get_buffer("positions")[self.position_slice(tokens, start)]
        return self.dropout(sqrt(self.tokens.embedding_dim) * self.tokens(tokens) + positions)
