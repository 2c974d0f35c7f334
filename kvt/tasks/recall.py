"""Recall tasks, in which a model finds earlier symbols: associative recall, induction heads, selective copying.

>>> data = Recall(task="mqar", vocab=12, length=8, pairs=2, train_size=4, val_size=2, test_size=2)
>>> data.setup("fit")
>>> symbols, answers, distance = batch = next(iter(data.val_dataloader()))
>>> symbols.tolist()  # in each row: two pairs of key and value, then both keys again
[[3, 9, 5, 7, 5, 0, 3, 0], [5, 11, 4, 10, 5, 0, 4, 0]]
>>> answers.tolist()  # the values, at the positions of the repeated keys
[[-100, -100, -100, -100, 7, -100, 9, -100], [-100, -100, -100, -100, 11, -100, 10, -100]]
>>> task = RecallTask(data.spec, attn="kv", dim=8)
>>> computed = task.compute_metrics(batch)
>>> computed["loss"].shape, computed["found"].right.shape, task.num_predictions(batch).item()
(torch.Size([]), torch.Size([4]), 4)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Generator, Tensor

from kvt.data.loader import Batches
from kvt.data.order import derive_seed
from kvt.data.splits import draw_apart
from kvt.data.tokens import IGNORE
from kvt.models.blocks import Expansion
from kvt.models.causal_lm import CausalLM
from kvt.models.embedding import make_embedding
from kvt.models.losses import Predictions
from kvt.system import UserError, require_choice, require_positive, require_probability
from kvt.tasks.base import Classification, Spec
from kvt.tasks.causality import require_causal
from kvt.tasks.datamodule import TaskData
from kvt.tasks.metrics import Metric, by_bin
from kvt.tasks.options import BlockTask

Batch = tuple[Tensor, Tensor, Tensor]  # symbols, answers and distances, all int64 (B, N)


class Questions(NamedTuple):
    """A batch of sequences with questions; the tensors are int64 (rows, N)."""

    symbols: Tensor
    answers: Tensor  # the symbol to predict at this position; `IGNORE` if there is no question
    distance: Tensor  # positions from the answer's earlier occurrence to the question; 0 without a question


def blank(rows: int, length: int) -> Questions:
    """Return sequences of zeros without questions."""
    zeros = torch.zeros(rows, length, dtype=torch.long)
    return Questions(zeros, torch.full_like(zeros, IGNORE), zeros.clone())


def distinct(rows: int, count: int, low: int, high: int, generator: Generator) -> Tensor:
    """Draw `count` distinct numbers from low … high − 1, in random order, by Floyd's algorithm: int64 (rows, count).

    Draw i is uniform over the first high − low − count + i + 1 numbers. If it repeats an earlier draw, the last of
    these numbers replaces it.
    """
    chosen = torch.empty(rows, count, dtype=torch.long)
    for i in range(count):
        last = high - low - count + i
        drawn = torch.randint(last + 1, (rows, 1), generator=generator)
        taken = (chosen[:, :i] == drawn).any(1, keepdim=True)
        chosen[:, i : i + 1] = drawn.masked_fill(taken, last)
    order = torch.rand(rows, count, generator=generator).argsort(1)
    return low + chosen.gather(1, order)


def slot_weights(slots: int, power: float = 0.01) -> Tensor:
    """Return weights of `mqar`'s slots i = 0 … slots − 1, (i + 1)^(power − 1) divided by their sum: float64 (slots)."""
    weights = torch.arange(1, slots + 1, dtype=torch.double) ** (power - 1)
    return weights / weights.sum()


def mqar(rows: int, vocab: int, length: int, pairs: int, random_filler: bool, generator: Generator) -> Questions:
    """Generate multi-query associative recall (Arora et al. 2023, "Zoology", §4): pairs, then each key a second time.

    A pair is a key and a value. With V symbols, keys are distinct numbers from 1 … V/2 − 1, and values are distinct
    numbers from V/2 … V − 1. With K pairs, a key is repeated at position 2K + 2 · slot, where its value is the answer.
    Slots are drawn without replacement, with the weights of `slot_weights`. All other positions after the pairs have 0,
    or random symbols with `random_filler`.

    >>> found = mqar(1, 12, 16, 2, False, Generator().manual_seed(0))
    >>> found.symbols.tolist()
    [[1, 9, 5, 11, 5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    >>> [(place, found.answers[0, place].item()) for place in (4, 8)]
    [(4, 11), (8, 9)]
    """
    keys = distinct(rows, pairs, 1, vocab // 2, generator)
    values = distinct(rows, pairs, vocab // 2, vocab, generator)
    weights = slot_weights(length // 2 - pairs).expand(rows, -1)
    places = 2 * pairs + 2 * torch.multinomial(weights, pairs, generator=generator)  # (rows, pairs)
    found = blank(rows, length)
    if random_filler:
        found.symbols.random_(vocab, generator=generator)
    found.symbols[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
    found.symbols.scatter_(1, places, keys)
    found.answers.scatter_(1, places, values)
    found.distance.scatter_(1, places, places - torch.arange(1, 2 * pairs, 2))
    return found


def induction(rows: int, vocab: int, length: int, generator: Generator) -> Questions:
    """Generate induction-head sequences (Gu and Dao 2023, "Mamba", §E.1).

    With V symbols, the special symbol V − 1 occurs at a random position, and again at the end. The answer at the end is
    the symbol after the first V − 1.
    """
    found = blank(rows, length)
    found.symbols.random_(vocab - 1, generator=generator)
    first = torch.randint(length - 2, (rows, 1), generator=generator)
    found.symbols.scatter_(1, first, vocab - 1)
    found.symbols[:, -1] = vocab - 1
    found.answers[:, -1:] = found.symbols.gather(1, first + 1)
    found.distance[:, -1:] = length - 1 - (first + 1)
    return found


def associative_recall(
    rows: int, vocab: int, length: int, pairs: int, random_filler: bool, generator: Generator
) -> Questions:
    """Generate associative recall (Ba et al. 2016, "Fast weights", §4.1): pairs, then the key of one pair at the end.

    A pair is a key and a value. The answer is the value of the last key. Keys and values are symbols from 0 … V − 1,
    with V = `vocab`. The keys of a sequence are distinct. The positions between the pairs and the last key have 0, or
    random symbols with `random_filler`.

    >>> found = associative_recall(1, 10, 7, 3, False, Generator().manual_seed(0))
    >>> found.symbols.tolist(), found.answers[0, -1].item()
    ([[4, 7, 0, 3, 3, 7, 4]], 7)
    """
    keys = distinct(rows, pairs, 0, vocab, generator)
    values = torch.randint(vocab, (rows, pairs), generator=generator)
    asked = torch.randint(pairs, (rows, 1), generator=generator)
    found = blank(rows, length)
    if random_filler:
        found.symbols.random_(vocab, generator=generator)
    found.symbols[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
    found.symbols[:, -1:] = keys.gather(1, asked)
    found.answers[:, -1:] = values.gather(1, asked)
    found.distance[:, -1:] = length - 2 - 2 * asked
    return found


def selective_copy(rows: int, vocab: int, length: int, count: int, generator: Generator) -> Questions:
    """Generate selective copying (Poli et al. 2024, §3.1): symbols between blanks, to be repeated in order at the end.

    With V symbols, V − 2 is the blank. A sequence begins with `count` symbols at random positions among blanks. The
    symbol V − 1 marks the end of the input. `count` blanks follow, whose answers are the `count` symbols in order.
    """
    found = blank(rows, length)
    found.symbols.fill_(vocab - 2)
    places = distinct(rows, count, 0, length - count - 1, generator).sort(1).values
    symbols = torch.randint(vocab - 2, (rows, count), generator=generator)
    found.symbols.scatter_(1, places, symbols)
    found.symbols[:, length - count - 1] = vocab - 1
    found.answers[:, length - count :] = symbols
    found.distance[:, length - count :] = torch.arange(length - count, length) - places
    return found


TASKS: dict[str, Callable[["Recall", int, int, Generator], Questions]] = {  # arguments: data, rows, length, generator
    "mqar": lambda d, rows, length, g: d.mqar(d.draw_pairs(rows, g), length, g),
    "induction": lambda d, rows, length, g: induction(rows, d.vocab, length, g),
    "associative_recall": lambda d, rows, n, g: associative_recall(rows, d.vocab, n, d.pairs, d.filler == "random", g),
    "selective_copy": lambda d, rows, length, g: selective_copy(rows, d.vocab, length, d.pairs, g),
}
LEAST: dict[str, Callable[[int], tuple[int, int]]] = {  # number of pairs → the smallest vocabulary and length
    "mqar": lambda pairs: (2 * pairs + 2, 4 * pairs),
    "induction": lambda _: (3, 3),
    "associative_recall": lambda pairs: (max(2, pairs), 2 * pairs + 1),
    "selective_copy": lambda pairs: (4, 2 * pairs + 2),
}

TRIES = 1000  # `tries` of `draw_apart`


class Recall(TaskData):
    """Sequences with questions about earlier symbols. A batch is (symbols, answers, distances), all int64 (B, length).

    An answer is the symbol to predict, a distance the number of positions since its earlier occurrence. Without a
    question, the answer is −100 and the distance 0. No sequence is in two splits (see `draw_apart`).

    Args:
        task: mqar, associative_recall, induction or selective_copy.
        vocab: number of symbols.
        length: number of symbols in a sequence.
        pairs: number of pairs of key and value; for selective_copy: number of symbols to copy.
        fewest_pairs: for mqar: each sequence has a random number of pairs from fewest_pairs to pairs; default: pairs.
        filler: symbols at positions without a pair or question, for mqar and associative_recall: zero (the symbol 0, as
            in the paper "Zoology") or random.
        train_size: number of training sequences; an incomplete last batch of an epoch is dropped.
        val_size: number of validation sequences.
        test_size: number of test sequences.
        longest: if given, test also on sequences of 2, 4, 8 … times `length` symbols, up to this number of symbols.
        data_dir: not used: the sequences are generated.
    """

    keeps_order = drop_last = True
    vocab: int
    length: int
    pairs: int
    filler: str

    def __init__(
        self,
        task: str = "mqar",
        vocab: int = 8192,
        length: int = 64,
        pairs: int = 4,
        fewest_pairs: int | None = None,
        filler: str = "zero",
        train_size: int = 100_000,
        val_size: int = 3_000,
        test_size: int = 3_000,
        longest: int | None = None,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_choice("task", task, TASKS)
        require_choice("filler", filler, ("zero", "random"))
        require_positive(vocab=vocab, length=length, pairs=pairs)
        require_positive(train_size=train_size, val_size=val_size, test_size=test_size)
        self.task_name, self.vocab, self.length, self.pairs, self.filler = task, vocab, length, pairs, filler
        self.fewest_pairs = pairs if fewest_pairs is None else fewest_pairs
        if not 1 <= self.fewest_pairs <= pairs:
            raise UserError(f"fewest_pairs={fewest_pairs} must be from 1 to pairs={pairs}")
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self._require_sizes()
        self.lengths = [length]
        while 2 * self.lengths[-1] <= (longest or length):
            self.lengths.append(2 * self.lengths[-1])
        self.spec = {"vocab_size": vocab, "length": length, "chance": self.chance(task, vocab)}
        if len(self.lengths) > 1:
            self.spec["lengths"] = self.lengths

    @classmethod
    def chance(cls, task: str = "mqar", vocab: int = 8192, **settings: Any) -> float:
        """Return the accuracy of guessing: 1 / the number of possible answers."""
        never = {"mqar": vocab // 2, "associative_recall": 0, "induction": 1, "selective_copy": 2}
        return 1 / (vocab - never[task])

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        varies = self.task_name == "mqar" and self.fewest_pairs < self.pairs
        draw, redraw = partial(self._draw, self.length), self._redraw if self.task_name == "mqar" else None
        try:
            splits = draw_apart(draw, self.sizes, self.seed, TRIES, redraw, by_hash=varies)
        except ValueError as error:
            sizes = f"vocab={self.vocab}, length={self.length} and fewest_pairs={self.fewest_pairs}"
            raise UserError(f"{sizes} make too few sequences for three splits") from error
        for length in self.lengths[1:]:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, length))
            splits[_split(length)] = self._draw(length, self.sizes["test"], generator)
        return splits

    def test_dataloader(self) -> list[Batches]:  # type: ignore[override]
        """Return a loader for every length of test sequences."""
        splits = ["test", *map(_split, self.lengths[1:])]
        return [self.batches(split, self.trainer) for split in splits]

    def draw_pairs(self, rows: int, generator: Generator) -> Tensor:
        """Draw the number of pairs of every sequence: int64 (rows)."""
        if self.fewest_pairs == self.pairs:
            return torch.full((rows,), self.pairs)
        return torch.randint(self.fewest_pairs, self.pairs + 1, (rows,), generator=generator)

    def mqar(self, pairs: Tensor, length: int, generator: Generator) -> Questions:
        """Draw sequences of the task mqar. `pairs`, int64 (rows), has the number of pairs of each sequence."""
        found = blank(len(pairs), length)
        for count in pairs.unique().tolist():
            rows = pairs == count
            made = mqar(int(rows.sum()), self.vocab, length, count, self.filler == "random", generator)
            for whole, part in zip(found, made, strict=True):
                whole[rows] = part
        return found

    def _draw(self, length: int, rows: int, generator: Generator) -> Questions:
        parts = torch.arange(rows).tensor_split(rows // 10_000 + 1)  # at most 10,000 rows at once, to save memory
        made = [TASKS[self.task_name](self, len(part), length, generator) for part in parts]
        return Questions(*map(torch.cat, zip(*made, strict=True)))

    def _redraw(self, questions: tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, ...]:
        """Return new sequences of the task mqar, each with as many questions as the sequence that it replaces."""
        return self.mqar((questions[1] != IGNORE).sum(1), self.length, generator)

    def _require_sizes(self) -> None:
        vocab, length = LEAST[self.task_name](self.pairs)
        if self.vocab < vocab or self.length < length:
            raise UserError(f"{self.task_name} with pairs={self.pairs} needs vocab >= {vocab} and length >= {length}")


def _split(length: int) -> str:
    return f"test_{length}"


class RecallTask(BlockTask, Classification):
    """Task of answering the questions in a sequence. The model is `CausalLM`; only its logits at the questions count.

    The test also records three kinds of accuracy, each only if at least two of its bins have questions. `acc_4_back` is
    the accuracy of answers that occurred 4 to 7 positions before the question (other bins: 1, 2–3, 8–15 …).
    `acc_4_asked` is the accuracy in sequences with 4 to 7 questions. `acc_512_long` is the accuracy in sequences of 512
    symbols. All metrics except `acc_…_long` leave out sequences that are longer than in training. Learned positions
    beyond the training length stay untrained.

    Args:
        positions: learned, sinusoidal, rotary (RoPE) or none.
        dropout: dropout probability in the residual branches of attention.
        stop_at: validation accuracy at which training stops.
        causal: whether a symbol attends only to itself and to earlier symbols; false: to all symbols of the sequence.
    """

    unit = "answers"
    metrics = (
        *Classification.metrics,
        Metric("acc_{}_back", "accuracy {} places back", better="more", highest=1, stages=("test",)),
        Metric("acc_{}_asked", "accuracy of {} questions", better="more", highest=1, stages=("test",)),
        Metric("acc_{}_long", "accuracy at length {}", better="more", highest=1, stages=("test",)),
    )
    model: CausalLM

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        heads: int = 1,
        expansion: Expansion = 0,
        dropout: float = 0.0,
        warmup: int = 1,
        schedule: str = "cosine",
        positions: str = "learned",
        smoothing: float = 0.0,
        stop_at: float = 0.99,
        causal: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(heads=heads, expansion=expansion, dropout=dropout, warmup=warmup, schedule=schedule, **kwargs)
        require_positive(stop_at=stop_at)
        require_probability(smoothing=smoothing)
        self.positions, self.smoothing, self.stop_at, self.causal = positions, smoothing, stop_at, causal
        self.validated = 0.0  # the latest validation accuracy
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> CausalLM:
        if "chance" in spec:
            self.metric_notes["chance"] = f"{spec['chance']:.4g}"
        longest = (spec.get("lengths") or [spec["length"]])[-1]
        make_attention = self.attention(longest, self.positions)
        embedding = make_embedding(self.positions, spec["vocab_size"], self.options["dim"], longest)
        return CausalLM(make_attention, embedding, causal=self.causal, **self.blocks)

    def bins(self) -> dict[str, list[int]]:
        spec = self.hparams["spec"]
        powers = [2**power for power in range(spec["length"].bit_length())]
        lengths = spec.get("lengths") or [spec["length"]]
        return {"acc_{}_back": powers, "acc_{}_asked": powers, "acc_{}_long": lengths}

    def check_causality(self) -> None:
        if self.model.causal:
            length, symbols = self.model.embedding.max_len, self.hparams["spec"]["vocab_size"]
            require_causal(self.hparams["attn"], self.model, self.model.states, length, symbols)

    def predictions(self, batch: Batch) -> Predictions:
        """Return the `Predictions` of a batch at the positions with a question."""
        asked = (batch[1] != IGNORE).nonzero(as_tuple=True)  # before the model runs, as the CPU waits for the GPU here
        return Predictions(self.model.states(batch[0])[asked], batch[1][asked], self.model.head)

    def num_predictions(self, batch: Batch) -> Tensor:
        return (batch[1] != IGNORE).sum()

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        _, answers, distance = batch
        asked, computed = answers != IGNORE, self.compute_metrics(batch)
        right = computed["found"].right
        binned = {"long": (right, torch.full_like(answers[asked], dataloader_idx))}
        if not dataloader_idx:  # longer sequences count only in the accuracy by length
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
        super().on_load_checkpoint(checkpoint)
        self.validated = checkpoint.get("metrics", {}).get("val/acc", 0.0)  # a plain Trainer saves no metrics

    def on_train_start(self) -> None:
        super().on_train_start()
        self._stop_if_solved()  # a resumed run may have reached `stop_at` before it was killed

    def _stop_if_solved(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING and self.validated >= self.stop_at:
            self.trainer.should_stop = True
            self.metric_notes["stopped"] = f"at an accuracy of {self.stop_at:g} in validation"

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[str]]:
        """Return a dict of lists with a text per sequence: "symbols", "target" (right answers) and "prediction"."""
        symbols, answers, _ = batch
        asked, predicted = answers != IGNORE, self(symbols).argmax(-1)
        rows = {"symbols": (symbols, symbols >= 0), "target": (answers, asked), "prediction": (predicted, asked)}

        def text(row: Tensor) -> str:
            return " ".join(map(str, row.tolist()))

        return {name: [text(row[of]) for row, of in zip(*both, strict=True)] for name, both in rows.items()}

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        symbols = [str(symbol) for symbol in inputs[0][0].tolist()]
        return symbols, symbols


def _log2(numbers: Tensor) -> Tensor:
    """Return ⌊log₂ n⌋ for each positive integer n."""
    return torch.bucketize(numbers, 2 ** torch.arange(1, 63, device=numbers.device), right=True)
