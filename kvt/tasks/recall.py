"""Recall: what stood before is asked again (associative recall, induction heads, MAD's synthetic tasks).

>>> data = Recall(task="mqar", vocab=12, length=16, pairs=2, train_size=4, val_size=2, test_size=2)
>>> symbols, answers, distance = data.load()["train"]
>>> symbols.shape, (answers >= 0).sum(1)  # each of two keys is asked once
(torch.Size([4, 16]), tensor([2, 2, 2, 2]))
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import perm
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Generator, Tensor, nn

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data import recall
from kvt.data.loader import Batches
from kvt.data.order import derive_seed
from kvt.data.recall import Questions
from kvt.data.splits import draw_apart
from kvt.data.vocabulary import IGNORE
from kvt.models.causal_lm import CausalLM, Compressor
from kvt.models.embedding import attention_settings, make_embedding
from kvt.system.errors import UserError, require_positive, require_probability, unknown
from kvt.tasks.base import Task
from kvt.tasks.causality import require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.metrics import ACC, LOSS, Metric, by_bin
from kvt.tasks.schedules import with_cosine

Batch = tuple[Tensor, Tensor, Tensor]
"""Symbols, answers and distances, int64 (B, N) each."""

TASKS: dict[str, Callable[["Recall", int, int, Generator], Questions]] = {
    "mqar": lambda d, rows, length, g: d.mqar(d.draw_pairs(rows, g), length, g),
    "induction": lambda d, rows, length, g: recall.induction(rows, d.vocab, length, g),
    "noisy_recall": lambda d, rows, length, g: recall.noisy_recall(rows, d.vocab, length, d.noise, g),
    "fuzzy_recall": lambda d, rows, length, g: recall.fuzzy_recall(rows, d.vocab, length, d.motif, g),
    "selective_copy": lambda d, rows, length, g: recall.selective_copy(rows, d.vocab, length, d.pairs, g),
    "compression": lambda d, rows, length, g: recall.compression(rows, d.vocab, length, g),
    "memorization": lambda d, rows, length, g: recall.memorization(rows, d.vocab, length, d.facts, g),
}
"""What makes so many rows of a length, of each task."""

MOTIFS = 1_000_000  # of fuzzy_recall, at most: all are listed
TRIES = 100  # to draw sequences that no earlier split has


class Recall(TaskData):
    """Sequences that ask for what stood before: symbols, answers and distances, int64 (B, length) each.

    An answer stands where it is asked, −100 elsewhere; its distance is how many places back it stood. A sequence may
    occur twice in a split, but never in two splits: it is drawn again if an earlier split has it.

    Args:
        task: mqar, induction, noisy_recall, fuzzy_recall, selective_copy, compression or memorization.
        vocab: number of symbols.
        length: of a sequence.
        pairs: of mqar: pairs of key and value; of selective_copy: symbols to copy.
        fewest_pairs: of mqar: the fewest pairs, where their number is drawn for each sequence, each as likely in all
            splits; default: `pairs`.
        filler: of mqar: what stands elsewhere: zero, as in the paper, or random symbols, as in its authors' code today.
        noise: of noisy_recall: the share of pairs that are noise; then half of the symbols are.
        motif: of fuzzy_recall: the most symbols of a key, and of a value.
        train_size: sequences to train on; an incomplete last batch of an epoch is dropped.
        val_size: sequences to validate on.
        test_size: sequences to test on.
        longest: also test sequences of 2, 4, 8 … times the length, up to this one, as many of each.
        data_dir: not used, the sequences are generated.
    """

    drop_last = True
    vocab: int
    length: int
    pairs: int
    filler: str
    noise: float
    motif: int

    def __init__(
        self,
        task: str = "mqar",
        vocab: int = 8192,
        length: int = 64,
        pairs: int = 4,
        fewest_pairs: int | None = None,
        filler: str = "zero",
        noise: float = 0.2,
        motif: int = 3,
        train_size: int = 100_000,
        val_size: int = 3_000,
        test_size: int = 3_000,
        longest: int | None = None,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        if task not in TASKS:
            raise unknown("task", task, TASKS)
        if filler not in ("zero", "random"):
            raise unknown("filler", filler, ("zero", "random"))
        require_positive(vocab=vocab, length=length, pairs=pairs, motif=motif)
        require_positive(train_size=train_size, val_size=val_size, test_size=test_size)
        require_probability(noise=noise)
        self.task_name, self.vocab, self.length, self.pairs = task, vocab, length, pairs
        self.filler, self.noise, self.motif = filler, noise, motif
        self.fewest_pairs = pairs if fewest_pairs is None else fewest_pairs
        if not 1 <= self.fewest_pairs <= pairs:
            raise UserError(f"fewest_pairs={fewest_pairs} must be from 1 to pairs={pairs}")
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self._require_sizes()
        self.lengths = [length]
        while 2 * self.lengths[-1] <= (longest or length):
            self.lengths.append(2 * self.lengths[-1])
        chance = self.chance(task, vocab, noise)
        self.spec = {"vocab_size": vocab, "length": length, "compresses": task == "compression", "chance": chance}
        if len(self.lengths) > 1:
            self.spec["lengths"] = self.lengths

    @classmethod
    def chance(cls, task: str = "mqar", vocab: int = 8192, noise: float = 0.2, **settings: Any) -> float:
        """Return 1 / the number of symbols that may be answers."""
        half, spoken = (vocab - 1) // 2, vocab // 2 if noise else vocab
        answers = {
            **{"mqar": vocab - vocab // 2, "noisy_recall": spoken - spoken // 2, "selective_copy": vocab - 2},
            **{"induction": vocab - 1, "compression": vocab - 1, "fuzzy_recall": half, "memorization": half},
        }
        return 1 / answers[task]

    @property
    def facts(self) -> Tensor:
        """The value of each key of memorization, a random one-to-one map: int64 (K)."""
        keys = (self.vocab - 1) // 2
        generator = torch.Generator().manual_seed(derive_seed(self.seed, len(self.sizes)))
        return keys + torch.randperm(self.vocab - 1 - keys, generator=generator)[:keys]

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        varies = self.task_name == "mqar" and self.fewest_pairs < self.pairs
        draw, redraw = partial(self._draw, self.length), self._redraw if varies else None
        try:
            splits = draw_apart(draw, self.sizes, self.seed, TRIES, redraw)
        except ValueError as error:
            fewest = f" with fewest_pairs={self.fewest_pairs}" if varies else ""
            sizes = f"vocab={self.vocab} and length={self.length}{fewest} make too few sequences for three splits"
            raise UserError(f"{sizes}: choose larger ones, or a smaller train_size") from error
        for length in self.lengths[1:]:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, length))
            splits[_split(length)] = self._draw(length, self.sizes["test"], generator)
        return splits

    def test_dataloader(self) -> list[Batches]:  # type: ignore[override]
        """Return the batches of each length."""
        return [
            self.batches("test", self.trainer),
            *(self.batches(_split(length), self.trainer) for length in self.lengths[1:]),
        ]

    def draw_pairs(self, rows: int, generator: Generator) -> Tensor:
        """Draw the number of pairs of each row: int64 (rows)."""
        if self.fewest_pairs == self.pairs:
            return torch.full((rows,), self.pairs)
        return torch.randint(self.fewest_pairs, self.pairs + 1, (rows,), generator=generator)

    def mqar(self, pairs: Tensor, length: int, generator: Generator) -> Questions:
        """Return rows of `kvt.data.recall.mqar` with these numbers of pairs, int64 (rows)."""
        found = recall.blank(len(pairs), length)
        for count in pairs.unique().tolist():
            rows = pairs == count
            made = recall.mqar(int(rows.sum()), self.vocab, length, count, self.filler == "random", generator)
            for whole, part in zip(found, made, strict=True):
                whole[rows] = part
        return found

    def _draw(self, length: int, rows: int, generator: Generator) -> Questions:
        parts = torch.arange(rows).tensor_split(rows // 10_000 + 1)  # so many at a time take little memory
        made = [TASKS[self.task_name](self, len(part), length, generator) for part in parts]
        return Questions(*map(torch.cat, zip(*made, strict=True)))

    def _redraw(self, questions: tuple[Tensor, ...], generator: Generator) -> Questions:
        _, answers, _ = questions
        return self.mqar((answers != IGNORE).sum(1), self.length, generator)

    def _require_sizes(self) -> None:
        given = ""
        match self.task_name:
            case "mqar":
                vocab, length, given = 2 * self.pairs + 2, 4 * self.pairs, f" with pairs={self.pairs}"
            case "selective_copy":
                vocab, length, given = 4, 2 * self.pairs + 2, f" with pairs={self.pairs}"
            case "noisy_recall":
                vocab, length, given = 8 if self.noise else 4, 4, f" with noise={self.noise:g}"
            case "fuzzy_recall":
                vocab, length, given = 2 * self.motif + 1, 8 * self.motif, f" with motif={self.motif}"
            case _:
                vocab, length = 3, 3
        for name, size, least in (("vocab", self.vocab, vocab), ("length", self.length, length)):
            if size < least:
                raise UserError(f"{name}={size} is too small: {self.task_name}{given} needs at least {least}")
        if self.task_name == "fuzzy_recall" and (motifs := perm((self.vocab - 1) // 2, self.motif)) > MOTIFS:
            many = f"{motifs:,} motifs of {self.motif} symbols, more than {MOTIFS:,}"
            raise UserError(f"vocab={self.vocab} is too large: fuzzy_recall{given} has {many}")
        if self.task_name in ("mqar", "noisy_recall", "memorization") and self.length % 2:
            raise UserError(f"length={self.length} must be even for {self.task_name}: a pair has two symbols")


def _split(length: int) -> str:
    return f"test_{length}"


class RecallTask(Task):
    """Answers what is asked: `CausalLM`, or `Compressor` for compression, with a cosine schedule.

    Only the places where something is asked are projected to symbols. A test also tells the accuracy by distance, of
    answers that stood 1, 2–3, 4–7 … places back, as `test/acc_4_back`; that of sequences which ask 1, 2–3, 4–7 …
    times, as `test/acc_4_asked`, if they differ in it; and by length, as `test/acc_512_long`, of the data's `longest`.
    Learned positions beyond the length that is trained on are as random as they began.

    Args:
        positions: learned, sinusoidal, rotary (RoPE) or none.
        expansion: width of the feed-forward networks in multiples of `dim`; 0 leaves them out.
        dropout: of residual branches.
        stop_at: accuracy in validation at which training stops.
    """

    unit = "answers"
    metrics = (
        *(LOSS, ACC),
        Metric("acc_{}_back", "accuracy {} places back", better="more", highest=1, stages=("test",)),
        Metric("acc_{}_asked", "accuracy of {} questions", better="more", highest=1, stages=("test",)),
        Metric("acc_{}_long", "accuracy at length {}", better="more", highest=1, stages=("test",)),
    )
    monitor = "val/acc"
    required_spec = ("vocab_size", "length")
    configure_optimizers = with_cosine
    model: CausalLM

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 64,
        depth: int = 2,
        heads: int = 1,
        pos_dim: int = 10,
        positions: str = "learned",
        expansion: int = 0,
        dropout: float = 0.0,
        lr: float = 1e-3,
        warmup: int = 1,
        stop_at: float = 0.99,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr, warmup=warmup, stop_at=stop_at)
        if expansion < 0:
            raise UserError(f"expansion={expansion} must be 0 or more")
        self.lr, self.warmup, self.stop_at = lr, warmup, stop_at
        self.validated = 0.0  # the latest accuracy in validation
        lengths = spec.get("lengths") or [spec["length"]]
        attn_kwargs = attention_settings(positions, attn_kwargs)
        make_attention = AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=lengths[-1])
        embedding = make_embedding(positions, spec["vocab_size"], dim, lengths[-1])
        settings: dict[str, Any] = {"depth": depth, "dropout": dropout, "expansion": expansion}
        if spec.get("compresses"):
            self.model = Compressor(make_attention, embedding, length=lengths[-1], **settings)
        else:
            self.model = CausalLM(make_attention, embedding, **settings)
        if "chance" in spec:
            self.metric_notes["chance"] = f"{spec['chance']:.4g}"

    def bins(self) -> dict[str, list[int]]:
        spec = self.hparams["spec"]
        powers = [2**power for power in range(spec["length"].bit_length())]
        lengths = spec.get("lengths") or [spec["length"]]
        return {"acc_{}_back": powers, "acc_{}_asked": powers, "acc_{}_long": lengths}

    def check_causality(self) -> None:
        symbols = self.hparams["spec"]["vocab_size"]
        require_causal(self.hparams["attn"], self.model, self.model.states, self.model.embedding.max_len, symbols)

    def compute_metrics(self, batch: Batch) -> dict[str, Any]:
        """Return loss and accuracy over all questions, and which of them were answered right."""
        symbols, answers, _ = batch
        # before the forward pass: to count them, the host waits for the GPU
        asked = (answers != IGNORE).nonzero(as_tuple=True)
        logits, wanted = self.model.logits_at(asked, symbols), answers[asked]
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        right = logits.argmax(-1) == wanted
        loss = nn.functional.cross_entropy(exact, wanted)
        return {"loss": loss, "acc": right.to(exact.dtype).mean(), "right": right}

    def num_predictions(self, batch: Batch) -> Tensor:
        return (batch[1] != IGNORE).sum()

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        _, answers, distance = batch
        asked, computed = answers != IGNORE, self.compute_metrics(batch)
        right = computed["right"]
        binned = {"long": (right, torch.full_like(answers[asked], dataloader_idx))}
        if not dataloader_idx:  # longer sequences count by their length alone
            times = asked.sum(1, keepdim=True).expand_as(asked)[asked]
            stands = distance[asked] > 0
            binned |= {"back": (right[stands], _log2(distance[asked][stands])), "asked": (right, _log2(times))}
        shapes = self.bins()
        parts = {(name := f"acc_{{}}_{word}"): by_bin(*part, len(shapes[name])) for word, part in binned.items()}
        self.measure("test", parts if dataloader_idx else computed | parts, self.num_predictions(batch))
        return computed

    def on_validation_epoch_end(self) -> None:
        self.validated = float(self.means["val/acc"].compute())
        super().on_validation_epoch_end()
        self._stop_if_solved()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = checkpoint["metrics"].get("val/acc", 0.0)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._stop_if_solved()  # a resumed run may have been killed just before it ended

    def _stop_if_solved(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING and self.validated >= self.stop_at:
            self.trainer.should_stop = True
            self.metric_notes["stopped"] = f"at an accuracy of {self.stop_at:g} in validation"

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, list[str]]:
        """Return the symbols of each sequence, and its answers in their order: the right ones, and the model's."""
        symbols, answers, _ = batch
        predicted = self(symbols).argmax(-1)
        asked = answers != IGNORE
        rows = {
            "symbols": (symbols, torch.ones_like(asked)),
            "target": (answers, asked),
            "prediction": (predicted, asked),
        }
        return {
            name: [" ".join(map(str, row[shown].tolist())) for row, shown in zip(*both, strict=True)]
            for name, both in rows.items()
        }

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        symbols = [str(symbol) for symbol in inputs[0][0].tolist()]
        return symbols, symbols


def _log2(numbers: Tensor) -> Tensor:
    """Return ⌊log₂⌋ of positive integers."""
    return torch.frexp(numbers.double()).exponent.long() - 1
