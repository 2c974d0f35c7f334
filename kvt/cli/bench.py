"""`kvt bench`."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvt.attention import ATTENTION, AttentionFactory
from kvt.attention.factory import find_attention, keyword_arguments
from kvt.bench.measure import (
    Stopwatch,
    cache_bytes_per_token,
    count_flops,
    in_turns,
    paper_formulas,
    peak_bytes,
    quartiles,
    steps,
)
from kvt.bench.plot import draw
from kvt.bench.table import COLUMNS, markdown, write_csv, write_markdown
from kvt.system.errors import UserError, is_out_of_memory, require_positive, unknown
from kvt.system.files import require_writable, user_path
from kvt.system.hardware import tune
from kvt.system.memory import MetaParameters
from kvt.training.attention_plots import save

ALL, LENGTHS, WIDTHS, HEADS = [*ATTENTION], [16, 64, 256], [64, 256], [4]
HEADS_AND_ONE: list[int] = []

BASELINES = {"literal": ("kv+pos, literal", "kvt.bench.literal.LiteralKVPos")}
"""What is only here to be compared with: name in the table and import path."""


class Variant(NamedTuple):
    """One line of each table: an attention with its heads."""

    name: str
    attn: str
    heads: int
    kv_heads: int | None

    def make(self, d: int, n: int, pos_dim: int) -> nn.Module:
        """A layer of width d for n tokens."""
        asked = {} if self.kv_heads is None else {"kv_heads": self.kv_heads}
        return AttentionFactory(self.attn, asked, heads=self.heads, max_len=n, pos_dim=pos_dim)(d)


class Setting(NamedTuple):
    """What all measurements share."""

    batch: int
    pos_dim: int
    repeats: int
    device: str


def bench(
    attn: list[str] = ALL,
    baseline: str | None = None,
    n: list[int] = LENGTHS,
    d: list[int] = WIDTHS,
    heads: list[int] = HEADS,
    kv_heads: list[int] = HEADS_AND_ONE,
    batch: int = 16,
    pos_dim: int = 50,
    repeats: int = 20,
    device: str | None = None,
    out: str = "bench",
    plot: bool = False,
) -> None:
    """Measures what every attention costs: Table 1 of the paper, with clocks.

    One self-attention layer, for each attention and size: parameters, FLOPs (matrix products, two a multiply-add) and
    beside them the paper's formulas (multiply-adds of what makes the scores, without value and output), time of a
    forward pass and of a training step, peak memory of that step, bytes that decoding caches for a token. Attentions
    are timed in turns, so that a machine that slows down slows down all of them.

    Args:
        attn: attentions, by name or import path; the others are compared with the first.
        baseline: "literal" adds the paper's formula for kv+pos as it stands, a tensor of batch · heads · n² · pos_dim
            numbers: mind the memory where n is large.
        n: lengths of the sequence.
        d: widths of the model.
        heads: numbers of heads.
        kv_heads: numbers of key and value heads; default: all heads, and one (multi-query attention).
        batch: sequences at once.
        pos_dim: channels m of the positional encoding of the map.
        repeats: how many times each is timed.
        device: cpu or cuda; default: cuda where there is one.
        out: where the table is written, without the ending: .csv, .md and .png are added.
        plot: whether to draw time and memory against n.
    """
    require_positive(batch=batch, pos_dim=pos_dim, repeats=repeats)
    for name, numbers in {"n": n, "d": d, "heads": heads, "kv_heads": kv_heads}.items():
        for number in numbers:
            require_positive(**{name: number})
    setting = Setting(batch, pos_dim, repeats, _device(device))
    tune()  # as training does
    variants = _variants(attn, baseline, heads, kv_heads)
    with MetaParameters():
        for variant, width in product(variants, d):
            variant.make(width, n=1, pos_dim=pos_dim)  # sizes that do not divide, too few channels
    if not (prefix := user_path(out)).name:
        raise UserError(f"--out {out!r}: name a file, its ending is added")
    endings = ("csv", "md", "png") if plot else ("csv", "md")
    paths = {ending: require_writable(prefix.with_name(f"{prefix.name}.{ending}")) for ending in endings}

    rows: list[dict[str, Any]] = []
    sizes = list(dict.fromkeys(product(d, n)))
    with tqdm(sizes, unit="size", disable=None) as bar:
        for width, length in bar:
            bar.set_description(f"n={length} d={width}")
            rows += _measure(variants, length, width, setting)
            text = markdown(rows, repeats)
            write_csv(paths["csv"], rows)  # after every size: whoever stops it keeps what there is
            write_markdown(paths["md"], text)
    if plot:
        save(draw(rows), paths["png"])
    print(text)


def _variants(
    attn: Sequence[str], baseline: str | None, heads: Sequence[int], kv_heads: Sequence[int]
) -> list[Variant]:
    """The lines of each table: all attentions with the first number of heads, then with the next."""
    if baseline is not None and baseline not in BASELINES:
        raise unknown("baseline", baseline, BASELINES)
    named = [(name if name in ATTENTION else name.rpartition(".")[2], name) for name in attn]
    named += [BASELINES[baseline]] if baseline else []
    grouped = {name for _, name in named if "kv_heads" in keyword_arguments(find_attention(name))}
    variants = []
    for number in heads:
        for shared in kv_heads or (number, 1):
            for label, name in named:
                variants.append(Variant(label, name, number, shared if name in grouped else None))
    return list(dict.fromkeys(variants))


def _measure(variants: Sequence[Variant], n: int, d: int, setting: Setting) -> list[dict[str, Any]]:
    """The rows of one size. What runs out of memory says so and leaves the others alone."""
    batch, pos_dim, repeats, device = setting
    common = {"n": n, "d": d, "batch": batch, "pos_dim": pos_dim, "device": device}
    rows: list[dict[str, Any]] = []
    timed: list[tuple[dict[str, Any], Stopwatch, Stopwatch]] = []
    for variant in variants:
        row = dict.fromkeys(COLUMNS) | common
        row |= {"attention": variant.name, "heads": variant.heads, "kv_heads": variant.kv_heads}
        rows.append(row)
        try:
            x = torch.randn(batch, n, d, device=device, requires_grad=True)
            layer = variant.make(d, n, pos_dim).to(device)
            row |= _count(layer, x[:1].detach())
            forward, training = steps(layer, x)
            watches = Stopwatch(forward, device), Stopwatch(training, device)
            row["training_peak_bytes"] = peak_bytes(training, device)
            timed.append((row, *watches))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            row["note"] = "out of memory"
    samples = in_turns([watch.sample for _, *watches in timed for watch in watches], repeats)
    for (row, *_), forward_seconds, training_seconds in zip(timed, samples[::2], samples[1::2], strict=True):
        row |= _summary("forward_ms", [1000 * seconds for seconds in forward_seconds])
        row |= _summary("training_ms", [1000 * seconds for seconds in training_seconds])
        if rows[0]["note"] is None:
            of_first = samples[1]
            ratios = [seconds / first for seconds, first in zip(training_seconds, of_first, strict=True)]
            row |= _summary("training_ratio", ratios)
    return rows


def _count(layer: nn.Module, example: Tensor) -> dict[str, Any]:
    """What needs no clock."""
    parameters, multiply_adds = paper_formulas(layer, example.shape[1])
    return {
        "parameters": sum(p.numel() for p in layer.parameters()),
        "paper_parameters": parameters,
        "forward_flops_per_example": count_flops(layer, example),
        "paper_multiply_adds_per_example": multiply_adds,
        "cache_bytes_per_token": cache_bytes_per_token(layer, example),
    }


def _summary(name: str, samples: Sequence[float]) -> dict[str, float]:
    first, median, third = quartiles(samples)
    return {name: median, f"{name}_q1": first, f"{name}_q3": third}


def _device(name: str | None) -> str:
    present = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if name is not None and name not in present:
        raise unknown("device", name, present)
    return name or present[0]
