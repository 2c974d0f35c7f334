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


def complete(app: Sphinx, page: str, content: list[str]) -> None:
    for link, place in LINKS.items():
        content[0] = content[0].replace(link, place)
    if page == "claims":
        content[0] = content[0].replace("--:", ":--")  # its cells are sentences
    if page == "results/README":
        content[0] += REPORTS
    if found := re.fullmatch(r"results/(.+)-(\w+)/report", page):
        grid, scale = found.groups()
        if len(list(app.srcdir.glob(f"results/{grid}-*"))) > 1:  # else two pages of one title
            content[0] = content[0].replace("\n", f" ({scale})\n", 1)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", complete)
    return {"parallel_read_safe": True}
