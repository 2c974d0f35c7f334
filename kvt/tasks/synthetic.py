"""Lists of digits: reverse, sort, swap, sub and copy them (Borji 2023, §3.1).

>>> data = DigitLists(task="sort", length=6, train_size=8, val_size=2, test_size=2)
>>> inputs, targets = data.load()["train"]
>>> inputs.shape, torch.equal(targets, inputs.sort(-1).values)
(torch.Size([8, 6]), True)
"""

from collections.abc import Callable, Mapping
from math import log10
from typing import Any

import torch
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.loader import derive_seed, row_hashes
from kvt.models import ListTagger
from kvt.system.errors import UserError, require_positive, unknown
from kvt.tasks.base import Classification
from kvt.tasks.datamodule import TaskData
from kvt.tasks.schedules import adam_with_cosine

TASKS: dict[str, Callable[[Tensor], Tensor]] = {  # [4, 3, 9, 8, 1, 7] becomes:
    "reverse": lambda digits: digits.flip(-1),  # [7, 1, 8, 9, 3, 4]
    "sort": lambda digits: digits.sort(-1).values,  # [1, 3, 4, 7, 8, 9]
    "swap": lambda digits: digits.roll(digits.shape[-1] // 2, -1),  # [8, 1, 7, 4, 3, 9], the halves exchanged
    "sub": lambda digits: 9 - digits,  # [5, 6, 0, 1, 8, 2]
    "copy": lambda digits: digits.clone(),  # [4, 3, 9, 8, 1, 7]
}
"""What each task makes of lists of digits, int64 (…, length)."""


class DigitLists(TaskData):
    """Uniformly random lists of digits and the lists that a task makes of them: int64 (B, length), twice.

    A list may occur twice in a split, but never in two splits: it is drawn again if an earlier split has it.

    Args:
        task: reverse, sort, swap, sub or copy.
        length: digits of a list; even for swap.
        train_size: lists to train on; an incomplete last batch of an epoch is dropped.
        val_size: lists to validate on.
        test_size: lists to test on.
        data_dir: not used, the lists are generated.
    """

    drop_last = True

    def __init__(
        self,
        task: str = "reverse",
        length: int = 16,
        train_size: int = 50_000,
        val_size: int = 1_000,
        test_size: int = 10_000,
        batch_size: int = 128,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        if task not in TASKS:
            raise unknown("task", task, TASKS)
        require_positive(length=length, train_size=train_size, val_size=val_size, test_size=test_size)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        if length < log10(sum(self.sizes.values())):
            raise UserError(f"length={length} makes 10^{length} lists, fewer than train_size + val_size + test_size")
        if task == "swap" and length % 2:
            raise UserError(f"length={length} must be even for the task 'swap', which exchanges two halves")
        self.task_name, self.length = task, length
        self.spec = {"vocab_size": 10, "length": length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        splits: dict[str, tuple[Tensor, ...]] = {}
        earlier: set[bytes] = set()  # hashes of the lists of the splits before
        for stream, (split, size) in enumerate(self.sizes.items()):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, stream))
            digits = torch.randint(10, (size, self.length), generator=generator)  # (size, length)
            while earlier and (again := [row for row, key in enumerate(row_hashes(digits)) if key in earlier]):
                digits[again] = torch.randint(10, (len(again), self.length), generator=generator)
            earlier.update(row_hashes(digits))
            splits[split] = (digits, TASKS[self.task_name](digits))
        return splits


class ListTask(Classification):
    """Labels every digit of a list: `ListTagger`, Adam, cosine schedule with warm-up stepped every batch.

    Args:
        dropout: of residual branches, feed-forward networks and head.
    """

    unit = "tokens"
    required_spec = ("vocab_size", "length")
    configure_optimizers = adam_with_cosine

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 64,
        depth: int = 2,
        heads: int = 4,
        pos_dim: int = 10,
        dropout: float = 0.1,
        lr: float = 1e-3,
        warmup: int = 5,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr, warmup=warmup)
        make_attention = AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=spec["length"])
        self.model = ListTagger(make_attention, dim=dim, depth=depth, dropout=dropout, **spec)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        digits = [str(digit) for digit in inputs[0][0].tolist()]
        return digits, digits
