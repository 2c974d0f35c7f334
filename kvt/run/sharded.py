"""Sharded tensors: the weights and gradients of a run with --strategy fsdp2."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, tensor: Tensor | None) -> Tensor:
    """Shard a tensor that every process holds whole, in the same way as another tensor, if that is sharded."""
    if not isinstance(tensor, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
