"""A GPU that is not there: its tensors have shape, type and device, but no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda:0")
ATEN = torch.ops.aten
MOVES = (ATEN._to_copy.default, ATEN.copy_.default)


class Call(NamedTuple):
    """An operation, and the shapes and types of its tensors, those of the result last."""

    name: str
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @property
    def counts(self) -> bool:
        """Whether the size of the result is the number of true entries of a mask."""
        masked = any(dtype == torch.bool for _, dtype in self.tensors[1:])
        return self.name == "aten.nonzero.default" or (self.name == "aten.index.Tensor" and masked)


class Calls(TorchDispatchMode):
    """Records the operations of a block of code."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.copies: list[str] = []  # the names of those between host and GPU, for which the host waits
        self.doubles: list[str] = []  # the names of those with more float64 numbers than a sum

    def products(self) -> set[torch.dtype]:
        """Return the types of the results of linear layers."""
        names = ("aten.mm.default", "aten.addmm.default")
        return {call.tensors[-1][1] for call in self.calls if call.name in names}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # asked of fake tensors alone
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.calls.append(Call(str(func), tuple((tensor.shape, tensor.dtype) for tensor in tensors)))
        # a kernel is told a single number of the host's without a wait
        devices = {tensor.device.type for tensor in tensors if tensor.ndim or func in MOVES}
        if len(devices) > 1 and not (kwargs or {}).get("non_blocking"):
            self.copies.append(str(func))
        if any(tensor.dtype == torch.float64 and tensor.ndim for tensor in tensors):
            self.doubles.append(str(func))
        return result


@contextmanager
def fake_gpu(autocast: bool = False, waits: bool = False) -> Iterator[None]:
    """Context manager: `GPU` exists. What mixes devices, or needs a value on the host, raises an exception.

    If it `waits`, the host may ask how many entries of a mask are true, and gets a symbol for the number. Tensors of
    the host take part, without their values. Autograd records its graph, but `backward` needs a true GPU.
    """
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", autocast)  # torch.autocast refuses where there is no GPU
    try:
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if waits else None):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()
