"""Read and set the weights of layers, also of layers changed by tools for adapters, quantisation or pruning."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kvt.system.errors import UserError


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks, or a `forward` that is an attribute of the instance."""
    before = module._forward_pre_hooks or module._backward_pre_hooks
    after = module._forward_hooks or module._backward_hooks
    return bool(before or after) or "forward" in module.__dict__


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a call of the layer computes x Wᵀ + b from the layer's weight and bias, and nothing else.

    The result is False for an adapter, for a quantised layer, and for a layer with hooks, which tools for pruning,
    sharding and attribution add. Code must call such a layer: reading the weight instead would bypass the tool.
    """
    tensors = layer._parameters.values()
    return (
        type(layer).forward is nn.Linear.forward
        and not has_hooks(layer)
        and all(tensor is None or type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    )


def affine_map(layer: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the matrix W, (outputs, width), and the bias b of a layer that computes x Wᵀ + b.

    If the layer is not plain (see `is_plain`), the function calls it with the unit vectors and zero to find W and b.
    """
    if is_plain(layer):
        return layer.weight, layer.bias
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), like.dtype)
    units = torch.eye(width + 1, width, dtype=dtype, device=like.device).roll(1, 0)  # zero and the unit vectors
    bias, *_ = outputs = layer(units)
    return (outputs[1:] - bias).mT, bias


def fill_weight(layer: nn.Module, fill: Callable[[Tensor], Tensor]) -> None:
    """Set the weight of a layer, if necessary through a parametrisation; `fill` sets the values of a tensor in place.

    Raises:
        UserError: a hook computes the weight from other tensors, and would overwrite a new value.
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
