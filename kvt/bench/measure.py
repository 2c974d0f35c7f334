"""Measures time, memory and FLOPs of a function call; computes the cost of a layer by the paper's formulas."""

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

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from printing its start and end on stderr
SAMPLE_SECONDS = 0.01  # least duration of a sample; a single call can be too short for the clock
Name = TypeVar("Name", bound=Hashable)
Samples = list[float]
"""The seconds that one call takes: a list with one number per round."""


def timed(calls: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, Samples]:
    """Return for each function the seconds of a call, with one sample per round.

    Each round times all functions, so that a slowdown of the machine affects all functions. A sample is the mean over
    several calls that take at least `SAMPLE_SECONDS` together. The number of calls is determined before the first
    round.
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
    """Return the first quartile, the median and the third quartile."""
    first, median, third = np.quantile(samples, [0.25, 0.5, 0.75]).tolist()
    return first, median, third


def count_flops(call: Callable[[], object]) -> int:
    """Return the number of floating-point operations of the matrix products in a call, two per multiply-add.

    The number does not depend on the attention kernel, because `Attention` uses its explicit formula during the count.
    """
    with explicit_maps(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paper_formulas(layer: nn.Module, n: int) -> tuple[int | None, int | None]:
    """Return parameters and multiply-adds of the logits by the paper's Table 1, for n tokens.

    `qkv` has 2d² parameters and 2nd² multiply-adds. `kv` has d² and nd², `kv+pos` has d² + m and nd² + n²m. The
    formulas omit the product of query and key, the value, and the output. A layer without logits has (None, None).
    """
    if not isinstance(layer, Attention) or not layer.has_logits:
        return None, None
    token = sum(layer.projection[role].get_parameter("weight").numel() for role in set(layer.projections[:2]))
    pair = layer.to_logit.weight.numel() if isinstance(layer, MapPosition) else 0
    return token + pair, n * token + n * n * pair


@torch.no_grad()
def cache_bytes_per_token(layer: nn.Module, x: Tensor) -> int | None:
    """Return the bytes of the key-value cache per token of x, (1, N, dim); None if the layer is not an `Attention`."""
    if not isinstance(layer, Attention):
        return None
    cache = KVCache(max_len=x.shape[1])
    layer(x, causal=True, cache=cache)
    return cache.nbytes // cache.max_len


def decoding(layer: nn.Module, x: Tensor) -> tuple[Callable[[], Tensor], KVCache]:
    """Return a function that decodes the last token of x, (B, N, dim) → (B, 1, dim), and the cache of all N tokens.

    Each call first removes the last token from the cache, so that every call does the same work.
    """
    n, token = x.shape[1], x[:, -1:].clone()  # cloned, because a view would keep x in memory
    cache = KVCache(max_len=n)

    @torch.no_grad()
    def step() -> Tensor:
        cache.length = n - 1
        return layer(token, causal=True, cache=cache)

    if isinstance(layer, Attention):
        with torch.no_grad():
            _, k, v = layer.rotate(*layer.project(x), start=0)
            cache.append(k, v)  # fills the cache without attention maps of all tokens, which need much memory
        step()
    if cache.length < n:
        raise UserError(f"--decode: {type(layer).__name__} does not use a cache: leave it out of --attn")
    return step, cache


def steps(layer: nn.Module, x: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: a forward pass of x, and a forward and backward pass that discards the gradients."""
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    gradient = torch.randn_like(x)

    @torch.no_grad()
    def forward() -> None:
        layer(x)

    def training() -> None:
        torch.autograd.grad(layer(x), wanted, gradient, allow_unused=True)

    return forward, training


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak memory of a call in bytes, without the memory that was allocated before the call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return max([0, *accumulate(allocations(step))])


def allocations(step: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation (> 0) and each release (< 0) in a call on a CPU, in order.

    The list includes memory that torch's kernels allocate inside an operation.
    """
    kinds = [ProfilerActivity.CPU]
    # without acc_events, torch 2.11 warns that the next profiling cycle loses the events
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
