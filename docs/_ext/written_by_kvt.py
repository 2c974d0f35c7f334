"""What the site adds to pages that kvt writes, or that the repository shows, too, without a change of the files."""

import re

from sphinx.application import Sphinx

LINKS = {"](results)": "](results/README.md)"}  # GitHub shows a folder's README; a site has only pages
REPORTS = """
```{toctree}
:hidden:
:glob:
*/*
```
"""
BARE = {"results/table1/table1": "Table 1, measured: what a layer costs"}
"""The titles of pages that begin without one, and have headings of the third level alone."""


def complete(app: Sphinx, page: str, content: list[str]) -> None:
    for link, place in LINKS.items():
        content[0] = content[0].replace(link, place)
    if page == "claims":
        content[0] = content[0].replace("--:", ":--")  # its cells are sentences
    if page == "results/README":
        content[0] += REPORTS
    if page in BARE:
        content[0] = f"# {BARE[page]}\n\n" + content[0].replace("\n### ", "\n## ")
    if found := re.fullmatch(r"results/(.+)-(\w+)/report", page):
        grid, scale = found.groups()
        if len(list(app.srcdir.glob(f"results/{grid}-*"))) > 1:  # else two pages of one title
            content[0] = content[0].replace("\n", f" ({scale})\n", 1)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", complete)
    return {"parallel_read_safe": True}
