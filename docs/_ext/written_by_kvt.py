"""What the site adds to pages that kvt writes, or that are read in the repository too: the files stay as they are."""

from sphinx.application import Sphinx

LINKS = {"](results)": "](results/README.md)"}  # GitHub shows a folder's README; a site has only pages
REPORTS = """
```{toctree}
:hidden:
:glob:
*/report
```
"""


def complete(app: Sphinx, page: str, content: list[str]) -> None:
    for link, place in LINKS.items():
        content[0] = content[0].replace(link, place)
    if page == "results/README":
        content[0] += REPORTS


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", complete)
    return {"parallel_read_safe": True}
