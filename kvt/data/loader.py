"""Batches by index, their order and all randomness a pure function of (seed, epoch, batch)."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtext.data import pool

from kvt.system.errors import UserError, require_positive

SHARE = 0.25
"""Of a GPU's free memory, how much a split of the data may take."""


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


def seed_generators(seed: int) -> None:
    """Seeds the generators that a training step draws from, as `torch.manual_seed` does.

    That one also writes down the stack it was called from, for every kind of device that is not there: 180 µs where
    this takes 2.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class Batches:
    """Serves tensors of equal length batch by batch: a loader that can go on exactly where it stopped.

    Shuffled, epoch e visits the rows in the order of randperm seeded by (seed, e), and before each batch torch's
    generators are seeded by (seed, e, batch, rank): what augmentation and dropout draw does not depend on what
    ran before. Process r of w takes the batches r, r + w, …: shuffled, each process gets the same number of them, and
    batch b of all processes together is batch b of one process that takes w times as many rows; in order, every row is
    visited once.

    On a GPU where they take but a part of the free memory, the tensors are moved there as a whole when the first batch
    is asked for, and each epoch's order once: no step waits for a copy. The rows served are the same wherever they lie.

    Args:
        tensors: what to serve; the first dimension counts the rows.
        batch_size: rows of a batch on one process.
        shuffle: a new order every epoch, for training; else 0, 1, 2 …
        drop_last: leave out a last, shorter batch.
        seed: of order and randomness.
        rank: of this process.
        world_size: number of processes.
        device: where the batches will be used.

    Raises:
        UserError: `batch_size` is not positive, or leaves a process without any batch.
    """

    batch_sampler = None  # asked for by the Trainer, as of any torch loader
    ragged: ClassVar[bool] = False
    """Whether batches of as many rows differ in shape."""

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
    ) -> None:
        require_positive(batch_size=batch_size)
        self.tensors, self.batch_size, self.shuffle, self.seed = tensors, batch_size, shuffle, seed
        self.rank, self.world_size, self.device = rank, world_size, device
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
        self.tensors = resident(self.tensors, self.device)
        plan = self._plan()[self.rank :: self.world_size]
        device = self.tensors[0].device
        there = plan if device.type == "cpu" else torch.cat([*plan]).to(device).split([len(rows) for rows in plan])
        for batch in range(first, self.batches):
            if self.shuffle:
                seed_generators(derive_seed(self.seed, self.epoch, batch, self.rank))
            self.next_batch = batch + 1
            yield self._take(plan[batch], there[batch])

    def _plan(self) -> Sequence[Tensor]:
        """The rows of every batch of this epoch, of all processes, on the processor."""
        order = torch.randperm(self.rows, generator=self._generator()) if self.shuffle else torch.arange(self.rows)
        return order.split(self.batch_size)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))

    def _take(self, rows: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        """A batch, of its rows, which lie on the processor and once more where the tensors do."""
        return tuple(tensor.index_select(0, there) for tensor in self.tensors)

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
    into batches, and these are shuffled within their pool. So `batch_size` decides which rows come together: the
    batches of w processes are not those of one process with a batch_size w times as large, cut into w.

    Args:
        sentences: int64 (rows, longest), filled up with `pad`; parallel corpora are sorted by the first, then the next.
        pad: the symbol that fills up.
        settings: those of `Batches`.
    """

    ragged = True

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

    def _take(self, rows: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        longest = self.lengths[rows].amax(0).tolist()
        trimmed = [
            tensor[:, :length].index_select(0, there) for tensor, length in zip(self.tensors, longest, strict=True)
        ]
        return (*trimmed, there)


def resident(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors as they are to be served: moved to a GPU if they take no more than `SHARE` of its free memory.

    A view that shows its storage many times over, such as the windows of a text, stays one.
    """
    if device.type != "cuda" or all(tensor.device == device for tensor in tensors):
        return tensors
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return tuple(moved(tensor, device) for tensor in tensors) if needed <= SHARE * free else tensors


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy there, with its storage as it is."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
