"""The law of cycles, docs/symmetry.md: along which permutations a head without queries can look."""

from itertools import product
from math import cos, inf, pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, KV, KVPhase, cycle_lengths, looked_at, symmetric_share
from kvt.tasks.lists import permutation
from kvt.view.maps import Layer, describe_looks
from tests.helpers.cycles import cycles_of, head, random
from tests.helpers.layers import SMALL, Case

seeds, lengths = st.integers(0, 2**31), st.integers(2, 12)
PHASES = [pi / 6, pi / 4, pi / 3, pi / 2]


@given(length=lengths, seed=seeds)
def test_the_lengths_of_all_cycles_are_counted(length, seed):
    """Of a permutation by walking along it; of any map i → j, those among its tokens that keep being reached."""
    generator = torch.Generator().manual_seed(seed)
    bijection = torch.randperm(length, generator=generator)
    assert cycle_lengths(bijection) == sorted(map(len, cycles_of(bijection)))
    any_map = torch.randint(length, (length,), generator=generator)
    reached = torch.arange(length)
    for _ in range(length):
        reached = any_map[reached].unique()
    renamed = torch.searchsorted(reached, any_map[reached])  # a permutation of what is left
    assert cycle_lengths(any_map) == cycle_lengths(renamed)


# what symmetric scores cannot do


sizes = st.floats(1e-3, 10)  # smaller ones are lost beside the others' rounding


@given(length=lengths, seed=seeds, gain=sizes | sizes.map(lambda size: -size), columns=sizes | st.just(0.0))
def test_symmetric_scores_with_any_gain_and_biases_have_no_cycle_of_three_or_more(length, seed, gain, columns):
    square = random(seed, length, length)
    bias, rows = columns * random(seed + 1, 1, length), random(seed + 2, length, 1)
    assert max(cycle_lengths(looked_at(gain * (square + square.mT) + bias + rows))) <= 2


@pytest.mark.parametrize("name", ["kv", "kv+pos", "k", "k+pos"])
@given(seed=seeds, length=lengths)
def test_no_head_of_the_papers_attentions_looks_along_a_longer_cycle(name, seed, length):
    case = Case(heads=4, group=2, head_dim=4, batch=3, length=length, seed=seed)
    layer = case.layer(name)
    if "pos" in name:
        torch.nn.init.normal_(layer.to_logit.weight, std=3)
    for scores in layer.scores(case.input()).flatten(0, 1):
        assert max(cycle_lengths(looked_at(scores))) <= 2


@pytest.mark.parametrize("name", ["kv+phase", "k+phase"])
@pytest.mark.parametrize("phase", [0, pi / 6, pi / 4, pi / 3])
@given(seed=seeds, length=lengths)
def test_keys_prefer_the_next_to_themselves_only_in_cycles_longer_than_pi_over_the_angle(name, phase, seed, length):
    """With the diagonal, the only cycles of a positive semidefinite matrix are tokens that look at themselves."""
    longest = pi / phase if phase else inf
    case = Case(heads=4, group=2, head_dim=4, batch=3, length=length, seed=seed)
    for scores in case.layer(name, phase=phase).scores(case.input()).flatten(0, 1):
        assert all(n == 1 or n > longest for n in cycle_lengths(scores.argmax(-1)))
    turns = 2 * pi / length * torch.arange(length, dtype=torch.float64)
    keys = torch.stack([turns.cos(), -turns.sin()], -1)  # on a circle
    scores = head(keys, KVPhase, phase=phase).scores(keys[None])[0, 0]
    prefers_next = scores.gather(1, torch.arange(length).roll(-1).unsqueeze(1))[:, 0] > scores.diagonal() + 1e-5
    assert prefers_next.tolist() == [length > longest + 1e-5] * length


def keys_of_causal(logits):
    """Keys (n, n) that have these logits (n, n) at j ≤ i, but for a number for each row."""
    offsets = 50.0 * torch.arange(len(logits), 0, -1, dtype=torch.float64)
    lower = (logits + offsets[:, None]).tril()
    return torch.linalg.cholesky(lower + lower.tril(-1).mT)


@given(length=st.integers(2, 12), seed=seeds)
def test_any_causal_logits_are_those_of_some_keys(length, seed):
    wanted = random(seed, length, length)
    keys = keys_of_causal(wanted)
    weights = head(keys).weights(keys[None], causal=True)[0, 0]
    assert_close(weights, wanted.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1))


@given(length=lengths, seed=seeds, preferred=st.floats(0.1, 3))
def test_keys_of_a_head_that_looks_at_the_token_before_grow_with_the_length(length, seed, preferred):
    """Made from logits that may be any, but that each token prefers the one before it to itself."""
    logits = random(seed, length, length)
    before = torch.arange(1, length)
    logits[before, before - 1] = logits.diagonal()[1:] + preferred
    squares = keys_of_causal(logits).square().sum(-1)
    assert squares[0] - squares[-1] >= 2 * (length - 1) * preferred


@given(length=st.integers(3, 12), cycle=st.integers(1, 12), seed=seeds)
def test_each_longer_cycle_costs_a_token_at_least(length, cycle, seed):
    successor = permutation(length, min(cycle, length), seed)
    square = random(seed, length, length)
    looks = looked_at(square + square.mT) == successor
    longer = sum(n > 2 for n in cycle_lengths(successor))
    assert (~looks).sum() >= longer


def test_a_free_table_and_a_query_escape():
    """`kv+pos` with `pos: learned` draws a cycle of five, with equal keys; so does a query."""
    successor = torch.arange(5).roll(-1)
    table = SMALL.layer("kv+pos", pos="learned")
    with torch.no_grad():
        table.positions.table[:5, :5] = torch.eye(5)[successor].unsqueeze(-1)
        table.to_logit.weight.fill_(1)
    scores = table.scores(torch.zeros(1, 5, SMALL.dim, dtype=torch.float64))
    assert torch.equal(looked_at(scores), successor.expand(1, SMALL.heads, 5))
    query = head(torch.eye(8).double()[:5], Querying)
    assert torch.equal(looked_at(query.scores(torch.eye(8)[None, :5].double()))[0, 0], successor)


class Querying(KV):
    """A head whose token asks for its successor."""

    def project(self, x, context=None):
        q, k, v = super().project(x)
        return q.roll(-1, -2), k, v


# what skew scores cannot do


@given(length=lengths, seed=seeds)
def test_skew_scores_with_any_biases_have_one_cycle_of_two_at_most(length, seed):
    square = random(seed, length, length)
    bias = random(seed + 1, 1, length)
    assert cycle_lengths(looked_at(square - square.mT + bias)).count(2) <= 1


@given(seed=seeds, length=lengths)
def test_nor_has_a_head_turned_by_a_quarter(seed, length):
    case = Case(heads=4, group=2, head_dim=4, batch=3, length=length, seed=seed)
    for scores in case.layer("kv+phase", phase=pi / 2).double().scores(case.input()).flatten(0, 1):
        assert cycle_lengths(looked_at(scores)).count(2) <= 1


# what can be looked along


def keys_of_a_cycle(length, phase):
    """Keys (n, 2 n) of a cycle of n tokens: turned by φ ≠ 0, each looks at the next.

    In the m-th of n pairs of channels, token t has √(1 + cos(mω − φ)) · (cos mtω, −sin mtω), ω = 2π / n. So s(t, t + d)
    = Σ_m (1 + cos(mω − φ)) cos(mdω − φ), which is n cos φ for d = 0, plus n/2 for d = 1, plus n/2 · cos 2φ for d = −1.
    """
    angles = 2 * pi * torch.arange(length, dtype=torch.float64) / length
    amplitude = (1 + (angles - phase).cos()).sqrt()
    turns = angles[:, None] * torch.arange(length)
    return torch.stack([amplitude * turns.cos(), -amplitude * turns.sin()], -1).flatten(1)


@pytest.mark.parametrize("phase", [0, *PHASES])
@given(length=lengths)
def test_the_scores_of_a_cycle_are_known(length, phase):
    keys, ahead = keys_of_a_cycle(length, phase), torch.eye(length, dtype=torch.float64).roll(1, 1)
    expected = length * cos(phase) * torch.eye(length) + length / 2 * (ahead + cos(2 * phase) * ahead.mT)
    assert_close(head(keys, KVPhase, phase=phase).scores(keys[None])[0, 0], expected, atol=1e-5, rtol=0)


def keys_of(successor, phase):
    """Keys with which every token looks at its successor: each cycle has channels of its own."""
    keys = []
    for cycle in cycles_of(successor):
        block = torch.zeros(len(successor), 2 * len(cycle), dtype=torch.float64)
        block[cycle] = keys_of_a_cycle(len(cycle), phase)
        keys.append(block)
    return torch.cat(keys, 1)


@pytest.mark.parametrize("phase", [0, *PHASES])
@given(length=st.integers(3, 12), cycle=st.integers(3, 12), seed=seeds)
def test_any_permutation_that_the_law_allows_can_be_looked_along(phase, length, cycle, seed):
    """An involution by symmetric scores, longer cycles by skew ones, any permutation by an angle between."""
    successor = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    if phase in (0, pi / 2):
        successor = permutation(length, 2 if phase == 0 else min(cycle, length), seed)
    keys = keys_of(successor, phase)
    looks, moved = (
        looked_at(head(keys, KVPhase, phase=phase).scores(keys[None]))[0, 0],
        successor != torch.arange(length),
    )
    assert torch.equal(looks[moved], successor[moved])


@pytest.mark.parametrize("length", [3, 4, 8, 16])
def test_symmetric_scores_look_along_a_chain_so_that_one_token_of_a_cycle_looks_back(length):
    """s_ij = rⁱ⁺ʲ ρ^|i−j| with r ρ < 1 < r rises along the chain: the bound is met."""
    i = torch.arange(length, dtype=torch.float64)
    scores = 1.2 ** (i + i[:, None]) * 0.5 ** (i - i[:, None]).abs()
    keys = torch.linalg.cholesky(scores)
    looks = looked_at(head(keys).scores(keys[None]))[0, 0]
    assert looks.tolist() == [*range(1, length), length - 2]


# why accuracy is not bounded


@pytest.mark.parametrize("length", [3, 5])
def test_a_symmetric_head_can_see_a_mixture_from_which_the_successor_can_be_read(length):
    """On a cycle, one token looks back; but what it gets is another mixture for each digit of its successor."""
    keys = random(0, length, 2 * length)
    weights = head(keys).weights(keys[None])[0, 0]  # (N, N), the same for all lists
    successor = torch.arange(length).roll(-1)
    assert not torch.equal(looked_at(weights), successor)
    lists = torch.tensor([*product(range(3), repeat=length)])  # of all lists of three digits
    mixtures = weights @ torch.nn.functional.one_hot(lists).double()  # (lists, N, digits), what the head returns
    for token in range(length):
        meaning = {}
        for mixture, digits in zip(mixtures[:, token], lists, strict=True):
            assert (
                meaning.setdefault(tuple(mixture.mul(1e9).round().tolist()), digits[successor[token]])
                == (digits[successor[token]])
            )


# what depth undoes


@given(length=st.integers(2, 16), seed=seeds)
def test_every_permutation_is_a_product_of_two_involutions(length, seed):
    successor = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    first, second = two_involutions(successor)
    assert torch.equal(first[second], successor)
    for involution in (first, second):
        assert torch.equal(involution[involution], torch.arange(length))


def two_involutions(successor):
    """α and β with π(i) = α(β(i)): on a cycle, t → 1 − t after t → −t moves t to 1 + t."""
    first, second = torch.empty_like(successor), torch.empty_like(successor)
    for cycle in cycles_of(successor):
        places = torch.tensor(cycle)
        second[places] = places.flip(0).roll(1)
        first[places] = places.flip(0).roll(2)
    return first, second


def test_two_symmetric_layers_move_a_cycle_of_sixteen():
    """Partners share a key, so a token gets ½ of its own content and ½ of its partner's; weights by hand undo that.

    x_i − 2 · ½ (x_i + x_partner) = −x_partner, also where a token is its own partner; two layers, and the sign is back.
    """
    successor = permutation(16, 16, seed=0)
    content = random(1, 16, 10)
    moved = content
    for involution in two_involutions(successor):
        keys = 10 * torch.eye(16, dtype=torch.float64)[torch.minimum(involution, torch.arange(16))]
        layer = KV(26, 1, bias=False, output_bias=False, score="dot").double()
        with torch.no_grad():
            layer.projection["k"].weight.copy_(torch.block_diag(torch.zeros(10, 10), torch.eye(16)))
            layer.projection["v"].weight.copy_(torch.block_diag(-2 * torch.eye(10), torch.zeros(16, 16)))
            layer.output.weight.copy_(torch.eye(26))
        x = torch.cat([moved, keys], 1)
        moved = (x + layer(x[None])[0])[:, :10]
    assert_close(moved, content[successor])


# how much of a head is symmetric


@pytest.mark.parametrize(("phase", "share"), [(0, 1), (pi / 2, 0)])
def test_the_symmetric_share_of_a_turned_key(phase, share):
    found = symmetric_share(SMALL.layer("kv+phase", phase=phase))
    assert_close(found, torch.full_like(found, share), atol=1e-6, rtol=0)


def test_the_symmetric_share_of_a_query_is_that_of_its_weights():
    layer = SMALL.layer("qkv", kv_heads=4)
    q, k = (layer.projection[name].weight.unflatten(0, (4, 4)) for name in "qk")  # (heads, head_dim, dim)
    product = q.mT @ k
    expected = (product + product.mT).flatten(1).norm(dim=1) ** 2 / 4 / product.flatten(1).norm(dim=1) ** 2
    assert_close(symmetric_share(layer), expected)
    assert_close(symmetric_share(SMALL.layer("kv")), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("attn", ATTENTION)
def test_no_symmetric_share_is_shown_where_there_is_no_matrix(attn):
    """A norm of queries or keys is not linear; with the score 'dot', all others are x_iᵀ M x_j up to biases."""
    layer = SMALL.layer(attn)
    if not layer.has_logits:
        return
    share = symmetric_share(layer)
    assert share.isnan().all() == any(isinstance(part, nn.RMSNorm) for part in layer.modules())
    seen = Layer("encoder.0", torch.zeros(4, 2, 2), None, None, None)._replace(symmetric=share)
    lines = describe_looks([seen._replace(looked_at=torch.tensor([[1, 0]] * 4))])
    assert all(("symmetric" in line) == bool(one.isfinite()) for line, one in zip(lines, share, strict=True))
