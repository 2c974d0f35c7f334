"""Attention maps as Markov chains, docs/symmetry.md: what symmetric scores mean at any temperature."""

from itertools import combinations, permutations
from math import cos, e, pi, sin

import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import KVPhase, eigenvalues
from tests.attention.test_cycles import keys_of_a_cycle
from tests.helpers.cycles import cycles_of, head, random
from tests.helpers.layers import Case

seeds, lengths = st.integers(0, 2**31), st.integers(2, 12)
SYMMETRIC = ["kv", "kv+pos", "k", "k+pos"]
tight = {"atol": 1e-9, "rtol": 1e-9}


def layer_of(name, case, gain=None, **setting):
    """A random layer; `gain` is the sign of that of a variant with positions, whose biases are large."""
    layer = case.layer(name, per_head=True, **setting)
    if "pos" in name:
        with torch.no_grad():
            layer.to_logit.weight.copy_(random(case.seed, *layer.to_logit.weight.shape))
            if gain is not None:  # of each head
                layer.to_logit.weight[:, 0] += gain * (1 + layer.to_logit.weight.abs().sum(1))
    return layer


def cases_of(seed, length):
    return Case(heads=4, group=2, head_dim=4, batch=3, length=length, seed=seed)


def chain(logits):
    return logits.softmax(-1)


# reversible chains


@given(seed=seeds, length=lengths, gain=st.floats(-5, 5), columns=st.floats(0, 5))
def test_symmetric_scores_with_any_gain_and_biases_are_a_reversible_chain(seed, length, gain, columns):
    square = random(seed, length, length)
    bias, rows = columns * random(seed + 1, 1, length), random(seed + 2, length, 1)
    scores = gain * (square + square.mT) + bias
    weights = chain(scores + rows)
    stationary = (bias[0] + scores.logsumexp(-1)).softmax(-1)  # ∝ e^c_i Z_i
    flow = stationary[:, None] * weights
    assert_close(stationary @ weights, stationary, **tight)
    assert_close(flow, flow.mT, **tight)
    assert eigenvalues(weights).imag.abs().max() < 1e-7


@given(seed=seeds, length=lengths)
def test_every_reversible_chain_comes_from_symmetric_scores(seed, length):
    """A chain of Metropolis, made for a distribution by accepting the moves of any other chain, or staying."""
    moves, stationary = chain(random(seed, length, length)), random(seed + 1, length).softmax(-1)
    flow = stationary[:, None] * moves
    weights = moves * (flow.mT / flow).clamp(max=1)
    weights += torch.diag(1 - weights.sum(-1))
    scores = (stationary[:, None] * weights).log()
    assert_close(scores, scores.mT, **tight)
    assert_close(chain(scores), weights, **tight)


@given(seed=seeds, length=st.integers(3, 12))
def test_scores_with_a_skew_part_are_not(seed, length):
    square, skew = random(seed, length, length), random(seed + 1, length, length)
    weights = chain(square + square.mT + skew - skew.mT)
    stationary = torch.linalg.matrix_power(weights, 10_000)[0]
    flow = stationary[:, None] * weights
    assert_close(stationary @ weights, stationary, **tight)
    assert (flow - flow.mT).abs().max() > 1e-9


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("gain", [1, -1])
@pytest.mark.parametrize("rope", [0.0, 1.0])
@settings(max_examples=15)
@given(seed=seeds, length=lengths, padded=st.booleans())
def test_the_eigenvalues_of_the_papers_attentions_are_real_and_with_a_positive_gain_not_negative(
    name, gain, rope, seed, length, padded
):
    case = cases_of(seed, length)
    weights = layer_of(name, case, gain, rope=rope).weights(
        case.input() / 2, **case.mask("padded" if padded else "none")
    )
    found = eigenvalues(weights)
    assert found.imag.abs().max() < 1e-5
    assert_close(found.real.max(-1).values, torch.ones(3, 4).double(), **tight)
    assert found.real.min() > (-1e-5 if gain > 0 or "pos" not in name else -1 - 1e-9)


def test_a_negative_gain_and_looking_away_from_oneself_have_negative_ones():
    case = cases_of(0, 6)
    for layer in (layer_of("kv+pos", case, -1), case.layer("kv", attend_self=False)):
        found = eigenvalues(layer.weights(case.input() / 2))
        assert found.imag.abs().max() < 1e-5
        assert (found.real.min(-1).values < -0.05).any()
    assert_close(found.real.sum(-1), torch.zeros(3, 4).double(), **tight)  # without self: the trace


@pytest.mark.parametrize("length", [5, 6, 8])
def test_those_of_a_turned_key_may_be_the_roots_of_unity(length):
    keys = 10 * keys_of_a_cycle(length, pi / 4)
    found = eigenvalues(head(keys, KVPhase, phase=pi / 4, attend_self=False).weights(keys[None])[0, 0])
    roots = torch.polar(torch.ones(length).double(), 2 * pi * torch.arange(length).double() / length)
    assert (found[:, None] - roots).abs().min(0).values.max() < 1e-3
    assert (found[:, None] - roots).abs().min(1).values.max() < 1e-3


@pytest.mark.parametrize("name", ["qkv", "kv", "kv+phase"])
@pytest.mark.parametrize("attend_self", [True, False])
def test_those_of_a_causal_map_are_its_diagonal(name, attend_self):
    case = cases_of(1, 7)
    weights = case.layer(name, attend_self=attend_self).weights(case.input(), causal=True)
    found = eigenvalues(weights)
    assert found.imag.abs().max() == 0
    assert_close(found.real.sort(-1).values, weights.diagonal(0, -2, -1).sort(-1).values, **tight)


# the weights along a cycle


def along(weights, cycle):
    """The geometric mean of the weights of the tokens of a cycle on the next, (…, N, N) → (…)."""
    cycle = torch.tensor(cycle)
    return weights[..., cycle, cycle.roll(-1)].log().mean(-1).exp()


def cycles(length, shortest):
    """All cycles among so many tokens, each once."""
    for count in range(shortest, length + 1):
        for first, *rest in combinations(range(length), count):
            for order in permutations(rest):
                yield [first, *order]


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("gain", [1, -1])
@pytest.mark.parametrize("attend_self", [True, False])
@settings(max_examples=20)
@given(seed=seeds, length=st.integers(2, 5), size=st.floats(0.1, 2))
def test_no_cycle_of_a_head_is_above_its_bound(name, gain, attend_self, seed, length, size):
    case = cases_of(seed, length)
    weights = layer_of(name, case, gain, attend_self=attend_self).weights(case.input() * size / 3)
    positive = (gain > 0 or "pos" not in name) and attend_self
    longer = [along(weights, cycle).max().item() for cycle in cycles(length, 3)]
    pairs = [along(weights, cycle).max().item() for cycle in cycles(length, 2) if len(cycle) == 2]
    target(max(longer, default=0.0))
    assert max(longer, default=0) <= (1 / 3 if positive else 1 / 2) + 1e-12
    assert max(pairs) <= (1 / 2 if positive else 1) + 1e-12


@pytest.mark.parametrize(
    ("length", "most"),
    [(2, 0.5), (3, 0.3333), (4, 0.25), (5, 0.2206), (6, 0.2179), (7, 0.2214), (8, 0.2256), (12, 0.2356)],
)
def test_how_much_keys_can_give_the_next_is_known(length, most):
    """The mean of the log weights is concave in the scores, so that the best keys may be turned round the cycle: of
    scores s_d = Σ_p a_p cos(2πpd/n) with a_p ≥ 0, n/2 + 1 numbers, a search finds the best; keys reach it, and no more.
    """
    waves = torch.cos(2 * pi * torch.outer(torch.arange(length // 2 + 1), torch.arange(length)) / length).double()
    power = random(0, length // 2 + 1).requires_grad_()
    keys = random(1, length, length).requires_grad_()
    successor = [*range(length)]

    def ascend(of, value):
        optimizer = torch.optim.LBFGS([of], max_iter=1000, tolerance_change=1e-14, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            negative = -value()
            negative.backward()
            return negative

        optimizer.step(loss)
        return value().exp().item()

    round_the_cycle = ascend(power, lambda: (power.square() @ waves).log_softmax(-1)[1])
    free = ascend(keys, lambda: chain(keys @ keys.mT)[successor, [*range(1, length), 0]].log().mean())
    assert round_the_cycle == pytest.approx(most, abs=1e-4)
    assert free == pytest.approx(most, abs=2e-3)
    assert free <= round_the_cycle + 1e-6


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_the_bounds_are_met(length):
    """A third by three equal keys; a half by symmetric scores of any rank, and by keys on a circle without self."""
    cycle = [*range(length)]
    if length == 3:
        assert_close(along(head(torch.ones(3, 2).double()).weights(torch.ones(1, 3, 2).double()), cycle).item(), 1 / 3)
    ahead = torch.eye(length).double().roll(1, 1)
    assert along(chain(50 * (ahead + ahead.mT)), cycle) > 0.4999
    turns = 2 * pi * torch.arange(length).double() / length
    keys = 20 * torch.stack([turns.cos(), turns.sin()], -1)
    assert along(head(keys, attend_self=False).weights(keys[None]), cycle) > 0.4999
    assert along(head(keys).weights(keys[None]), cycle) < 1 / 3
    turned = 10 * keys_of_a_cycle(length, pi / 4)
    assert along(head(turned, KVPhase, phase=pi / 4, attend_self=False).weights(turned[None]), cycle) > 0.999


# circulation


def circulation(weights, cycle):
    """Σ log A(next) − log A(back) along a cycle."""
    cycle = torch.tensor(cycle)
    return (weights[..., cycle, cycle.roll(-1)].log() - weights[..., cycle.roll(-1), cycle].log()).sum(-1)


@given(seed=seeds, length=st.integers(3, 8), data=st.data())
def test_the_circulation_is_that_of_the_skew_part_and_no_bias_changes_it(seed, length, data):
    cycle = data.draw(st.lists(st.integers(0, length - 1), min_size=3, unique=True))
    scores, bias, rows = random(seed, length, length), random(seed + 1, 1, length), random(seed + 2, length, 1)
    skew = (scores - scores.mT) / 2
    expected = 2 * sum(skew[i, j] for i, j in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    for gain in (1, -2):
        assert_close(circulation(chain(gain * scores + bias + rows), cycle), gain * expected, **tight)


@pytest.mark.parametrize("name", SYMMETRIC)
@settings(max_examples=20)
@given(seed=seeds, length=st.integers(3, 8), data=st.data())
def test_what_the_papers_encoding_adds_has_none(name, seed, length, data):
    """KV and KV+Pos have none; that of QKV+Pos is that of its bare scores, times the gain."""
    cycle, case = data.draw(st.lists(st.integers(0, length - 1), min_size=3, unique=True)), cases_of(seed, length)
    x = case.input() / 3
    none = circulation(layer_of(name, case).weights(x), cycle)
    assert_close(none, torch.zeros_like(none), atol=1e-7, rtol=0)
    layer = layer_of("qkv+pos", case)
    q, k = map(layer._repeat_groups, layer.project(x)[:2])
    gain = layer.gain_and_bias(length, length)[0][:, 0, 0]
    found = circulation(layer.weights(x), cycle)
    assert_close(found, gain * circulation(chain(layer.score(q, k)), cycle), atol=1e-7, rtol=1e-7)
    assert found.abs().max() > 1e-3  # of twelve heads: one alone can be nearly reversible by chance


@given(seed=seeds, length=st.integers(3, 8), phase=st.floats(-pi, pi))
def test_that_of_a_turned_key_is_the_area_that_its_keys_enclose(seed, length, phase):
    keys = random(seed, length, 6) / 2
    weights = head(keys, KVPhase, phase=phase).weights(keys[None])[0, 0]
    a, b = keys.unflatten(1, (-1, 2)).unbind(-1)
    area = (a * b.roll(-1, 0) - b * a.roll(-1, 0)).sum() / 2  # the shoelace formula, anticlockwise
    assert_close(circulation(weights, [*range(length)]), -4 * sin(phase) * area, atol=1e-5, rtol=1e-5)


# relative positions: the mirror


def first_layer(name, seed, **setting):
    """A layer that has rotary positions alone, and the vectors of three symbols."""
    case = cases_of(seed, 3)
    return case.layer(name, rope=1.0, **setting), 3 * random(seed + 1, 3, case.dim)


def spell(symbols, text):
    return symbols[["abc".index(letter) for letter in text]][None]


@pytest.mark.parametrize("name", ["kv", "k"])
@given(seed=seeds, distance=st.integers(0, 8))
def test_a_score_with_rotary_positions_is_that_of_the_mirrored_pair(name, seed, distance):
    layer, symbols = first_layer(name, seed)
    text = f"a{'c' * distance}b"
    here, later = (layer.scores(spell(symbols, before + text))[0] for before in ("", "cc"))
    assert_close(here[:, 0, -1], later[:, -1, 2], **tight)  # s(a, b, δ) = s(b, a, −δ)


@pytest.mark.parametrize("name", ["kv", "k", "kv+pos"])
@pytest.mark.parametrize("attend_self", [True, False])
@given(seed=seeds)
def test_no_head_prefers_the_token_before_in_both_of_two_texts(name, attend_self, seed):
    """In "b a b" and "a b a" both neighbours are alike; a gain does not help, a bias of the keys would."""
    layer, symbols = first_layer(name, seed, attend_self=attend_self)
    if name == "kv+pos":
        layer.positions.columns.zero_()
    one, other = (layer.scores(spell(symbols, text))[0, :, 1] for text in ("bab", "aba"))
    assert_close(one[:, 0] - one[:, 2], other[:, 2] - other[:, 0], **tight)
    alike = layer.scores(spell(symbols, "aaa"))[0, :, 1]
    assert_close(alike[:, 0], alike[:, 2], **tight)


def test_a_query_prefers_it_in_any_text():
    case = Case(heads=1, group=1, head_dim=2, batch=1, length=8, seed=0)
    layer = case.layer("qkv", rope=1.0)
    with torch.no_grad():  # constant queries and keys: R(1) between them
        for role, (a, b) in (("q", (cos(1), -sin(1))), ("k", (1, 0))):
            layer.projection[role].weight.zero_()
            layer.projection[role].bias.copy_(10 * torch.tensor([a, b]))
    looks = layer.scores(case.input())[0, 0].argmax(-1)
    assert looks[1:].tolist() == [*range(7)]


@given(seed=seeds, length=st.integers(2, 40))
def test_a_turn_by_the_angle_of_a_place_looks_at_the_token_before(seed, length):
    """cos(δθ + φ) is largest at δ = −1 if φ = θ: here of the fastest pair of channels, θ = 1."""
    case = Case(heads=1, group=1, head_dim=4, batch=1, length=length, seed=seed)
    layer = case.layer("kv+phase", rope=1.0, phase=1.0)
    with torch.no_grad():
        layer.projection["k"].weight.zero_()
        layer.projection["k"].bias.copy_(torch.tensor([10.0, 0, 0, 0]))
    scores = layer.scores(case.input())[0, 0]
    place = torch.arange(length).double()
    assert_close(scores, 50 * torch.cos(place - place[:, None] + 1), atol=1e-4, rtol=0)
    assert scores[1:].argmax(-1).tolist() == [*range(length - 1)]


@pytest.mark.parametrize("attend_self", [True, False])
def test_without_self_constant_keys_look_at_the_token_before_if_attention_is_causal(attend_self):
    """Of the slow pair of channels, θ = 0.01: cos(δθ) falls with the distance. Without a mask, both sides are alike."""
    layer = Case(heads=1, group=1, head_dim=4, batch=1, length=12, seed=0).layer(
        "kv", rope=1.0, attend_self=attend_self
    )
    with torch.no_grad():
        layer.projection["k"].weight.zero_()
        layer.projection["k"].bias.copy_(torch.tensor([0.0, 0, 500, 0]))
    x = random(0, 1, 12, 4)
    looks = layer.weights(x, causal=True)[0, 0].argmax(-1)
    assert looks[1:].tolist() == ([*range(1, 12)] if attend_self else [*range(11)])
    weights = layer.weights(x)[0, 0]
    assert_close(weights[1:-1].diagonal(0), weights[1:-1].diagonal(2))


@given(seed=seeds, phase=st.floats(0.01, pi - 0.01), back=st.booleans())
def test_an_angle_leans_all_heads_to_one_side(seed, phase, back):
    """Among equal tokens, every head prefers the one before to the one after; with a negative angle the one after."""
    layer, symbols = first_layer("kv+phase", seed, phase=-phase if back else phase)
    before, _, after = layer.scores(spell(symbols, "aaa"))[0, :, 1].unbind(-1)
    assert ((before < after) if back else (before > after)).all()


# causal attention: norms


@pytest.mark.parametrize("name", ["kv", "kv+pos", "k"])
@pytest.mark.parametrize("rope", [0.0, 1.0])
@settings(max_examples=20)
@given(seed=seeds, length=lengths)
def test_who_prefers_another_to_itself_has_a_shorter_key(name, rope, seed, length):
    """By Δ: α g |k_j|² + 2 c_j ≥ α g |k_i|² + 2 c_i + 2 Δ."""
    case = cases_of(seed, length)
    layer, x = layer_of(name, case, 1, rope=rope), case.input()
    keys = layer._repeat_groups(layer.project(x)[1])
    gain, bias = layer.gain_and_bias(length, length)
    logits = layer.logits(*2 * [layer.rotary(keys, 0)])
    own = layer.score.scale * (1.0 if gain is None else gain[..., 0]) * keys.square().sum(-1)
    potential = own if bias is None else own + 2 * bias[..., 0, :]
    margin = logits - logits.diagonal(0, -2, -1).unsqueeze(-1)
    assert (potential.unsqueeze(-2) - potential.unsqueeze(-1) >= 2 * margin - 1e-7).all()
    assert length < 6 or (margin > 0).any()


@given(seed=seeds, length=st.integers(2, 12), margin=st.floats(0.1, 3))
def test_a_head_that_looks_at_the_token_before_has_keys_that_grow_towards_the_first(seed, length, margin):
    """Along a ray: |k_{i−1}| = |k_i| + Δ / |k_i|. And by the bound, at least as much."""
    norms = [1 + torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()]
    for _ in range(length - 1):
        norms.append(norms[-1] + margin / norms[-1])
    keys = torch.tensor(norms[::-1], dtype=torch.float64).unsqueeze(1)
    scores = head(keys).scores(keys[None])[0, 0]
    before, own = scores.diagonal(-1), scores.diagonal()[1:]
    assert_close(before - own, torch.full_like(own, margin))
    assert keys[0] ** 2 >= keys[-1] ** 2 + 2 * (length - 1) * margin


@given(seed=seeds, length=lengths)
def test_with_cosines_no_token_prefers_another_to_itself(seed, length):
    case = cases_of(seed, length)
    scores = case.layer("kv", score="cosine").scores(case.input())
    assert (scores <= scores.diagonal(0, -2, -1).unsqueeze(-1) + 1e-12).all()


# two heads


def keys_of_a_chain(length):
    """s_ij = 1.2^(i+j) 0.5^|i−j| rises along the chain, so that each token but the last looks at the next."""
    i = torch.arange(length, dtype=torch.float64)
    return torch.linalg.cholesky(1.2 ** (i + i[:, None]) * 0.5 ** (i - i[:, None]).abs())


@given(length=st.integers(2, 16), seed=seeds)
def test_two_heads_look_along_any_permutation(length, seed):
    """The first along a chain of each cycle; the second from its last token to its first, which share a key."""
    successor = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    chains, pairs, last = [], [], []
    for cycle in cycles_of(successor):
        for keys, block in ((chains, keys_of_a_chain(len(cycle))), (pairs, torch.ones(1, 1).double().repeat(2, 1))):
            placed = torch.zeros(length, block.shape[1], dtype=torch.float64)
            placed[cycle if keys is chains else [cycle[0], cycle[-1]]] = block
            keys.append(placed)
        last.append(cycle[-1])
    first, second = (torch.cat(keys, 1) for keys in (chains, pairs))
    looks = [head(keys).scores(keys[None])[0, 0].fill_diagonal_(-1).argmax(-1) for keys in (first, second)]
    for token in range(length):
        if successor[token] != token:
            assert looks[token in last][token] == successor[token]


def test_round_long_cycles_the_weight_on_the_next_token_tends_to_a_limit():
    """1/√(2πe): no positive semidefinite scores of a cycle exceed the bound, and equal steps on a circle come near."""
    limit, m = (2 * pi * e) ** -0.5, 1000
    turn = 2 * pi * torch.arange(m, dtype=torch.float64) / m
    steps = torch.softmax((m / (2 * pi)) ** 2 * turn.cos(), dim=0)
    assert abs(steps[1].item() - limit) < 1e-5
    generator = torch.Generator().manual_seed(0)
    distance = torch.minimum(torch.arange(m), m - torch.arange(m)).double()
    for decay in (0.0, 1.0, 3.0):
        power = torch.rand(m // 2, generator=generator, dtype=torch.float64) * torch.arange(1, m // 2 + 1) ** -decay
        scores = (power[:, None] * torch.cos(torch.arange(1, m // 2 + 1)[:, None] * turn)).sum(0)
        scores = scores / (scores[0] - scores[1])  # c = 1
        assert torch.softmax(scores, dim=0)[1] <= (-distance.square()).softmax(dim=0)[1] + 1e-12
