"""`kvt bench`."""

from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from kvt.attention import ATTENTION
from kvt.attention.factory import find_attention, keyword_arguments, parse_attention
from kvt.bench.compare import Variant, compare
from kvt.bench.costs import DECODING, TRAINING
from kvt.bench.measure import decoding
from kvt.bench.table import csv_columns, csv_row, markdown
from kvt.system.console import tell
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import require_writable, user_path, write_atomically, write_csv
from kvt.system.hardware import tune
from kvt.view.maps import save

ALL, WIDTHS, HEADS, BATCHES = [*ATTENTION], [64, 256], [4], [16]
LENGTHS = {False: [16, 64, 256], True: [256, 1024, 4096]}
"""By `decode`: a cache outweighs the layer's weights only when it is long."""
OF_LENGTHS: list[int] = []
HEADS_AND_ONE: list[int] = []


def bench(
    attn: list[str] = ALL,
    n: list[int] = OF_LENGTHS,
    d: list[int] = WIDTHS,
    heads: list[int] = HEADS,
    kv_heads: list[int] = HEADS_AND_ONE,
    batch: list[int] = BATCHES,
    pos_dim: int = 50,
    repeats: int = 20,
    device: str | None = None,
    out: str = "bench",
    plot: bool = False,
    decode: bool = False,
) -> None:
    """Measure what every attention costs: Table 1 of the paper, with clocks.

    One self-attention layer for each attention and size: parameters and FLOPs (of matrix products, two per
    multiply-add) beside the paper's formulas (multiply-adds of what the scores are made of, without value and output),
    time of a forward pass and of a training step, peak memory of that step, bytes that decoding caches per token.
    Attentions are timed in turns, so that a machine that slows down affects all of them.

    With --decode it is the cost of writing instead: tokens per second of a layer that adds one token to a cache and
    attends to all that it holds, and bytes of that cache.

    Args:
        attn: attentions, by name or import path; the others are compared with the first. With arguments of its own, as
            mla,rank=128 or q-kv,kv_heads=2, one is measured as they say, whatever --kv_heads. The paper's formula for
            kv+pos, computed literally, is kvt.bench.literal.LiteralKVPos: it takes a tensor of
            batch · heads · n² · pos_dim numbers.
        n: sequence lengths, or with --decode tokens in the cache; default: 16 64 256, or with --decode 256 1024 4096.
        d: model widths.
        heads: numbers of heads.
        kv_heads: numbers of key and value heads; default: all heads, and one (multi-query attention).
        batch: numbers of sequences at once.
        pos_dim: channels m of the positional encoding of the map.
        repeats: samples of each time.
        device: cpu or cuda; default: cuda if there is one.
        out: path of the table without its ending: .csv, .md and .png are added.
        plot: whether to plot time and memory, or tokens per second and bytes, against n.
        decode: whether to measure decoding instead. Each step decodes the n-th token of every sequence: the cache holds
            n tokens every time. At a small n a step reads mostly the layer's weights, at a large one mostly the cache.
            The cache takes half the bytes where the key is also the value (q-kv, k), and fewer with --kv_heads; a step
            reads a shared head once for all of its queries. The caches of all attentions are in memory at once.
    """
    require_positive(pos_dim=pos_dim, repeats=repeats)
    n = n or LENGTHS[decode]
    for name, numbers in {"n": n, "d": d, "heads": heads, "kv_heads": kv_heads, "batch": batch}.items():
        require_positive(**{name: min(numbers, default=1)})
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if (device := device or devices[0]) not in devices:
        raise unknown("device", device, devices)
    tune()  # as in training
    variants = _variants(attn, heads, kv_heads)
    for variant, width in product(variants, d):
        layer = variant.make(width, n=1, pos_dim=pos_dim)  # raises for impossible sizes, before anything is measured
        if decode:
            decoding(layer, torch.zeros(1, 1, width))  # and for a layer without a cache
    if not (prefix := user_path(out)).name:
        raise UserError(f"--out {out!r}: expected a file name without its ending")
    endings = ("csv", "md", "png") if plot else ("csv", "md")
    paths = {ending: require_writable(prefix.with_name(f"{prefix.name}.{ending}")) for ending in endings}

    cost = DECODING if decode else TRAINING
    rows: list[dict[str, Any]] = []
    with tqdm(dict.fromkeys(product(d, batch, n)), unit="size", disable=None) as bar:
        for width, size, length in bar:
            bar.set_description(f"n={length} d={width} batch={size}")
            rows += compare(cost, variants, length, width, batch=size, pos_dim=pos_dim, repeats=repeats, device=device)
            text = markdown(cost, rows, repeats)
            # after every size: an interrupted run keeps its results
            write_csv(paths["csv"], csv_columns(cost), map(csv_row, rows))
            write_atomically(paths["md"], f"{text}\n")
    if plot:
        from kvt.bench.plot import draw

        save(draw(cost, rows), paths["png"])
    tell(text)


def _variants(attn: list[str], heads: list[int], kv_heads: list[int]) -> list[Variant]:
    """Return the lines of each table: all attentions with the first number of heads, then with the next."""
    sizes = [(number, shared) for number in heads for shared in kv_heads or (number, 1)]
    variants = [_variant(words, *size) for size, words in product(sizes, attn)]
    return [variant for place, variant in enumerate(variants) if variant not in variants[:place]]


def _variant(words: str, heads: int, kv_heads: int) -> Variant:
    """Parse an attention, such as "mla" or "mla,rank=128", into a variant with these heads, named as in reports."""
    name, settings = parse_attention(words)
    grouped = not settings and "kv_heads" in keyword_arguments(find_attention(name))
    details = [f"{setting} {value}" for setting, value in settings.items()]
    label = ", ".join([name if name in ATTENTION else name.rpartition(".")[2], *details])
    return Variant(label, name, heads, kv_heads if grouped else settings.pop("kv_heads", None), settings)
