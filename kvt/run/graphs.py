"""Training and decoding as CUDA graphs: a model's kernels are launched at once in place of one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import is_
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakSet

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvt.attention import KVCache
from kvt.models import CausalLM
from kvt.models.blocks import stacks_of
from kvt.system.errors import UserError
from kvt.system.quoting import one_line

DEVICE = "cuda"
"""The type of device that has graphs."""
NO_GPU = "--compile graph: needs one GPU: drop the flag"


@contextmanager
def capturing() -> Iterator[None]:
    """Context manager: raise what no graph can repeat, such as asking for a value on the host, as a UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--compile graph: {one_line(str(error))}: drop the flag") from error


class Graphed:
    """A module's `forward` which in training is a CUDA graph, forward and backward, one for each shape of its inputs.

    Evaluation runs as ever, and so does a second call before the gradients of the first have come, whose values a
    replay would overwrite. Capturing a graph runs the module a few times; random numbers and buffers are then set back.

    Raises:
        UserError: as `capturing`.
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
                capturing(),
                torch.random.fork_rng({x.device for x in args if x.is_cuda}),
                torch.autocast(kind, cache_enabled=False, **autocast),
            ):
                torch.cuda.make_graphed_callables(self.module, inputs, allow_unused_input=True)
            return self.module.forward
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
        raise UserError(NO_GPU)
    if trainer.accumulate_grad_batches > 1:
        raise UserError("--compile graph: drop the flag, or --accumulate_grad_batches")


class GraphedSteps:
    """A language model's `next_logits` as CUDA graphs: for one more token, one for each number of tokens in the caches.

    There is one for a whole window without caches, too. Prompts and caches that slide run as ever. Of each size of
    batch, the text that goes on has its caches where its graphs expect them; the one that had has copies from then on.

    Raises:
        UserError: as `capturing`.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model, self.eager = model, MethodType(type(model).next_logits, model)
        self.pool = torch.cuda.graph_pool_handle()
        self.places: dict[Any, _Place] = {}

    def __call__(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        caches = caches or []
        length, window = (caches[0].length, caches[0].max_len) if caches else (0, self.model.embedding.max_len)
        again = 0 < length < window and tokens.shape[1] == 1 if caches else tokens.shape[1] == window
        plain = all(type(cache) is KVCache for cache in caches)  # a user's may hold more than buffers
        trains = self.model.training or torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type)
        if trains or not (again and plain):
            return self.eager(tokens, caches)
        key = tokens.shape, *((buffer.shape, buffer.dtype) for cache in caches for buffer in cache.buffers)
        if key not in self.places:
            self.places[key] = _Place(tokens, caches)
        place = self.places[key]
        place.take(tokens, caches)
        if length not in place.graphs:
            place.graphs[length] = self._capture(place, length)
        place.graphs[length].replay()
        for cache in caches:
            cache.length = length + 1
        return place.logits.clone()

    def _capture(self, place: "_Place", length: int) -> torch.cuda.CUDAGraph:
        def step() -> Tensor:
            for cache in place.caches:
                cache.length = length
            return self.eager(place.tokens, place.caches)

        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # what libraries prepare at a first call is not for a graph
            logits = step()
        here.wait_stream(aside)
        if not place.graphs:
            place.logits = logits.clone()
        graph = torch.cuda.CUDAGraph()
        with capturing(), torch.cuda.graph(graph, pool=self.pool):
            place.logits.copy_(step())
        return graph


class _Place:
    """The tensors that graphs of one size of batch read and write; their caches have buffers, too, and a length."""

    logits: Tensor

    def __init__(self, tokens: Tensor, caches: Sequence[KVCache]) -> None:
        self.tokens, self.caches = torch.empty_like(tokens), [copy(cache) for cache in caches]
        for cache in self.caches:
            cache.buffers = [torch.empty_like(buffer) for buffer in cache.buffers]
        self.taken = WeakSet[KVCache]()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def take(self, tokens: Tensor, caches: Sequence[KVCache]) -> None:
        """Copy the tokens, and buffers of caches unless they are here already: from then on the caches have these."""
        self.tokens.copy_(tokens)
        here, given = ([buffer for cache in each for buffer in cache.buffers] for each in (self.caches, caches))
        if all(map(is_, here, given)):
            return
        for cache in self.taken:
            cache.buffers = [buffer.clone() for buffer in cache.buffers]
        torch._foreach_copy_(here, given)
        for cache, own in zip(caches, self.caches, strict=True):
            cache.buffers = [*own.buffers]
        self.taken = WeakSet(caches)


def graph_decoding(model: CausalLM) -> None:
    """Make a language model's decoding replay CUDA graphs; raise UserError if it is not on a GPU."""
    if model.head.weight.device.type != DEVICE:
        raise UserError(NO_GPU)
    model.next_logits = GraphedSteps(model)  # type: ignore[method-assign]
