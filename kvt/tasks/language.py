"""Language models of characters and of numbers in words (Borji 2023, §3.3), and of texts of any size.

A text is encoded as a stream of tokens, and the stream is cut into windows. The data sets differ in their tokens and
in the positions at which windows begin.

>>> data = HumanNumbers(length=5)  # the words of "one . two . three …", in adjacent windows
>>> data.setup("fit")
>>> task = NumberTask(data.spec, attn="kv", dim=16, depth=1, heads=2)
>>> for inputs, targets in data.examples(0, 2):
...     task.vocabulary.text(inputs[0].tolist()), task.vocabulary.text(targets[0].tolist())
('eighty four . eight thousand', 'four . eight thousand eighty')
('eighty five . eight thousand', 'five . eight thousand eighty')
>>> task(inputs).shape  # the logits of the next word, at each of 5 positions
torch.Size([1, 5, 30])
>>> len(list(task.write("seven thousand", tokens=3)))  # the prompt and three new words
4
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise
from math import log
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvt.data.files import Remote, download, once, optional_path
from kvt.data.hub import HubCorpus, base_name, is_hub
from kvt.data.loader import Batches, row_hashes
from kvt.data.order import derive_seed
from kvt.data.texts import LIBRARY, Corpus, fingerprint, nfc, read_text
from kvt.data.tokens import (
    IGNORE,
    Bytes,
    TokenFile,
    Vocabulary,
    build_vocab,
    document_starts,
    first_of,
    learn_pairs,
    read_tokenizer,
    start_of_last,
    tokens_of,
)
from kvt.models import CausalLM
from kvt.models.embedding import make_embedding
from kvt.models.generation import sample
from kvt.models.init import gpt2
from kvt.models.losses import Predictions
from kvt.system import UserError, printable, require_choice, require_positive, say, user_path, write_atomically
from kvt.tasks.base import Classification, Spec
from kvt.tasks.causality import require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.metrics import ACC, ACCUM_DTYPE, LOSS, PPL, Metric
from kvt.tasks.options import BlockTask

SMALL = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SHAKESPEARE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
    "/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
MASK = b"<mask>"  # text of the mask token, the last token in the vocabulary of a masked language model
Rows = tuple[Tensor, Tensor, Tensor]  # start and stop positions of windows, both int64 (R,); tokens of the stream, (T,)


class Windows(Batches):
    """Batches of windows of a token stream: `length` tokens from a start position on, and the next tokens as targets.

    `rows` are start positions, stop positions and the stream, as in `Rows`. The text of a window ends before its stop
    position. From the stop position on, targets are `filler`, and inputs are `fill`.

    >>> stream, starts, stops = torch.tensor([5, 6, 7, 9, 8, 9]), torch.tensor([0, 4]), torch.tensor([4, 6])
    >>> for part in next(iter(Windows(starts, stops, stream, length=4, fill=9, batch_size=2))):
    ...     print(part.tolist())
    [[5, 6, 7, 9], [8, 9, 9, 9]]
    [[6, 7, 9, -100], [9, -100, -100, -100]]
    """

    def __init__(self, *rows: Tensor, length: int, fill: int = 0, filler: int = IGNORE, **settings: Any) -> None:
        super().__init__(*rows, **settings)
        self.length, self.fill, self.filler = length, fill, filler

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        inputs, targets, _ = self._windows(rows)
        return inputs[:, :-1], targets[:, 1:]

    def _windows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets (not yet shifted), and whether a token is before the stop, each (B, length + 1)."""
        starts, stops, stream = self.tensors
        rows = rows.to(stream.device, non_blocking=True)
        places = starts[rows].unsqueeze(1) + torch.arange(self.length + 1, device=stream.device)  # (B, length + 1)
        real = places < stops[rows].unsqueeze(1)
        tokens = stream[places.clamp(max=len(stream) - 1)].long()
        return tokens.masked_fill(~real, self.fill), tokens.masked_fill(~real, self.filler), real


class TokenBatches(Windows):
    """Batches of inputs, targets, and whether a target is real (before the stop position): tensors (B, length)."""

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        inputs, targets, real = self._windows(rows)
        return inputs[:, :-1], targets[:, 1:], real[:, 1:]


class MaskedBatches(Windows):
    """Batches for masked language models: inputs with masked tokens, targets, and which targets are not padding.

    15 % of a window's tokens, at least one, are chosen as targets. The target at all other positions is `IGNORE`. In
    the inputs, a chosen token becomes the mask token, whose id is `mask`, with probability 0.8, becomes a random other
    token with probability 0.1, and stays the same with probability 0.1 (Devlin et al. 2019, §3.1).

    With `reseed` (training), torch's default generator, which `Batches` seeds, chooses the tokens. Without `reseed`,
    the choice depends only on the seed and the index of the window.

    >>> rows = torch.tensor([0]), torch.tensor([6]), torch.tensor([5, 6, 7, 9, 8, 9])
    >>> for part in next(iter(MaskedBatches(*rows, length=6, fill=9, mask=10, batch_size=1, seed=3))):
    ...     print(part.tolist())
    [[5, 6, 10, 9, 8, 9]]
    [[-100, -100, 7, -100, -100, -100]]
    [[False, False, True, False, False, False]]
    """

    rows_on_host = True
    SHARE, AS_MASK, KEPT = 0.15, 0.8, 0.1

    def __init__(self, *rows: Tensor, mask: int, **settings: Any) -> None:
        super().__init__(*rows, **settings)
        self.mask = mask

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        inputs, targets, real = (part[:, :-1] for part in self._windows(rows))
        which, how, other = self._uniform(rows).to(inputs.device)  # (B, length) each
        served = targets != IGNORE
        places = which.masked_fill(~served, 1).argsort(1).argsort(1)  # random ranks; places without a target come last
        hidden = places < (self.SHARE * served.sum(1, keepdim=True)).round().clamp(min=1)
        others = (inputs + 1 + (other * (self.mask - 1)).long()) % self.mask
        shown = torch.where(how < 1 - self.KEPT, others, inputs).masked_fill(how < self.AS_MASK, self.mask)
        return torch.where(hidden, shown, inputs), targets.masked_fill(~hidden, IGNORE), real & hidden

    def _uniform(self, rows: Tensor) -> Tensor:
        """Return random numbers from U(0, 1), float32 (3, B, length)."""
        if self.reseed:
            return torch.rand(3, len(rows), self.length)
        generators = [torch.Generator().manual_seed(derive_seed(self.seed, 1, row)) for row in rows.tolist()]
        return torch.stack([torch.rand(3, self.length, generator=generator) for generator in generators], dim=1)


class TextData(TaskData):
    """A text, cut into windows. A batch begins with inputs and targets, both int64 (B, length).

    A subclass implements `load`, which returns a dict that maps each split to its `Rows`.
    """

    keeps_order = drop_last = True
    windows: ClassVar[type[Windows]] = Windows
    length: int

    @property
    def layout(self) -> dict[str, int]:
        """Keyword arguments for the class `windows`."""
        return {"length": self.length}

    def adjacent(self, stream: Tensor, first: int, last: int) -> Rows:
        """Return adjacent windows in which every token from `first` + 1 to `last` − 1 is a target once."""
        return self.rows(torch.arange(first, max(first, last - 1), self.length), last, stream)

    def rows(self, starts: Tensor, stop: int, stream: Tensor) -> Rows:
        return starts, torch.tensor(stop).expand(len(starts)), stream

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        return self.windows(*tensors, **self.layout, **settings)

    def input_keys(self, split: str) -> Iterable[Hashable]:
        batches = self.windows(*self.splits[split], **self.layout, batch_size=256)
        return (key for inputs, *_ in batches for key in row_hashes(inputs))

    def keys_between(self, split: str, ends: Sequence[int]) -> Iterator[Hashable]:
        """Yield a key (a hash) for each non-empty part of a split, such as a line. Tokens in `ends` end a part."""
        starts, stops, stream = self.splits[split]
        tokens = stream[int(starts[0]) : int(stops[-1])].numpy()
        cuts = np.isin(tokens, ends).nonzero()[0].tolist()
        for before, end in pairwise([-1, *cuts, len(tokens)]):
            if end > before + 1:
                yield blake2b(tokens[before + 1 : end].tobytes(), digest_size=16).digest()


class Characters(TextData):
    """Windows of characters. A batch is (inputs, targets), such as "To be" and "o be,", both int64 (B, length).

    Training uses the first part of the text, and validation the rest, unless the data set has a validation split. A
    training window begins at every character that is followed by at least `length` training characters. In validation,
    every character except the first is a target once. The vocabulary has the characters of the whole text, in Unicode's
    form NFC. There is no test split.

    Args:
        text: path of your own UTF-8 file; or a Hugging Face data set of documents, hf:NAME or hf:NAME:CONFIGURATION,
            where NAME may be a folder. Default: tiny Shakespeare, with 1,115,394 characters, of which 65 are distinct.
        length: number of characters in a window, which is the longest context of the model.
        val_size: fraction of the text to validate on. Not used if the data set has a validation split.
    """

    path_settings = ("data_dir", "text")

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
    def parts(self) -> tuple[str, str]:
        """The training part and the validation part of the text."""
        if self.path and is_hub(self.path):
            splits = HubCorpus(str(self.path)).splits().values()
            text, *val = (nfc("\n".join(part.removesuffix("\n") for part in parts)) for parts in splits)
            if val:
                return text, val[0]
        else:
            text = nfc(read_text(self.path or download(SHAKESPEARE, self.data_dir, "tinyshakespeare/input.txt")))
        train_size = len(text) - min(round(self.val_size * len(text)), len(text))
        return text[:train_size], text[train_size:]

    @cached_property
    def spec(self) -> dict[str, Any]:  # type: ignore[override]  # reads the text
        train, val = map(build_vocab, self.parts)  # characters that only `val` has come last
        return {"vocab": list(dict.fromkeys(train + val)), "length": self.length}

    def prepare_data(self) -> None:
        _ = self.parts  # downloads the text

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        text, cut = "".join(self.parts), len(self.parts[0])
        self.content = fingerprint(text)
        if not self.path:
            self.note_counts("tinyshakespeare", text=len(text))
        stream = torch.tensor(Vocabulary(self.spec["vocab"]).encode(text), dtype=torch.int32)
        if cut <= self.length or len(text) < cut + 2:
            settings = f"length={self.length} and val_size={self.val_size}"
            raise UserError(f"{self.path or 'the text'} has {len(text)} characters, too few for {settings}")
        every_place = self.rows(torch.arange(cut - self.length), cut, stream)
        return {"train": every_place, "val": self.adjacent(stream, cut, len(text))}

    def input_keys(self, split: str) -> Iterable[Hashable]:
        """Return a key for each non-empty line of a split."""
        return self.keys_between(split, [i for i, symbol in enumerate(self.spec["vocab"]) if symbol == "\n"])


def spell(number: int) -> str:
    """Spell a number from 1 to 9999 in words, without hyphens and without "and".

    >>> spell(7312)
    'seven thousand three hundred twelve'
    """
    for unit, name in ((1000, " thousand"), (100, " hundred")):
        if number >= unit:
            return f"{SMALL[number // unit]}{name} {spell(number % unit)}".rstrip()
    return SMALL[number] if number < 20 else f"{TENS[number // 10]} {SMALL[number % 10]}".rstrip()


class HumanNumbers(TextData):
    """Adjacent windows of words. A batch is (words, next words), both int64 (B, length).

    The text is "one . two . three …" up to 9999, without 8000. Training uses the first windows, and validation the
    rest. Words at the end that do not fill a window are left out. There is no test split.

    Args:
        length: number of words in a window.
        val_size: fraction of the windows to validate on.
        data_dir: not used: the text is generated.
    """

    task_name = "human_numbers"

    def __init__(
        self, length: int = 16, val_size: float = 0.2, batch_size: int = 64, seed: int = 0, data_dir: str | None = None
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, val_size=val_size)
        self.length, self.val_size = length, val_size
        # fastai's published text, Human Numbers, lacks 8000
        numbers = (spell(number) for number in range(1, 10_000) if number != 8000)
        self.text = " . ".join(numbers).split()  # 63,095 words
        self.spec = {"vocab": build_vocab(self.text), "length": length}

    @classmethod
    def chance(cls, **settings: Any) -> float:
        """Return the accuracy of guessing ".", one of the two most frequent words, in the last fifth of the text."""
        return 0.152

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        stream = torch.tensor(Vocabulary(self.spec["vocab"]).encode(self.text), dtype=torch.int32)
        whole = (len(stream) - 1) // self.length  # number of windows without padding
        train_size = int((1 - self.val_size) * whole)
        cut, last = (windows * self.length + 1 for windows in (train_size, whole))
        return {"train": self.adjacent(stream, 0, cut), "val": self.adjacent(stream, cut - 1, last)}


class TextTokens(TextData):
    """Windows of tokens of a text or of a folder of texts; `<|endoftext|>` follows every document.

    The text is encoded once, into a memory-mapped file. Each text file must fit into memory; the tokens of all files
    together need not. Validation uses the validation split of a Hugging Face data set if there is one, else the last
    documents of the text. A last document that is larger than the validation part is cut; with loss_on all, it is an
    error. The files of a folder are in a fixed random order. There is no test split.

    Args:
        text: path of a UTF-8 file or of a folder of such files; or a Hugging Face data set of documents, hf:NAME or
            hf:NAME:CONFIGURATION, where NAME may be a folder. Default: the modules of Python's standard library.
        pattern: shell pattern of the names of files to read in the folder, such as `*.txt`.
        separator: string between the documents of a file; default: every file is one document.
        tokenizer: bytes; or bpe, byte pairs learned from the text; or the path or the content of the tokenizer.json of
            a byte-level BPE, such as `task.vocabulary.definition` of a trained task.
        vocab_size: for bpe: largest number of tokens in the vocabulary; a short text gives fewer.
        length: number of tokens in a window.
        loss_on: real: windows are cut from the concatenated documents, and every token except the first is a target.
            all: a window is one document, cut at `length` + 1 tokens or padded with `<|endoftext|>`, which is then also
            a target, as in the code of "Do Transformers Need Three Projections?" (2026).
        objective: causal: every token is predicted from the tokens before it. masked: 15 % of the tokens are masked and
            predicted from all other tokens, as in BERT.
        val_size: fraction of the text's bytes to validate on if the data set has no validation split; 1: the whole
            text, to evaluate a trained model.
    """

    windows = TokenBatches
    path_settings = ("data_dir", "text", "pattern", "separator")

    def __init__(
        self,
        text: str | None = None,
        pattern: str = "*",
        separator: str | None = None,
        tokenizer: str = "bytes",
        vocab_size: int = 8192,
        length: int = 256,
        loss_on: str = "real",
        objective: str = "causal",
        val_size: float = 0.05,
        batch_size: int = 32,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, vocab_size=vocab_size)
        if not 0 < val_size <= 1:
            raise UserError(f"val_size={val_size} must be above 0, and at most 1")
        require_choice("loss_on", loss_on, ("real", "all"))
        require_choice("objective", objective, ("causal", "masked"))
        self.length, self.loss_on, self.objective, self.val_size = length, loss_on, objective, val_size
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        if text is None and pattern == "*":
            pattern = "*.py"
        separator = (separator or "").replace("\r\n", "\n") or None
        path = optional_path(text) or LIBRARY
        if is_hub(path) and (separator or pattern != "*"):
            raise UserError(f"text={text}: every row is a document: drop separator and pattern, which are for files")
        self.corpus = HubCorpus(str(path)) if is_hub(path) else Corpus(path, pattern, separator)
        name = base_name(str(path)) if is_hub(path) else path.stem
        self.task_name = f"language_model_{name}" if text else "language_model"

    @cached_property
    def tokens(self) -> Bytes:
        """The tokenizer that `spec` defines."""
        return tokens_of(self.spec["tokenizer"], self.tokenizer)

    @cached_property
    def spec(self) -> dict[str, Any]:  # type: ignore[override]  # reads the text if byte pairs are learned
        masked = {"objective": "masked"} if self.objective == "masked" else {}  # no key if causal, as in older versions
        return {"tokenizer": self._definition(), "length": self.length} | masked

    def _definition(self) -> str:
        """Return the definition of the tokenizer. With "bpe", learn byte pairs unless they are cached."""
        if self.tokenizer == Bytes.definition or self.tokenizer.startswith("{"):
            return self.tokenizer
        path = user_path(self.tokenizer)
        if self.tokenizer == "bpe":
            path = self.data_dir / ".cache" / f"bpe-{fingerprint(f'{self.vocab_size} {self.corpus.identity}')}.json"
            once(self.data_dir, path.exists, lambda: self._learn(path))
        return read_tokenizer(path).definition

    def _learn(self, path: Path) -> None:
        write_atomically(path, learn_pairs(first_of(chain(*self.corpus.splits().values())), self.vocab_size))

    @property
    def layout(self) -> dict[str, int]:
        end = self.tokens.end
        return {"length": self.length, "fill": end, "filler": IGNORE if self.loss_on == "real" else end}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        file = TokenFile(self.corpus, self.tokens, self.data_dir)
        stream, self.content = file.load(), file.content
        if file.not_utf8:
            self.notes["left_out"] = f"{len(file.not_utf8)} files, which are not UTF-8, such as {file.not_utf8[0]}"
            say(printable(f"text={self.corpus.root}: left out: {self.notes['left_out']}"))
        documents = document_starts(stream, self.tokens.end)
        if self.val_size == 1:
            return {"val": self._rows(stream, documents, 0, len(stream))}
        wanted = file.cut or start_of_last(self.val_size, stream, self.tokens.pieces)
        later = documents[documents >= wanted]
        cut = int(later[0]) if len(later) else wanted  # if no document begins later, the last document is cut
        if self.loss_on == "real" and not self.length < cut < len(stream) - 1:
            sizes = f"length={self.length} and val_size={self.val_size}"
            raise UserError(f"{self.corpus.root} has {len(stream)} tokens, too few for {sizes}")
        parts = {"train": (0, cut), "val": (cut, len(stream))}
        splits = {split: self._rows(stream, documents, *part) for split, part in parts.items()}
        if not all(len(starts) for starts, *_ in splits.values()):
            raise UserError(f"{self.corpus.root}: loss_on=all needs a document in each split: change val_size")
        return dict(splits)

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        if self.objective == "masked":
            return MaskedBatches(*tensors, mask=len(self.tokens.pieces), **self.layout, **settings)
        return super().make_batches(*tensors, **settings)

    def input_keys(self, split: str) -> Iterable[Hashable]:
        """Return keys of a split's documents, or of its lines if "train" has one document or ends within a document."""
        starts, stops, stream = self.splits["train"]
        read, end = stream[int(starts[0]) : int(stops[-1])], self.tokens.end
        if len(document_starts(read, end)) > 1 and read[-1] == end:
            return self.keys_between(split, [end])
        return self.keys_between(split, [i for i, piece in enumerate(self.tokens.pieces) if b"\n" in piece or i == end])

    def _rows(self, stream: Tensor, documents: Tensor, first: int, last: int) -> Rows:
        """Return windows of the tokens from `first` to `last` − 1: adjacent, or one per document with `loss_on` all."""
        if self.loss_on == "real":
            return self.adjacent(stream, first, last)
        starts = documents[(documents >= first) & (documents < last)]
        return starts, torch.cat([starts[1:], torch.tensor([last])]), stream


class LanguageTask(BlockTask, Classification):
    """Base class of the tasks with language models. A batch begins with (tokens, targets), both int64 (B, N)."""

    unit = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, ACC, PPL)
    must_match: ClassVar[tuple[str, ...]] = ("vocab",)
    vocabulary: Vocabulary | Bytes
    model: CausalLM

    def check_causality(self) -> None:
        if self.model.causal:
            length, symbols = self.model.embedding.max_len, len(self.vocabulary.vocab)
            require_causal(self.hparams["attn"], self.model, self.model, length, symbols)

    def predictions(self, batch: Any) -> Predictions:
        return Predictions(self.model.states(batch[0]), batch[1], self.model.head)

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        computed = super().compute_metrics(batch)
        return computed | {"ppl": computed["found"].nll}

    def num_predictions(self, batch: Any) -> Tensor:
        return Tensor.sum(batch[1] != IGNORE)

    def num_read(self, batch: Any) -> int | Tensor:
        """Return the number of targets in a batch; for a masked language model, the number of all tokens."""
        return self.num_predictions(batch) if self.model.causal else batch[0].numel()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[str]]:
        """Return a dict of lists with a text per window: "input", "target" and "prediction", the likeliest tokens."""
        inputs, targets = batch[:2]
        asked = targets != IGNORE
        shown = asked if self.model.causal else torch.ones_like(asked)
        rows = {"input": (inputs, shown), "target": (targets, asked), "prediction": (self(inputs).argmax(-1), asked)}
        return {name: [self._text(row[of]) for row, of in zip(*both, strict=True)] for name, both in rows.items()}

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        symbols = self.vocabulary.decode(inputs[0][0].tolist())
        return symbols, symbols

    def batch_of(self, text: str) -> tuple[Tensor, Tensor]:
        """Return a text as a batch (tokens, tokens), int64 (1, N); UserError if N < 2, or if N > the window length."""
        tokens, longest = self.vocabulary.begin(text), self.hparams["spec"]["length"]
        if not 2 <= len(tokens) <= longest:
            raise UserError(f"the prompt has {len(tokens)} tokens: pass from 2 to {longest}, the length of the window")
        batch = torch.tensor([tokens], dtype=torch.long, device=self.device)  # (1, N)
        return batch, batch

    def write(self, prompt: str, tokens: int, seed: int = 0, stop: str | None = None, **how: Any) -> Iterator[str]:
        """Yield the prompt, then each of `tokens` new tokens as text; end after the first `stop` in the new text.

        Needs eval mode. An empty prompt means the most frequent symbol; for bytes and byte pairs, a document's start.
        `how`: temperature, top_k and top_p of `generation.sample`. Raises UserError if the model is masked, if an
        argument is not allowed, if the vocabulary lacks a symbol of the prompt, or if logits are not finite.
        """
        if not self.model.causal:
            raise UserError("a masked language model cannot continue a text: use kvt predict, which fills in masks")
        stop = nfc(stop) if stop and isinstance(self.vocabulary, Vocabulary) else stop
        generator = torch.Generator(self.device).manual_seed(seed)
        begun = torch.tensor([self.vocabulary.begin(prompt)], dtype=torch.long, device=self.device)  # (1, N)
        drawn = sample(self.model, begun, tokens, generator=generator, **how)
        added = self.vocabulary.additions(int(token) for token in drawn)
        return chain([self._text(begun[0])], _up_to(added, stop) if stop else added)

    def generate(self, prompt: str, tokens: int, seed: int = 0, stop: str | None = None, **how: Any) -> str:
        """Return the prompt and the new text as one string; the arguments are those of `write`."""
        return "".join(self.write(prompt, tokens, seed, stop, **how))

    def sample(self) -> str | None:
        """Return 200 tokens, generated with a fixed seed, as a Markdown code block; None if the model is masked."""
        if not self.model.causal:
            return None
        return "\n".join(f"    {line}" for line in self.generate("", 200).splitlines())

    def _text(self, symbols: Tensor) -> str:
        return self.vocabulary.text(symbols.tolist())


def _up_to(parts: Iterable[str], stop: str) -> Iterator[str]:
    """Yield the parts of a text up to the end of the first `stop`, which may lie across parts.

    >>> "".join(_up_to(["ab", "c", "de"], "cd"))
    'abcd'
    """
    text = ""
    for part in parts:
        text += part
        if (place := text.find(stop, max(0, len(text) - len(part) - len(stop)))) >= 0:
            yield part[: len(part) - (len(text) - place - len(stop))]
            return
        yield part


class CharacterTask(LanguageTask):
    """Task of predicting the next character. The model is `CausalLM`; the default optimiser is Adam.

    Args:
        positions: learned, sinusoidal, rotary (RoPE) or none.
        dropout: dropout probability in attention weights, and in the outputs of attention and feed-forward networks.
    """

    metrics = (LOSS, ACC, Metric("bpc", "bits per character", better="less"), PPL)
    monitor = "val/loss"

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
        pos_dim: int = 20,
        dropout: float = 0.2,
        lr: float = 5e-4,
        positions: str = "learned",
        **kwargs: Any,
    ) -> None:
        super().__init__(dim=dim, depth=depth, heads=heads, pos_dim=pos_dim, dropout=dropout, lr=lr, **kwargs)
        self.positions = positions
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> CausalLM:
        self.vocabulary = Vocabulary(spec["vocab"])
        dropout = self.options["dropout"]
        style = {"bias": False, "dropout": dropout, "score": "model_scaled_dot", "per_head": True}
        make_attention = self.attention(spec["length"], self.positions, **style)
        embedding = make_embedding(self.positions, len(spec["vocab"]), self.options["dim"], spec["length"])
        return CausalLM(make_attention, embedding, feed_forward_dropout=dropout, **self.blocks)

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        computed = super().compute_metrics(batch)
        return computed | {"bpc": computed["ppl"] / log(2)}


class NumberTask(LanguageTask):
    """Task of predicting the next word. The model is `CausalLM`; the default optimiser is Adam.

    The embedding is tied to the output layer, and there is no final norm.

    Args:
        positions: sinusoidal, learned, rotary (RoPE) or none.
        dropout: dropout probability in embeddings and attention output.
        feed_forward_dropout: dropout probability in the output of feed-forward networks.
    """

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        depth: int = 4,
        heads: int = 8,
        dropout: float = 0.1,
        schedule: str = "one_cycle",
        positions: str = "sinusoidal",
        feed_forward_dropout: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(depth=depth, heads=heads, dropout=dropout, schedule=schedule, **kwargs)
        self.positions, self.feed_forward_dropout = positions, feed_forward_dropout
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> CausalLM:
        self.vocabulary = Vocabulary(spec["vocab"], separator=" ")
        make_attention = self.attention(spec["length"], self.positions, bias=False, output_bias=False)
        settings: dict[str, Any] = {"dropout": self.options["dropout"], "scaled": True}
        embedding = make_embedding(self.positions, len(spec["vocab"]), self.options["dim"], spec["length"], **settings)
        how: dict[str, Any] = {"feed_forward_dropout": self.feed_forward_dropout, "final_norm": False, "tied": True}
        return CausalLM(make_attention, embedding, **how, **self.blocks)


# (width, layers, heads)
SIZES = {"tiny": (128, 4, 4), "small": (384, 6, 6), "base": (768, 12, 12), "follow-up": (1024, 20, 16)}


class LanguageModelTask(LanguageTask):
    """Task of predicting next tokens or masked tokens with GPT-2, in which `attn` replaces the attention.

    The model is a `CausalLM` with GELU, initialised by `kvt.models.init.gpt2`. The embedding is tied to the output
    layer. If the objective of the data is masked, the model attends to all tokens, and the vocabulary has a mask token.

    A batch is (tokens, targets, real), each (B, N). `real` is True at targets that are not padding. Loss, accuracy and
    ppl are computed over all targets, real_ppl (perplexity) and bpb (bits per byte of text) over the real ones. The
    metric padding is the share of padding among the targets.

    Args:
        size: tiny (width 128, 4 layers, 4 heads), small (384, 6, 6), base (768, 12, 12) or follow-up (1024, 20, 16).
        dim: width of the model; default: given by `size`.
        depth: number of layers; default: given by `size`.
        heads: number of attention heads; default: given by `size`.
        positions: learned, sinusoidal, rotary (RoPE) or none.
        dropout: dropout probability in attention weights, and in the outputs of attention and feed-forward networks.
        share_layers: number of consecutive layers in a group, all of which use the keys and values of the first layer
            of the group (Cross-Layer Attention).
        recompute: whether to use activation checkpointing: training needs less memory, and is a third slower.
    """

    metrics = (
        *(LOSS, ACC, PPL),
        Metric("real_ppl", "perplexity of real tokens", better="less", how="exp", stages=("val", "test")),
        Metric("bpb", "bits per byte", better="less", stages=("val", "test")),
        Metric("padding", stages=("val", "test")),
    )
    monitor = "val/loss"
    must_match = ("tokenizer", "objective")
    vocabulary: Bytes

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        size: str = "tiny",
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        pos_dim: int = 20,
        activation: str = "gelu",
        dropout: float = 0.1,
        warmup: int = 100,
        schedule: str = "cosine_to_tenth",
        positions: str = "learned",
        share_layers: int = 1,
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
        require_choice("size", size, SIZES)
        width, layers, number = SIZES[size]
        sizes: dict[str, Any] = {"dim": dim or width, "depth": depth or layers, "heads": heads or number}
        given: dict[str, Any] = {"dropout": dropout, "warmup": warmup, "schedule": schedule}
        super().__init__(pos_dim=pos_dim, activation=activation, **sizes, **given, **kwargs)
        self.positions, self.share_layers, self.recompute = positions, share_layers, recompute
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> CausalLM:
        self.vocabulary = tokens_of(spec["tokenizer"])
        if is_masked := spec.get("objective") == "masked":
            self.vocabulary.pieces.append(MASK)
        dim, dropout = self.options["dim"], self.options["dropout"]
        make_attention = self.attention(spec["length"], self.positions, dropout=dropout)
        embedding = make_embedding(self.positions, len(self.vocabulary.pieces), dim, spec["length"])
        settings: dict[str, Any] = {**self.blocks, "feed_forward_dropout": dropout, "share_layers": self.share_layers}
        model = CausalLM(make_attention, embedding, tied=True, causal=not is_masked, **settings)
        model.encoder.recomputes = self.recompute
        gpt2(model)
        # no buffer, because Lightning's EMAWeightAveraging would truncate averaged integers
        self.piece_sizes = torch.tensor([len(piece) for piece in self.vocabulary.pieces])
        return model

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        computed, (_, targets, real) = super().compute_metrics(batch), batch
        if self.training:
            return computed
        # only in eval mode, because the CPU waits for the GPU here
        nll, reals, served = computed["found"].each, real.sum(), self.num_predictions(batch)
        total, text = nll[real].sum(dtype=ACCUM_DTYPE), self.piece_sizes.to(targets.device)[targets[real]].sum()
        padding = {"padding": (served - reals, served)}
        return computed | {"real_ppl": (total, reals), "bpb": (total / log(2), text)} | padding
