"""Both BLEU scores against sacreBLEU."""

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.tasks.translation import paper_bleu, sacre_bleu

TEXTS = ["A man, who's old, is sleeping.", "Two dogs run in the snow!", "A girl in a red coat.", "Why? Nobody knows."]
NEARLY = ["An old man who's asleep.", "Two dogs run in the deep snow!", "A girl in a coat of red", "Why? Nobody knows."]
WORDS = st.lists(st.sampled_from("abc.,"), max_size=9)
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5)


def plain(translations, references):
    """Corpus BLEU of given tokens without smoothing."""
    bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score([" ".join(t) for t in translations], [[" ".join(r) for r in references]]).score


def test_sacre_bleu_has_a_signature():
    score, signature = sacre_bleu(NEARLY, TEXTS)
    assert score == sacrebleu.corpus_bleu(NEARLY, [TEXTS]).score
    assert 10 < score < 90
    for setting in ("tok:13a", "case:mixed", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert setting in signature.split("|")


@settings(deadline=None)
@given(PAIRS)
def test_paper_bleu_is_unsmoothed_bleu_of_tokens(pairs):
    translations, references = map(list, zip(*pairs, strict=True))
    expected = plain(translations, references)
    assert paper_bleu(translations, references) == pytest.approx(expected, abs=1e-3)  # torchtext rounds to float32
