"""Compute cross-entropy in at least float32; with a large vocabulary, compute logits in chunks."""

from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.ordinary import is_plain
from kvt.data.tokens import IGNORE

CHUNK = 256  # rows of logits in memory at once: fewer rows save memory, more rows speed up matrix products
LARGE = 256  # a plain head (see `is_plain`) with at least this many classes computes logits in chunks


class Predictions(NamedTuple):
    """The target classes of a batch, and either the logits, or the model's last layer and this layer's input."""

    states: Tensor  # input of `head`, (…, D); if `head` is None, the logits, (…, C)
    targets: Tensor  # classes, int64 (…)
    head: nn.Module | None = None  # last layer of the model, which computes logits
    ignore: int = IGNORE  # value of targets that do not count; if it is a class (padding), its target probability is 0


class Losses(NamedTuple):
    """The loss and other measures of predictions; only `loss` and `logits` are differentiable."""

    loss: Tensor  # a scalar
    nll: Tensor  # a scalar: the mean of `each` over the targets that count
    each: Tensor  # −log p of each target class, or 0 if the target does not count, (…)
    right: Tensor  # whether the most probable class is the target, bool (…)
    logits: Tensor | None = None  # (…, C); None if computed in chunks


def cross_entropy(found: Predictions, smoothing: float = 0.0) -> Losses:
    """Return `Losses`, in which the loss is the mean cross-entropy over the targets that count.

    With ε = `smoothing` and C classes, the target probability t is 1 − ε + ε / C for the true class, and ε / C for
    every other class. If `found.ignore` is a class, t is 1 − ε for the true class, 0 for the ignored class, and
    ε / (C − 2) for every other class; the loss is then KL(t ‖ p) = Σ_c t_c (log t_c − log p_c) (Borji 2023, §3.3;
    Vaswani et al. 2017, §5.4).
    """
    states, targets, head, ignore = found
    if head is not None and is_plain(head) and len(head.weight) >= LARGE:
        return linear_cross_entropy(found, head.weight, head.bias, smoothing)
    logits = head(states) if head else states
    exact, real = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets != ignore
    # On a CPU, softmax over ten classes is up to six times as fast if classes are the second dimension, not the last.
    # On a GPU, torch sums losses of several dimensions in no fixed order, which --deterministic true forbids.
    exact, wanted = (exact.movedim(-1, 1), targets) if exact.is_cpu else (exact.flatten(0, -2), targets.flatten())
    log_p, aim = exact.log_softmax(1), _Aim(logits.shape[-1], smoothing, ignore)
    nll = loss = F.nll_loss(log_p, wanted, ignore_index=ignore)
    if smoothing:
        others = aim.others(log_p).masked_fill(wanted == ignore, 0)
        loss = aim.more * nll + aim.other * (others.sum() / real.sum()) - aim.entropy
    each = F.nll_loss(log_p.detach(), wanted, ignore_index=ignore, reduction="none").view(targets.shape)
    return Losses(loss, nll.detach(), each, logits.argmax(-1) == targets, logits)


def linear_cross_entropy(found: Predictions, weight: Tensor, bias: Tensor | None, smoothing: float = 0.0) -> Losses:
    """Return `cross_entropy` for the logits x Wᵀ + b of the states x, (…, D), computed for `CHUNK` rows at a time.

    If gradients are enabled, the forward pass also computes them. A backward pass with `create_graph=True` computes
    them again, from all logits at once.
    """
    rows = found._replace(states=found.states.flatten(0, -2), targets=found.targets.flatten(), head=None)
    tensors = rows.states, weight, weight.new_zeros(len(weight)) if bias is None else bias
    loss, nll, each, right = _LinearCrossEntropy.apply(*tensors, rows, smoothing, torch.is_grad_enabled())
    return Losses(loss, nll, each.view(found.targets.shape), right.view(found.targets.shape))


class _Aim:
    """Target probabilities t: `other` + `more` for the true class, 0 for `pad`, and `other` for every other class."""

    def __init__(self, classes: int, smoothing: float, pad: int) -> None:
        self.pad, self.entropy = pad if pad >= 0 else None, 0.0
        self.other, self.more = smoothing / classes, 1 - smoothing
        if self.pad is not None:
            self.other = smoothing / (classes - 2)
            self.more = 1 - self.other * (classes - 1)
            self.entropy = -(1 - smoothing) * log(1 - smoothing) - (smoothing * log(self.other) if smoothing else 0)

    def others(self, x: Tensor) -> Tensor:
        """Return −Σ_c x_c over all classes except `pad`, in at least float32; classes are the second dimension."""
        total = x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (0 if self.pad is None else x.select(1, self.pad)) - total

    def subtract(self, p: Tensor, target: Tensor) -> Tensor:
        """Return p − t, (rows, C), computed in place: the gradient of −Σ_c t_c log p_c with respect to the logits."""
        slope = p.sub_(self.other) if self.other else p
        if self.pad is not None:
            slope[:, self.pad] += self.other
        return slope.scatter_add_(1, target, slope.new_full(target.shape, -self.more))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *settings: Any) -> tuple[Tensor, ...]:
        found, smoothing, differentiate = settings
        real = (found.targets != found.ignore).to(torch.promote_types(x.dtype, torch.float32))
        aim, share, more = _Aim(len(weight), smoothing, found.ignore), real / real.sum(), real.new_zeros(())
        each, right = torch.empty_like(real), torch.empty_like(real, dtype=torch.bool)
        gradients = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        dtype = (x[:1] @ weight[:1].mT).dtype  # if autocast is enabled, it chooses the dtype
        # cast here: autocast would cache this cast, which has no gradient, also for other uses of a tied weight
        cast_weight, cast_bias = weight.to(dtype), bias.to(dtype)
        apart = dtype == share.dtype  # add the bias after the product: oneDNN takes 1.5 times as long for x Wᵀ + b
        for rows in (slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)):
            part, target = share[rows], found.targets[rows].clamp_min(0).unsqueeze(1)
            logits = F.linear(x[rows], cast_weight, None if apart else cast_bias)
            logits = logits.add_(cast_bias) if apart else logits
            top, best = logits.max(1, keepdim=True)
            p, top = logits.softmax(1, dtype=share.dtype), top.to(share.dtype)
            log_z = -p.gather(1, best).log()  # z = Σ_c exp(logit_c − top); log p of all classes would take another pass
            right[rows] = best.squeeze(1) == found.targets[rows]
            each[rows] = (top - logits.gather(1, target) + log_z).squeeze(1) * real[rows]
            if smoothing:  # `.sum()`, because autocast would round the result of `@` to half precision
                more += ((aim.other * aim.others(logits) + (1 - aim.more) * (top + log_z).squeeze(1)) * part).sum()
            slope = aim.subtract(p, target) if differentiate else p
            if differentiate:
                slope = slope.to(weight.dtype)  # `part` multiplies smaller tensors, not `slope`
                gradients[0][rows] = (slope @ cast_weight) * part.unsqueeze(1)
                gradients[1].addmm_(slope.mT, (x[rows] * part.unsqueeze(1)).to(weight.dtype))
                gradients[2].unsqueeze(0).addmm_(part.to(bias.dtype).unsqueeze(0), slope)  # `addmv_` is slow in oneDNN
            del logits, p, slope  # free memory before the next chunk
        ctx.settings = found, smoothing
        ctx.save_for_backward(x, weight, bias, *gradients)
        nll = (each * share).sum()
        ctx.mark_non_differentiable(nll, each, right)
        return aim.more * nll + more - aim.entropy, nll, each, right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs, gradients, (found, smoothing) = ctx.saved_tensors[:3], ctx.saved_tensors[3:], ctx.settings
        if torch.is_grad_enabled():  # saved gradients are constants: compute gradients again, with a graph
            # views, so that the gradient of a tied W leaves out the path through x, which depends on W
            inputs = [one.view_as(one).requires_grad_() for one in inputs]
            loss = cross_entropy(found._replace(states=F.linear(*inputs)), smoothing).loss
            gradients = torch.autograd.grad(loss, inputs, upstream, create_graph=True)
            return *gradients, None, None, None
        return *(upstream.to(gradient.dtype) * gradient for gradient in gradients), None, None, None
