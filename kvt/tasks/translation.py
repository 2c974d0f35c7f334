"""Translation: Multi30k, or any parallel corpus (Borji 2023, §3.5)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.loader import Batches, SentenceBatches
from kvt.data.texts import fingerprint, parallel_corpus
from kvt.data.tokenizer import SpacedTokens, fit_detokenizer, join, splitter
from kvt.data.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary, count_symbols
from kvt.models import Seq2Seq
from kvt.models.generation import beam_search, decode_sorted, greedy
from kvt.models.losses import label_smoothed_kl
from kvt.system.errors import UserError, require_finite, require_positive, require_probability
from kvt.system.files import user_path
from kvt.system.memory import require_memory
from kvt.tasks.base import Task, adam, every_step
from kvt.tasks.bleu import paper_bleu, sacre_bleu
from kvt.tasks.causality import differ, eval_mode, leaks_future
from kvt.tasks.datamodule import Spec, TaskData
from kvt.tasks.metrics import MeanPerplexity
from kvt.tasks.schedules import inverse_square_root

Batch = tuple[Tensor, Tensor, Tensor]
"""Padded sources (B, M), padded targets (B, N), and their rows in the split (B)."""

PAD_NUMBER, BOS_NUMBER, EOS_NUMBER = (SPECIALS.index(symbol) for symbol in (PAD, BOS, EOS))


class SentencePairs(TaskData):
    """Sentences and their translations: int64 (B, M) and (B, N), <bos> … <eos>, filled up with <pad>, and their rows.

    Words are those of spaCy's rules, their case kept; the vocabularies are those of the training split, and a word
    that is not in them is <unk>. Training batches are of like length, in a new order every epoch.

    Args:
        source: language to translate from: de, en, fr or cs; any that spaCy knows with `root`.
        target: language to translate to.
        root: a folder of your own instead of Multi30k: train, val and test, each with one file a language, such as
            train.de and train.en, UTF-8, one sentence a line.
        max_len: the longest sentence, in tokens, <bos> and <eos> among them; also the longest translation.
        min_freq: how often a word must occur in the training split to be in the vocabulary.
        batch_size: pairs of a batch on one process.
        seed: of the order of batches and all randomness of training.
        data_dir: the folder where data sets lie; default: $KVT_DATA_DIR, else ./data.

    Raises:
        UserError: files that are missing, not UTF-8, of unequal length, or with empty lines; sentences that are
            longer than `max_len`; languages that are unknown.
    """

    places = ("data_dir", "root")

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
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(max_len=max_len, min_freq=min_freq)
        self.languages, self.max_len, self.min_freq = (source, target), max_len, min_freq
        self.texts = parallel_corpus(source, target, self.data_dir, user_path(root) if root else None)
        texts = [text for pairs in self.texts.values() for pair in pairs for text in pair]
        self.save_hyperparameters({"content": fingerprint(*texts)})  # wherever the files lie

    @property
    def task_name(self) -> str:
        """ "translation_de_en" …"""
        return "_".join(("translation", *self.languages))

    @cached_property
    def spec(self) -> Spec:
        """Languages, vocabularies, which words of the target are joined, and the longest sentence."""
        source, target = self._words["train"]
        return {
            "source": self.languages[0],
            "target": self.languages[1],
            "source_vocab": self._count(source),
            "target_vocab": self._count(target),
            "detok_rules": fit_detokenizer(target),
            "max_len": self.max_len,
        }

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Numbers the words."""
        vocabularies = [Vocabulary(self.spec[symbols]) for symbols in ("source_vocab", "target_vocab")]
        splits: dict[str, tuple[Tensor, ...]] = {}
        for split, sides in self._words.items():
            splits[split] = tuple(
                self._numbers(split, *side) for side in zip(self.languages, vocabularies, sides, strict=True)
            )
        return splits

    def input_keys(self, split: str) -> list[str]:
        """The sentences to translate, as they were read."""
        return [source for source, _ in self.texts[split]]

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        """Batches of sentences of like length."""
        return SentenceBatches(*tensors, pad=PAD_NUMBER, **settings)

    @cached_property
    def _words(self) -> dict[str, list[list[SpacedTokens]]]:
        """The words of each split, of source and of target."""
        split = [splitter(language) for language in self.languages]
        return {
            name: [[split[side](pair[side]) for pair in pairs] for side in (0, 1)] for name, pairs in self.texts.items()
        }

    def _count(self, sentences: Sequence[SpacedTokens]) -> list[str]:
        return count_symbols((word for sentence in sentences for word, _ in sentence), SPECIALS, self.min_freq)

    def _numbers(self, split: str, language: str, vocabulary: Vocabulary, sentences: Sequence[SpacedTokens]) -> Tensor:
        rows = [encode(vocabulary, [word for word, _ in sentence]) for sentence in sentences]
        for line, row in enumerate(rows, start=1):
            if len(row) > self.max_len:
                raise UserError(
                    f"line {line} of {language}, {split}, has {len(row)} tokens, <bos> and <eos> among them: choose a "
                    f"greater --max_len than {self.max_len}, or split the sentence"
                )
        longest = max(map(len, rows))
        require_memory(8 * len(rows) * longest, f"{language}, {split}: {len(rows)} sentences of {longest} tokens each")
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD_NUMBER)


def encode(vocabulary: Vocabulary, words: Sequence[str]) -> list[int]:
    """The numbers of <bos>, the words and <eos>."""
    return vocabulary.encode([BOS, *words, EOS])


class TranslationTask(Task):
    """Translates sentences: `Seq2Seq`, label smoothing, Adam at a rate that rises and falls with 1/√step.

    After every epoch the validation split is translated greedily, and once, at the end, the test split. `bleu` is that
    of sacreBLEU, on text; `bleu_paper` that of the paper, on tokens, <bos> and <eos> counted as right ones.

    Args:
        spec: of the data; the command line fills it in.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of a class of your own,
            my_package.my_module.MyAttention: the self-attention; attention to the source is qkv's.
        attn_kwargs: settings of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers of the encoder, and of the decoder.
        heads: number of attention heads.
        pos_dim: channels of the map's positional encoding, for the attentions that have one.
        dropout: of embeddings, attention weights, residual branches and feed-forward networks.
        smoothing: probability taken from the true word and spread over all others.
        lr: Adam's learning rate, in multiples of the schedule's dim^−½ · min(t^−½, t · warmup^−1.5).
        warmup: steps of linear warm-up.
    """

    unit = "tokens"
    metric_names = ("loss",)
    monitor = "val/bleu"
    mode = "max"
    needs = ("source", "target", "source_vocab", "target_vocab", "detok_rules", "max_len")

    model: Seq2Seq

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 128,
        depth: int = 1,
        heads: int = 4,
        pos_dim: int = 10,
        dropout: float = 0.1,
        smoothing: float = 0.1,
        lr: float = 1.0,
        warmup: int = 4000,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr, warmup=warmup)
        require_probability(smoothing=smoothing)
        self.source_vocabulary = Vocabulary(spec["source_vocab"])
        self.target_vocabulary = Vocabulary(spec["target_vocab"])
        make_attention = AttentionFactory(
            attn,
            attn_kwargs,
            called_with=("mask", "causal", "cache"),
            heads=heads,
            dropout=dropout,
            pos_dim=pos_dim,
            max_len=spec["max_len"],
        )
        self.model = Seq2Seq(
            make_attention,
            source_vocab_size=len(spec["source_vocab"]),
            target_vocab_size=len(spec["target_vocab"]),
            pad=PAD_NUMBER,
            max_len=spec["max_len"],
            dim=dim,
            depth=depth,
            dropout=dropout,
        )
        for stage in ("val", "test"):
            self.metrics[f"{stage}/ppl"] = MeanPerplexity()
        self._seen: list[Batch] = []  # of the evaluation under way
        self._examples: list[tuple[str, str, str]] = []

    def check_causality(self) -> None:
        """Makes sure that no word is predicted from those after it, nor from padding.

        Raises:
            UserError: one is.
        """
        length = self.model.max_len
        target = torch.arange(length, device=self.device) % len(self.target_vocabulary.vocab)
        source = torch.full((1, length // 2), EOS_NUMBER, device=self.device)
        longer = pad(source, (0, length - length // 2), value=PAD_NUMBER)

        def predict(target: Tensor, source: Tensor = source) -> Tensor:
            return self.model.forward(source.expand(len(target), -1), target)

        with eval_mode(self.model):
            if leaks_future(predict, target):
                raise UserError(f"--attn {self.hparams['attn']}: it looks at what comes later: make it obey `causal`")
            if differ(predict(target[None]), predict(target[None], longer)):
                raise UserError(f"--attn {self.hparams['attn']}: it looks at padding: make it obey `mask`")

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The source, and the target without its last token."""
        source, target, _ = batch
        return source, target[:, :-1]

    def compute_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """The smoothed loss of a batch and the mean of −log p of the true words, in nats a token."""
        states, generator = self.model.states(*self.inputs(batch)).flatten(0, 1), self.model.generator
        truth, smoothing = batch[1][:, 1:].flatten(), self.hparams["smoothing"]
        loss, nll = label_smoothed_kl(
            states, generator.weight, generator.bias, truth, smoothing=smoothing, pad=PAD_NUMBER
        )
        return {"loss": loss, "nll": nll}

    def num_predictions(self, batch: Batch) -> Tensor:
        """The number of target tokens to predict."""
        return (batch[1][:, 1:] != PAD_NUMBER).sum()

    @property
    def notes(self) -> dict[str, str]:
        """How `bleu` is computed."""
        return {"bleu": sacre_bleu([""], [""])[1]}

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds a batch to the perplexity and to what will be translated."""
        self._see("val", outputs, batch)

    def on_test_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds a batch to the perplexity and to what will be translated."""
        self._see("test", outputs, batch)

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics of the epoch, BLEU among them."""
        super().on_validation_epoch_end()
        self._score("val")

    def on_test_epoch_end(self) -> None:
        """Logs the metrics of the split, BLEU among them."""
        super().on_test_epoch_end()
        self._score("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, list[str]]:
        """Sources, references and translations, as text."""
        texts = self._texts("test", batch[2].tolist())
        return {**texts, "translation": [self._text(words) for words in self._translate(unpadded(batch[0]))]}

    def translate(self, sentences: Sequence[str], beam: int = 1, progress: bool = False) -> list[str]:
        """The translation of each sentence; of an empty one, an empty one. Put the task in eval mode first.

        Args:
            sentences: of the source language.
            beam: width of the beam search; 1 is greedy.
            progress: whether to show a progress bar.

        Raises:
            UserError: a sentence longer than the model's maximum, a beam that is not positive or too wide for memory.
        """
        require_positive(beam=beam)
        require_finite(beam=beam)
        max_len, split = self.model.max_len, splitter(self.hparams["spec"]["source"])
        sources = {}
        for row, sentence in enumerate(sentences):
            if words := [word for word, _ in split(sentence)]:
                sources[row] = encode(self.source_vocabulary, words)
                if len(sources[row]) > max_len:
                    raise UserError(
                        f"sentence {row + 1} has {len(words)} words, this model reads {max_len - 2} at most: split it"
                    )
        longest = max(map(len, sources.values()), default=0)
        require_memory(beam * self.model.decoding_bytes(longest), f"beam={beam}")
        translated = dict(zip(sources, self._translate(list(sources.values()), beam, progress), strict=True))
        return [self._text(translated.get(row, [])) for row in range(len(sentences))]

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        """The words of source and target, whichever the layer looks from and at."""
        source, target = (
            vocabulary.decode(numbers[0].tolist())
            for vocabulary, numbers in zip((self.source_vocabulary, self.target_vocabulary), inputs, strict=True)
        )
        from_target, at_target = layer.startswith("decoder"), "cross_attention" not in layer
        rows = target if from_target else source
        return rows, target if from_target and at_target else source

    def sample(self) -> str:
        """The first validation sentences and their translations by now, as a table."""
        rows = ["| source | reference | translation |", "|---|---|---|"]
        rows += [f"| {' | '.join(map(_literal, texts))} |" for texts in self._examples]
        return "\n".join(rows)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam as in Vaswani et al. 2017, §5.3."""
        optimizer = adam(self, betas=(0.9, 0.98), eps=1e-9)
        factor = inverse_square_root(self.hparams["dim"], self.hparams["warmup"])
        return every_step(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))

    def _see(self, stage: str, outputs: Any, batch: Batch) -> None:
        self._metric(stage, "ppl").update(outputs["nll"], self.num_predictions(batch))
        self._seen.append(batch)

    def _score(self, stage: str) -> None:
        """Translates what was seen, and logs both BLEUs."""
        sources, targets, rows = [], [], []
        for source, target, row in self._seen:
            sources += unpadded(source)
            targets += unpadded(target)
            rows += row.tolist()
        self._seen.clear()
        translated = self._translate(sources)
        results = list(zip(rows, translated, targets, strict=True))
        if self.trainer.world_size > 1:  # each process has translated its own batches
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, results)
            results = list(chain.from_iterable(parts))
        rows, translated, targets = map(list, zip(*sorted(results), strict=True))
        texts = self._texts(stage, rows)
        translations = [self._text(numbers) for numbers in translated]
        self._examples = list(zip(texts["source"], texts["reference"], translations, strict=True))[:10]
        decode = self.target_vocabulary.decode
        bleu, _ = sacre_bleu(translations, texts["reference"])
        with_ends = [decode([BOS_NUMBER, *numbers, EOS_NUMBER]) for numbers in translated]
        self.record(f"{stage}/bleu", bleu, prog_bar=stage == "val")
        self.record(f"{stage}/bleu_paper", paper_bleu(with_ends, [decode(numbers) for numbers in targets]))

    def _translate(self, sources: Sequence[list[int]], beam: int = 1, progress: bool = False) -> list[list[int]]:
        def decode(batch: Tensor) -> list[list[int]]:
            batch = batch.to(self.device)
            if beam == 1:
                return greedy(self.model, batch, bos=BOS_NUMBER, eos=EOS_NUMBER)
            return beam_search(self.model, batch, bos=BOS_NUMBER, eos=EOS_NUMBER, beam=beam)

        return decode_sorted(decode, sources, PAD_NUMBER, progress, batch_size=max(1, 200 // beam))

    def _text(self, numbers: Sequence[int]) -> str:
        return join(self.target_vocabulary.decode(numbers), self.hparams["spec"]["detok_rules"])

    def _texts(self, split: str, rows: Sequence[int]) -> dict[str, list[str]]:
        """The text of these pairs, as it was read."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        pairs = [data.texts[split][row] for row in rows]
        return {"source": [source for source, _ in pairs], "reference": [target for _, target in pairs]}


def unpadded(sentences: Tensor) -> list[list[int]]:
    """The tokens of each row without padding."""
    return [row[row != PAD_NUMBER].tolist() for row in sentences.cpu()]


def _literal(text: str) -> str:
    """A text that Markdown takes for nothing else."""
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)
