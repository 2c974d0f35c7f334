"""How good translations are: BLEU, as everybody reports it and as the paper does."""

from collections.abc import Sequence

from sacrebleu.metrics import BLEU
from torchtext.data.metrics import bleu_score


def sacre_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU of plain text, 0 to 100, and the signature that says how it was computed (Post 2018)."""
    bleu = BLEU()
    score = bleu.corpus_score(list(translations), [list(references)]).score
    return score, str(bleu.get_signature())


def paper_bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """The paper's corpus BLEU, 0 to 100: of spaCy's tokens, `<bos>` and `<eos>` counted among them.

    Every translation gets these two right for nothing, so it is higher than an honest BLEU (Borji 2023, Fig. 7).
    """
    return 100 * bleu_score(translations, [[reference] for reference in references])
