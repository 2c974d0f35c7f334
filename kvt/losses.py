"""Losses that torch has not."""

from math import log

import torch.nn.functional as F
from torch import Tensor

from kvt.errors import UserError


def label_smoothed_kl(logits: Tensor, target: Tensor, *, smoothing: float, pad: int) -> Tensor:
    """KL divergence from smoothed targets to the model, averaged over the targets that are no padding.

    The target distribution t has 1 − ε on the truth and ε / (V − 2) on every other symbol but `pad`; for one token
    KL(t ‖ p) = Σ_c t_c (log t_c − log p_c)   (Borji 2023, §3.5; Vaswani et al. 2017, §5.4).

    t is never made: it is torch's own label smoothing, which spreads over all V symbols, with weight 0 for `pad` and
    ε' = s ε V / (V − 2), s = 1 / (1 − ε + ε (V − 1) / (V − 2)), divided by s, less the entropy of t, a constant.

    Args:
        logits: (N, V), V at least 3.
        target: int64 (N,).
        smoothing: ε, at least 0 and at most (V − 2) / (V − 1), where the truth is as likely as any other.
        pad: the symbol whose targets count for nothing, and which gets no probability.

    Returns:
        A scalar, in nats.

    Raises:
        UserError: ε is greater.
    """
    symbols = logits.shape[-1]
    if smoothing > (symbols - 2) / (symbols - 1):
        raise UserError(
            f"smoothing={smoothing} makes the truth less likely than any of the other {symbols - 2} symbols: choose "
            f"{(symbols - 2) / (symbols - 1):.3g} at most"
        )
    scale = 1 / (1 - smoothing + smoothing * (symbols - 1) / (symbols - 2))
    weight = logits.new_ones(symbols)
    weight[pad] = 0
    spread = min(scale * smoothing * symbols / (symbols - 2), 1.0)
    loss = F.cross_entropy(logits, target, weight, ignore_index=pad, label_smoothing=spread) / scale
    entropy = -(1 - smoothing) * log(1 - smoothing)
    if smoothing:
        entropy -= smoothing * log(smoothing / (symbols - 2))
    return loss - entropy
