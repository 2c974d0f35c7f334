"""A report shows titles, notes, names and messages as text, whatever they hold."""

import json
import re
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown import markdown

from kvt.reports.page import latex_tables
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
    """The text and the elements of a page, without those of its pictures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts, self.elements = [], set()
        self.feed(re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", html, flags=re.DOTALL))
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements |= {(tag, *attribute) for attribute in attributes} or {(tag,)}

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        self.elements.add(("comment", data))


OURS = {"html", "head", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "em", "strong", "code", "figure"}
OURS |= {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # names are as wide as the picture
def test_a_page_holds_nothing_but_text(hostile, tmp_path):
    grid, root = hostile
    files = write_report(grid, read_outcomes(grid.runs, root), tmp_path / "report")
    markdown_file, *_, html_file = files
    page = Page(html_file.read_text())
    assert not re.search(r"<(script|img|iframe|foreignObject)", html_file.read_text()), "in pictures neither"
    attributes = {element[1:] for element in page.elements if len(element) > 1}
    assert {element[0] for element in page.elements} <= OURS | {"meta", "a"}
    assert {name for name, _ in attributes} <= {"lang", "charset", "style", "name", "content", "href"}
    assert {file for name, file in attributes if name == "href"} == {file.name for file in files} - {"report.html"}
    assert all(value.startswith("text-align") for name, value in attributes if name == "style")
    for where in ("title", "about", "column", "note", "processor", "package", "version"):
        assert payload(where) in page.text, where
    assert file_name("task") in page.text
    assert payload("error")[:200] in page.text
    assert f"Tagged, tag {payload('attention')}" in page.text
    again = Page(markdown(markdown_file.read_text(), extensions=["tables"]))
    assert {element[0] for element in again.elements} <= OURS | {"img"}, "the pictures"
    names = ("differences-test-acc", "val-loss", "bars-test-acc")
    pictures = {("alt", name.replace("-", " ")) for name in names} | {("src", f"{name}.svg") for name in names}
    assert {element[1:] for element in again.elements if element[0] == "img"} == pictures
    assert payload("title") in again.text


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


COMMANDS = {
    r"\textbackslash": "\\",
    r"\textasciitilde": "~",
    r"\textasciicircum": "^",
    r"\textbar": "|",
    r"\space": " ",
}
COMMANDS |= {f"\\{sign}": sign for sign in "&%$#_{}"} | {r"$\pm$": "±", r"$\times$": "×"}
COMMANDS |= {"$-$": "−", "$<$": "<", "$>$": ">"}
TOKEN = re.compile(r"\$[^$]*\$|\\[a-z]+ ?|\\.|\{\}|.", re.DOTALL)


def read_latex(cell: str) -> str:
    """Return the text that LaTeX sets; raise KeyError for a command that it must not meet."""
    found = [token.rstrip() if token.startswith("\\") else token for token in TOKEN.findall(cell)]
    assert not {"&", "%", "#", "_", "~", "^", "<", ">", "|", "$", "{", "}"}.intersection(found)
    return "".join(COMMANDS[token] if token[0] in "\\$" else token for token in found if token != "{}")


@given(st.text(st.sampled_from(" -0.1ab&%$#_{}~^\\<>|[]*±×−–\n") | st.characters(), max_size=30))
def test_whatever_is_put_into_a_table_comes_out_of_latex_as_text(text):
    shown = Markdown.escape(text).unescape()
    table = markdown_table([["", text], [text, Markdown("**{}**").format(text)]])
    page = latex_tables(Markdown("\n\n").join([Markdown("# {}").format(text), Markdown("Text."), table]))
    package, heading, *lines = page.splitlines()
    assert package == r"% \usepackage{booktabs}"
    assert heading == f"% {shown}"
    assert [line for line in lines if not line.endswith(r" \\")] == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    rows = [re.split(r" (?<!\\)& ", line.removesuffix(r" \\")) for line in lines if line.endswith(r" \\")]
    read = [[read_latex(cell).strip() for cell in row] for row in rows]
    wanted = re.sub(r"(?<![\w.])-(?=\d)", "−", shown)
    assert read == [["", wanted], [wanted, wanted]]
    assert not any(line.startswith("[") for line in lines), "which would be an argument of \\\\"
