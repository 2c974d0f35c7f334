"""Lists of digits: reverse, sort, swap, sub and copy them (Borji 2023, §3.1).

>>> digits = torch.tensor([[4, 3, 9, 8, 1, 7]])
>>> reverse(digits).tolist()
[[7, 1, 8, 9, 3, 4]]
"""

from collections.abc import Callable, Mapping
from math import log10
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.loader import derive_seed
from kvt.data.row_hash import row_hashes
from kvt.models import ListTagger
from kvt.system.errors import UserError, require_positive, unknown
from kvt.tasks.base import Classification, adam_with_cosine
from kvt.tasks.datamodule import Spec, TaskData


def reverse(digits: Tensor) -> Tensor:
    """[4, 3, 9, 8, 1, 7] → [7, 1, 8, 9, 3, 4]."""
    return digits.flip(-1)


def sort(digits: Tensor) -> Tensor:
    """[4, 3, 9, 8, 1, 7] → [1, 3, 4, 7, 8, 9]."""
    return digits.sort(-1).values


def swap(digits: Tensor) -> Tensor:
    """[4, 3, 9, 8, 1, 7] → [8, 1, 7, 4, 3, 9]: the halves change places."""
    return digits.roll(digits.shape[-1] // 2, -1)


def sub(digits: Tensor) -> Tensor:
    """[4, 3, 9, 8, 1, 7] → [5, 6, 0, 1, 8, 2]: each from 9."""
    return 9 - digits


def copy(digits: Tensor) -> Tensor:
    """[4, 3, 9, 8, 1, 7] → [4, 3, 9, 8, 1, 7]."""
    return digits.clone()


TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": reverse,
    "sort": sort,
    "swap": swap,
    "sub": sub,
    "copy": copy,
}


class DigitLists(TaskData):
    """Uniformly random digit lists and what a task makes of them: int64 (B, length) and (B, length).

    A list may be there twice, but never in two splits: what is drawn for validation is drawn anew where training has it
    already, and so is what is drawn for test where one of the two has it.

    Args:
        task: reverse, sort, swap, sub or copy.
        length: digits of a list; even for swap.
        train_size: lists to train on; the last batch of an epoch is dropped unless whole.
        val_size: lists to validate on.
        test_size: lists to test on.
        batch_size: lists of a batch on one process.
        seed: of the lists, the order of batches and all randomness of training.
        data_dir: as in every task; the lists are made here, nothing is read.

    Raises:
        UserError: unknown task, sizes that are not positive, an odd length to swap, more lists than there are different
            ones.
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
            raise UserError(
                f"length={length} makes 10^{length} different lists, fewer than train_size + val_size + test_size: no "
                "list may be trained on and tested: choose a greater length or smaller sizes"
            )
        if task == "swap" and length % 2:
            raise UserError(f"length={length} must be even for the task 'swap', which exchanges two halves")
        self.task, self.length = task, length

    @property
    def task_name(self) -> str:
        """The task: "reverse" …"""
        return self.task

    @property
    def spec(self) -> Spec:
        """The alphabet's size and the length of the lists."""
        return {"vocab_size": 10, "length": self.length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Draws the lists of each split from its own stream."""
        splits: dict[str, tuple[Tensor, ...]] = {}
        drawn: set[bytes] = set()
        for stream, (split, size) in enumerate(self.sizes.items()):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, stream))
            digits = torch.randint(10, (size, self.length), generator=generator)
            while drawn and (again := [row for row, content in enumerate(row_hashes(digits)) if content in drawn]):
                digits[again] = torch.randint(10, (len(again), self.length), generator=generator)
            drawn.update(row_hashes(digits))
            splits[split] = (digits, TASKS[self.task](digits))
        return splits


class ListTask(Classification):
    """Labels every digit of a list: `ListTagger`, Adam, cosine schedule with warm-up stepped every batch.

    Args:
        spec: of the data; the command line fills it in.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of a class of your own,
            my_package.my_module.MyAttention.
        attn_kwargs: settings of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the map's positional encoding, for the attentions that have one.
        dropout: of residual branches, feed-forward networks and head.
        lr: Adam's learning rate.
        warmup: steps of linear warm-up.
    """

    unit = "tokens"
    needs = ("vocab_size", "length")

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
        """The digits."""
        digits = [str(digit) for digit in inputs[0][0].tolist()]
        return digits, digits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, and the cosine over all steps of the run."""
        return adam_with_cosine(self)
