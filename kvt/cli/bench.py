"""The command `kvt bench`."""

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
"""Default lengths, by the value of `decode`. In decoding, only a long cache is larger than the weights."""
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
    """Measure time, memory and FLOPs of each attention, and compare them with the formulas of the paper's Table 1.

    For each attention and size, the command measures one self-attention layer: parameters and FLOPs, the paper's
    formulas, time of a forward pass and of a training step, peak memory of a training step, and bytes per token in the
    key-value cache. FLOPs count matrix products, two per multiply-add. The paper's formulas count the multiply-adds of
    the scores, without value and output. Attentions are timed in turns, so that a slowdown of the machine affects all.

    With --decode, the command measures decoding instead: tokens per second of a layer that adds one token to a
    key-value cache and attends to all tokens in it, and bytes of the cache.

    Args:
        attn: attentions, by name or import path. The first attention is the baseline. Arguments of an attention follow
            its name, as in mla,rank=128 or q-kv,kv_heads=2; then --kv_heads does not apply to it.
            kvt.bench.literal.LiteralKVPos computes kv+pos exactly by the paper's formula, with a tensor of batch ·
            heads · n² · pos_dim numbers.
        n: sequence lengths, or with --decode numbers of tokens in the cache; default: 16 64 256, or with --decode
            256 1024 4096.
        d: model widths.
        heads: numbers of heads.
        kv_heads: numbers of heads of keys and values; default: the number of heads, and 1 (multi-query attention).
        batch: batch sizes.
        pos_dim: channels m of the positional encoding of the attention map, for attentions such as kv+pos.
        repeats: number of times that each duration is measured.
        device: cpu or cuda; default: cuda if there is a GPU.
        out: path of the output files without ending. The command adds .csv, .md and .png.
        plot: plot time and memory, or with --decode tokens per second and bytes, against n.
        decode: measure decoding instead of training. Each step decodes the n-th token of every sequence, so the cache
            always holds n tokens. At a small n, a step mostly reads the layer's weights. At a large n, a step mostly
            reads the cache. The cache has half the size if the key is also the value (q-kv, k), and is smaller with
            fewer --kv_heads. The caches of all attentions are in memory at the same time.
    """
    require_positive(pos_dim=pos_dim, repeats=repeats)
    n = n or LENGTHS[decode]
    for name, numbers in {"n": n, "d": d, "heads": heads, "kv_heads": kv_heads, "batch": batch}.items():
        require_positive(**{name: min(numbers, default=1)})
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if (device := device or devices[0]) not in devices:
        raise unknown("device", device, devices)
    tune()  # uses the same torch settings as training
    variants = _variants(attn, heads, kv_heads)
    for variant, width in product(variants, d):
        layer = variant.make(width, n=1, pos_dim=pos_dim)  # raises for impossible sizes before the first measurement
        if decode:
            decoding(layer, torch.zeros(1, 1, width))  # raises an error for a layer without a cache
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
            # written after every size, so that an interrupted command keeps its results
            write_csv(paths["csv"], csv_columns(cost), map(csv_row, rows))
            write_atomically(paths["md"], f"{text}\n")
    if plot:
        from kvt.bench.plot import draw

        save(draw(cost, rows), paths["png"])
    tell(text)


def _variants(attn: list[str], heads: list[int], kv_heads: list[int]) -> list[Variant]:
    """Return the variants in the order of rows: all attentions with the first number of heads, then with the next."""
    sizes = [(number, shared) for number in heads for shared in kv_heads or (number, 1)]
    variants = [_variant(words, *size) for size, words in product(sizes, attn)]
    return [variant for place, variant in enumerate(variants) if variant not in variants[:place]]


def _variant(words: str, heads: int, kv_heads: int) -> Variant:
    """Return the `Variant` of an attention such as "mla" or "mla,rank=128".

    The variant has `heads` heads, and `kv_heads` heads of keys and values if the attention has this setting.
    """
    name, settings = parse_attention(words)
    grouped = not settings and "kv_heads" in keyword_arguments(find_attention(name))
    details = [f"{setting} {value}" for setting, value in settings.items()]
    label = ", ".join([name if name in ATTENTION else name.rpartition(".")[2], *details])
    return Variant(label, name, heads, kv_heads if grouped else settings.pop("kv_heads", None), settings)
