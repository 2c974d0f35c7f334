"""Sharded tensors: the weights and gradients of a run with --strategy fsdp2."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, tensor: Tensor | None) -> Tensor:
    """Shard a tensor that every process holds whole, in the same way as another tensor, if that is sharded."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
