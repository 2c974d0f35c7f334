"""Batches by index, their order and all randomness a pure function of (seed, epoch, batch)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchtext.data import pool

from kvt.errors import UserError, require_positive


def derive_seed(*numbers: int) -> int:
    """One 63-bit seed for a tuple of numbers: nearby tuples give unrelated seeds.

    >>> derive_seed(0, 1) != derive_seed(1, 0)
    True
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:  # splitmix64, fed number by number
        state = (state ^ (number % 2**64)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


class Batches:
    """Serves tensors of equal length batch by batch: a loader that can go on exactly where it stopped.

    Shuffled, epoch e visits the rows in the order of randperm seeded by (seed, e), and before each batch torch's
    generators are seeded by (seed, e, batch, rank): what augmentation and dropout draw does not depend on what
    ran before. Process r of w takes the batches r, r + w, …: shuffled, each process gets the same number of them;
    in order, every row is visited once.

    Args:
        tensors: what to serve; the first dimension counts the rows.
        batch_size: rows of a batch on one process.
        shuffle: a new order every epoch, for training; else 0, 1, 2 …
        drop_last: leave out a last, shorter batch.
        seed: of order and randomness.
        rank: of this process.
        world_size: number of processes.

    Raises:
        UserError: `batch_size` is not positive, or leaves a process without any batch.
    """

    batch_sampler = None  # asked for by the Trainer, as of any torch loader

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require_positive(batch_size=batch_size)
        self.tensors, self.batch_size, self.shuffle, self.seed = tensors, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.rows = len(tensors[0])
        whole, rest = divmod(self.rows, batch_size)
        batches = whole + (rest > 0 and not drop_last)
        self.batches = batches // world_size if shuffle else len(range(rank, batches, world_size))
        if batches < world_size:
            raise UserError(
                f"batch_size={batch_size} makes {batches} batches of {self.rows} rows, too few for {world_size} "
                "processes: choose a smaller one"
            )
        self.epoch = self.next_batch = self.resume_at = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        first, self.resume_at = self.resume_at, 0
        plan = self._plan()
        for batch in range(first, self.batches):
            if self.shuffle:
                torch.manual_seed(derive_seed(self.seed, self.epoch, batch, self.rank))
            rows = plan[batch * self.world_size + self.rank]
            self.next_batch = batch + 1
            yield self._take(rows)

    def _plan(self) -> Sequence[Tensor]:
        """The rows of every batch of this epoch, of all processes."""
        order = torch.randperm(self.rows, generator=self._generator()) if self.shuffle else torch.arange(self.rows)
        return order.split(self.batch_size)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor[rows] for tensor in self.tensors)

    @property
    def sampler(self) -> "Batches":
        """Where the Trainer looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; the Trainer calls it before every epoch."""
        if epoch != self.epoch:  # where the epoch before was cut short, nothing of it is still to come
            self.epoch, self.next_batch, self.resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Where to go on: the batch after the one served last."""
        if self.next_batch >= self.batches:
            return {"epoch": self.epoch + 1, "batch": 0}
        return {"epoch": self.epoch, "batch": self.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass begin where `state_dict` was taken."""
        self.epoch = state["epoch"]
        self.next_batch = self.resume_at = state["batch"]


class SentenceBatches(Batches):
    """Batches of sentences, filled up with `pad` to the batch's longest, and their rows; shuffled, of like lengths.

    Each epoch the rows are shuffled, cut into pools of a hundred batches, sorted by length within each pool and cut
    into batches, and these are shuffled within their pool.

    Args:
        sentences: int64 (rows, longest), filled up with `pad`; parallel corpora are sorted by the first, then the next.
        pad: the symbol that fills up.
        settings: those of `Batches`.
    """

    def __init__(self, *sentences: Tensor, pad: int, **settings: Any) -> None:
        super().__init__(*sentences, **settings)
        self.pad = pad
        self.lengths = torch.stack([(tensor != pad).sum(1) for tensor in sentences], dim=1)  # (rows, languages)

    def _plan(self) -> Sequence[Tensor]:
        if not self.shuffle:
            return super()._plan()
        generator = self._generator()

        def shuffled(rows: list[Any]) -> list[Any]:
            return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]

        lengths = self.lengths.tolist()
        batches = pool(
            shuffled(list(range(self.rows))),
            self.batch_size,
            key=lengths.__getitem__,
            random_shuffler=shuffled,
            shuffle=True,
            sort_within_batch=True,
        )
        return [torch.tensor(rows) for rows in batches]

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        longest = self.lengths[rows].amax(0).tolist()
        trimmed = [tensor[rows, :length] for tensor, length in zip(self.tensors, longest, strict=True)]
        return (*trimmed, rows)
