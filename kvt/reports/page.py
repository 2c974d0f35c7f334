"""Converts the Markdown of a report to HTML, and the tables in the Markdown to LaTeX."""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd
from markdown import markdown
from markupsafe import Markup

from kvt.system.quoting import Markdown

TEX = str.maketrans({"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "<": "$<$", ">": "$>$", "|": r"\textbar{}"})
"""LaTeX commands for characters that pandas does not escape and that some fonts lack."""

IMAGE = re.compile(r'<p><img alt="[^"]*" src="([^"]*)\.svg" /></p>')  # the HTML of a picture in Markdown

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; overflow-wrap: normal; vertical-align: top; }
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


def latex_tables(text: Markdown) -> str:
    """Return the tables that `markdown_table` wrote, as LaTeX for the package booktabs, below their headings."""
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
            table = re.sub(r"^(?=\[)", "{}", table, flags=re.MULTILINE)  # LaTeX would read a [ after \\ as an argument
            found.append(f"% {heading}\n{table.translate(TEX)}")
    return "\n".join(found)


def _plain(cell: str) -> str:
    return Markup(cell.replace("**", "")).unescape()


def html_page(title: str, text: Markdown, svgs: Mapping[str, str]) -> Markup:
    """Return a text as an HTML page. `svgs` maps the name of each picture to its <svg> element."""
    page = markdown(str(text), extensions=["tables"])
    page = page.replace(" ± ", "&nbsp;±&nbsp;").replace(" n = ", " n&nbsp;=&nbsp;")  # prevents line breaks
    body = IMAGE.sub(lambda found: f"<figure>\n{svgs[found[1]]}\n</figure>", page)
    return PAGE.format(title=Markdown.escape(title), style=Markup(STYLE), body=Markup(body))
