"""Attentions have names in reports that say which projections are one."""

from kvt.attention import ATTENTION
from kvt.reports.names import label


def test_no_name_has_a_dash_which_readers_take_for_a_minus():
    labels = [label(name) for name in ATTENTION]
    assert len(set(labels)) == len(labels)
    assert not [text for text in labels if set(text) & set("-–—−")]


def test_a_shared_projection_is_an_equals_sign_between_its_roles():
    assert [label(name) for name in ("q-kv", "k", "k+pos")] == ["Q≠K=V", "Q=K=V", "Q=K=V+Pos"]
