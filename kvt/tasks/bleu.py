"""BLEU as commonly reported (sacreBLEU), and as in the paper."""

from collections.abc import Sequence

from sacrebleu.metrics import BLEU
from torchtext.data.metrics import bleu_score


def sacre_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return the corpus BLEU of plain text, 0 to 100, and its signature (Post 2018)."""
    bleu = BLEU()
    score = bleu.corpus_score(list(translations), [list(references)]).score
    return score, str(bleu.get_signature())


def paper_bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return the paper's corpus BLEU, 0 to 100, of spaCy's tokens including `<bos>` and `<eos>` (Borji 2023, Fig. 7).

    Every translation has these two right, so it is higher than `sacre_bleu`.
    """
    return 100 * bleu_score(translations, [[reference] for reference in references])
