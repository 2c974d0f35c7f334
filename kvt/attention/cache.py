"""The memory of incremental decoding."""

from torch import Tensor

from kvt.system.errors import UserError


class KVCache:
    """One attention layer's keys and values, in buffers of a fixed length: of the tokens so far, or of a context.

    What an attention shares it remembers once: where key and value are the same tensor there is one
    buffer, and a grouped attention's buffers hold `kv_heads` heads.

    Args:
        max_len: how many tokens fit.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self.buffers: list[Tensor] = []

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the new tokens' k and v (B, kv_heads, N, D); returns all so far, (B, kv_heads, M, D) each.

        Raises:
            UserError: more than `max_len` tokens.
        """
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
        """All keys and values so far, (B, kv_heads, M, D) each."""
        past = [buffer[:, :, : self.length] for buffer in self.buffers]
        return past[0], past[-1]

    def select(self, rows: Tensor) -> None:
        """Keeps these examples of the batch, in this order; an example may be taken twice.

        Args:
            rows: int64 (R,), or boolean (B,).
        """
        for i, buffer in enumerate(self.buffers):
            kept = buffer[:, :, : self.length][rows]
            self.buffers[i] = buffer.new_empty(len(kept), *buffer.shape[1:])
            self.buffers[i][:, :, : self.length] = kept
