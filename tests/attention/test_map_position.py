"""The positional encoding of the map: the paper's formula as it stands, and what ours costs beside it."""

import pytest
import torch
from hypothesis import given, settings
from positional_encodings.torch_encodings import PositionalEncoding2D
from torch import nn
from torch.testing import assert_close

from kvt.attention import KVPos
from kvt.bench.measure import allocations, peak_bytes
from kvt.system.errors import UserError
from tests.helpers.layers import MASKS, MAX_LEN, POSITIONED, Case, cases, gradients


def sinusoid_2d(n, m):
    """P (n, n, m), with angles in float64 and entries rounded to float32, as the layer keeps them."""
    encoding = PositionalEncoding2D(m).double()
    half = encoding.channels
    encoding.inv_freq = 10_000.0 ** -(torch.arange(0, half, 2).double() / half)
    return encoding(torch.zeros(1, n, n, m).double())[0].float().double()


def literal(layer, roles, x, *, mask=None, causal=False):
    """Linear_{m→1}(Q Kᵀ / √D broadcast to m channels + P), softmax, times V: with a tensor (B, H, n, n, m)."""

    def project(role):
        heads = layer.projection[role](x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        return heads.repeat_interleave(layer.heads // heads.shape[1], 1)

    q, k, v = map(project, roles)
    n, m = x.shape[1], layer.to_logit.in_features
    table = getattr(layer.positions, "table", None)
    encoding = sinusoid_2d(n, m) if table is None else table[:n, :n]
    score = q @ k.mT / layer.head_dim**0.5
    logits = layer.to_logit(score.unsqueeze(-1).expand(*score.shape, m) + encoding).squeeze(-1)
    allowed = torch.ones(n, n, dtype=torch.bool) if mask is None else mask.expand(len(x), 1, n, n)
    allowed = allowed.tril() if causal else allowed
    mixed = logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
    return layer.output(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["none", "causal", "padded", "causal+padded"])
@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("pos_dim", [10, 20, 50])
@pytest.mark.parametrize("name", POSITIONED)
@settings(max_examples=5, deadline=None)
@given(case=cases())
def test_it_is_the_papers_formula_in_value_and_every_gradient(name, pos_dim, pos, kind, case):
    layer, x, told = case.layer(name, pos_dim=pos_dim, pos=pos), case.input().requires_grad_(), case.mask(kind)
    ours, paper = layer(x, **told), literal(layer, POSITIONED[name], x, **told)
    assert_close(ours, paper)
    learned = dict(layer.named_parameters())
    for parameter, our, their in zip(
        ["x", *learned],
        gradients(ours, x, *learned.values()),
        gradients(paper, x, *learned.values()),
        strict=True,
    ):
        assert_close(our, their, atol=1e-10, rtol=1e-6, msg=lambda difference, p=parameter: f"{p}: {difference}")


@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
def test_a_sequence_longer_than_its_positions_is_refused(name, pos):
    case = Case(heads=2, group=1, head_dim=4, batch=1, length=MAX_LEN + 1, seed=0)
    with pytest.raises(UserError, match=f"{MAX_LEN + 1} tokens is longer than max_len={MAX_LEN}"):
        case.layer(name, pos=pos)(case.input())


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"max_len": 0}, "max_len=0"),
        ({"max_len": -1, "pos": "learned"}, "max_len=-1"),
        ({"max_len": 4, "pos_dim": 0, "pos": "learned"}, "pos_dim=0"),
        ({"max_len": 4, "pos_dim": 2}, "pos_dim=2 must be at least 3"),
        ({"max_len": 4, "pos": "sinusoids"}, "did you mean 'sinusoid'"),
    ],
)
def test_impossible_positions_are_named(setting, says):
    with pytest.raises(UserError, match=says):
        KVPos(8, 2, **setting)


class Block(nn.Module):
    """A transformer block around an attention."""

    def __init__(self, attention, dim):
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, **told):
        x = x + self.attention(self.norm(x), **told)
        return x + self.mlp(x)


def training_step(module, x, **told):
    return lambda: module(x, **told).sum().backward()


@pytest.mark.parametrize("kind", MASKS[:3])
@pytest.mark.parametrize("name", POSITIONED)
def test_no_map_is_ever_made(name, kind):
    n = 512
    case = Case(heads=4, group=1, head_dim=8, batch=2, length=n, seed=0)
    layer = case.layer(name, max_len=n, pos_dim=50).float()
    step = training_step(layer, case.input().float().requires_grad_(), **case.mask(kind))
    largest = max(allocations(step))
    assert largest < 4 * n * n  # one float32 map of one head


@pytest.mark.parametrize("kind", MASKS[:3])
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("length", [64, 256])
def test_a_training_step_takes_little_more_memory_than_without_positions(length, head_dim, kind):
    case = Case(heads=4, group=1, head_dim=head_dim, batch=8, length=length, seed=0)

    def peak(name):
        block = Block(case.layer(name, max_len=length, pos_dim=50), case.dim).float()
        return peak_bytes(training_step(block, case.input().float().requires_grad_(), **case.mask(kind)), "cpu")

    assert peak("kv+pos") < 1.3 * peak("kv")
