"""The batches of many loaders, stacked."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kvt.data.loader import Batches


class Stack(NamedTuple):
    """One batch of every member of a fleet.

    Attributes:
        tensors: of the batches, (N, B, …) each.
        streams: what each member draws random numbers from until its next batch.
    """

    tensors: tuple[Tensor, ...]
    streams: tuple[Generator, ...]


class StackedLoader:
    """Serves loaders of equally many batches of equal shapes in step: a `Stack` at a time.

    Before a loader that shuffles serves a batch it seeds torch's generator, of which all that is random in the step is
    drawn: where that then stands begins the member's stream.
    """

    batch_sampler = None  # asked for by the Trainer, as of any torch loader

    def __init__(self, loaders: Sequence[Batches]) -> None:
        self.loaders = loaders
        self.streams = tuple(Generator() for _ in loaders)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[Stack]:
        for batches in zip(*map(_serve, self.loaders, self.streams), strict=True):
            yield Stack(tuple(torch.stack(tensors) for tensors in zip(*batches, strict=True)), self.streams)

    @property
    def sampler(self) -> "StackedLoader":
        """Where the Trainer looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; the Trainer calls it before every epoch."""
        for loader in self.loaders:
            loader.set_epoch(epoch)


def _serve(loader: Batches, stream: Generator) -> Iterator[tuple[Tensor, ...]]:
    for batch in loader:
        stream.set_state(torch.get_rng_state())
        yield batch
