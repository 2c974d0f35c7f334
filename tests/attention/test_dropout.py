"""Dropout: independent, unbiased, reproducible."""

import pytest
import torch

from kvt.attention.kernels import Dropout, dropout


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_numbers_are_dropped_independently_with_their_probability(p):
    torch.manual_seed(0)
    dropped = dropout(torch.ones(1000, 400), p) == 0
    spread = (p * (1 - p)) ** 0.5
    assert abs(dropped.float().mean() - p) < 5 * spread / dropped.numel() ** 0.5
    centred = dropped.float() - p
    for distance in (1, 2, 3, 4, 5, 8, 400):  # four share one draw of 64 bits
        product = (centred.flatten()[distance:] * centred.flatten()[:-distance]).mean() / spread**2
        assert abs(product) < 5 / dropped.numel() ** 0.5


def test_the_mean_is_kept():
    x = torch.rand(7, 5) + 1
    y = dropout(x, 0.25)
    torch.testing.assert_close(y[y != 0], (x / 0.75)[y != 0])
    assert (dropout(torch.ones(500_000), 0.1).mean() - 1).abs() < 0.003


@pytest.mark.parametrize("p", [0.999993, 1 - 1e-16])
def test_a_probability_close_to_one_drops_almost_all(p):
    y = dropout(torch.ones(100_000), p)
    assert y.isfinite().all()
    assert (y != 0).sum() < 20


def test_the_gradient_is_masked_and_scaled_alike():
    x = torch.randn(30, 11, requires_grad=True)
    y = dropout(x, 0.3)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x, y)


def test_torchs_default_generator_is_used():
    x = torch.ones(100)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_eval_mode_or_with_probability_zero():
    x = torch.randn(50)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert (Dropout(0.5)(x) == 0).any()
