"""A report shows titles, notes, names and messages as text, whatever they hold."""

import json
import re
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown import markdown

from kvt.reports.report import write_report
from kvt.study.grid import read_grid
from kvt.study.outcomes import read_outcomes
from kvt.system.files import CONFIGS
from kvt.system.quoting import Markdown, markdown_table
from tests.helpers.drivers import METRICS, RESULT, finish

ATTENTION = """
from kvt.attention import KV


class Tagged(KV):
    def __init__(self, dim, heads, tag="", **others):
        super().__init__(dim, heads, **others)
"""
SPECIAL = "`a` *b* **c** _d_ ~~e~~ [f](javascript:g) ![h](i) | j # k &amp; l &lt; $m$ <!-- n --> \\* __init__ 1. o"


def payload(where: str) -> str:
    """A text that runs a script, loads a picture or becomes Markdown unless it is escaped."""
    call = f"document.title='owned';new Image().src='http://127.0.0.1:9/{where}';alert(1)"
    return f'{where} ` <img src=x onerror="{call}"> ``` ]]> --> <script>{call}</script> {SPECIAL}'


def file_name(where: str) -> str:
    return payload(where).replace("/", "&#47;")[:200]


def study(folder):
    """A study with hostile text wherever users or runs can put any: two runs are finished, two have failed."""
    (folder / "tagged.py").write_text(ATTENTION)
    task = f"{file_name('task')}.yaml"
    (folder / task).write_text((CONFIGS / "reverse.yaml").read_text())
    column = payload("column")
    table = {"metric": "test/acc", "columns": {column: {}}, "note": payload("note")}
    tagged = {"attn": "tagged.Tagged", "attn_kwargs": {"tag": payload("attention")}}
    content = {
        "title": payload("title"),
        "tasks": [task],
        "axes": {"which": [{"attn": "kv"}, tagged]},
        "seeds": [0, 1],
        "scales": {"all": {"about": payload("about")}, "paper": {"seeds": [0, 1, 2]}},
        "tables": [table | {"published": {"kv": {column: 0.5}}}],
    }
    path = folder / f"{file_name('file')}.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True))
    grid, root = read_grid(path, "all"), folder / "runs"
    machine = RESULT["machine"] | {"processor": payload("processor")}
    packages = {payload("package"): payload("version")}
    for run in grid.runs[:2]:
        finish(run, root, RESULT | METRICS | {"machine": machine, "packages": packages})
    for run in grid.runs[2:]:
        run.folder(root).mkdir(parents=True)
        error = f"{payload('error')}\n\n# heading\n\n    code\n\n* {payload('line')}"
        (run.folder(root) / "failure.json").write_text(json.dumps({"error": error}))
    return grid, root


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return study(tmp_path)


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


OURS = {"h1", "h2", "h3", "p", "ul", "li", "em", "strong", "code", "img"}
OURS |= {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # names are as wide as the picture
def test_a_report_holds_nothing_but_text_and_its_pictures(hostile, tmp_path):
    grid, root = hostile
    file, *_ = write_report(grid, read_outcomes(grid.runs, root), tmp_path / "report")
    page = Page(markdown(file.read_text(), extensions=["tables"]))
    assert {element[0] for element in page.elements} <= OURS
    names = ("differences-test-acc", "val-loss", "bars-test-acc")
    pictures = {("alt", name.replace("-", " ")) for name in names} | {("src", f"{name}.svg") for name in names}
    assert {element[1:] for element in page.elements if element[0] == "img"} == pictures
    others = {element[1:] for element in page.elements if len(element) > 1 and element[0] != "img"}
    assert all(name == "style" and value.startswith("text-align") for name, value in others)
    for where in ("title", "about", "column", "note", "processor", "package", "version"):
        assert payload(where) in page.text, where
    assert file_name("task") in page.text
    assert payload("error")[:200] in page.text
    assert f"Tagged, tag {payload('attention')}" in page.text
    assert not re.search(
        r"<(script|img|iframe|foreignObject)", "".join(p.read_text() for p in file.parent.glob("*.svg"))
    )


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
