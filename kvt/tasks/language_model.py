"""Language models of any text: bytes or byte pairs, packed into windows, the loss over real tokens."""

import codecs
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from math import log
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.loader import Batches, row_hashes
from kvt.data.order import derive_seed
from kvt.data.subwords import Bytes, learn_pairs, read_tokenizer, tokens_of
from kvt.data.tensor_files import once
from kvt.data.texts import fingerprint
from kvt.data.token_files import Corpus, TokenFile, document_starts, sample_of, standard_library, start_of_last
from kvt.data.vocabulary import IGNORE
from kvt.models.causal_lm import CausalLM, MaskedLM
from kvt.models.embedding import attention_settings, make_embedding
from kvt.models.init import gpt2
from kvt.models.losses import cross_entropy
from kvt.system.console import say
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import optional_path, user_path, write_atomically
from kvt.system.quoting import printable
from kvt.tasks.base import make_optimizer
from kvt.tasks.datamodule import TaskData
from kvt.tasks.language import LanguageTask
from kvt.tasks.metrics import ACC, ACCUM_DTYPE, LOSS, PPL, Metric
from kvt.tasks.schedules import cosine_after_warmup, every_step, total_steps


class Size(NamedTuple):
    dim: int
    depth: int
    heads: int


SIZES = {
    "tiny": Size(128, 4, 4),
    "small": Size(384, 6, 6),
    "base": Size(768, 12, 12),
    "follow-up": Size(1024, 20, 16),
}


OBJECTIVES = ("causal", "masked")
MASK = b"<mask>"
"""The text shown for a hidden token, the last in the vocabulary of a masked model."""


def is_masked(spec: Mapping[str, Any]) -> bool:
    """Return whether the data of this spec hide tokens, which the model predicts."""
    return spec.get("objective") == "masked"


class TokenBatches(Batches):
    """Batches of windows of a token stream: rows of `length` tokens, those that follow each, and which are real.

    Row r has the tokens from starts[r] on, int64 (R,), up to stops[r]; beyond, it is filled with `end`, and what is to
    be predicted there is `filler`.

    >>> stream = torch.tensor([5, 6, 7, 9, 8, 9])
    >>> starts, stops = torch.tensor([0, 4]), torch.tensor([4, 6])
    >>> rows = TokenBatches(starts, stops, stream, length=4, end=9, filler=IGNORE, batch_size=2)
    >>> for part in next(iter(rows)):
    ...     print(part.tolist())
    [[5, 6, 7, 9], [8, 9, 9, 9]]
    [[6, 7, 9, -100], [9, -100, -100, -100]]
    [[True, True, True, False], [True, False, False, False]]
    """

    def __init__(
        self, starts: Tensor, stops: Tensor, stream: Tensor, *, length: int, end: int, filler: int, **settings: Any
    ) -> None:
        super().__init__(starts, stops, stream, **settings)
        self.length, self.end, self.filler = length, end, filler

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        inputs, targets, real = self._windows(rows)
        return inputs[:, :-1], targets[:, 1:], real[:, 1:]

    def _windows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `length` + 1 tokens of each row, as inputs and as targets, and which are real, (B, length + 1)."""
        starts, stops, stream = self.tensors
        rows = rows.to(stream.device, non_blocking=True)
        places = starts[rows].unsqueeze(1) + torch.arange(self.length + 1, device=stream.device)  # (B, length + 1)
        real = places < stops[rows].unsqueeze(1)
        tokens = stream[places.clamp(max=len(stream) - 1)].long()
        return tokens.masked_fill(~real, self.end), tokens.masked_fill(~real, self.filler), real


class MaskedBatches(TokenBatches):
    """Batches of windows of a token stream in which some tokens are hidden: inputs, targets, which targets are real.

    Of the tokens that `TokenBatches` serves in a row, 15 %, at least one, are hidden, and are the targets; the others'
    are `IGNORE`. In the inputs, a hidden token is `mask` with probability 0.8, any other token below `mask` with 0.1,
    and stays with 0.1 (Devlin et al. 2019, §3.1).

    Training draws from torch's default generator, which `Batches` seeds; otherwise a row's tokens are hidden by (seed,
    row) alone.

    >>> settings = {"length": 6, "end": 9, "filler": IGNORE, "mask": 10, "batch_size": 1, "seed": 3}
    >>> rows = MaskedBatches(torch.tensor([0]), torch.tensor([6]), torch.tensor([5, 6, 7, 9, 8, 9]), **settings)
    >>> for part in next(iter(rows)):
    ...     print(part.tolist())
    [[5, 6, 10, 9, 8, 9]]
    [[-100, -100, 7, -100, -100, -100]]
    [[False, False, True, False, False, False]]
    """

    SHARE, AS_MASK, KEPT = 0.15, 0.8, 0.1

    def __init__(self, *tensors: Tensor, mask: int, **settings: Any) -> None:
        super().__init__(*tensors, **settings)
        self.mask = mask

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        inputs, targets, real = (part[:, :-1] for part in self._windows(rows))
        which, how, other = self._uniform(rows).to(inputs.device)  # (B, length) each
        served = targets != IGNORE
        places = which.masked_fill(~served, 1).argsort(1).argsort(1)  # in random order, those that are not served last
        hidden = places < (self.SHARE * served.sum(1, keepdim=True)).round().clamp(min=1)
        others = (inputs + 1 + (other * (self.mask - 1)).long()) % self.mask
        shown = torch.where(how < 1 - self.KEPT, others, inputs).masked_fill(how < self.AS_MASK, self.mask)
        return torch.where(hidden, shown, inputs), targets.masked_fill(~hidden, IGNORE), real & hidden

    def _uniform(self, rows: Tensor) -> Tensor:
        """Return numbers from U(0, 1), float32 (3, B, length)."""
        if self.reseed:
            return torch.rand(3, len(rows), self.length)
        generators = [torch.Generator().manual_seed(derive_seed(self.seed, 1, row)) for row in rows.tolist()]
        return torch.stack([torch.rand(3, self.length, generator=generator) for generator in generators], dim=1)


class TextTokens(TaskData):
    """Windows of tokens of a text, or of a folder of texts; each document ends with `<|endoftext|>`.

    They are computed once, and read from a file that is mapped into memory: a text may be larger than that. The last
    documents validate, in a folder a random choice; there is no test split. Given another text than its run had,
    `kvt validate` measures a checkpoint on all of it, in the checkpoint's own tokens.

    Args:
        text: a UTF-8 file, or a folder of them; default: the modules of Python's standard library.
        pattern: of the names of files in the folder, as a shell has it.
        separator: what stands between documents within a file; default: a file is one document.
        tokenizer: bytes; bpe: byte pairs learned from the text; or your own tokenizer.json, of a byte-level BPE, or its
            content, as `task.vocabulary.definition` of a trained task has it.
        vocab_size: tokens of bpe at most; a short text has fewer.
        length: tokens of a window.
        loss_on: real: documents are packed, one after the other, and each token of a split but the first is predicted.
            all: a row is a document, cut at `length` + 1 tokens or filled with `<|endoftext|>`, which is predicted,
            too, as in the code of "Do Transformers Need Three Projections?" (2026).
        objective: causal: each token is predicted from those before it. masked: 15 % of the tokens are hidden, and
            predicted from all others, as in BERT; for validation by the seed, always the same.
        val_size: the fraction of the text to validate on, in bytes, which is the same whatever the tokenizer; 1: all of
            it, to measure a trained model.
    """

    drop_last = True
    path_settings = ("data_dir", "text", "pattern", "separator")
    measures_others = True

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
        if loss_on not in ("real", "all"):
            raise unknown("loss_on", loss_on, ("real", "all"))
        if objective not in OBJECTIVES:
            raise unknown("objective", objective, OBJECTIVES)
        self.length, self.loss_on, self.objective, self.val_size = length, loss_on, objective, val_size
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        library = standard_library()
        pattern = library.pattern if text is None and pattern == "*" else pattern
        separator = (separator or "").replace("\r\n", "\n") or None
        self.corpus = Corpus(optional_path(text) or library.root, pattern, separator)
        self.task_name = f"language_model_{self.corpus.root.stem}" if text else "language_model"

    @cached_property
    def tokens(self) -> Bytes:
        """The tokenizer."""
        return tokens_of(self.spec["tokenizer"], self.tokenizer)

    @cached_property
    def spec(self) -> dict[str, Any]:  # type: ignore[override]  # reads the text if byte pairs are learned
        masked = {"objective": "masked"} if self.objective == "masked" else {}  # so that other specs are as they were
        return {"tokenizer": self._definition(), "length": self.length} | masked

    def _definition(self) -> str:
        """Return the definition of the tokens; byte pairs are learned at the first time."""
        if self.tokenizer == Bytes.definition or self.tokenizer.startswith("{"):
            return self.tokenizer
        if self.tokenizer != "bpe":
            return read_tokenizer(user_path(self.tokenizer))
        path = self.data_dir / ".cache" / f"bpe-{fingerprint(f'{self.vocab_size} {self.corpus.identity}')}.json"
        size = self.vocab_size
        once(self.data_dir, path.exists, lambda: write_atomically(path, learn_pairs(sample_of(self.corpus), size)))
        return read_tokenizer(path)

    @cached_property
    def file(self) -> TokenFile:
        return TokenFile(self.corpus, self.tokens, self.data_dir)

    def prepare_data(self) -> None:
        self.file.prepare()

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        self.file.prepare()
        stream, self.content = self.file.load(), self.file.content
        if left_out := self.file.left_out:
            self.notes["left_out"] = left_out
            say(printable(f"--text {self.corpus.root}: left out are {left_out}"))
        documents = document_starts(stream, self.tokens.end)
        if self.val_size == 1 or self.are_others:
            return {"val": (*self._rows(documents, 0, len(stream)), stream)}
        wanted = start_of_last(self.val_size, stream, self.tokens.pieces)
        later = documents[documents >= wanted]
        cut = int(later[0]) if len(later) else wanted  # of a single document, its last part
        splits = {"train": self._rows(documents, 0, cut), "val": self._rows(documents, cut, len(stream))}
        if self.loss_on == "real" and not self.length < cut < len(stream) - 1:
            sizes = f"length={self.length} and val_size={self.val_size}"
            raise UserError(f"{self.corpus.root} has {len(stream)} tokens, too few for {sizes}")
        if not all(len(starts) for starts, _ in splits.values()):
            found = f"{len(documents)} document{'s' if len(documents) > 1 else ''}"
            remedy = f"name more files, or a --separator, or choose a greater --val_size than {self.val_size}"
            raise UserError(f"{self.corpus.root} has {found}: loss_on=all needs one in each split: {remedy}")
        return {split: (*rows, stream) for split, rows in splits.items()}

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        if self.objective == "masked":
            return self._loader(MaskedBatches, *tensors, mask=len(self.tokens.pieces), **settings)
        return self._loader(TokenBatches, *tensors, **settings)

    def input_keys(self, split: str) -> Iterable[Hashable]:
        rows = self._loader(TokenBatches, *self.splits[split], batch_size=256)  # none of whose tokens is hidden
        return (key for inputs, *_ in rows for key in row_hashes(inputs))

    def _loader(self, kind: type[TokenBatches], *tensors: Tensor, **settings: Any) -> Batches:
        end = self.tokens.end
        filler = IGNORE if self.loss_on == "real" else end
        return kind(*tensors, length=self.length, end=end, filler=filler, **settings)

    def _rows(self, documents: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return where the rows of the tokens from first to last − 1 begin and end."""
        if self.loss_on == "real":
            starts = torch.arange(first, max(first, last - 1), self.length)
            stops = torch.tensor(last)
        else:
            starts = documents[(documents >= first) & (documents < last)]
            stops = torch.cat([starts[1:], torch.tensor([last])])
        return starts, torch.minimum(stops, starts + self.length + 1)


class LanguageModelTask(LanguageTask):
    """A GPT-2 with any attention: `CausalLM` with GELU, a tied head, initialised by `kvt.models.init.gpt2`.

    If the data hide tokens, it is a `MaskedLM`, with one more symbol that stands for them.

    The rate rises over `warmup` steps, and falls with a cosine to a tenth. Loss, accuracy and ppl are over all targets
    that the data serve; real_ppl, and bpb, the bits per byte of text, which can be compared across tokenizers, over
    those that are not padding; padding is the share of the others. A batch is tokens and the targets at each, int64
    (B, N), and which of these are real.

    Args:
        size: tiny: 128 wide, 4 layers, 4 heads, 1 million parameters; small: 384, 6, 6, 11 million; base: 768, 12, 12,
            85 million and the embeddings; follow-up: 1024, 20, 16, 252 million and the embeddings.
        dim: width, if not that of the size.
        depth: layers, if not those of the size.
        heads: attention heads, if not those of the size.
        positions: learned, sinusoidal, rotary (RoPE) or none.
        dropout: of attention weights, attention output and feed-forward networks.
        recompute: keep the inputs of layers alone in training, and compute the rest again: less memory, a third slower.
    """

    metrics = (
        *(LOSS, ACC, PPL),
        Metric("real_ppl", "perplexity of real tokens", better="less", how="exp", stages=("val", "test")),
        Metric("bpb", "bits per byte", better="less", stages=("val", "test")),
        Metric("padding", stages=("val", "test")),
    )
    monitor = "val/loss"
    required_spec = ("tokenizer", "length")
    must_match = ("tokenizer", "objective")
    separator = ""

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        size: str = "tiny",
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        pos_dim: int = 20,
        positions: str = "learned",
        dropout: float = 0.1,
        lr: float = 1e-3,
        warmup: int = 100,
        recompute: bool = False,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr, warmup=warmup)
        if size not in SIZES:
            raise unknown("size", size, SIZES)
        self.lr, self.warmup = lr, warmup
        usual = SIZES[size]
        depth, length = depth or usual.depth, spec["length"]
        attn_kwargs = attention_settings(positions, attn_kwargs)
        make_attention = AttentionFactory(
            attn, attn_kwargs, heads=heads or usual.heads, pos_dim=pos_dim, max_len=length, dropout=dropout
        )
        embedding = make_embedding(positions, len(self.vocabulary.pieces), dim or usual.dim, length)
        settings: dict[str, Any] = {"dropout": dropout, "feed_forward_dropout": dropout, "activation": nn.GELU}
        model = MaskedLM if is_masked(spec) else CausalLM
        self.model = model(make_attention, embedding, depth=depth, tied=True, **settings)
        self.model.encoder.recomputes = recompute
        gpt2(self.model)
        sizes_of_pieces = torch.tensor([len(piece) for piece in self.vocabulary.pieces])
        self.register_buffer("piece_sizes", sizes_of_pieces, persistent=False)

    @staticmethod
    def make_vocabulary(spec: Mapping[str, Any]) -> Bytes:
        tokens = tokens_of(spec["tokenizer"])
        tokens.pieces += [MASK] if is_masked(spec) else []
        return tokens

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = make_optimizer(self)
        schedule = cosine_after_warmup(self.warmup, total_steps(self), floor=0.1)
        return every_step(optimizer, LambdaLR(optimizer, schedule))

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        """Return loss and accuracy over all targets, and −log p of each, (B, N); 0 where there is none."""
        inputs, targets, real = batch
        logits = self(inputs)
        nll = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        right = (logits.argmax(-1) == targets).sum(dtype=nll.dtype)
        count = self.num_predictions(batch)
        loss = nll.sum() / count
        computed = {"loss": loss, "acc": right / count, "ppl": loss, "nll": nll}
        if self.training:
            return computed
        reals, served = real.sum(), count  # to choose real ones, the host waits for the GPU
        total, text = nll[real].sum(dtype=ACCUM_DTYPE), self.get_buffer("piece_sizes")[targets[real]].sum()
        padding = {"padding": (served - reals, served)}
        return computed | {"real_ppl": (total, reals), "bpb": (total / log(2), text)} | padding

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, list[str]]:
        """Return the text of each window, what follows each token, and the likeliest tokens instead.

        If tokens are hidden: the window with `<mask>` for them, those tokens, and the likeliest ones.
        """
        predicted = super().predict_step(batch[:2], batch_idx)
        return predicted if self.model.causal else predicted | {"input": [self._text(row) for row in batch[0]]}

    def _encode(self, prompt: str) -> list[int]:
        return [self.vocabulary.end, *self.vocabulary.encode(prompt)]

    def _text(self, symbols: Tensor) -> str:
        return str(self.vocabulary.text(symbols.tolist()))

    def _continue(self, drawn: Iterable[Tensor]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may have several tokens
        return (decoder.decode(self.vocabulary.pieces[int(symbol)]) for symbol in drawn)
