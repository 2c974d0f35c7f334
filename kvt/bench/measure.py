"""Measure the time, memory and FLOPs of a call, and compute a layer's cost by the paper's formulas."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from timeit import Timer
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from kvt.attention import Attention, KVCache
from kvt.attention.kernels import explicit_maps
from kvt.attention.map_position import MapPosition
from kvt.system.errors import UserError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its start and end on stderr
SAMPLE_SECONDS = 0.01  # the least duration of a sample: clocks are too coarse for a single call
Name = TypeVar("Name", bound=Hashable)
Samples = list[float]
"""Seconds of one call, one number per round."""


def timed(calls: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, Samples]:
    """Return the seconds of each call, measured once per round: a machine that slows down affects all of them.

    A sample is the mean of as many calls as take `SAMPLE_SECONDS`, a number found once.
    """
    timers = {name: Timer(call, timer=_now) for name, call in calls.items()}
    numbers = {name: _calls_per_sample(timer) for name, timer in timers.items()}
    samples: dict[Name, Samples] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(numbers[name]) / numbers[name])
    return samples


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()


def _calls_per_sample(timer: Timer) -> int:
    timer.timeit(1)  # warms up
    number = 1
    while timer.timeit(number) < SAMPLE_SECONDS:
        number *= 2
    return number


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile."""
    first, median, third = np.quantile(samples, [0.25, 0.5, 0.75]).tolist()
    return first, median, third


def count_flops(call: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products in a call, two per multiply-add.

    The count is of the formula: it does not depend on the kernel that the sizes and the processor choose.
    """
    with explicit_maps(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paper_formulas(layer: nn.Module, n: int) -> tuple[int | None, int | None]:
    """Return parameters and multiply-adds of the logits by the paper's Table 1, for n tokens.

    `qkv` has 2d² and 2nd², `kv` d² and nd², `kv+pos` d² + m and nd² + n²m: the product of query and key, the value and
    the output are not counted. A layer without logits has (None, None).
    """
    if not isinstance(layer, Attention) or not layer.has_logits:
        return None, None
    token = sum(layer.projection[role].get_parameter("weight").numel() for role in set(layer.projections[:2]))
    pair = layer.to_logit.weight.numel() if isinstance(layer, MapPosition) else 0
    return token + pair, n * token + n * n * pair


@torch.no_grad()
def cache_bytes_per_token(layer: nn.Module, x: Tensor) -> int | None:
    """Return the bytes that incremental decoding of x, (1, N, dim), caches per token; None if not an `Attention`."""
    if not isinstance(layer, Attention):
        return None
    cache = KVCache(max_len=x.shape[1])
    layer(x, causal=True, cache=cache)
    return cache.nbytes // cache.max_len


def decoding(layer: nn.Module, x: Tensor) -> tuple[Callable[[], Tensor], KVCache]:
    """Return a function that decodes the last token of x, (B, N, dim) → (B, 1, dim), and the cache of all N tokens.

    The function takes its token out of the cache again before it adds it, so each call does the same.
    """
    n, token = x.shape[1], x[:, -1:].clone()  # a view would keep x
    cache = KVCache(max_len=n)

    @torch.no_grad()
    def step() -> Tensor:
        cache.length = n - 1
        return layer(token, causal=True, cache=cache)

    if isinstance(layer, Attention):
        with torch.no_grad():
            _, k, v = layer.rotate(*layer.project(x), start=0)
            cache.append(k, v)  # without the maps of all tokens, which may not fit the memory
        step()
    if cache.length < n:
        raise UserError(f"--decode: {type(layer).__name__} does not use a cache: leave it out of --attn")
    return step, cache


def steps(layer: nn.Module, x: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: one runs a forward pass of x, the other also computes all gradients and discards them."""
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    gradient = torch.randn_like(x)

    @torch.no_grad()
    def forward() -> None:
        layer(x)

    def training() -> None:
        torch.autograd.grad(layer(x), wanted, gradient, allow_unused=True)

    return forward, training


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Return the most memory that a call holds at once, beyond what was allocated before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return max([0, *accumulate(allocations(step))])


def allocations(step: Callable[[], object]) -> list[int]:
    """Return the bytes that a call on a CPU allocates (> 0) and frees (< 0), in order, within kernels too."""
    kinds = [ProfilerActivity.CPU]
    # acc_events: torch 2.11 would warn that a further profiling cycle loses the events
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
