"""Token embeddings with positions."""

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvt.attention.factory import find_attention
from kvt.attention.kernels import Dropout
from kvt.attention.positions import sinusoid
from kvt.attention.shared_keys import NormedSharedKV
from kvt.system import UserError, require_choice, require_positive, require_probability


class Embedding(nn.Module):
    """Token embedding Drop(s · E[token] + P[position]): int64 (B, N) → (B, N, dim).

    The argument `start` of `forward` is the position of the first token. In this class P = 0. Subclasses define a table
    P, (max_len, dim).

    Args:
        max_len: length of the longest sequence. With a table, `forward` raises UserError for a longer one.
        scaled: if True, s = √dim, and E is initialised from N(0, 1/dim), so that an output layer with the weight
            E has initial logits with a variance near 1. If False, s = 1, and E is initialised from N(0, 1).
    """

    has_table: ClassVar[bool] = False

    def __init__(self, vocab_size: int, dim: int, max_len: int, dropout: float = 0.0, *, scaled: bool = False) -> None:
        super().__init__()
        require_positive(vocab_size=vocab_size, dim=dim, max_len=max_len)
        require_probability(dropout=dropout)
        self.max_len, self.scale = max_len, sqrt(dim) if scaled else 1.0
        self.tokens = nn.Embedding(vocab_size, dim)
        if scaled:
            nn.init.normal_(self.tokens.weight, std=dim**-0.5)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.scale * self.tokens(tokens)
        if self.has_table:
            if (stop := start + tokens.shape[1]) > self.max_len:
                raise UserError(f"a sequence of {stop} tokens is longer than max_len={self.max_len}")
            x = x + self.rows(start, stop, x.device)
        return self.dropout(x)

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the rows `start` to `stop` − 1 of the table P, (stop − start, dim)."""
        raise NotImplementedError


class LearnedPositions(Embedding):
    """A token embedding with learned positions P, initialised from N(0, 1)."""

    has_table = True

    def __init__(self, vocab_size: int, dim: int, max_len: int, dropout: float = 0.0, *, scaled: bool = False) -> None:
        super().__init__(vocab_size, dim, max_len, dropout, scaled=scaled)
        self.positions = nn.Embedding(max_len, dim)

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self.positions(torch.arange(start, stop, device=device))


class SinusoidalPositions(Embedding):
    """A token embedding, scaled by default, with sinusoidal P (Vaswani et al. 2017, §3.4, §3.5); `dim` must be even."""

    has_table = True

    def __init__(self, vocab_size: int, dim: int, max_len: int, dropout: float = 0.0, *, scaled: bool = True) -> None:
        super().__init__(vocab_size, dim, max_len, dropout, scaled=scaled)
        self.register_buffer("positions", sinusoid(max_len, dim), persistent=False)

    def rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        return self.get_buffer("positions")[start:stop]


POSITIONS: dict[str, type[Embedding]] = {
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rotary": Embedding,  # the attentions rotate queries and keys
    "none": Embedding,
}


def attention_settings(attn: str, positions: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `given` (None: {}). For "rotary", add rope=1 unless `given` has rope or `attn` names a NormedSharedKV."""
    own = positions != "rotary" or issubclass(find_attention(attn), NormedSharedKV)  # which rotates by default
    return {**({} if own else {"rope": 1.0}), **(given or {})}


def make_embedding(positions: str, vocab_size: int, dim: int, max_len: int, **settings: Any) -> Embedding:
    """Return the embedding named `positions` in `POSITIONS`; `settings` are its further arguments."""
    require_choice("positions", positions, POSITIONS)
    return POSITIONS[positions](vocab_size, dim, max_len, **settings)
