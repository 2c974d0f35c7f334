"""The names of attentions in reports are not taken for differences."""

from kvt.attention import ATTENTION
from kvt.reports.tables import label


def test_no_name_has_a_dash_which_readers_take_for_a_minus():
    labels = [label(name) for name in ATTENTION]
    assert len(set(labels)) == len(labels)
    assert not [text for text in labels if set(text) & set("-–—−")]
