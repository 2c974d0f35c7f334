"""Cross-entropy and divergence in full precision, and the label-smoothed loss of translation in little memory."""

from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 128  # rows of logits in memory at once: few take little memory, many keep matrix products efficient


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean", smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of logits (…, C) and classes, int64 (…), in float32 or better: half would round it.

    A target is 1 − ε + ε / C for the true class and ε / C for every other, with ε = `smoothing`.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if exact.is_cpu:  # classes second, not last: there up to six times as fast for the ten digits of lists
        return F.cross_entropy(exact.movedim(-1, 1), targets, **settings)
    # in one dimension: on a GPU torch adds up those of several in any order, and refuses to with --deterministic true
    losses = F.cross_entropy(exact.flatten(0, -2), targets.flatten(), **settings)
    return losses.view_as(targets) if reduction == "none" else losses


def kl_divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return KL(p ‖ q) = Σ_c p_c (log p_c − log q_c), p = softmax(teacher), q = softmax(logits), in float32 or better.

    Both are (…, C). The result is a scalar, the mean over all but the last dimension, in nats. It takes the memory of
    about four more tensors of their size.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (x.flatten(0, -2).log_softmax(-1, dtype=exact) for x in (teacher, logits))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def label_smoothed_kl(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of softmax(x Wᵀ + b) from smoothed targets, averaged over targets other than `pad`.

    KL(t ‖ p) = Σ_c t_c (log t_c − log p_c), p = softmax(x Wᵀ + b)   (Borji 2023, §3.5; Vaswani et al. 2017, §5.4)

    t is 1 − ε for the true token y, and ε / (V − 2) for every other but `pad`. Neither t nor the (N, V) logits exist
    as a whole: the gradients are computed in the forward pass, from the logits of `CHUNK` rows at a time.

    Args:
        x: input of the last layer, (N, D); weight: its W, (V, D), V at least 3; bias: its b, (V).
        target: int64 (N).
        smoothing: ε, at least 0 and below 1; at (V − 2) / (V − 1) the true token is as likely as any other.
        pad: the token whose targets do not count.

    Returns:
        Two scalars, in nats: the divergence, and the mean of −log p_y, which has no gradient.
    """
    vocab_size = len(weight)
    other = smoothing / (vocab_size - 2)
    cross_entropy, nll = _SmoothedCrossEntropy.apply(x, weight, bias, target, other, pad, torch.is_grad_enabled())
    entropy = -(1 - smoothing) * log(1 - smoothing)
    if smoothing:
        entropy -= smoothing * log(other)
    return cross_entropy - entropy, nll


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The means of −Σ_c t_c log p_c and of −log p_y. The gradient of the first for the logits of a row is p − t."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, other: float, pad: int, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(x.dtype, torch.float32)
        more = 1 - other * (len(weight) - 1)  # target probability of the true token beyond that of any other
        real = (target != pad).to(exact)
        share = real / real.sum()  # weight of a row in the means
        loss, nll = share.new_zeros(()), share.new_zeros(())
        gradients = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        # cast once: autocast would cache a cast without gradient, and in torch 2.8 reuse it in later layers
        cast_weight, cast_bias = weight.to(dtype), bias.to(dtype)
        chunks = zip(*(t.split(CHUNK) for t in (x, target.unsqueeze(1), share, gradients[0])), strict=True)
        for rows, truth, part, gradient in chunks:
            log_p = F.linear(rows, cast_weight, cast_bias).log_softmax(1, dtype=exact)
            log_p_true = log_p.gather(1, truth).squeeze(1)
            # sums: autocast would round a product with `@` to half precision
            nll -= (log_p_true * part).sum()
            loss -= ((more * log_p_true + other * (log_p.sum(1) - log_p[:, pad])) * part).sum()
            if differentiate:
                # p − t; `part` multiplies the smaller tensors below
                slope = log_p.exp_().sub_(other)
                slope[:, pad] += other
                slope.scatter_add_(1, truth, slope.new_full(truth.shape, -more))
                slope = slope.to(weight.dtype)
                gradient.copy_((slope @ cast_weight) * part.unsqueeze(1))
                gradients[1].addmm_(slope.mT, (rows * part.unsqueeze(1)).to(weight.dtype))
                gradients[2].addmv_(slope.mT, part.to(bias.dtype))
                del log_p, slope  # free them before the next chunk
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *(upstream.to(gradient.dtype) * gradient for gradient in ctx.saved_tensors), None, None, None, None
