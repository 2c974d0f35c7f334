"""Markdown, HTML and LaTeX of reports. Data that are put into a text are escaped, whatever they hold."""

import html
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
from markdown import markdown
from markupsafe import Markup

SPECIAL = re.compile(r"[\\`*\[\]#|~$]|(?<![^\W_])_|_(?![^\W_])")
"""The special characters of Markdown within a line that are not special in HTML; a _ between letters is not special."""

TEX = str.maketrans({"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "<": "$<$", ">": "$>$", "|": r"\textbar{}"})
"""LaTeX for characters that pandas does not escape and that not every font has."""

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #888; }
td:first-child { position: sticky; left: 0; background: #fff; }
figure { margin: 1em 0; overflow-x: auto; }
svg { width: 100%; min-width: 45em; height: auto; }
code { background: #f3f3f3; padding: 0 .2em; }
@media print { body { margin: 0; max-width: none; } table { display: table; page-break-inside: avoid; } }"""

PAGE = Markup("""\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
{style}
</style></head>
<body>
{body}
</body>
</html>
""")


class Markdown(Markup):
    """Markdown. `format`, `join` and `+` escape what they put into it, and make it one line, unless it is Markdown.

    A template must not begin a line with data, which could make it a heading or a list.

    >>> print(Markdown("**{}**: {}").format("a*b", Markdown("*c*")))
    **a&#42;b**: *c*
    """

    __slots__ = ()

    @classmethod
    def escape(cls, s: Any, /) -> "Markdown":
        if isinstance(s, Markdown):
            return s
        printable = "".join(letter if letter.isprintable() else " " for letter in str(s))
        text = html.escape(" ".join(printable.split()), quote=False)
        return cls(SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text))

    def to_html(self) -> Markup:
        return Markup(markdown(str(self), extensions=["tables"]))


def markdown_table(lines: Sequence[Sequence[str]]) -> Markdown:
    heading, *rest = lines
    rule = [":--", *["--:"] * (len(heading) - 1)]
    return Markdown("\n").join(Markdown("| {} |").format(Markdown(" | ").join(line)) for line in [heading, rule, *rest])


def latex_tables(text: Markdown) -> str:
    """Return the tables of a text, of `markdown_table`, as LaTeX, each below its heading; they need booktabs."""
    heading, found = "", [r"% \usepackage{booktabs}"]
    for block in str(text).split("\n\n"):
        if block.startswith("#"):
            heading = _plain(block.lstrip("# "))
        elif block.startswith("|"):
            lines = [[*map(_plain, line[2:-2].split(" | "))] for line in block.splitlines()]
            columns, _, *rows = lines
            style: dict[str, Any] = {"index": False, "escape": True, "column_format": "l" + "r" * (len(columns) - 1)}
            table = pd.DataFrame(rows, columns=columns).to_latex(**style)
            table = re.sub(r"(?<![\w.])-(?=\d)", "−", table)
            table = re.sub(r"^(?=\[)", "{}", table, flags=re.MULTILINE)  # after \\ a [ would be an argument
            found.append(f"% {heading}\n{table.translate(TEX)}")
    return "\n".join(found)


def _plain(cell: str) -> str:
    return Markup(cell.replace("**", "")).unescape()


def html_page(title: str, body: Markup) -> Markup:
    return PAGE.format(title=Markdown.escape(title), style=Markup(STYLE), body=body)
