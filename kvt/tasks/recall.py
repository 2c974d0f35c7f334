"""Recall: what stood before is asked again (associative recall, induction heads, MAD's synthetic tasks).

>>> data = Recall(task="mqar", vocab=12, length=16, pairs=2, train_size=4, val_size=2, test_size=2)
>>> symbols, answers, distance = data.load()["train"]
>>> symbols.shape, (answers >= 0).sum(1)  # each of two keys is asked once
(torch.Size([4, 16]), tensor([2, 2, 2, 2]))
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Generator, Tensor, nn

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data import recall
from kvt.data.order import derive_seed
from kvt.data.recall import Questions
from kvt.data.splits import draw_apart
from kvt.data.vocabulary import IGNORE
from kvt.models.causal_lm import CausalLM, Compressor
from kvt.models.embedding import Embedding, LearnedPositions, NoPositions
from kvt.system.errors import UserError, require_positive, require_probability, unknown
from kvt.tasks.base import Task, WeightedMean
from kvt.tasks.causality import require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.schedules import with_cosine

Batch = tuple[Tensor, Tensor, Tensor]
"""Symbols, answers and distances, int64 (B, N) each."""

TASKS: dict[str, Callable[["Recall", int, Generator], Questions]] = {
    "mqar": lambda d, rows, g: recall.mqar(rows, d.vocab, d.length, d.pairs, d.filler == "random", g),
    "induction": lambda d, rows, g: recall.induction(rows, d.vocab, d.length, g),
    "noisy_recall": lambda d, rows, g: recall.noisy_recall(rows, d.vocab, d.length, d.noise, g),
    "fuzzy_recall": lambda d, rows, g: recall.fuzzy_recall(rows, d.vocab, d.length, d.motif, g),
    "selective_copy": lambda d, rows, g: recall.selective_copy(rows, d.vocab, d.length, d.pairs, g),
    "compression": lambda d, rows, g: recall.compression(rows, d.vocab, d.length, g),
    "memorization": lambda d, rows, g: recall.memorization(rows, d.vocab, d.length, d.facts, g),
}
"""What makes rows of each task."""

POSITIONS: dict[str, type[Embedding]] = {"learned": LearnedPositions, "none": NoPositions}
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
        filler: of mqar: what stands elsewhere: zero, as in the paper, or random symbols, as in its authors' code today.
        noise: of noisy_recall: the share of pairs that are noise; then half of the symbols are.
        motif: of fuzzy_recall: the most symbols of a key, and of a value.
        train_size: sequences to train on; an incomplete last batch of an epoch is dropped.
        val_size: sequences to validate on.
        test_size: sequences to test on.
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
        filler: str = "zero",
        noise: float = 0.2,
        motif: int = 3,
        train_size: int = 100_000,
        val_size: int = 3_000,
        test_size: int = 3_000,
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
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self._require_sizes()
        chance = self.chance(task, vocab, noise)
        self.spec = {"vocab_size": vocab, "length": length, "compresses": task == "compression", "chance": chance}

    @classmethod
    def chance(cls, task: str = "mqar", vocab: int = 8192, noise: float = 0.2, **settings: Any) -> float:
        """Return 1 / the number of symbols that may be answers."""
        special = {"mqar": vocab // 2, "selective_copy": 2, "induction": 1, "compression": 1}
        if task in special:
            return 1 / (vocab - special[task])
        spoken = {"noisy_recall": vocab // 2 if noise else vocab}.get(task, vocab - 1)
        return 1 / (spoken - spoken // 2)

    @property
    def facts(self) -> Tensor:
        """The value of each key of memorization, a random one-to-one map: int64 (K)."""
        keys = (self.vocab - 1) // 2
        generator = torch.Generator().manual_seed(derive_seed(self.seed, len(self.sizes)))
        return keys + torch.randperm(self.vocab - 1 - keys, generator=generator)[:keys]

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        try:
            return draw_apart(self._draw, self.sizes, self.seed, TRIES)
        except ValueError as error:
            sizes = f"vocab={self.vocab} and length={self.length}"
            raise UserError(f"{sizes} make too few sequences for three splits") from error

    def _draw(self, rows: int, generator: Generator) -> Questions:
        parts = rows // 10_000 + 1  # so many at a time take little memory
        drawn = [TASKS[self.task_name](self, len(part), generator) for part in torch.arange(rows).tensor_split(parts)]
        return Questions(*map(torch.cat, zip(*drawn, strict=True)))

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
        if self.task_name in ("mqar", "noisy_recall", "memorization") and self.length % 2:
            raise UserError(f"length={self.length} must be even for {self.task_name}: a pair has two symbols")


class RecallTask(Task):
    """Answers what is asked: `CausalLM`, or `Compressor` for compression, with a cosine schedule.

    Only the places where something is asked are projected to symbols. A test also tells the accuracy by distance, of
    answers that stood 1, 2–3, 4–7 … places back.

    Args:
        positions: learned, or none.
        expansion: width of the feed-forward networks in multiples of `dim`; 0 leaves them out.
        dropout: of residual branches.
        stop_at: accuracy in validation at which training stops.
    """

    unit = "answers"
    metric_names = ("loss", "acc")
    monitor = "val/acc"
    mode = "max"
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
        if positions not in POSITIONS:
            raise unknown("positions", positions, POSITIONS)
        if expansion < 0:
            raise UserError(f"expansion={expansion} must be 0 or more")
        self.lr, self.warmup, self.stop_at = lr, warmup, stop_at
        make_attention = AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=spec["length"])
        embedding = POSITIONS[positions](spec["vocab_size"], dim, spec["length"])
        settings: dict[str, Any] = {"depth": depth, "dropout": dropout, "expansion": expansion}
        if spec.get("compresses"):
            self.model = Compressor(make_attention, embedding, length=spec["length"], **settings)
        else:
            self.model = CausalLM(make_attention, embedding, **settings)
        for distance in range(spec["length"].bit_length()):
            self.metrics[f"test/acc_{2**distance}_back"] = WeightedMean()
        if "chance" in spec:
            self.metric_notes["chance"] = f"{spec['chance']:.4g}"

    def check_causality(self) -> None:
        symbols = self.hparams["spec"]["vocab_size"]
        require_causal(self.hparams["attn"], self.model, self.model.states, self.model.embedding.max_len, symbols)

    def compute_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return loss and accuracy over all questions, and which of them were answered right."""
        symbols, answers, _ = batch
        asked = answers != IGNORE
        logits, wanted = self.model.logits_at(asked, symbols), answers[asked]
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        right = logits.argmax(-1) == wanted
        loss = nn.functional.cross_entropy(exact, wanted)
        return {"loss": loss, "acc": right.to(exact.dtype).mean(), "right": right}

    def num_predictions(self, batch: Batch) -> Tensor:
        return (batch[1] != IGNORE).sum()

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        computed = super().test_step(batch, batch_idx)
        _, answers, distance = batch
        back = distance[answers != IGNORE]
        for power in range(int(back.max()).bit_length()):
            here = computed["right"][(back >= 2**power) & (back < 2 ** (power + 1))]
            if len(here):
                self.metrics[f"test/acc_{2**power}_back"].update(here.double().mean(), len(here))
        return computed

    def on_validation_epoch_end(self) -> None:
        accuracy = self.metrics["val/acc"].compute()
        super().on_validation_epoch_end()
        if self.trainer.state.fn == TrainerFn.FITTING and accuracy >= self.stop_at:
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
