"""Tells whether code may use the weight of a layer instead of calling the layer."""

from typing import TypeGuard

from torch import nn


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is exactly an `nn.Linear`, without hooks, replaced `forward` or parametrised weight."""
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    changed = hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and not changed and type(layer.weight) is nn.Parameter
