"""Escapes text for a shell, for a terminal and for Markdown. Only this module of kvt escapes text.

CSV and JSON contain text without escapes. In the HTML page of `kvt maps`, a script inserts text from JSON.
"""

import html
import re
from collections.abc import Iterable, Sequence
from shlex import quote
from string import Formatter
from typing import Any

MAX_LINE_CHARS = 800  # largest length of an error message, which may quote a large file
SPECIAL = re.compile(r"[\\`*\[\]#|~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
"""Special characters of Markdown that HTML escaping leaves unchanged, and characters that make an address a link.

The character _ between letters is not special.
"""


def shell_word(text: object) -> str:
    """Return any text as one word for a shell.

    >>> print(shell_word("a.B; touch c"))
    'a.B; touch c'
    """
    return quote(str(text))


def printable(text: object, keep: str = "") -> str:
    r"""Return a text in which escapes replace all unprintable characters except the characters in `keep`.

    >>> printable("a\n\x1b[2J")
    'a\\n\\x1b[2J'
    """
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in str(text))


def one_line(message: str) -> str:
    r"""Return a message as one printable line. An ellipsis replaces the middle of a long message.

    >>> one_line("no\n such\tfile: \x1b[2J")
    'no such file: \\x1b[2J'
    """
    line, half = printable(" ".join(message.split())), MAX_LINE_CHARS // 2
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:half]} … {line[-half:]}"


class Markdown(str):
    """A string of Markdown. `format`, `join` and `+` escape other strings and put each of them on one line.

    A line of a template must not begin with data, because the data could turn the line into a heading or a list.

    >>> print(Markdown("**{}**: {}").format("a*b", Markdown("*c*")))
    **a&#42;b**: *c*
    """

    __slots__ = ()

    @classmethod
    def escape(cls, value: Any) -> "Markdown":
        if isinstance(value, Markdown):
            return value
        line = "".join(letter if letter.isprintable() else " " for letter in str(value))
        text = html.escape(" ".join(line.split()), quote=False)
        return cls(SPECIAL.sub(lambda match: f"&#{ord(match[0])};", text))

    def format(self, *values: Any, **named: Any) -> "Markdown":
        return Markdown(_Escaping().vformat(self, values, named))

    def join(self, parts: Iterable[str], /) -> "Markdown":
        return Markdown(super().join(map(self.escape, parts)))

    def __add__(self, other: str, /) -> "Markdown":
        return Markdown(super().__add__(self.escape(other)))


class _Escaping(Formatter):
    def format_field(self, value: Any, spec: str) -> Markdown:
        return Markdown.escape(value if isinstance(value, Markdown) else format(value, spec))


def markdown_table(lines: Iterable[Sequence[str]]) -> Markdown:
    """Return a Markdown table. The first line is the heading. Only the first column is left-aligned."""
    heading, *rest = lines
    rule = [":--", *["--:"] * (len(heading) - 1)]
    return Markdown("\n").join(Markdown("| {} |").format(Markdown(" | ").join(line)) for line in [heading, rule, *rest])
