"""The command `kvt bench`: parameters, FLOPs, time and memory of attention layers, beside the paper's Table 1."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from kvt.attention import ATTENTION, Attention, AttentionFactory, KVCache
from kvt.attention.factory import find_attention, keyword_arguments, parse_attention
from kvt.attention.kernels import explicit_maps
from kvt.attention.map_position import MapPosition
from kvt.markdown import markdown_table
from kvt.system import UserError, require_positive, tell, user_path, write_atomically
from kvt.tune import environment, tune
from kvt.view.maps import save

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from printing its start and end on stderr
SAMPLE_SECONDS = 0.01  # least duration of a sample; a single call can be too short for the clock
ALL, LENGTHS, WIDTHS = [*ATTENTION], [16, 64, 256], [64, 256]
HEADS_AND_ONE: list[int] = []
Samples = list[float]  # seconds per call, one number for each round
Row = dict[str, Any]
LAYER = ("attention", "heads", "kv_heads")
COLUMNS = ["parameters", "paper_parameters", "forward_flops_per_example", "paper_multiply_adds_per_example"]
COLUMNS += ["forward_ms", "training_ms", "training_ratio", "training_peak_bytes", "cache_bytes_per_token"]
TEXT = """# What a layer of attention costs

One self-attention layer, float32, batch {batch}, m = {pos_dim}; {repeats} samples each, taken in turns, on {machine}.

Times are for a whole batch: medians, with quartiles in brackets. *training* is a forward and a backward pass. *ratio*
is its time divided by that of the first row, computed in each round. *peak* is the peak memory of a training step
without weights and input. *flops* are those of matrix products, two per multiply-add. *paper* has parameters and
multiply-adds by the formulas of Borji 2023, Table 1, which count the scores only, without value and output."""


def bench(
    attn: list[str] = ALL,
    n: list[int] = LENGTHS,
    d: list[int] = WIDTHS,
    heads: int = 4,
    kv_heads: list[int] = HEADS_AND_ONE,
    batch: int = 16,
    pos_dim: int = 50,
    repeats: int = 20,
    device: str = "cpu",
    out: str = "bench",
    plot: bool = False,
) -> None:
    """Measure parameters, FLOPs, time and memory of a layer of each attention, beside the formulas of Borji's Table 1.

    For each attention and size, the command measures one self-attention layer: parameters and FLOPs, the paper's
    formulas, time of a forward pass and of a training step, peak memory of a training step, and bytes per token in the
    key-value cache. Attentions are timed in turns, so that a slowdown of the machine affects all.

    Args:
        attn: attentions, by name or import path. The first attention is the baseline. Arguments of an attention follow
            its name, as in mla,rank=128 or q-kv,kv_heads=2; then --kv_heads does not apply to it.
            kvt.attention.literal.LiteralKVPos computes kv+pos exactly by the paper's formula, with a tensor of batch ·
            heads · n² · pos_dim numbers.
        n: sequence lengths.
        d: model widths.
        heads: number of heads.
        kv_heads: numbers of heads of keys and values; default: the number of heads, and 1 (multi-query attention).
        batch: batch size.
        pos_dim: channels m of the positional encoding of the attention map, for attentions such as kv+pos.
        repeats: number of times that each duration is measured.
        device: cpu or cuda.
        out: path of the output files without ending. The command adds .csv and .md, with --plot also .png.
        plot: plot time and memory against n.
    """
    lengths, widths, shared = (min(numbers, default=1) for numbers in (n, d, kv_heads))
    require_positive(n=lengths, d=widths, kv_heads=shared, heads=heads, batch=batch, pos_dim=pos_dim, repeats=repeats)
    if device not in ["cpu", "cuda"][: 1 + torch.cuda.is_available()]:
        raise UserError(f"--device {device}: expected cpu, or cuda on a machine with a GPU")
    paths = {end: Path(f"{user_path(out)}.{end}") for end in ("csv", "md", "png")[: 2 + plot]}
    paths["csv"].parent.mkdir(parents=True, exist_ok=True)
    tune()  # uses the same torch settings as training
    variants = [*dict.fromkeys(_variant(words, number) for number in kv_heads or (heads, 1) for words in attn)]
    rows: list[Row] = []
    for width, length in tqdm([*product(d, n)], unit="size", disable=None):
        size = {"heads": heads, "n": length, "d": width, "batch": batch, "pos_dim": pos_dim, "device": device}
        rows += compare(variants, size, repeats)
        table, text = pd.DataFrame(rows).convert_dtypes(convert_floating=False), markdown(rows, repeats)
        # written after every size, so that an interrupted command keeps its results
        write_atomically(paths["csv"], table.to_csv(index=False, float_format="%.6g"))
        write_atomically(paths["md"], f"{text}\n")
    if plot:
        save(draw(rows), paths["png"])
    tell(text)


def _variant(words: str, kv_heads: int) -> tuple[str, int | None]:
    """Return (`words`, `kv_heads`), or (`words`, None) if --kv_heads does not apply to the attention."""
    name, settings = parse_attention(words)
    return words, kv_heads if not settings and "kv_heads" in keyword_arguments(find_attention(name)) else None


def compare(variants: Iterable[tuple[str, int | None]], size: Row, repeats: int) -> list[Row]:
    """Measure a layer of each variant (see `_variant`); return a row for each, with `size` and the measurements."""
    x = torch.randn(size["batch"], size["n"], size["d"], device=size["device"], requires_grad=True)
    rows: list[Row] = []
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for line, (words, kv_heads) in enumerate(variants):
        name, settings = parse_attention(words)
        settings |= {} if kv_heads is None else {"kv_heads": kv_heads}
        make = AttentionFactory(name, settings, heads=size["heads"], max_len=size["n"], pos_dim=size["pos_dim"])
        layer = make(size["d"]).to(x.device)
        calls[line, "forward_ms"], calls[line, "training_ms"] = steps(layer, x)
        calls[line, "training_ms"]()  # warms up
        row = {"attention": words, "heads": size["heads"], "kv_heads": settings.get("kv_heads")} | size
        row["parameters"] = sum(p.numel() for p in layer.parameters())
        row["paper_parameters"], row["paper_multiply_adds_per_example"] = paper_formulas(layer, size["n"])
        row["forward_flops_per_example"] = count_flops(partial(layer, x[:1]))
        row["training_peak_bytes"] = peak_bytes(calls[line, "training_ms"], x.device.type)
        row["cache_bytes_per_token"] = cache_bytes_per_token(layer, x[:1])
        rows.append(row)
    samples = {key: 1000 * np.array(seconds) for key, seconds in timed(calls, repeats).items()}
    samples |= {(i, "training_ratio"): samples[i, "training_ms"] / samples[0, "training_ms"] for i in range(len(rows))}
    for (line, column), numbers in samples.items():
        rows[line] |= zip((f"{column}_q1", column, f"{column}_q3"), quartiles(numbers), strict=True)
    return rows


def timed(calls: Mapping[Any, Callable[[], object]], rounds: int) -> dict[Any, Samples]:
    """Return, for each function, a list of seconds per call, with one number for each round.

    In a round, each function is called repeatedly for at least `SAMPLE_SECONDS`, and the median time is kept. Functions
    are timed in turns, so that a slowdown of the machine affects all.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns if there is CUDA, but no GPU
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    samples: dict[Any, Samples] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.blocked_autorange(min_run_time=SAMPLE_SECONDS).median)
    return samples


def quartiles(samples: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    first, median, third = np.quantile(samples, [0.25, 0.5, 0.75]).tolist()
    return first, median, third


def steps(layer: nn.Module, x: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: a forward pass of x without autograd, and a forward and backward pass without update."""
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    gradient = torch.randn_like(x)

    def training() -> None:
        torch.autograd.grad(layer(x), wanted, gradient, allow_unused=True)

    return torch.no_grad()(lambda: layer(x)), training


def count_flops(call: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products in a call without fused attention kernels, two per multiply-add."""
    with explicit_maps(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paper_formulas(layer: nn.Module, n: int) -> tuple[int | None, int | None]:
    """Return parameters and multiply-adds of a layer for n tokens of width d, counted as in the paper's Table 1.

    `qkv` has 2 d² parameters and 2 n d² multiply-adds, `kv` has d² and n d², and `kv+pos`, with m positional channels,
    has d² + m and n d² + n² m. So the projections of query and key and the positional term count. Q Kᵀ, the value
    and the output do not count. Return (None, None) if `layer` is not an `Attention`, or has no logits.
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


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak memory of a call in bytes, without the memory that was allocated before the call."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    return max([0, *accumulate(allocations(step))])


def allocations(step: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation (> 0) and release (< 0) in a call on a CPU, in order."""
    # without acc_events, torch 2.11 warns that the next profiling cycle loses the events
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def markdown(rows: Sequence[Row], repeats: int) -> str:
    """Return Markdown: a title, the method, and one table for each n and d."""
    parts = [TEXT.format(**rows[0], repeats=repeats, machine=machine(rows[0]["device"]))]
    for (n, d), of_size in groupby(rows, key=itemgetter("n", "d")):
        lines = ([str(row[name] or "–") for name in LAYER] + [_cell(row, name) for name in COLUMNS] for row in of_size)
        parts += [f"## n = {n}, d = {d}", markdown_table([[*LAYER, *COLUMNS], *lines])]
    return "\n\n".join(parts)


def _cell(row: Row, name: str) -> str:
    return spread(row[name + q] for q in ("_q1", "", "_q3")) if name.endswith("_ms") else number(row[name])


def machine(device: str) -> str:
    """Describe the device and torch's version in one line."""
    found = environment()
    cpu = "{processor}, threads: {threads}, float32 products: {float32_matmul}".format(**found["machine"])
    return f"{found['machine']['gpus'][0] if device == 'cuda' else cpu}, torch {found['packages']['torch']}"


def spread(quartiles: Iterable[float]) -> str:
    first, median, third = map(number, quartiles)
    return f"{median} ({first}–{third})"


def number(value: float | None, unit: float = 1) -> str:
    """Format value / unit with about three digits, an int with unit 1 with all digits, and None as an empty string.

    >>> number(12345), number(12345, 1e6), number(1234.5), number(1.0), number(None)
    ('12,345', '0.0123', '1,234', '1.00', '')
    """
    if value is None:
        return ""
    if isinstance(value, int) and unit == 1:
        return f"{value:,}"
    value /= unit
    digits = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if abs(value) < limit), 0)
    return f"{value:,.{digits}f}"


def draw(rows: Sequence[Row]) -> Figure:
    """Plot time and peak memory of a training step against n, with a column of panels for each width d."""
    table = pd.DataFrame(rows)
    table["layer"] = [f"{row['attention']}, kv_heads {row['kv_heads'] or '–'}" for row in rows]
    sizes, shown = [*table.groupby("d")], ("training_ms", "training_peak_bytes")
    figure = Figure(figsize=(4 * len(sizes) + 3, 8), layout="constrained")
    panels = figure.subplots(len(shown), len(sizes), sharex=True, sharey="row", squeeze=False)
    for axes, (column, (d, part)) in zip(panels.flat, product(shown, sizes), strict=True):
        lines = part.pivot(index="n", columns="layer", values=column)
        lines.plot(ax=axes, loglog=True, style=".-", colormap="tab20", legend=False, title=f"d = {d}", ylabel=column)
        axes.set_xticks([], minor=True)
        axes.set_xticks(lines.index, lines.index)
    figure.legend(handles=panels[0, 0].lines, loc="outside right upper", fontsize="small")
    return figure
