"""The site: `python -m sphinx -W docs build/site`, without a network; `pip install -e ".[docs]"` first."""

import sys
from importlib.util import find_spec
from pathlib import Path

import kvt

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project, author, release = "kvt", "the authors of kvt", kvt.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
extensions += ["reference", "written_by_kvt", "search_words"]
exclude_patterns = ["_*"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

# the notebooks run in their own folder, as they do when one opens them; a mistake in one ends the build
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

html_theme = "furo"
html_title = "kvt"
html_copy_source = html_show_sourcelink = html_show_copyright = False
# One file of MathJax: its SVG output needs no fonts. The package's extension would copy all 24 MB.
mathjax = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static/mathjax/tex-svg.js"
html_static_path = ["_static", str(mathjax)]
html_favicon = "_static/kvt.svg"
html_search_language = "kvt"  # search_words
html_css_files = ["kvt.css"]
mathjax_path = mathjax.name
mathjax3_config = {"startup": {"typeset": True}}  # not MathJax 4, as Sphinx would think

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # those of torch and Lightning are about other methods
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
smartquotes = False  # of --text it would make –text
default_role = "code"  # docstrings quote code with one backtick
