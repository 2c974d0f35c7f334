"""Random numbers for stacked models: each model draws from its own generator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FILLS = {aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default}  # a tensor with random numbers
FILLS |= {aten.random_.default, aten.random_.to, getattr(aten.random_, "from")}


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
