"""CUDA graphs on a CPU: they run one operation after the other, but their tensors have the places of true ones."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kvt.run.graphs import Graphed


class EagerGraphs:
    """Stands in for `torch.cuda.make_graphed_callables`, of a module with one output.

    Inputs, output and gradients of a graph have one place each, which the next replay overwrites, and its backward pass
    is that of the last replay. Unlike a true one, it runs the module's Python again, as within a capture.
    """

    def __init__(self) -> None:
        self.captured, self.replays = list[nn.Module](), 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], allow_unused_input: bool) -> None:
        assert not torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled()
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
        graphs, eager, taking_part = self, module.forward, (*inputs, *module.parameters())
        differentiable = [tensor for tensor in taking_part if tensor.requires_grad]
        autocast = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}
        autocast["cache_enabled"] = False

        def differentiate(output: Tensor, gradient: Tensor) -> list[Tensor | None]:
            found = torch.autograd.grad(output, differentiable, gradient, allow_unused=allow_unused_input)
            return [*found]

        for _ in range(4):  # torch warms up three times
            output = module(*inputs)
            grads = differentiate(output, torch.zeros_like(output))
        output_place, grad_places = output.detach().clone(), grads

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> Tensor:
                nonlocal output
                graphs.replays += 1
                for place, given in zip(inputs, tensors, strict=False):
                    assert place.shape == given.shape
                    place.detach().copy_(given)
                with patch.object(Graphed, "captures", True), torch.enable_grad(), torch.autocast("cpu", **autocast):
                    output = eager(*inputs)
                return output_place.copy_(output.detach()).detach()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
                for place, new in zip(grad_places, differentiate(output, gradient), strict=True):
                    if place is not None:
                        place.copy_(new)
                found = iter(grad_places)
                places = [next(found) if tensor.requires_grad else None for tensor in taking_part]
                return tuple(None if place is None else place.detach() for place in places)

        def forward(*args: Tensor) -> Any:
            return Replay.apply(*args, *module.parameters()) if module.training else eager(*args)

        self.captured.append(module)
        module.forward = forward  # type: ignore[method-assign]
