"""Weights of one attention become those of another, exactly where they can be."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention.convert import FROM, convert_layer
from kvt.system import UserError
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


@pytest.mark.parametrize("attn", ["k", "q-kv"])
def test_the_mean_is_of_projections(attn):
    """That of kv's queries and keys is one of the two that k has become of."""
    layer = SMALL.layer("kv")
    k = converted(layer, SMALL, attn).projection["k"].weight
    assert_close(k, (layer.projection["k"].weight + layer.projection["v"].weight) / 2, **EXACT)


def test_a_role_that_shares_nothing_cannot_be_kept():
    with pytest.raises(UserError, match="keep_v"):
        converted(SMALL.layer("qkv"), SMALL, "kv", "keep_v")
