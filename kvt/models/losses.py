"""Cross-entropy and divergence in full precision, and the label-smoothed loss of translation in little memory."""

from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    as a whole: the gradients are computed in the forward pass, from the logits of `CHUNK` rows at a time. Gradients
    that are to be differentiated again (`create_graph=True`) are computed from all logits at once.

    Args:
        x: input of the last layer, (N, D); weight: its W, (V, D), V at least 3; bias: its b, (V).
        target: int64 (N).
        smoothing: ε, at least 0 and below 1; at (V − 2) / (V − 1) the true token is as likely as any other.
        pad: the token whose targets do not count.

    Returns:
        Two scalars, in nats: the divergence, and the mean of −log p_y, which has no gradient.
    """
    targets = _Targets(target, len(weight), smoothing, pad)
    cross_entropy, nll = _SmoothedCrossEntropy.apply(x, weight, bias, targets, torch.is_grad_enabled())
    return cross_entropy - targets.entropy, nll


def label_smoothed_kl_of_logits(logits: Tensor, target: Tensor, *, smoothing: float, pad: int) -> tuple[Tensor, Tensor]:
    """Return what `label_smoothed_kl` does, from logits (N, V): for a last layer that must be called."""
    targets = _Targets(target, logits.shape[1], smoothing, pad)
    share = targets.shares(logits.dtype)
    cross_entropy, nll = targets.sums(logits.log_softmax(1, dtype=share.dtype), target, share)
    return cross_entropy - targets.entropy, nll.detach()


class _Targets:
    """The distributions t of the targets y, int64 (N), over V tokens."""

    def __init__(self, target: Tensor, vocab_size: int, smoothing: float, pad: int) -> None:
        self.target, self.pad, self.other = target, pad, smoothing / (vocab_size - 2)
        self.more = 1 - self.other * (vocab_size - 1)  # probability of the true token beyond that of any other
        self.entropy = -(1 - smoothing) * log(1 - smoothing) - (smoothing * log(self.other) if smoothing else 0)

    def shares(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of the rows in the means, (N), in float32 or better."""
        real = (self.target != self.pad).to(torch.promote_types(dtype, torch.float32))
        return real / real.sum()

    def sums(self, log_p: Tensor, target: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of −Σ_c t_c log p_c and of −log p_y over rows, each times its share."""
        log_p_true = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
        # sums: autocast would round a product with `@` to half precision
        nll = -(log_p_true * share).sum()
        others = log_p.sum(1) - log_p[:, self.pad]
        return -((self.more * log_p_true + self.other * others) * share).sum(), nll

    def subtract(self, p: Tensor, target: Tensor) -> Tensor:
        """Return p − t, in place of p: the gradient of −Σ_c t_c log p_c for the logits."""
        slope = p.sub_(self.other)
        slope[:, self.pad] += self.other
        truth = target.unsqueeze(1)
        return slope.scatter_add_(1, truth, slope.new_full(truth.shape, -self.more))


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The means of −Σ_c t_c log p_c and of −log p_y. The gradient of the first for the logits of a row is p − t."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: _Targets, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        share = targets.shares(x.dtype)
        loss, nll = share.new_zeros(()), share.new_zeros(())
        gradients = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        # cast once: autocast would cache a cast without gradient, and in torch 2.8 reuse it in later layers
        cast_weight, cast_bias = weight.to(dtype), bias.to(dtype)
        chunks = zip(*(t.split(CHUNK) for t in (x, targets.target, share, gradients[0])), strict=True)
        for rows, target, part, gradient in chunks:
            log_p = F.linear(rows, cast_weight, cast_bias).log_softmax(1, dtype=share.dtype)
            sums = targets.sums(log_p, target, part)
            loss, nll = loss + sums[0], nll + sums[1]
            if differentiate:
                # `part` multiplies the smaller tensors
                slope = targets.subtract(log_p.exp_(), target).to(weight.dtype)
                gradient.copy_((slope @ cast_weight) * part.unsqueeze(1))
                gradients[1].addmm_(slope.mT, (rows * part.unsqueeze(1)).to(weight.dtype))
                gradients[2].addmv_(slope.mT, part.to(bias.dtype))
                del log_p, slope  # free them before the next chunk
        ctx.targets = targets
        ctx.save_for_backward(x, weight, bias, *gradients)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients above are constants: compute them again, with a graph
            share = ctx.targets.shares(x.dtype)
            p = F.linear(x, weight, bias).softmax(1, dtype=share.dtype).clone()
            slope = ctx.targets.subtract(p, ctx.targets.target) * (upstream * share).unsqueeze(1)
            slope = slope.to(weight.dtype)
            gradients = [slope @ weight, slope.mT @ x, slope.sum(0)]
        else:
            gradients = [upstream.to(gradient.dtype) * gradient for gradient in gradients]
        return *gradients, None, None
