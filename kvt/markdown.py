"""`Markdown`, a string that escapes other strings when it includes them."""

import html
import re
from collections.abc import Iterable, Sequence
from string import Formatter
from typing import Any

SPECIAL = re.compile(r"[\\`*\[\]#|~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
"""Special characters of Markdown that HTML escaping leaves unchanged, and characters that turn an address into a link.

The character _ between letters or digits is not special.
"""


class Markdown(str):
    """A string of Markdown. `format`, `join` and `+` escape each string that is no `Markdown`, and put it on one line.

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
