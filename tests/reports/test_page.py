"""What a report puts into Markdown comes out as text, whatever it holds."""

import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from markdown import markdown

from kvt.markdown import Markdown, markdown_table


class Page(HTMLParser):
    """The text and the elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts, self.elements = [], set()
        self.feed(html)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements |= {(tag, *attribute) for attribute in attributes} or {(tag,)}

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        self.elements.add(("comment", data))


@given(
    st.text(st.sampled_from(" \n\t`*_[]()<>&#|~$\\!+-=.:;{}\"'/1ax\0\x1b\u202e\ud800é") | st.characters(), max_size=30)
)
def test_whatever_is_put_into_markdown_comes_out_as_text(text):
    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    for template in ("# {}", "A {} b", "**{}**", "* a: {}"):
        page = Page(markdown(Markdown(template).format(text), extensions=["tables"]))
        expected = " ".join(re.sub(r"^(# |\* (?=a))|\*\*", "", template).format(shown).split())
        assert page.text == expected
        assert len(page.elements) <= 2
    table = markdown_table([["", text], [text, Markdown("*b*")]])
    page = Page(markdown(table, extensions=["tables"]))
    assert [part.strip() for part in page.texts if part.strip()] == [part for part in (shown, shown, "b") if part]
