"""The batches of many loaders, stacked."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kvt.data.loader import Batches


class Stack(NamedTuple):
    tensors: tuple[Tensor, ...]  # (N, B, …) each
    streams: tuple[Generator, ...]  # a random generator for each member, on the CPU


class StackedLoader:
    """Iterates over N loaders in step, and serves their batches as a `Stack`.

    A shuffling loader seeds torch's default generator before each batch; the member's stream continues from that state.
    """

    batch_sampler = None  # read by the Trainer, as from any torch loader

    def __init__(self, loaders: Sequence[Batches]) -> None:
        self.loaders, self.sampler = loaders, self  # the Trainer calls set_epoch of the sampler
        self.streams = tuple(Generator() for _ in loaders)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[Stack]:
        for batches in zip(*map(self._serve, self.loaders, self.streams), strict=True):
            yield Stack(tuple(torch.stack(tensors) for tensors in zip(*batches, strict=True)), self.streams)

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)

    @staticmethod
    def _serve(loader: Batches, stream: Generator) -> Iterator[tuple[Tensor, ...]]:
        for batch in loader:
            stream.set_state(torch.get_rng_state())
            yield batch
