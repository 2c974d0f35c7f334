"""The cost of a training step of one self-attention layer, forward and backward, float32, 4 heads, m = 50.

`kvt`'s attentions are compared with `torch.nn.MultiheadAttention` and with the paper's formula for kv+pos, computed
literally. The columns *literal /* and *torch /* give time and peak memory of these two, divided by those of the line.
GFLOP/s count the matrix products of the formula, two per multiply-add, and twice as many backward as forward, even if
the computation skips some. *of best* is the ratio to the GFLOP/s of a product of two 2048 × 2048 matrices in the same
round, with the faster of torch's float32 settings.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from comparison import PEERS, add_peers, begin, default_of_torch, flags, milliseconds, ratios, times, under
from peers import TorchAttention
from torch import nn

from kvt.attention import AttentionFactory
from kvt.bench.literal import LiteralKVPos
from kvt.bench.measure import Samples, count_flops, peak_bytes, steps, timed
from kvt.bench.table import number
from kvt.system.quoting import markdown_table

HEADS, POS_DIM = 4, 50
OURS, LITERAL, TORCH = ("qkv", "kv", "kv+pos"), "kv+pos, literal", "torch"
SIDE = 2048
PRECISIONS = ("highest", "medium")


class Size(NamedTuple):
    """The shape of the input."""

    batch: int
    n: int
    d: int


SIZES = [Size(128, 65, 256), Size(128, 64, 64), Size(8, 256, 256)]


def layers(n: int, d: int) -> dict[str, nn.Module]:
    return {
        **{attn: AttentionFactory(attn, heads=HEADS, max_len=n, pos_dim=POS_DIM)(d) for attn in OURS},
        LITERAL: LiteralKVPos(d, HEADS, max_len=n, pos_dim=POS_DIM),
        TORCH: TorchAttention(d, HEADS),
    }


def product(side: int) -> Callable[[], object]:
    """Return a function that multiplies two square matrices, side × side."""
    left, right, out = (torch.randn(side, side) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def compare(size: Size, rounds: int, as_peer: Callable[[Callable[[], object]], Callable[[], object]]) -> None:
    x = torch.randn(*size, requires_grad=True)
    made = layers(size.n, size.d)
    training = {name: steps(layer, x)[1] for name, layer in made.items()}
    flops = {name: 3 * size.batch * count_flops(partial(layer, x[:1])) for name, layer in made.items()}
    peak = {name: peak_bytes(step) for name, step in training.items()}
    timed_so = dict(training)
    timed_so[TORCH] = as_peer(training[TORCH])
    timed_so[LITERAL] = default_of_torch(training[LITERAL])
    products = {setting: under(setting, product(SIDE)) for setting in PRECISIONS}
    samples = timed(timed_so | products, rounds)
    best = [2 * SIDE**3 / min(seconds) for seconds in zip(*(samples[setting] for setting in PRECISIONS), strict=True)]

    def cells(name: str, seconds: Samples) -> list[str]:
        per_second = [flops[name] / each for each in seconds]
        return [
            *(name, milliseconds(seconds), times(seconds, samples["kv"])),
            *(times(samples[other], seconds) for other in (LITERAL, TORCH)),
            *(number(median(per_second), 1e9), f"{median(ratios(per_second, best)):.0%}", number(peak[name], 2**20)),
            *map(number, (peak[name] / peak["kv"], peak[LITERAL] / peak[name], peak[TORCH] / peak[name])),
        ]

    compared = ("× kv", "literal /", "torch /")
    head = (f"batch {size.batch}, n {size.n}, d {size.d}", "ms", *compared, "GFLOP/s", "of best", "peak MiB", *compared)
    print("", markdown_table([head, *(cells(name, samples[name]) for name in made)]), sep="\n", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    add_peers(parser := flags(__doc__, repeats=15))
    asked = begin(parser, argv)
    for size in SIZES:
        compare(size, asked.repeats, PEERS[asked.peers])


if __name__ == "__main__":
    main()
