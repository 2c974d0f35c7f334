"""Number generation: the numbers from one to 9999, spelled out (Borji 2023, §3.4).

>>> spell(7312)
'seven thousand three hundred twelve'
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.vocabulary import Vocabulary, count_symbols
from kvt.models import CausalLM
from kvt.models.embedding import SinusoidalPositions
from kvt.system.errors import UserError, require_positive
from kvt.tasks.base import adam
from kvt.tasks.datamodule import TaskData
from kvt.tasks.language import LanguageTask, windows
from kvt.tasks.schedules import OneCycle, every_step, total_steps

SMALL = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell(number: int) -> str:
    """Spell a number from 1 to 9999 without hyphens and "and"."""
    for unit, name in ((1000, " thousand"), (100, " hundred")):
        if number >= unit:
            return f"{SMALL[number // unit]}{name} {spell(number % unit)}".rstrip()
    return SMALL[number] if number < 20 else f"{TENS[number // 10]} {SMALL[number % 10]}".rstrip()


def count_up() -> list[str]:
    """Return the text: the numbers but 8000, which the published data set lacks, joined by "."; 63,095 words."""
    return " . ".join(spell(number) for number in range(1, 10_000) if number != 8000).split()


class HumanNumbers(TaskData):
    """Adjacent windows of the counting text, int64 (B, length), and the words that follow each of theirs, likewise.

    The first windows train, the rest validate; there is no test split. Training drops an incomplete last batch.

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
        self.text = count_up()
        self.vocab = count_symbols(self.text)
        self.spec = {"vocab": self.vocab, "length": length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        text = torch.tensor(Vocabulary(self.vocab).encode(self.text))
        whole = (len(text) - 1) // self.length  # windows without padding
        train_size = int((1 - self.val_size) * whole)
        if not 0 < train_size < whole:
            split = f"length={self.length} and val_size={self.val_size} make {whole} windows, {train_size} to train on"
            raise UserError(f"{split}: there must be some to train on and some to validate on")
        both = windows(text[: whole * self.length + 1], self.length)  # inputs and targets
        return {"train": tuple(t[:train_size] for t in both), "val": tuple(t[train_size:] for t in both)}


class NumberTask(LanguageTask):
    """Predicts the next word: `CausalLM` with sinusoidal positions, a tied head, no final norm; Adam, `OneCycle`.

    Args:
        dropout: of embeddings and attention output.
        feed_forward_dropout: of the feed-forward networks' output.
        lr: the highest rate of the cycle.
    """

    metric_names = ("loss", "acc")
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
        dropout: float = 0.1,
        feed_forward_dropout: float = 0.2,
        lr: float = 1e-3,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr)
        sizes = {"heads": heads, "pos_dim": pos_dim, "max_len": spec["length"]}
        style = {"bias": False, "output_bias": False}
        make_attention = AttentionFactory(attn, attn_kwargs, called_with=("causal", "cache"), **sizes, **style)
        embedding = SinusoidalPositions(len(spec["vocab"]), dim, spec["length"], dropout)
        dropouts = {"dropout": dropout, "feed_forward_dropout": feed_forward_dropout}
        self.model = CausalLM(make_attention, embedding, depth=depth, **dropouts, final_norm=False, tied=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = adam(self)
        return every_step(optimizer, OneCycle(optimizer, self.hparams["lr"], total_steps=total_steps(self)))
