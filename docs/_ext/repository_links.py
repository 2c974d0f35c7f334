"""Links of pages that are written by kvt, and read in the repository too, to where the site has what they name."""

from sphinx.application import Sphinx

LINKS = {"](results)": "](results/README.md)"}  # GitHub shows a folder's README, a site has only pages


def repair(app: Sphinx, page: str, content: list[str]) -> None:
    for link, place in LINKS.items():
        content[0] = content[0].replace(link, place)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", repair)
    return {"parallel_read_safe": True}
