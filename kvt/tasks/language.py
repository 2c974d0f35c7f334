"""Language models: tiny Shakespeare by characters, or any text, and the numbers in words (Borji 2023, §3.4)."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from math import log
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.download import download
from kvt.data.hub import base_name, is_hub, read_texts
from kvt.data.texts import SHAKESPEARE, fingerprint, read_text
from kvt.data.vocabulary import IGNORE, Vocabulary, build_vocab
from kvt.models import CausalLM
from kvt.models.embedding import attention_settings, make_embedding
from kvt.models.generation import sample
from kvt.system.errors import UserError, require_positive, require_seed
from kvt.system.files import optional_path
from kvt.tasks.base import Classification, make_optimizer
from kvt.tasks.causality import require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.metrics import ACC, LOSS, PPL, Metric
from kvt.tasks.schedules import OneCycle, every_step, total_steps

SMALL = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


class Characters(TaskData):
    """Windows of a text, int64 (B, length), and the characters that follow each of theirs: "To be" and "o be,".

    The first part of the text trains, the rest validates, unless the text has a validation split of its own; there is
    no test split. Training visits the windows that begin at every character, in random order. Validation predicts every
    character of its part but the first once. The vocabulary is that of the whole text; training learns nothing else of
    the validation part. Given another text than its run had, whose characters it must know, `kvt validate` measures a
    checkpoint on all of it.

    Args:
        text: your own UTF-8 file; or the documents of a data set of Hugging Face, hf:NAME, which may be a folder, or
            hf:NAME:CONFIGURATION; default: tiny Shakespeare, 1,115,394 characters, 65 different ones.
        length: characters of a window: the longest context of the model.
        val_size: the fraction of the text to validate on.
    """

    drop_last = True
    path_settings = ("data_dir", "text")
    measures_others = True

    def __init__(
        self,
        text: str | None = None,
        length: int = 64,
        val_size: float = 0.1,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, val_size=val_size)
        self.path, self.length, self.val_size = optional_path(text), length, val_size
        self.task_name = "characters"
        if self.path:
            self.task_name += f"_{base_name(str(self.path)) if is_hub(self.path) else self.path.stem}"

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text as "train", and as "val" its validation split, if it has one of its own."""
        if self.path and is_hub(self.path):
            return read_texts(str(self.path))
        return {"train": read_text(self.path or download(SHAKESPEARE, self.data_dir, "tinyshakespeare/input.txt"))}

    @cached_property
    def text(self) -> str:
        return "".join(self.texts.values())

    @cached_property
    def parts(self) -> tuple[str, str]:
        """The training part of the text, and the validation part."""
        if "val" in self.texts:
            return self.texts["train"], self.texts["val"]
        train_size = len(self.text) - min(round(self.val_size * len(self.text)), len(self.text))
        return self.text[:train_size], self.text[train_size:]

    @cached_property
    def spec(self) -> dict[str, Any]:  # type: ignore[override]  # reads the text
        train, val = map(build_vocab, self.parts)  # most frequent first, those only in the validation part last
        return {"vocab": list(dict.fromkeys(train + val)), "length": self.length}

    def prepare_data(self) -> None:
        _ = self.text  # downloads it

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        self.content = fingerprint(self.text)
        vocabulary = Vocabulary(self.spec["vocab"])
        if self.are_others:
            return {"val": windows(torch.tensor(vocabulary.encode(self.text)), self.length)}
        train, val = (torch.tensor(vocabulary.encode(part)) for part in self.parts)
        if len(train) <= self.length or len(val) < 2:
            settings = f"length={self.length} and val_size={self.val_size}"
            raise UserError(f"{self.path or 'the text'} has {len(self.text)} characters, too few for {settings}")
        return {
            "train": (train[:-1].unfold(0, self.length, 1), train[1:].unfold(0, self.length, 1)),  # overlapping views
            "val": windows(val, self.length),
        }


def spell(number: int) -> str:
    """Spell a number from 1 to 9999 without hyphens and "and".

    >>> spell(7312)
    'seven thousand three hundred twelve'
    """
    for unit, name in ((1000, " thousand"), (100, " hundred")):
        if number >= unit:
            return f"{SMALL[number // unit]}{name} {spell(number % unit)}".rstrip()
    return SMALL[number] if number < 20 else f"{TENS[number // 10]} {SMALL[number % 10]}".rstrip()


class HumanNumbers(TaskData):
    """Adjacent windows of the counting text, int64 (B, length), and the words that follow each of theirs, likewise.

    The first windows train, the rest validate; there is no test split. The last words, which fill no window, are left
    out. Training drops an incomplete last batch.

    Args:
        length: words of a window.
        val_size: the fraction of the windows to validate on.
        data_dir: not used, the text is generated.
    """

    drop_last = True
    task_name = "human_numbers"

    def __init__(
        self, length: int = 16, val_size: float = 0.2, batch_size: int = 64, seed: int = 0, data_dir: str | None = None
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, val_size=val_size)
        self.length, self.val_size = length, val_size
        numbers = (spell(number) for number in range(1, 10_000) if number != 8000)  # which the published text lacks
        self.text = " . ".join(numbers).split()  # 63,095 words
        self.spec = {"vocab": build_vocab(self.text), "length": length}

    @classmethod
    def chance(cls, **settings: Any) -> float:
        """Return the share of the commonest words of the last fifth of the text, "." and "thousand"."""
        return 0.152

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        text = torch.tensor(Vocabulary(self.spec["vocab"]).encode(self.text))
        whole = (len(text) - 1) // self.length  # windows without padding
        train_size = int((1 - self.val_size) * whole)
        if not 0 < train_size < whole:
            split = f"length={self.length} and val_size={self.val_size} make {whole} windows, {train_size} to train on"
            raise UserError(f"{split}: both splits need at least one")
        both = windows(text[: whole * self.length + 1], self.length)  # inputs and targets
        return {"train": tuple(t[:train_size] for t in both), "val": tuple(t[train_size:] for t in both)}


def windows(symbols: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut a text into adjacent windows that predict every symbol but the first once: int64 (M,) → two of (B, length).

    The last window is padded with symbol 0 in the inputs and with `IGNORE` in the targets.

    >>> windows(torch.tensor([5, 6, 7, 8, 9, 4]), 3)
    (tensor([[5, 6, 7],
            [8, 9, 0]]), tensor([[   6,    7,    8],
            [   9,    4, -100]]))
    """
    missing = -(len(symbols) - 1) % length
    inputs, targets = symbols[:-1], symbols[1:]
    inputs = torch.cat([inputs, inputs.new_zeros(missing)])
    targets = torch.cat([targets, targets.new_full((missing,), IGNORE)])
    return inputs.view(-1, length), targets.view(-1, length)


class LanguageTask(Classification):
    """Predicts every symbol of a text from those before it; a batch is (symbols, next symbols), int64 (B, N) each."""

    unit = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, ACC, PPL)
    required_spec = ("vocab", "length")
    must_match: ClassVar[tuple[str, ...]] = ("vocab",)
    separator: ClassVar[str]  # between the symbols of a text: "" for characters, " " for words
    model: CausalLM

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.vocabulary = self.make_vocabulary(spec)

    @staticmethod
    def make_vocabulary(spec: Mapping[str, Any]) -> Any:
        """Return what has the list `vocab`, and encodes and decodes symbols."""
        return Vocabulary(spec["vocab"])

    def check_causality(self) -> None:
        if not self.model.causal:
            return
        symbols = len(self.vocabulary.vocab)
        require_causal(self.hparams["attn"], self.model, self.model, self.model.embedding.max_len, symbols)

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        computed = super().compute_metrics(batch)
        return computed | {"ppl": computed["loss"]}

    def num_predictions(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE).sum()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, list[str]]:
        """Return the text of each window, what follows each symbol, and the likeliest symbols instead."""
        inputs, targets = batch
        rows = {"input": inputs, "target": targets, "prediction": self(inputs).argmax(-1)}
        return {
            name: [self._text(row[real != IGNORE]) for row, real in zip(tokens, targets, strict=True)]
            for name, tokens in rows.items()
        }

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        symbols = self.vocabulary.decode(inputs[0][0].tolist())
        return symbols, symbols

    def write(self, prompt: str, tokens: int, seed: int = 0, **settings: Any) -> Iterator[str]:
        """Yield the prompt, by default the most frequent symbol, then each symbol as it is drawn, in eval mode.

        The settings are those of `kvt.models.generation.sample`.
        """
        require_seed(seed)
        if not self.model.causal:
            raise UserError("a masked language model writes no text, it fills in: kvt predict shows what")
        encoded = self._encode(prompt)
        generator = torch.Generator(self.device).manual_seed(seed)
        symbols = torch.tensor([encoded], dtype=torch.long, device=self.device)  # (1, N)
        drawn = sample(self.model, symbols, tokens, generator=generator, **settings)
        return chain([self._text(symbols[0])], self._continue(token[0] for token in drawn))

    def generate(self, prompt: str, tokens: int, **settings: Any) -> str:
        """Return the text that `write` continues, with the same settings."""
        return "".join(self.write(prompt, tokens, **settings))

    def sample(self) -> str | None:
        """Return two hundred symbols as a Markdown code block, always from the same random numbers."""
        if not self.model.causal:
            return None
        return "\n".join(f"    {line}" for line in self.generate("", 200).splitlines())

    def _encode(self, prompt: str) -> list[int]:
        prompt = prompt or self.vocabulary.vocab[0]
        encoded: list[int] = self.vocabulary.encode(prompt.split() if self.separator else prompt)
        return encoded

    def _text(self, symbols: Tensor) -> str:
        return self.separator.join(self.vocabulary.decode(symbols.tolist()))

    def _continue(self, drawn: Iterable[Tensor]) -> Iterator[str]:
        """Yield what each symbol, int64 (1,), adds to the text."""
        return (f"{self.separator}{self._text(symbol)}" for symbol in drawn)


class CharacterTask(LanguageTask):
    """Predicts the next character with a `CausalLM`; Adam at a constant rate.

    Args:
        positions: learned, sinusoidal, rotary (RoPE) or none.
        dropout: of attention weights, attention output and feed-forward networks.
    """

    metrics = (LOSS, ACC, Metric("bpc", "bits per character", better="less"), PPL)
    monitor = "val/loss"
    separator = ""

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
        pos_dim: int = 20,
        positions: str = "learned",
        dropout: float = 0.2,
        lr: float = 5e-4,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr)
        self.lr = lr
        sizes = {"heads": heads, "pos_dim": pos_dim, "max_len": spec["length"]}
        style = {"bias": False, "dropout": dropout, "score": "model_scaled_dot", "per_head": True}
        make_attention = AttentionFactory(attn, attention_settings(positions, attn_kwargs), **sizes, **style)
        embedding = make_embedding(positions, len(spec["vocab"]), dim, spec["length"])
        self.model = CausalLM(make_attention, embedding, depth=depth, dropout=dropout, feed_forward_dropout=dropout)

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        computed = super().compute_metrics(batch)
        return computed | {"bpc": computed["loss"] / log(2)}


class NumberTask(LanguageTask):
    """Predicts the next word with a `CausalLM`, its head tied and without final norm; Adam, `OneCycle`.

    Args:
        positions: sinusoidal, learned, rotary (RoPE) or none.
        dropout: of embeddings and attention output.
        feed_forward_dropout: of the feed-forward networks' output.
        lr: the highest rate of the cycle.
    """

    separator = " "

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 64,
        depth: int = 4,
        heads: int = 8,
        pos_dim: int = 10,
        positions: str = "sinusoidal",
        dropout: float = 0.1,
        feed_forward_dropout: float = 0.2,
        lr: float = 1e-3,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr)
        self.lr = lr
        sizes = {"heads": heads, "pos_dim": pos_dim, "max_len": spec["length"]}
        style = {"bias": False, "output_bias": False}
        make_attention = AttentionFactory(attn, attention_settings(positions, attn_kwargs), **sizes, **style)
        embedding = make_embedding(positions, len(spec["vocab"]), dim, spec["length"], dropout=dropout, scaled=True)
        dropouts: dict[str, Any] = {"dropout": dropout, "feed_forward_dropout": feed_forward_dropout}
        self.model = CausalLM(make_attention, embedding, depth=depth, **dropouts, final_norm=False, tied=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = make_optimizer(self)
        cycles_momentum = not optimizer.defaults.keys().isdisjoint(("betas", "momentum"))
        schedule = OneCycle(optimizer, self.lr, total_steps=total_steps(self), cycle_momentum=cycles_momentum)
        return every_step(optimizer, schedule)
