"""Decides whether code may use the weight of a layer without a call of the layer."""

from typing import TypeGuard

from torch import nn


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a call of the layer computes x Wᵀ + b, and nothing else: exactly `nn.Linear`, without hooks.

    The result is False for an adapter and for a quantised or pruned layer. Code must then call the layer.
    """
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    changed = hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and not changed and type(layer.weight) is nn.Parameter
