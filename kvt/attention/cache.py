"""Cached keys and values for incremental decoding."""

from torch import Tensor

from kvt.system import UserError


class KVCache:
    """Keys and values of one attention layer, for at most `max_len` tokens.

    A tensor that is both key and value is stored once. `length` is the number of tokens appended so far, and thus the
    position of the next token. If `slides` is True, a full cache drops its oldest token for each new token.
    """

    def __init__(self, max_len: int, slides: bool = False) -> None:
        self.max_len, self.slides = max_len, slides
        self.length = 0
        self.buffers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes. The first `append` allocates buffers for `max_len` tokens."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, (B, kv_heads, N, D); return all cached keys and values, (B, kv_heads, M, D).

        Raises UserError if the tokens do not fit. Beyond `max_len`, a cache that slides accepts one token per call: for
        a second token, it would drop a token to which the first one attends.
        """
        count = k.shape[2]
        stop = self.length + count
        if stop > self.max_len and not (self.slides and count == 1):
            raise UserError(f"{stop} tokens do not fit a cache of max_len={self.max_len}")
        new = [k] if v is k else [k, v]
        if not self.buffers:
            self.buffers = [t.new_empty(*t.shape[:2], self.max_len, t.shape[-1]) for t in new]
        if self.length >= self.max_len:
            # not in place, because a copy of the cache may share the buffers
            self.buffers = [buffer.roll(-1, 2) for buffer in self.buffers]
        place = min(stop, self.max_len) - count
        for buffer, tokens in zip(self.buffers, new, strict=True):
            buffer[:, :, place : place + count] = tokens
        self.length = stop
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values, (B, kv_heads, M, D) each."""
        past = [buffer[:, :, : self.length] for buffer in self.buffers]
        return past[0], past[-1]

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the examples that `rows` selects, as indices, int64 (R,), or as a mask, bool (B,)."""
        for i, buffer in enumerate(self.buffers):
            kept = buffer[:, :, : self.length][rows]
            self.buffers[i] = buffer.new_empty(len(kept), *buffer.shape[1:])
            self.buffers[i][:, :, : self.length] = kept


class OnePass(KVCache):
    """Keys and values of one forward pass, from the first layer of a group for its other layers (see `Encoder`)."""

    def __init__(self) -> None:
        super().__init__(max_len=0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.buffers, self.length = [k, v], k.shape[2]
        return k, v
