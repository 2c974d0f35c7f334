"""The cross-entropy in chunks against dense formulas, in both forms of label smoothing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kvt.bench import peak_bytes
from kvt.data.tokens import IGNORE
from kvt.models.losses import CHUNK, LARGE, Predictions, cross_entropy, linear_cross_entropy


def dense(logits, target, smoothing, pad):
    """KL(t ‖ p) with dense t, averaged over the targets that are not padding."""
    symbols, total, real = logits.shape[-1], 0.0, target != pad
    for row in real.nonzero().flatten().tolist():
        t = torch.full((symbols,), smoothing / (symbols - 2), dtype=logits.dtype)
        t[pad] = 0.0
        t[target[row]] = 1 - smoothing
        total = total + (torch.xlogy(t, t) - t * logits[row].log_softmax(-1)).sum()
    return total / real.sum()


def smoothed_kl(x, weight, bias, target, *, smoothing, pad, **settings):
    found = Predictions(x, target, ignore=pad)
    return linear_cross_entropy(found, weight, bias, smoothing, **settings)[:2]


def smoothed_kl_of_logits(logits, target, *, smoothing, pad):
    return cross_entropy(Predictions(logits, target, ignore=pad), smoothing)[:2]


def last_layer(rows, symbols, pad, dtype=torch.float64, seed=0):
    """Input, weight, bias and targets; the first target is not padding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 5), (symbols, 5), (symbols,)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    target = torch.randint(symbols, (rows,), generator=generator)
    target[0] = (pad + 1) % symbols
    return *tensors, target


@settings(max_examples=40)
@given(
    symbols=st.integers(3, 12), rows=st.integers(1, 8), share=st.floats(0, 1), chunk=st.integers(1, 9), data=st.data()
)
@example(symbols=3, rows=1, share=1.0, chunk=1, data=None)
def test_it_is_the_dense_divergence_in_value_and_gradients_for_any_chunk(symbols, rows, share, chunk, data):
    draw = data.draw if data else lambda _: 0
    pad, seed = draw(st.integers(0, symbols - 1)), draw(st.integers(0, 2**31))
    smoothing = share * (symbols - 2) / (symbols - 1)  # at most: all symbols as likely as the true one
    assume(smoothing == 0 or smoothing > 1e-300)
    x, weight, bias, target = last_layer(rows, symbols, pad, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvt.models.losses.CHUNK", chunk)
        ours, nll = smoothed_kl(x, weight, bias, target, smoothing=smoothing, pad=pad)
    logits = F.linear(x, weight, bias)
    plain = dense(logits, target, smoothing, pad)
    assert_close(ours, plain, atol=1e-10, rtol=1e-10)
    wanted = x, weight, bias
    gradients = torch.autograd.grad(3 * ours, wanted)
    assert_close(gradients, torch.autograd.grad(3 * plain, wanted, retain_graph=True), atol=1e-10, rtol=1e-10)
    assert not gradients[0][target == pad].any()
    assert not nll.requires_grad
    assert_close(nll, F.cross_entropy(logits, target, ignore_index=pad))
    assert_close(smoothed_kl_of_logits(logits, target, smoothing=smoothing, pad=pad), (ours, nll))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_in_half_precision_it_is_as_accurate_as_the_logits(smoothing):
    x, weight, bias, target = last_layer(300, 40, 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, nll = smoothed_kl(x, weight, bias, target, smoothing=smoothing, pad=1)
        plain = dense(F.linear(x, weight, bias).float(), target, smoothing, 1)
    assert ours.dtype == nll.dtype == torch.float32
    assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    wanted = x, weight, bias
    for our, their in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(plain, wanted), strict=True):
        assert our.dtype == torch.float32
        assert_close(our, their, atol=2e-2 * their.abs().max().item(), rtol=0)


def test_without_gradients_it_is_the_same():
    x, weight, bias, target = last_layer(300, 40, 1)
    ours = smoothed_kl(x, weight, bias, target, smoothing=0.1, pad=1)
    with torch.no_grad():
        assert_close(smoothed_kl(x, weight, bias, target, smoothing=0.1, pad=1), ours, atol=0, rtol=0)


def test_one_chunk_of_logits_is_in_memory_at_once():
    x, weight, bias, target = last_layer(16 * CHUNK, 500, 1, torch.float32)

    def gradients():
        torch.autograd.grad(smoothed_kl(x, weight, bias, target, smoothing=0.1, pad=1)[0], (x, weight, bias))

    assert peak_bytes(gradients, "cpu") < 4 * CHUNK * 500 * 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_can_be_differentiated_twice(smoothing):
    """Also with targets that are ignored."""
    *tensors, target = last_layer(4, 6, 1)
    target[1:3] = 1
    assert torch.autograd.gradgradcheck(
        lambda *tensors: 3 * smoothed_kl(*tensors, target, smoothing=smoothing, pad=1)[0], tensors
    )


def masked_layer(rows=7, symbols=12, **settings):
    *tensors, target = last_layer(rows, symbols, 1, **settings)
    return *tensors, target.masked_fill(torch.arange(rows) % 3 == 1, IGNORE)


@pytest.mark.parametrize("chunk", [1, 3, 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_in_chunks_it_is_the_dense_loss_in_value_gradients_and_each_target(chunk, smoothing, monkeypatch):
    monkeypatch.setattr("kvt.models.losses.CHUNK", chunk)
    *tensors, target = masked_layer()
    found = linear_cross_entropy(Predictions(tensors[0], target), *tensors[1:], smoothing)
    logits = F.linear(*tensors)
    wanted = F.cross_entropy(logits, target, label_smoothing=smoothing)
    assert_close(found.loss, wanted)
    gradients = torch.autograd.grad(3 * found.loss, tensors)
    assert_close(gradients, torch.autograd.grad(3 * wanted, tensors, retain_graph=True))
    assert_close(found.each, F.cross_entropy(logits.detach(), target, reduction="none"))
    assert_close(found.nll, F.cross_entropy(logits.detach(), target))
    assert torch.equal(found.right, logits.argmax(-1) == target)
    assert not any(part.requires_grad for part in found[1:4])
    whole = cross_entropy(Predictions(logits, target), smoothing)
    assert_close(whole[:4], found[:4])
    assert_close(torch.autograd.grad(3 * whole.loss, tensors), gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_frozen_weights_get_the_gradients_of_the_dense_loss(tied):
    _, weight, bias, target = masked_layer()
    gradients = []
    for way in (lambda *tensors: linear_cross_entropy(Predictions(tensors[0], target), *tensors[1:]).loss, None):
        leaf = weight.detach().clone().requires_grad_()
        tensors = (leaf[:7], leaf if tied else leaf.detach(), bias if tied else None)
        loss = way(*tensors) if way else F.cross_entropy(F.linear(*tensors), target)
        first = torch.autograd.grad(loss, leaf, create_graph=True)[0]
        gradients.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    assert_close(*gradients)


@pytest.mark.parametrize("symbols", [LARGE - 1, LARGE])
@pytest.mark.parametrize("hooked", [False, True])
def test_logits_of_large_plain_heads_alone_never_exist_as_a_whole(symbols, hooked):
    head, x, target = nn.Linear(5, symbols), torch.randn(2, 4, 5), torch.randint(symbols, (2, 4))
    calls = []
    if hooked:
        head.register_forward_hook(lambda *_: calls.append(1))
    found = cross_entropy(Predictions(x, target, head))
    assert (found.logits is None) == (symbols >= LARGE and not hooked)
    assert len(calls) == hooked
    assert_close(found.loss, F.cross_entropy(F.linear(x, head.weight, head.bias).flatten(0, 1), target.flatten()))
    assert found.each.shape == found.right.shape == target.shape
