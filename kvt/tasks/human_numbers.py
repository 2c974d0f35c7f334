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
from kvt.tasks.base import adam, every_step
from kvt.tasks.datamodule import Spec, TaskData
from kvt.tasks.language import LanguageTask, windows
from kvt.tasks.schedules import OneCycle

SMALL = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell(number: int) -> str:
    """A number from 1 to 9999 in words, without hyphens and "and"."""
    words = []
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if number >= unit:
            words += [SMALL[number // unit - 1], name]
        number %= unit
    if number >= 20:
        words.append(TENS[number // 10 - 2])
        number %= 10
    if number:
        words.append(SMALL[number - 1])
    return " ".join(words)


def count_up() -> list[str]:
    """The text: 9,998 numbers joined by ".", 63,095 symbols, 30 different ones.

    8000 is left out, as in the published data set, where it parts two files; the paper's figures count without it.
    """
    return " . ".join(spell(number) for number in range(1, 10_000) if number != 8000).split()


class HumanNumbers(TaskData):
    """The words of the counting text: int64 (B, length), and those one further on.

    The text is cut into windows side by side. The first of them train, the rest validate; there is no test split.

    Args:
        length: words of a window.
        val_size: the part of the windows to validate on.
        batch_size: windows of a batch on one process; the last batch of an epoch is dropped unless whole.
        seed: of the order of windows and all randomness of training.
        data_dir: as in every task; the text is made here, nothing is read.

    Raises:
        UserError: a length or size that leaves no window on one side.
    """

    drop_last = True
    task_name = "human_numbers"

    def __init__(
        self,
        length: int = 16,
        val_size: float = 0.2,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, val_size=val_size)
        self.length, self.val_size = length, val_size
        self.text = count_up()
        self.vocab = count_symbols(self.text)

    @property
    def spec(self) -> Spec:
        """The words, and the length of a window."""
        return {"vocab": self.vocab, "length": self.length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Cuts the windows in two."""
        text = torch.tensor(Vocabulary(self.vocab).encode(self.text))
        whole = (len(text) - 1) // self.length
        train_size = int((1 - self.val_size) * whole)
        if not 0 < train_size < whole:
            raise UserError(
                f"length={self.length} and val_size={self.val_size} make {whole} windows, {train_size} of them to "
                "train on: there must be some on both sides"
            )
        inputs, targets = windows(text[: whole * self.length + 1], self.length)
        return {
            "train": (inputs[:train_size], targets[:train_size]),
            "val": (inputs[train_size:], targets[train_size:]),
        }


class NumberTask(LanguageTask):
    """Predicts the next word: `CausalLM` with sinusoidal positions, a tied head, no final norm; Adam, one cycle.

    Args:
        spec: of the data; the command line fills it in.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of a class of your own,
            my_package.my_module.MyAttention.
        attn_kwargs: settings of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the map's positional encoding, for the attentions that have one.
        dropout: of embeddings and attention output.
        feed_forward_dropout: of the feed-forward networks' output.
        lr: the greatest rate of the cycle.
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
        length = spec["length"]
        make_attention = AttentionFactory(
            attn,
            attn_kwargs,
            called_with=("causal", "cache"),
            heads=heads,
            bias=False,
            output_bias=False,
            pos_dim=pos_dim,
            max_len=length,
        )
        self.model = CausalLM(
            make_attention,
            SinusoidalPositions(len(spec["vocab"]), dim, length, dropout),
            depth=depth,
            dropout=dropout,
            feed_forward_dropout=feed_forward_dropout,
            final_norm=False,
            tied=True,
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam; the rate rises for 30 % of the run and falls to nearly nothing, β₁ the other way (see `OneCycle`)."""
        optimizer = adam(self)
        return every_step(optimizer, OneCycle(optimizer, self.hparams["lr"], total_steps=self.total_steps))
