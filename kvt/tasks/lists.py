"""Tasks on lists of digits: five tasks of Borji 2023, §3.1, and the tasks shift and permute.

>>> data = DigitLists(task="sort", length=6, train_size=8, val_size=2, test_size=2)
>>> data.setup("fit")
>>> digits, targets = batch = next(iter(data.val_dataloader()))
>>> digits.tolist(), targets.tolist()
([[2, 1, 4, 9, 6, 8], [4, 3, 8, 4, 7, 9]], [[1, 2, 4, 6, 8, 9], [3, 4, 4, 7, 8, 9]])
>>> task = ListTask(data.spec, attn="kv", dim=8, heads=2)
>>> computed = task.compute_metrics(batch)
>>> computed["logits"].shape, [metric.name for metric in task.metrics]  # logits of 10 labels for each of 2 · 6 digits
(torch.Size([2, 6, 10]), ['loss', 'acc'])
"""

from collections.abc import Callable, Mapping
from math import log10
from typing import Any

import torch
from torch import Generator, Tensor

from kvt.data.order import derive_seed
from kvt.data.splits import draw_apart
from kvt.models import ListTagger
from kvt.models.blocks import Expansion
from kvt.system import UserError, require_choice, require_positive, require_probability
from kvt.tasks.base import Classification, Spec
from kvt.tasks.datamodule import TaskData
from kvt.tasks.options import BlockTask

# from lists of digits, int64 (…, length), to target lists; on the right: the target of [4, 3, 9, 8, 1, 7]
TASKS: dict[str, Callable[[Tensor, "DigitLists"], Tensor]] = {
    "reverse": lambda digits, _: digits.flip(-1),  # [7, 1, 8, 9, 3, 4]
    "sort": lambda digits, _: digits.sort(-1).values,  # [1, 3, 4, 7, 8, 9]
    "swap": lambda digits, _: digits.roll(digits.shape[-1] // 2, -1),  # [8, 1, 7, 4, 3, 9]: the halves change places
    "sub": lambda digits, _: 9 - digits,  # [5, 6, 0, 1, 8, 2]
    "copy": lambda digits, _: digits.clone(),  # [4, 3, 9, 8, 1, 7]
    "shift": lambda digits, data: digits.roll(-data.by, -1),  # [3, 9, 8, 1, 7, 4]
    "permute": lambda digits, data: digits[..., data.permutation],  # [1, 4, 7, 9, 3, 8] with cycle 3 and seed 0
}


def permutation(length: int, cycle: int, seed: int) -> Tensor:
    """Return a random permutation π, int64 (length), with ⌊length / cycle⌋ cycles of `cycle` positions.

    The remaining positions are fixed points.

    >>> permutation(7, 3, seed=0)  # cycles 0 → 5 → 4 → 0 and 2 → 6 → 3 → 2; fixed point 1
    tensor([5, 1, 6, 2, 0, 4, 3])
    """
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    cycles = order[: length - length % cycle].view(-1, cycle)
    successor = torch.arange(length)
    successor[cycles] = cycles.roll(-1, 1)
    return successor


class DigitLists(TaskData):
    __doc__ = f"""Random lists of digits with target lists. A batch is (digits, targets), both int64 (B, length).

    A list may occur twice in a split, but never in two splits: a list that is also in an earlier split is
    replaced by a new list.

    Args:
        task: {", ".join(TASKS)}. shift and permute move the digit at position π(i) to position i.
        length: number of digits in a list; must be even for swap.
        by: for shift: π(i) = (i + by) mod length.
        cycle: for permute: π is a random permutation with cycles of this length. The seed determines π.
        train_size: number of training lists; an incomplete last batch of an epoch is dropped.
        val_size: number of validation lists.
        test_size: number of test lists.
        data_dir: not used: the lists are generated.
    """

    keeps_order = drop_last = True

    def __init__(
        self,
        task: str = "reverse",
        length: int = 16,
        by: int = 1,
        cycle: int = 3,
        train_size: int = 50_000,
        val_size: int = 1_000,
        test_size: int = 10_000,
        batch_size: int = 128,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_choice("task", task, TASKS)
        require_positive(length=length, cycle=cycle, train_size=train_size, val_size=val_size, test_size=test_size)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        if length < log10(sum(self.sizes.values())):
            raise UserError(f"length={length} gives 10^{length} lists, fewer than train_size + val_size + test_size")
        if task == "swap" and length % 2:
            raise UserError(f"length={length} must be even for the task swap, which exchanges the halves of a list")
        if task == "permute" and cycle > length:
            raise UserError(f"cycle={cycle} must be at most length={length}")
        self.by: int = by
        self.task_name, self.length, self.cycle = task, length, cycle
        self.spec = {"vocab_size": 10, "length": length}

    @classmethod
    def chance(cls, **settings: Any) -> float:
        return 0.1

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        return draw_apart(self._draw, self.sizes, self.seed)

    def _draw(self, rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        digits = torch.randint(10, (rows, self.length), generator=generator)
        return digits, self.targets(digits)

    def targets(self, digits: Tensor) -> Tensor:
        """Return the target lists of lists of digits, both int64 (…, length)."""
        return TASKS[self.task_name](digits, self)

    @property
    def permutation(self) -> Tensor:
        """The permutation π of the task permute, int64 (length): `digits[π(i)]` moves to position i."""
        return permutation(self.length, self.cycle, derive_seed(self.seed, len(self.sizes)))


class ListTask(BlockTask, Classification):
    """Task of labelling every digit of a list. The model is `ListTagger`; the default optimiser is Adam.

    Args:
        dropout: dropout probability in residual branches, feed-forward networks and the output layer.
    """

    unit = "tokens"

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        norm: str = "post",
        expansion: Expansion = 2,
        dropout: float = 0.1,
        warmup: int = 5,
        schedule: str = "cosine",
        smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(norm=norm, expansion=expansion, dropout=dropout, warmup=warmup, schedule=schedule, **kwargs)
        require_probability(smoothing=smoothing)
        self.smoothing = smoothing
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> ListTagger:
        sizes = {"vocab_size": spec["vocab_size"], "length": spec["length"], "dim": self.options["dim"]}
        return ListTagger(self.attention(spec["length"]), **sizes, **self.blocks)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        digits = [str(digit) for digit in inputs[0][0].tolist()]
        return digits, digits
