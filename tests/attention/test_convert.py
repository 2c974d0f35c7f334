"""Weights of one attention become those of another: exact where they can be, and where not, by least squares."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention.cache import OnePass
from kvt.attention.convert import FROM, TO, convert_layer, fit_layers
from kvt.system.errors import UserError
from tests.helpers.layers import SMALL, cases, kinds_of_mask

EXACT = {"atol": 1e-12, "rtol": 0}


def converted(source, case, attn, how="mean", **setting):
    target = case.layer(attn, **setting)
    target.output.load_state_dict(source.output.state_dict())
    convert_layer(source, target, how)
    return target


def tie(layer, *names):
    """Give projections equal weights."""
    for name in names[1:]:
        layer.projection[name].load_state_dict(layer.projection[names[0]].state_dict())
    return layer


@pytest.mark.parametrize(("attn", "tied"), [("kv", "qk"), ("q-kv", "kv"), ("k", "qkv"), ("qkv", "q")])
@pytest.mark.parametrize("how", ["keep_k", "keep_v", "mean"])
@settings(max_examples=5)
@given(case=cases(groups=st.just(1)), kind=kinds_of_mask)
def test_projections_that_were_equal_become_one(attn, tied, how, case, kind):
    layer, x = tie(case.layer("qkv"), *tied), case.input()
    if how == "mean" or how[-1] in tied or attn == "qkv":
        assert_close(converted(layer, case, attn, how)(x, **case.mask(kind)), layer(x, **case.mask(kind)), **EXACT)


@pytest.mark.parametrize(("old", "group"), product(FROM, [1, 2]))
def test_roles_may_be_separated_and_groups_split(old, group):
    case = replace(SMALL, group=group)
    layer, x = case.layer(old), case.input()
    assert_close(converted(layer, replace(case, group=1), "qkv")(x, causal=True), layer(x, causal=True), **EXACT)


def test_a_group_has_the_mean_of_its_heads():
    full, x = replace(SMALL, group=1).layer("qkv"), SMALL.input()
    one = converted(full, SMALL, "qkv")
    for role in (1, 2):
        expected = full.project(x)[role].unflatten(1, (2, 2)).mean(2)
        assert_close(one.project(x)[role], expected, **EXACT)


@pytest.mark.parametrize(("how", "kept"), [("keep_k", 1), ("keep_v", 2)])
def test_what_is_kept_is_kept(how, kept):
    case = replace(SMALL, group=1)
    layer, x = case.layer("qkv"), case.input()
    q, k, v = converted(layer, case, "q-kv", how).project(x)
    assert_close(q, layer.project(x)[0], **EXACT)
    assert k is v
    assert_close(k, layer.project(x)[kept], **EXACT)


@torch.no_grad()
def distance(target, source, x, **how):
    return float((target(x, **how) - source(x, **how)).norm() / source(x, **how).norm())


@pytest.mark.parametrize("attn", [name for name in TO if name != "qkv"])
@pytest.mark.parametrize("setting", [{}, {"attend_self": False}, {"rope": True}], ids=str)
def test_least_squares_is_closer_to_the_output_than_any_choice(attn, setting):
    case = replace(SMALL, group=1, length=8)
    layer, x = case.layer("qkv", **setting), case.input() / 3
    fitted = converted(layer, case, attn, **setting)
    fit_layers([layer], [fitted], [[{"x": x, "mask": None, "causal": True}]])
    choices = ["keep_k", "mean"] if attn in ("kv", "kv+phase") else ["keep_k", "keep_v", "mean"]
    others = [converted(layer, case, attn, how, **setting) for how in choices]
    assert distance(fitted, layer, x, causal=True) < 0.9 * min(distance(one, layer, x, causal=True) for one in others)


def test_padding_decides_nothing():
    case = replace(SMALL, group=1, length=8)
    layer, x = case.layer("qkv"), case.input()
    mask, weights = case.mask("padded")["mask"], []
    assert not mask.all()
    for tokens in (x, x.masked_fill(~mask.any(-2).any(1)[..., None], 7.0)):
        fitted = converted(layer, case, "q-kv")
        fit_layers([layer], [fitted], [[{"x": tokens, "mask": mask, "causal": False}]])
        weights.append(fitted.state_dict())
    assert_close(*weights, **EXACT)


def test_every_batch_counts_as_if_it_were_one():
    case = replace(SMALL, group=1, length=8)
    layer, x = case.layer("qkv"), case.input() / 3
    fitted = [converted(layer, case, "q-kv") for _ in range(2)]
    for target, batches in zip(fitted, ([x], x.split(1)), strict=True):
        fit_layers([layer], [target], [[{"x": part, "mask": None, "causal": True} for part in batches]])
    assert len(x) > 1
    assert_close(*(target.state_dict() for target in fitted), atol=1e-6, rtol=0)


def test_layers_that_share_keys_are_fitted_together():
    case = replace(SMALL, group=1, length=8)
    pairs = [[case.layer(attn), replace(case, seed=1).layer(attn)] for attn in ("qkv", "q-kv")]
    for _, upper in pairs:
        upper.borrow_keys()
    (layer, above), (fitted, fitted_above) = pairs
    for old, new in zip(*pairs, strict=True):
        new.output.load_state_dict(old.output.state_dict())
        convert_layer(old, new, "mean")
    calls = [{"x": x, "mask": None, "causal": True} for x in (case.input(), replace(case, seed=2).input())]

    def above_as_it_is(lower, upper):
        cache = OnePass()
        lower(**calls[0], cache=cache)
        return upper(**calls[1], cache=cache)

    wanted, before = above_as_it_is(layer, above), above_as_it_is(fitted, fitted_above)
    fit_layers([layer, above], [fitted, fitted_above], [[call] for call in calls])
    assert (above_as_it_is(fitted, fitted_above) - wanted).norm() < 0.9 * (before - wanted).norm()


def test_least_squares_leaves_what_is_exact():
    case = replace(SMALL, group=1)
    layer, x = tie(case.layer("qkv"), "q", "k"), case.input()
    fitted = converted(layer, case, "kv")
    fit_layers([layer], [fitted], [[{"x": x, "mask": None, "causal": False}]])
    assert_close(fitted(x), layer(x), **EXACT)


@pytest.mark.parametrize("attn", ["k", "q-kv"])
def test_the_mean_is_of_projections(attn):
    """That of kv's queries and keys is one of the two that k has become of."""
    layer = SMALL.layer("kv")
    k = converted(layer, SMALL, attn).projection["k"].weight
    assert_close(k, (layer.projection["k"].weight + layer.projection["v"].weight) / 2, **EXACT)


def test_a_role_that_shares_nothing_cannot_be_kept():
    with pytest.raises(UserError, match="--how keep_v: KV does not share that projection"):
        converted(SMALL.layer("qkv"), SMALL, "kv", "keep_v")
