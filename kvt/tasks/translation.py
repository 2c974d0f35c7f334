"""Translation of Multi30k or of any parallel corpus (Borji 2023, §3.3).

>>> german, english = Vocabulary([*SPECIALS, "ein", "Hund"]), Vocabulary([*SPECIALS, "dog", "a"])
>>> inputs = [[("ein", True), ("Hund", False)], [("Hund", False)]]  # tokens, and whether a space follows the token
>>> targets = [[("a", True), ("dog", False)], [("dog", False)]]
>>> encode_sentences(inputs, german).tolist()  # <unk>, <pad>, <bos> and <eos> are 0, 1, 2 and 3
[[2, 4, 5, 3], [2, 5, 3, 1]]
>>> encode_sentences(targets, english).tolist()
[[2, 5, 4, 3], [2, 4, 3, 1]]
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torchtext.data.metrics import bleu_score

from kvt.data.files import Remote, download, optional_path
from kvt.data.loader import Batches, SentenceBatches
from kvt.data.texts import fingerprint, nfc, read_text
from kvt.data.tokens import UNK, Vocabulary, build_vocab
from kvt.markdown import Markdown
from kvt.models import Seq2Seq
from kvt.models.generation import beam_search, decode_sorted, greedy
from kvt.models.losses import Predictions
from kvt.system import UserError, require_positive, require_probability, unknown
from kvt.tasks.base import Spec, make_optimizer
from kvt.tasks.causality import eval_mode, outputs_differ, require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.metrics import LOSS, PPL, Metric
from kvt.tasks.options import BlockTask
from kvt.tasks.schedules import with_schedule

URL = "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw"
MULTI30K = {
    name: Remote(f"{URL}/{name}.gz", sha256)
    for name, sha256 in {
        "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
        "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
        "train.cs": "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077",
        "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
        "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
        "val.cs": "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc",
        "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
        "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
        "test_2016_flickr.fr": "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
        "test_2016_flickr.cs": "200a4a74cc9560f051924abb9803be008d1908d77f747e9141aeb86dfd2797f1",
    }.items()
}
LANGUAGES = ("de", "en", "fr", "cs")
SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (UNK, PAD, BOS, EOS)
UNK_ID, PAD_ID, BOS_ID, EOS_ID = range(4)
UNSPACED = ("bo", "km", "lo", "my", "th")  # languages without spaces, for which sacreBLEU has no word tokenizer
SpacedTokens = list[tuple[str, bool]]  # a sentence: each token, and whether a space follows it
Pairs = list[tuple[str, str]]
Pair = tuple[tuple[str, str], list[SpacedTokens]]  # source and target sentence, as texts and as tokens
Batch = tuple[Tensor, Tensor, Tensor]  # padded sources (B, M), padded targets (B, N), row numbers in the split (B,)


class SentencePairs(TaskData):
    """Sentences and translations. A batch is (sentences, int64 (B, M); translations, (B, N); row numbers, (B,)).

    A sentence is <bos> … <eos>, then padding. Sentences are normalised to Unicode's form NFC and split into words by
    spaCy's rules; case is kept. A vocabulary has the words that occur `min_freq` times or more in the training split;
    all other words are <unk>. A training batch has sentences of similar length.

    Args:
        source: language to translate from: de, en, fr or cs; with `root`, the code of any language that spaCy supports.
        target: language to translate to; takes the same values as `source`.
        root: folder of your own UTF-8 files with a sentence per line, train.de, train.en … test.en; replaces Multi30k.
        max_len: largest number of tokens in a sentence and in a translation, including <bos> and <eos>.
        min_freq: how often a word must at least occur in the training split to be in the vocabulary.
        drop_pairs: whether to leave out pairs with an empty or too long sentence; default: such a pair is an error.
    """

    keeps_order = True
    path_settings = ("data_dir", "root")

    def __init__(
        self,
        source: str = "de",
        target: str = "en",
        root: str | None = None,
        max_len: int = 100,
        min_freq: int = 1,
        batch_size: int = 50,
        seed: int = 0,
        data_dir: str | None = None,
        drop_pairs: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(max_len=max_len, min_freq=min_freq)
        if source == target:
            raise UserError(f"source and target are both {source!r}: choose two languages")
        for language in (source, target):
            if root is None and language not in LANGUAGES:
                raise unknown("language of Multi30k", language, LANGUAGES)
        self.drop_pairs = drop_pairs
        self.languages, self.max_len, self.min_freq = (source, target), max_len, min_freq
        self.task_name = f"translation_{source}_{target}"
        self.root = optional_path(root)

    @cached_property
    def texts(self) -> dict[str, Pairs]:
        """A dict that maps each split to its pairs of sentences, (source, target)."""
        return {split: [pair for pair, _ in pairs] for split, pairs in self._pairs.items()}

    @cached_property
    def spec(self) -> dict[str, Any]:  # type: ignore[override]  # reads the texts
        sides = self._words("train")
        words = ((word for word, _ in chain.from_iterable(side)) for side in sides)
        source_vocab, target_vocab = (build_vocab(side, SPECIALS, self.min_freq) for side in words)
        return {
            **{"source": self.languages[0], "target": self.languages[1]},
            **{"source_vocab": source_vocab, "target_vocab": target_vocab},
            **{"detok_rules": fit_detokenizer(sides[1]), "max_len": self.max_len},
        }

    def prepare_data(self) -> None:
        _ = self.texts  # downloads the files

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        self.content = fingerprint(json.dumps(self.texts))
        if not self.root:
            self.note_counts("multi30k", **{split: len(pairs) for split, pairs in self.texts.items()})
        vocabularies = [Vocabulary(self.spec[name]) for name in ("source_vocab", "target_vocab")]
        splits = {split: tuple(map(encode_sentences, self._words(split), vocabularies)) for split in self.texts}
        shares = [
            f"{language} {split} {(side == UNK_ID).sum() / ((side == UNK_ID) | (side > EOS_ID)).sum():.2%}"
            for split, sides in splits.items()
            for language, side in zip(self.languages, sides, strict=True)
        ]
        self.notes["unknown_words"] = f"share of {UNK}: {', '.join(shares)}"
        return splits

    def input_keys(self, split: str) -> list[str]:
        return [source for source, _ in self.texts[split]]

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        return SentenceBatches(*tensors, pad=PAD_ID, **settings)

    @cached_property
    def _pairs(self) -> dict[str, list[Pair]]:
        """A dict that maps each split to its sentence pairs, without pairs that `drop_pairs` leaves out."""
        splitters, faults, dropped = [*map(splitter, self.languages)], [], Counter[str]()
        pairs: dict[str, list[Pair]] = {}
        for split in SPLITS:
            pairs[split] = []
            files = [self._file(split, language) for language in self.languages]
            for line, texts in enumerate(read_pairs(*files), start=1):
                words = [cut(text) for cut, text in zip(splitters, texts, strict=True)]
                sides = zip(files, words, strict=True)
                found = [f"{file}, line {line} {fault}" for file, side in sides if (fault := self._fault(side))]
                faults += found[:1]
                dropped[split] += bool(found)
                if not found:
                    pairs[split].append((texts, words))
        if faults and not self.drop_pairs:
            remedy = "correct these lines, or pass drop_pairs=true"
            raise UserError(f"{len(faults):,} pairs cannot be used: {faults[0]}: {remedy}")
        if faults:
            count = f"{len(faults):,} of {sum(map(len, pairs.values())) + len(faults):,} pairs"
            self.notes["dropped_pairs"] = f"{count}: " + ", ".join(f"{n:,} of {split}" for split, n in dropped.items())
        return pairs

    def _file(self, split: str, language: str) -> Path:
        if self.root:
            return self.root / f"{split}.{language}"
        name = f"{SPLITS[split]}.{language}"
        return download(MULTI30K[name], self.data_dir, f"multi30k/{name}")

    def _fault(self, words: SpacedTokens) -> str:
        """Return the reason why a sentence cannot be used; "" if it can."""
        length = len(words) + 2
        too_long = f"has {length} tokens with <bos> and <eos>, more than max_len={self.max_len}"
        return "is empty" if not words else too_long if length > self.max_len else ""

    def _words(self, split: str) -> list[list[SpacedTokens]]:
        """Return the source sentences and the target sentences of a split, as tokens."""
        return [[words[side] for _, words in self._pairs[split]] for side in (0, 1)]


def read_pairs(source: Path, target: Path) -> Pairs:
    """Return pairs of stripped NFC lines of two files; UserError for an unreadable file or unequal numbers of lines."""
    texts = [read_text(path, "add the file, or choose other languages or another root") for path in (source, target)]
    # str.splitlines also splits at characters such as U+2028, so that the two files might not match
    ours, theirs = ([nfc(line.strip()) for line in text.removesuffix("\n").split("\n")] for text in texts)
    if len(ours) != len(theirs):
        raise UserError(f"{source} has {len(ours)} lines, {target} has {len(theirs)}: write one sentence per line")
    return list(zip(ours, theirs, strict=True))


def language_code(language: str) -> str:
    """Return spaCy's code for a language, such as "zh" for "zho"; raise UserError if spaCy does not know it."""
    from spacy.util import get_lang_class  # imported here, because the import is slow

    try:
        return str(get_lang_class(language).lang)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"spaCy does not know the language {language!r}: use a code such as de or en") from error


@cache
def splitter(language: str) -> Callable[[str], SpacedTokens]:
    """Return a function that splits a sentence into words; raise UserError if spaCy does not know the language."""
    code = language_code(language)
    import spacy

    tokenizer = spacy.blank(code).tokenizer

    def split(sentence: str) -> SpacedTokens:
        return [(word.text, bool(word.whitespace_)) for word in tokenizer(sentence) if not word.is_space]

    return split


def fit_detokenizer(sentences: Iterable[SpacedTokens]) -> list[list[str]]:
    """Learn which tokens usually have no space before them, and which tokens usually have no space after them.

    Every pair of neighbouring tokens without a quotation mark votes on two rules: to join the left token to every token
    after it, and the right token to every token before it. A pair without a space votes for both, a pair with a space
    against both. The rule with the largest majority is accepted, and its pairs lose their votes on other rules. This
    repeats until no majority is left. For example, the rule for the hyphen explains "T-shirt", so "shirt" gets no rule.

    Returns two sorted lists: tokens to join to the token before, such as ".", and to the token after, such as "(".
    """
    votes: Counter[tuple[str, str]] = Counter()  # for each pair: occurrences without a space minus those with a space
    for sentence in sentences:
        for (left, spaced), (right, _) in pairwise(sentence):
            if '"' not in (left, right):  # `join` has a rule for quotation marks
                votes[left, right] += -1 if spaced else 1
    # keys are rules: (0, token) means that no space follows the token, (1, token) that no space precedes it
    scores: dict[tuple[int, str], float] = {}
    pairs: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for pair, vote in votes.items():
        for end in enumerate(pair):
            tie_break = 0 if any(map(str.isalnum, end[1])) else 0.5  # of rules with equal votes, punctuation wins
            scores[end] = scores.get(end, tie_break) + vote
            pairs.setdefault(end, set()).add(pair)
    joined: tuple[list[str], list[str]] = ([], [])
    while scores and scores[end := max(scores, key=lambda end: (scores[end], end[0]))] >= 1:
        joined[end[0]].append(end[1])
        for pair in list(pairs[end]):
            for other in enumerate(pair):
                scores[other] -= votes[pair]
                pairs[other].discard(pair)
    return [sorted(joined[1]), sorted(joined[0])]


def join(tokens: Sequence[str], detok_rules: Sequence[Sequence[str]]) -> str:
    """Join tokens into a sentence by the rules of `fit_detokenizer`. Every second quotation mark closes a quotation.

    >>> join(["Do", "n't", "run", "(", "he", "said", ")", "."], [[".", ")", "n't"], ["("]])
    "Don't run (he said)."
    """
    before, after = map(set, detok_rules)
    text, quoted = "", False
    for i, token in enumerate(tokens):
        joined = i == 0 or tokens[i - 1] in after or token in before
        if token == '"':
            joined = i == 0 or quoted
        elif i > 0 and tokens[i - 1] == '"':
            joined = quoted or token in before
        text += token if joined else f" {token}"
        quoted ^= token == '"'
    return text


def encode_sentences(sentences: Iterable[SpacedTokens], vocabulary: Vocabulary) -> Tensor:
    """Encode sentences as one padded tensor, int64 (B, longest)."""
    rows = [vocabulary.encode([BOS, *(token for token, _ in sentence), EOS]) for sentence in sentences]
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD_ID)


def unpadded(sentences: Tensor) -> list[list[int]]:
    """Return a list of the tokens of each row, without padding: int64 (B, N) → B lists."""
    return [row[row != PAD_ID].tolist() for row in sentences.cpu()]


class TranslationTask(BlockTask):
    """Task of translating sentences. The model is `Seq2Seq`; the default optimiser is Adam.

    In every validation and test, the task translates the split with greedy decoding. sacreBLEU computes `bleu` and
    `chrf` from text (see `text_scores`). `bleu_paper` is computed as in the paper, from tokens that include <bos> and
    <eos>. Cross-attention is always qkv.

    Args:
        depth: number of encoder layers, and number of decoder layers.
        dropout: dropout probability in embeddings, attention weights, residual branches and feed-forward networks.
        smoothing: label smoothing: probability that is taken from the true word and spread over all other words.
        lr: learning rate; the schedule noam multiplies it by dim^−½ · min(t^−½, t · warmup^−1.5) at step t = 1, 2, ….
    """

    unit = "tokens"
    metrics = (
        *(LOSS, PPL),
        Metric("bleu", "BLEU", better="more", how="recorded", highest=100, stages=("val", "test")),
        Metric("chrf", "chrF", better="more", how="recorded", highest=100, stages=("val", "test")),
        Metric("bleu_paper", "BLEU as the paper counts it", "", "more", "recorded", 100, ("val", "test")),
    )
    monitor = "val/bleu"
    must_match = ("source_vocab", "target_vocab")
    model: Seq2Seq
    dim: int = 0  # width of the model; a task with this attribute can use the schedule noam

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        dim: int = 128,
        depth: int = 1,
        dropout: float = 0.1,
        lr: float = 1.0,
        warmup: int = 4000,
        schedule: str = "noam",
        smoothing: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim=dim, depth=depth, dropout=dropout, lr=lr, warmup=warmup, schedule=schedule, **kwargs)
        require_probability(smoothing=smoothing)
        self.dim, self.smoothing = dim, smoothing
        self._evaluated: list[Batch] = []  # the batches of the current evaluation
        self._examples: list[tuple[str, str, str]] = []  # source, reference, translation
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> Seq2Seq:
        self.source_vocabulary = Vocabulary(spec["source_vocab"])
        self.target_vocabulary = Vocabulary(spec["target_vocab"])
        sizes: dict[str, Any] = {f"{side}_vocab_size": len(spec[f"{side}_vocab"]) for side in ("source", "target")}
        sizes |= {"max_len": spec["max_len"], "dim": self.dim}
        make_attention = self.attention(spec["max_len"], dropout=self.options["dropout"])
        return Seq2Seq(make_attention, pad=PAD_ID, **sizes, **self.blocks)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "predict":
            scores = text_scores([""], [""], self.hparams["spec"]["target"])  # raises now if a tokenizer is missing
            self.metric_notes |= {name: signature for name, (_, signature) in scores.items()}

    def check_causality(self) -> None:
        length = self.model.max_len
        target = torch.arange(length, device=self.device) % len(self.target_vocabulary.vocab)
        source = torch.full((1, length // 2), self.source_vocabulary.ids[EOS], device=self.device)
        longer = pad(source, (0, length - length // 2), value=PAD_ID)

        def predict(target: Tensor, source: Tensor = source) -> Tensor:
            return self.model(source.expand(len(target), -1), target)

        require_causal(self.hparams["attn"], self.model, predict, length, len(self.target_vocabulary.vocab))
        with eval_mode(self.model):
            if outputs_differ(predict(target[None]), predict(target[None], longer)):
                raise UserError(f"attn={self.hparams['attn']} attends to padding: make the attention respect `mask`")

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1][:, :-1]  # the last token has no next token to predict

    def predictions(self, batch: Batch) -> Predictions:
        return Predictions(self.model.states(*self.inputs(batch)), batch[1][:, 1:], self.model.generator, PAD_ID)

    def compute_metrics(self, batch: Batch) -> dict[str, Any]:
        """Return "loss" (smoothed in all stages), "ppl" (the mean −log p) and "found" (the result of `losses`)."""
        found = self.losses(batch, self.smoothing)
        return {"loss": found.loss, "ppl": found.nll, "found": found}

    def num_predictions(self, batch: Batch) -> Tensor:
        return (batch[1][:, 1:] != PAD_ID).sum()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[str]]:
        """Return a dict of source sentences, reference translations and the model's translations, as text."""
        sources, references = zip(*self._pairs("test", batch[2].tolist()), strict=True)
        translations = [self._text(row) for row in self._translate(unpadded(batch[0]))]
        return {"source": [*sources], "reference": [*references], "translation": translations}

    def translate(self, sentences: Sequence[str], beam: int = 1, progress: bool = False) -> list[str]:
        """Translate by beam search, or greedily if `beam` is 1; raise UserError if a sentence is too long.

        Needs eval mode.
        """
        require_positive(beam=beam)
        most, split, sources = self.model.max_len - 2, splitter(self.hparams["spec"]["source"]), {}
        for row, sentence in enumerate(sentences):
            if words := [word for word, _ in split(nfc(sentence))]:
                sources[row] = self.source_vocabulary.encode([BOS, *words, EOS])
                if len(words) > most:
                    raise UserError(f"sentence {row + 1} has {len(words)} words; this model reads at most {most}")
        translated = dict(zip(sources, self._translate(list(sources.values()), beam, progress), strict=True))
        return [self._text(translated.get(row, [])) for row in range(len(sentences))]

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        """Return words as row and column labels: both source, both target, or target and source in cross-attention."""
        vocabularies = (self.source_vocabulary, self.target_vocabulary)
        source, target = (v.decode(tokens[0].tolist()) for v, tokens in zip(vocabularies, inputs, strict=True))
        if not layer.startswith("decoder"):
            return source, source
        return target, source if "cross_attention" in layer else target

    def sample(self) -> str:
        """Return a Markdown table of the first ten sentences of the last evaluation, with their translations."""
        rows = [Markdown("| {} | {} | {} |").format(*texts) for texts in self._examples]
        return "\n".join(["| source | reference | translation |", "|---|---|---|", *rows])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return with_schedule(self, make_optimizer(self, betas=(0.9, 0.98), eps=1e-9))

    def _step(self, stage: str, batch: Batch) -> dict[str, Any]:
        computed = super()._step(stage, batch)
        if stage != "train":
            self._evaluated.append(batch)
        return computed

    def _log_metrics(self, stage: str) -> None:
        super()._log_metrics(stage)
        if stage != "train":
            self._record_scores(stage)

    def _record_scores(self, stage: str) -> None:
        """Translate the evaluated batches, and record the scores over all processes."""
        sources, targets = ([row for batch in self._evaluated for row in unpadded(batch[side])] for side in (0, 1))
        rows = [row for _, _, rows in self._evaluated for row in rows.tolist()]
        self._evaluated.clear()
        results = list(zip(rows, self._translate(sources), targets, strict=True))
        if self.trainer.world_size > 1:  # a process has only the translations of its own batches
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, results)
            results = list(chain.from_iterable(parts))
        rows, translated, targets = map(list, zip(*sorted(results), strict=True))
        split = self.trainer.datamodule.validated if stage == "val" else stage  # type: ignore[attr-defined]
        originals, references = zip(*self._pairs(split, rows), strict=True)
        translations = [self._text(tokens) for tokens in translated]
        self._examples = list(zip(originals, references, translations, strict=True))[:10]
        decode = self.target_vocabulary.decode
        with_ends = [[BOS, *decode(tokens), EOS] for tokens in translated]
        for name, (score, _) in text_scores(translations, references, self.hparams["spec"]["target"]).items():
            self.record(f"{stage}/{name}", score, prog_bar=f"{stage}/{name}" == self.monitor)
        self.record(f"{stage}/bleu_paper", paper_bleu(with_ends, [decode(tokens) for tokens in targets]))

    def _translate(self, sources: Sequence[list[int]], beam: int = 1, progress: bool = False) -> list[list[int]]:
        ends = {"bos": self.target_vocabulary.ids[BOS], "eos": self.target_vocabulary.ids[EOS]}
        search = greedy if beam == 1 else partial(beam_search, beam=beam)

        def decode(batch: Tensor) -> list[list[int]]:
            return search(self.model, batch.to(self.device), **ends)

        return decode_sorted(decode, sources, PAD_ID, progress, batch_size=max(1, 200 // beam))

    def _text(self, tokens: Sequence[int]) -> str:
        return nfc(join(self.target_vocabulary.decode(tokens), self.hparams["spec"]["detok_rules"]))

    def _pairs(self, split: str, rows: Sequence[int]) -> list[tuple[str, str]]:
        return [self.trainer.datamodule.texts[split][row] for row in rows]  # type: ignore[attr-defined]


def text_scores(translations: Sequence[str], references: Sequence[str], language: str) -> dict[str, tuple[float, str]]:
    """Return {"bleu": (score, signature), "chrf": (score, signature)} of sacreBLEU (Post 2018).

    Scores are from 0 to 100. BLEU counts tokens of sacreBLEU's tokenizer for the language, or characters for the
    languages in `UNSPACED`.
    """
    code = language_code(language)
    metrics = {"bleu": BLEU(trg_lang=code, tokenize="char" if code in UNSPACED else None), "chrf": CHRF()}
    scores = {name: metric.corpus_score(translations, [references]).score for name, metric in metrics.items()}
    return {name: (score, str(metrics[name].get_signature())) for name, score in scores.items()}


def paper_bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return BLEU, from 0 to 100, as in the paper's figure 7: sentences include <bos> and <eos>, which always match."""
    return 100 * bleu_score(translations, [[reference] for reference in references])
