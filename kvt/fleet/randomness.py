"""Random numbers of many models in one step, each model's from its own stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FILLS = {
    *(aten.bernoulli_.float, aten.random_.default, aten.random_.to),
    *(getattr(aten.random_, "from"), aten.uniform_.default, aten.normal_.default),
}
"""Operations that fill a tensor with random numbers."""


class OwnStreams(TorchDispatchMode):
    """Lets every member of a fleet draw from its own generator what it would draw alone.

    Under `vmap` one operation draws for all members, (N, …). Beneath it, where this mode looks, that is an ordinary
    tensor: it is filled member by member. That holds for `FILLS` and torch's dropout, on a processor; whatever else is
    random, and all dropout and augmentation on a GPU, differs between members, but is not what a member draws alone.

    Args:
        streams: one a member, on the processor.
    """

    def __init__(self, streams: Sequence[Generator]) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draws, where `func` is a draw; else calls it."""
        if func is aten.bernoulli.p:  # torch's own dropout
            func, args = aten.bernoulli_.float, (torch.empty_like(args[0]), *args[1:])
        if func not in FILLS:
            return func(*args, **(kwargs or {}))
        drawn, *settings = args
        for part, stream in zip(drawn, self.streams, strict=True):
            func(part, *settings, generator=stream)
        return drawn


@contextmanager
def drawing_from(stream: Generator) -> Iterator[None]:
    """Makes a stream torch's own on the processor, for what takes no generator."""
    before = torch.get_rng_state()
    torch.set_rng_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(torch.get_rng_state())
        torch.set_rng_state(before)
