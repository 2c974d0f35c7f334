"""The paper's BLEU against sacreBLEU; sacreBLEU's own in languages with and without spaces."""

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.tasks.translation import paper_bleu, text_scores

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


WRITTEN = {  # a text, and one with a word in place of another
    "zh": ("一个男人在雪中睡觉。", "一个女人在雪中睡觉。"),
    "th": ("ผู้ชายคนหนึ่งนอนหลับอยู่ในหิมะ", "ผู้หญิงคนหนึ่งนอนหลับอยู่ในหิมะ"),
    "de": ("Ein Mann schläft tief im Schnee.", "Eine Frau schläft tief im Schnee."),
}
WORDS_OF = {"zh": "zh", "zho": "zh", "th": "char", "tha": "char", "de": "13a", "en": "13a", "xx": "13a"}


@pytest.mark.parametrize("language", WRITTEN)
def test_one_other_word_is_neither_nothing_nor_all(language):
    text, other = WRITTEN[language]
    scores = text_scores([other], [text], language)
    assert all(20 < score < 95 for score, _ in scores.values())
    assert scores["bleu"][0] == sacrebleu.corpus_bleu([other], [[text]], tokenize=WORDS_OF[language]).score
    assert scores["chrf"][0] == sacrebleu.corpus_chrf([other], [[text]]).score
    assert all(score == pytest.approx(100) for score, _ in text_scores([text], [text], language).values())


@pytest.mark.parametrize(("language", "words"), WORDS_OF.items())
def test_the_signature_says_what_counts_as_a_word(language, words):
    (_, bleu), (_, chrf) = text_scores([""], [""], language).values()
    version = f"version:{sacrebleu.__version__}"
    assert bleu == f"nrefs:1|case:mixed|eff:no|tok:{words}|smooth:exp|{version}"
    assert chrf == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}"
