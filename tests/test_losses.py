"""The smoothed loss against the dense divergence, and the schedule that goes with it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.errors import UserError
from kvt.losses import label_smoothed_kl
from kvt.schedules import inverse_square_root


def dense(logits, target, smoothing, pad):
    """KL(t ‖ p) with t written down, averaged over the targets that are no padding."""
    symbols, total, real = logits.shape[-1], 0.0, target != pad
    for row in real.nonzero().flatten().tolist():
        t = torch.full((symbols,), smoothing / (symbols - 2), dtype=logits.dtype)
        t[pad] = 0.0
        t[target[row]] = 1 - smoothing
        total = total + (torch.xlogy(t, t) - t * logits[row].log_softmax(-1)).sum()
    return total / real.sum()


@settings(deadline=None)
@given(symbols=st.integers(3, 12), rows=st.integers(1, 8), share=st.floats(0, 1), data=st.data())
@example(symbols=3, rows=1, share=1.0, data=None)
def test_it_is_the_dense_divergence_in_value_and_gradient(symbols, rows, share, data):
    draw = data.draw if data else lambda _: 0
    pad, seed = draw(st.integers(0, symbols - 1)), draw(st.integers(0, 2**31))
    smoothing = share * (symbols - 2) / (symbols - 1)  # up to where all symbols are as likely as the truth
    assume(smoothing == 0 or smoothing > 1e-300)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, symbols, generator=generator, dtype=torch.float64)
    target = torch.randint(symbols, (rows,), generator=generator)
    target[0] = (pad + 1) % symbols  # one at least that is no padding
    logits.requires_grad_()
    ours = label_smoothed_kl(logits, target, smoothing=smoothing, pad=pad)
    plain = dense(logits, target, smoothing, pad)
    assert_close(ours, plain, atol=1e-10, rtol=1e-10)
    (our,), (their,) = torch.autograd.grad(ours, logits), torch.autograd.grad(plain, logits)
    assert_close(our, their, atol=1e-10, rtol=1e-10)
    # padding asks for no probability: what the model gives it is pushed down, and that of padded rows left alone
    real = target != pad
    assert_close(our[:, pad], logits.softmax(-1)[:, pad] * real / real.sum())
    assert not our[~real].any()


@settings(deadline=None)
@given(symbols=st.integers(3, 12), seed=st.integers(0, 2**31))
def test_without_smoothing_it_is_cross_entropy(symbols, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, target = torch.randn(9, symbols, generator=generator), torch.randint(1, symbols, (9,), generator=generator)
    target[::2] = 0
    plain = F.cross_entropy(logits, target, ignore_index=0)
    assert_close(label_smoothed_kl(logits, target, smoothing=0.0, pad=0), plain)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_the_smoothed_truth_itself_loses_nothing(smoothing):
    truth = torch.tensor([2, 4, 3])
    t = torch.full((3, 6), smoothing / 4, dtype=torch.float64)
    t[:, 1] = 0.0
    t[range(3), truth] = 1 - smoothing
    loss = label_smoothed_kl(t.clamp(min=1e-300).log(), truth, smoothing=smoothing, pad=1)
    assert_close(loss, torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("symbols", "smoothing"), [(3, 0.51), (5, 0.8), (12, 0.95)])
def test_the_truth_may_not_be_less_likely_than_the_rest(symbols, smoothing):
    with pytest.raises(UserError, match=f"smoothing={smoothing}"):
        label_smoothed_kl(torch.zeros(1, symbols), torch.tensor([1]), smoothing=smoothing, pad=0)


@settings(deadline=None)
@given(dim=st.integers(1, 1024), warmup=st.integers(1, 5000), step=st.integers(0, 20_000))
def test_inverse_square_root_is_its_formula_and_peaks_when_warm(dim, warmup, step):
    factor, t = inverse_square_root(dim, warmup), step + 1  # the first step is step 1 of the paper
    assert factor(step) == pytest.approx(min(1 / t**0.5, t / warmup**1.5) / dim**0.5)
    assert factor(warmup - 1) == pytest.approx((dim * warmup) ** -0.5)
    assert factor(step) <= factor(warmup - 1) * (1 + 1e-12)
