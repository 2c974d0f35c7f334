"""Pages and docstrings name things; the docstring of a function begins with a verb."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conftest import REPOSITORY

WORDS = ["likewise", "it comes to", "(?:has|have|had) come to", "of one's own", "those (?:that|which|who)"]
WORDS += ["what it(?! costs)", "(?:are|is) told"]
UNCLEAR = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
"""Words in place of a noun or a verb."""
NO_VERBS = {"a", "an", "the", "all", "its", "half", "what", "whether", "which", "when", "after", "of"}
PAGES = [
    path
    for pages in ("*.md", "docs/*.md", "docs/guides/*.md", "docs/reference/*.md", "docs/results/README.md")
    for path in sorted(REPOSITORY.glob(pages))
]


def unclear(text: str) -> list[str]:
    """Return the unclear words of a text, without its code and without quoted sentences."""
    return UNCLEAR.findall(re.sub(r"```.*?```|`[^`\n]*`|“[^”\n]*”", "", text, flags=re.DOTALL))


def begins_with_a_verb(text: str) -> bool:
    """Return whether a docstring begins with a verb, or with the shapes that a `forward` has."""
    word = text.removeprefix("Context manager: ").split()[0].rstrip(".,")
    third_person = word.endswith("s") and not word.endswith("ss")
    return "→" in text.splitlines()[0] or (word.isalpha() and word.lower() not in NO_VERBS and not third_person)


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the place, the definition and the docstring of each module, class and function of kvt."""
    for path in sorted((REPOSITORY / "kvt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)}", node, text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_page_has_no_unclear_words(path):
    assert unclear(path.read_text()) == []


def test_docstrings_have_no_unclear_words():
    assert {place: words for place, _, text in docstrings() if (words := unclear(text))} == {}


def test_the_docstring_of_a_function_begins_with_a_verb():
    """A property is a thing, and its docstring may begin with a noun."""
    functions = [
        (place, text)
        for place, node, text in docstrings()
        if isinstance(node, ast.FunctionDef) and "property" not in " ".join(map(ast.unparse, node.decorator_list))
    ]
    assert len(functions) > 500
    assert [(place, text.splitlines()[0]) for place, text in functions if not begins_with_a_verb(text)] == []


@pytest.mark.parametrize(
    "text", ["Likewise.", "It has those that it needs.", "what it holds", "callbacks of one's own"]
)
def test_unclear_words_are_noticed(text):
    assert unclear(text)
    assert not unclear(f"`{text}`")


def test_a_beginning_without_a_verb_is_noticed():
    assert [*map(begins_with_a_verb, ["The mean.", "Whether it is so.", "Makes a run.", "(B, N)."])] == [False] * 4
    assert all(map(begins_with_a_verb, ["Return a run.", "Express it.", "Context manager: wait.", "(B, N) → (B, N)."]))
