"""Cached keys and values for incremental decoding."""

from torch import Tensor

from kvt.system.errors import UserError


class KVCache:
    """Keys and values of one layer, of at most `max_len` tokens. A tensor that serves as both is stored once."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.buffers: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all it can hold, which are occupied from the first token on."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v of new tokens, (B, kv_heads, N, D); return those of all tokens, (B, kv_heads, M, D) each."""
        stop = self.length + k.shape[2]
        if stop > self.max_len:
            raise UserError(f"{stop} tokens do not fit a cache of max_len={self.max_len}")
        new = [k] if v is k else [k, v]
        if not self.buffers:
            self.buffers = [t.new_empty(*t.shape[:2], self.max_len, t.shape[-1]) for t in new]
        for buffer, tokens in zip(self.buffers, new, strict=True):
            buffer[:, :, self.length : stop] = tokens
        self.length = stop
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, (B, kv_heads, M, D) each."""
        past = [buffer[:, :, : self.length] for buffer in self.buffers]
        return past[0], past[-1]

    def select(self, rows: Tensor) -> None:
        """Keep these examples of the batch, in this order: indices, int64 (R,), or a mask, boolean (B,)."""
        for i, buffer in enumerate(self.buffers):
            kept = buffer[:, :, : self.length][rows]
            self.buffers[i] = buffer.new_empty(len(kept), *buffer.shape[1:])
            self.buffers[i][:, :, : self.length] = kept
