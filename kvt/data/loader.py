"""Data loaders for tensors in memory. Their random numbers depend only on seed, epoch, batch and process."""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtext.data import pool

from kvt.data.order import derive_seed, random_order
from kvt.system import UserError, require_positive

FIXED = -1  # replaces the epoch in the seed of an order that is the same in all epochs
GPU_SHARE = 0.25  # largest fraction of the free memory of a GPU that the tensors of a split may take


def seed_generators(seed: int) -> None:
    """Seed torch's CPU, MPS and, if initialised, CUDA generators in 2 µs, where `torch.manual_seed` takes 180 µs."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class Batches:
    """Data loader of tensors with equal numbers of rows. After `load_state_dict`, it continues the saved epoch.

    Process r of w takes batches r, r + w, …; all processes take the same number of batches. With `shuffle`, the b-th
    batches of all processes together equal batch b of a single process with w times the batch size. If fewer than w
    batches remain at the end, they are left out. Without `shuffle`, each row is in exactly one batch, and the batches
    of several processes have nearly equal sizes.

    If `device` is a CUDA GPU, an iteration first moves the tensors to it, unless they take more than `GPU_SHARE` of its
    free memory. Raises UserError if `batch_size` is not positive, or if there are too few rows for a batch per process.

    Args:
        tensors: the data, with rows along the first dimension.
        batch_size: number of rows in a batch of one process.
        shuffle: whether rows are in random order, with a new order in each epoch, determined by (seed, epoch).
        mix: whether rows are in random order, with the same order in each epoch; not used with `shuffle`.
        drop_last: whether to drop the last batch if it has fewer than `batch_size` rows; only with `shuffle`.
        reseed: whether to seed torch's generators before each batch from (seed, epoch, batch, rank), so that dropout
            does not depend on earlier batches; default: the value of `shuffle`.
        seed: seed of the order of the rows and of torch's generators.
        rank, world_size: index of this process, and number of processes.
        device: device on which the batches will be used.
    """

    batch_sampler = None  # the Trainer reads this attribute of loaders that have a `sampler`
    ragged: ClassVar[bool] = False  # whether batches with the same number of rows may differ in shape
    rows_on_host: ClassVar[bool] = False  # whether `_take` needs the row numbers on the CPU

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        mix: bool = False,
        drop_last: bool = False,
        reseed: bool | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
    ) -> None:
        require_positive(batch_size=batch_size)
        self.tensors, self.batch_size, self.shuffle, self.mix, self.seed = tensors, batch_size, shuffle, mix, seed
        self.rank, self.world_size, self.device = rank, world_size, device
        self.reseed = shuffle if reseed is None else reseed
        self.rows = len(tensors[0])
        whole, rest = divmod(self.rows, batch_size)
        batches = whole + (rest > 0 and not drop_last)
        rounds = min(-(-self.rows // (world_size * batch_size)), self.rows // world_size)  # no batch is empty
        self.batches = batches // world_size if shuffle else rounds
        if not self.batches:
            found = f"batch_size={batch_size} makes {batches} batches of {self.rows} rows"
            remedy = "choose a smaller batch_size" if self.rows >= world_size else "use fewer --devices"
            raise UserError(f"{found}, too few for {world_size} processes: {remedy}")
        self.epoch = self.next_batch = self.resume_at = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        first, self.resume_at = self.resume_at, 0
        self.tensors = _to_device(self.tensors, self.device)
        rows_of = self._plan()
        for batch in range(first, self.batches):
            if self.reseed:
                seed_generators(derive_seed(self.seed, self.epoch, batch, self.rank))
            self.next_batch = batch + 1
            yield self._take(rows_of(batch * self.world_size + self.rank))

    def _plan(self) -> Callable[[int], Tensor]:
        """Return a function that maps the number of a batch, counted over all processes, to its row numbers."""
        size, parts = self.batch_size, self.batches * self.world_size
        device = torch.device("cpu") if self.rows_on_host else self.tensors[0].device
        order = None
        if self.shuffle or self.mix:
            order = random_order(self.rows, derive_seed(self.seed, self.epoch if self.shuffle else FIXED))
            order = order.to(device) if isinstance(order, Tensor) else order  # a FeistelOrder has no device

        def rows_of(batch: int) -> Tensor:
            first, last = batch * size, min((batch + 1) * size, self.rows)
            if not self.shuffle and self.world_size > 1:
                first, last = batch * self.rows // parts, (batch + 1) * self.rows // parts
            if order is None:
                return torch.arange(first, last, device=device)
            return order[first:last].to(device, non_blocking=True)

        return rows_of

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    @property
    def sampler(self) -> "Batches":
        """This loader itself, because the Trainer calls `sampler.set_epoch` before every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # a new epoch drops the remaining batches of an unfinished epoch
            self.epoch, self.next_batch, self.resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        if self.next_batch >= self.batches:
            return {"epoch": self.epoch + 1, "batch": 0}
        return {"epoch": self.epoch, "batch": self.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration with the batch that was next when `state_dict` was called."""
        self.epoch = state["epoch"]
        self.next_batch = self.resume_at = state["batch"]


class SentenceBatches(Batches):
    """Data loader that trims padded sentences to the longest sentence of a batch, and adds row numbers to the batch.

    `sentences` has a tensor for each language, int64 (rows, longest), padded with `pad`. With `shuffle`, a batch has
    sentences of similar length: each epoch shuffles the rows, and cuts them into pools of a hundred batches. A pool is
    sorted by length in the first language, then in the second, and cut into batches, which are shuffled. Unlike in
    `Batches`, the b-th batches of several processes together do not equal a batch of a single process.
    """

    ragged = rows_on_host = True

    def __init__(self, *sentences: Tensor, pad: int, **settings: Any) -> None:
        super().__init__(*sentences, **settings)
        self.pad = pad
        self.lengths = torch.stack([(tensor != pad).sum(1) for tensor in sentences], dim=1)  # (rows, languages)

    def _plan(self) -> Callable[[int], Tensor]:
        if not self.shuffle:
            return super()._plan()
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))

        def shuffled(rows: list[Any]) -> list[Any]:
            return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]

        lengths = self.lengths.tolist()
        how = {"key": lengths.__getitem__, "random_shuffler": shuffled, "shuffle": True, "sort_within_batch": True}
        batches = pool(shuffled(list(range(self.rows))), self.batch_size, **how)
        return [torch.tensor(rows) for rows in batches].__getitem__

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        longest = self.lengths[rows].amax(0).tolist()
        on_device = rows.to(self.tensors[0].device, non_blocking=True)
        pairs = zip(self.tensors, longest, strict=True)
        return (*(tensor[:, :length].index_select(0, on_device) for tensor, length in pairs), on_device)


def _to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    if device.type != "cuda" or all(tensor.is_cuda for tensor in tensors):  # "cuda" and "cuda:0" compare unequal
        return tensors
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return tuple(move_storage(tensor, device) for tensor in tensors) if needed <= GPU_SHARE * free else tensors


def move_storage(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor with its whole storage to a device, so that rows that overlap in memory still overlap."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def row_hashes(examples: Tensor) -> Iterator[bytes]:
    """Yield a hash of 16 bytes for each row of a tensor. Equal rows have equal hashes.

    >>> same, other, again = row_hashes(torch.tensor([[1, 2], [1, 3], [1, 2]]))
    >>> (same == again, same == other)
    (True, False)
    """
    for part in examples.split(4096):  # in parts, because a copy of overlapping rows needs much memory
        for row in part.cpu().numpy():
            yield blake2b(row.tobytes(), digest_size=16).digest()
