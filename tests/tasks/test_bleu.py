"""The paper's BLEU against sacreBLEU; tests/training/test_honest_results.py has the other."""

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.tasks.translation import paper_bleu

WORDS = st.lists(st.sampled_from("abc.,"), max_size=9)
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5)


def plain(translations, references):
    """Corpus BLEU of given tokens without smoothing."""
    bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score([" ".join(t) for t in translations], [[" ".join(r) for r in references]]).score


@settings(deadline=None)
@given(PAIRS)
def test_paper_bleu_is_unsmoothed_bleu_of_tokens(pairs):
    translations, references = map(list, zip(*pairs, strict=True))
    expected = plain(translations, references)
    assert paper_bleu(translations, references) == pytest.approx(expected, abs=1e-3)  # torchtext rounds to float32
