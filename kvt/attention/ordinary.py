"""Read and set the weights of layers that tools such as adapters, quantisation or pruning may have changed."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kvt.system.errors import UserError


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module runs hooks, or a `forward` that was set on the instance."""
    before = module._forward_pre_hooks or module._backward_pre_hooks
    after = module._forward_hooks or module._backward_hooks
    return bool(before or after) or "forward" in module.__dict__


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the layer computes x Wᵀ + b with its own weight and bias, and nothing else.

    The result is False for an adapter, a quantised layer, and a layer with hooks, which pruning, sharding and
    attribution add. Such a layer must be called: code that reads its weights would bypass the tool.
    """
    tensors = layer._parameters.values()
    return (
        type(layer).forward is nn.Linear.forward
        and not has_hooks(layer)
        and all(tensor is None or type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    )


def affine_map(layer: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the matrix W, (outputs, width), and the bias b of a layer that computes x Wᵀ + b.

    If the layer is not plain, W and b are read from its outputs for the unit vectors and for zero.
    """
    if is_plain(layer):
        return layer.weight, layer.bias
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), like.dtype)
    units = torch.eye(width + 1, width, dtype=dtype, device=like.device).roll(1, 0)  # zero and the unit vectors
    bias, *_ = outputs = layer(units)
    return (outputs[1:] - bias).mT, bias


def fill_weight(layer: nn.Module, fill: Callable[[Tensor], Tensor]) -> None:
    """Set the weight of a layer, if need be through its parametrisation; `fill` fills a tensor in place.

    Raises:
        UserError: a hook computes the weight from other tensors, so that a new value would be lost.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if is_parametrized(layer, "weight"):
        layer.weight = fill(weight.detach().clone())
    elif "weight" in layer._parameters:
        fill(weight)
    else:
        remedy = "use torch.nn.utils.parametrizations, whose weights can be set"
        raise UserError(f"the weight of {type(layer).__name__} is computed by a hook: {remedy}")
