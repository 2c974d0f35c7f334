"""The batches of many loaders, stacked, and the random numbers that each model draws for its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvt.data.loader import Batches

aten = torch.ops.aten
FILLS = {aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default}  # a tensor with random numbers
FILLS |= {aten.random_.default, aten.random_.to, getattr(aten.random_, "from")}


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


class OwnStreams(TorchDispatchMode):
    """Dispatch mode: in a `vmap` over N models, each model draws from its own generator what it would draw alone.

    This mode sees a draw for all models as one that fills a tensor (N, …), and fills it row by row from `streams`, one
    a model. It covers `FILLS` and torch's dropout, on the CPU. Other random draws differ from those of a model alone.
    """

    def __init__(self, streams: Sequence[Generator]) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.bernoulli.p:  # torch's own dropout
            func, args = aten.bernoulli_.float, (torch.empty_like(args[0]), *args[1:])
        if func not in FILLS:
            return func(*args, **(kwargs or {}))
        drawn, *settings = args
        for row, stream in zip(drawn, self.streams, strict=True):
            func(row, *settings, generator=stream)
        return drawn
