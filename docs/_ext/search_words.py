"""The search takes kv+pos for one word, in the index and in what is typed; Sphinx would see kv and pos."""

import re

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish


class Search(SearchEnglish):
    lang = "kvt"
    js_splitter_code = r"""
var splitQuery = (query) => query.match(/[\p{L}\p{N}_]+(\+[\p{L}\p{N}_]+)*/gu) || [];
"""
    _word_re = re.compile(r"\w+(?:\+\w+)*")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_search_language(Search)
    return {"parallel_read_safe": True}
