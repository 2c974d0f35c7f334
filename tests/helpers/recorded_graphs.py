"""CUDA graphs of a call without gradients, on a CPU: its operations are recorded, and run again on the same tensors."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph`: no Python runs at a replay, and what is computed has one place.

    As a graph computes nothing while it is captured, what was computed meanwhile is spoilt, and asking for a value is
    an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def spoil(self) -> None:
        for func, _, _, result in self.calls:
            if not (func.is_view or func._schema.is_mutable):
                for place in tree_leaves(result):
                    place.fill_(float("nan") if place.is_floating_point() else 0)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, places in self.calls:
            result = func(*args, **kwargs)
            for place, new in zip(tree_leaves(places), tree_leaves(result), strict=True):
                if place.data_ptr() != new.data_ptr():
                    place.copy_(new)


class RecordedGraphs:
    """The graphs that were captured, once `torch.cuda` is patched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[Recording] = []
        patched = {"CUDAGraph": Recording, "graph": self._capture, "graph_pool_handle": lambda: "pool"}
        patched |= {"Stream": MagicMock, "current_stream": MagicMock, "stream": lambda _: nullcontext()}
        for name, stand_in in patched.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.captured)

    @contextmanager
    def _capture(self, graph: Recording, pool: object) -> Iterator[None]:
        assert pool == "pool", "all graphs share one"
        with graph:
            yield
        graph.spoil()
        self.captured.append(graph)
