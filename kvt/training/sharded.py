"""Tensors of which each process has a part: the weights and gradients of a run with --strategy fsdp2."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: its part, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, tensor: Tensor | None) -> Tensor:
    """Return a whole tensor, which every process has, in parts if another one is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
