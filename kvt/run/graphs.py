"""Training as CUDA graphs: a model's kernels are launched at once in place of one by one."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvt.models.blocks import stacks_of
from kvt.system.errors import UserError
from kvt.system.quoting import one_line

DEVICE = "cuda"
"""The type of device that has graphs."""


class Graphed:
    """A module's `forward` which in training is a CUDA graph, forward and backward, one for each shape of its inputs.

    Evaluation runs as ever, and so does a second call before the gradients of the first have come, whose values a
    replay would overwrite. Capturing a graph runs the module a few times; random numbers and buffers are then set back.

    Raises:
        UserError: the module does what no graph can repeat, such as asking for a value on the host.
    """

    SHAPES = 2  # with graphs: whole batches and the last one
    captures: ClassVar[bool] = False  # whether one is captured now, in which the modules within take part

    def __init__(self, module: nn.Module) -> None:
        self.module, self.eager = module, MethodType(type(module).forward, module)
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.awaits_gradients = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.module.training and torch.is_grad_enabled() and not (Graphed.captures or self.awaits_gradients)
        plain = all(isinstance(value, int | None) for value in kwargs.values())
        if not (trains and plain and {*map(type, args)} == {Tensor}):
            return self.eager(*args, **kwargs)
        key = *((x.shape, x.dtype, x.requires_grad) for x in args), *sorted(kwargs.items())
        if key not in self.graphs:
            if len(self.graphs) == self.SHAPES:
                return self.eager(*args, **kwargs)
            self.graphs[key] = self._capture(args, kwargs)
        results = self.graphs[key](*args)
        tensors = [leaf for leaf in tree_leaves(results) if leaf.requires_grad]
        self.awaits_gradients = bool(tensors)
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, self._on_gradient, mode="any")
        return results

    def _on_gradient(self, gradient: Tensor) -> None:
        self.awaits_gradients = False

    def _capture(self, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the graph of a call with inputs like these."""
        kind = args[0].device.type
        autocast: Any = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in args)
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        Graphed.captures, self.module.forward = True, partial(self.eager, **kwargs)
        try:
            # a graph casts the weights anew each time
            with (
                torch.random.fork_rng({x.device for x in args if x.is_cuda}),
                torch.autocast(kind, cache_enabled=False, **autocast),
            ):
                torch.cuda.make_graphed_callables(self.module, inputs, allow_unused_input=True)
            return self.module.forward
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--compile graph: {one_line(str(error))}: drop the flag") from error
        finally:
            Graphed.captures, self.module.forward = False, self
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def graph_model(model: nn.Module) -> None:
    """Make training of a model replay CUDA graphs; its stacks of blocks have their own, for losses that call these."""
    for module in (model, *stacks_of(model)):
        module.forward = Graphed(module)


def require_graphs(trainer: L.Trainer) -> None:
    """Raise UserError if a run has no GPU or several, or adds up gradients of batches, which a replay overwrites."""
    if trainer.strategy.root_device.type != DEVICE or trainer.world_size > 1:
        raise UserError("--compile graph: needs one GPU: drop the flag")
    if trainer.accumulate_grad_batches > 1:
        raise UserError("--compile graph: drop the flag, or --accumulate_grad_batches")
