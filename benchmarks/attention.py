"""The cost of a training step of one self-attention layer, forward and backward, float32, 4 heads, m = 50.

`kvt`'s attentions are compared with `torch.nn.MultiheadAttention` and with the paper's formula for kv+pos, computed
literally. *literal /* and *torch /* are their time and peak memory relative to the line's. GFLOP/s count the products
of the formula, two per multiply-add and twice as many backward as forward, even if the computation leaves some out;
*of best* is their share of what a product of two 2048 × 2048 matrices reaches in the same round, under torch's better
float32 setting.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from comparison import PEERS, Flags, Samples, default_of_torch, digits, head, row, spread, timed, times, under
from peers import TorchAttention
from torch import nn

from kvt.attention import AttentionFactory
from kvt.bench.literal import LiteralKVPos
from kvt.bench.measure import count_flops, peak_bytes, quartiles, steps

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
    """Return a call that multiplies two square matrices, side × side."""
    left, right, out = (torch.randn(side, side) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def compare(size: Size, rounds: int, as_peer: Callable[[Callable[[], object]], Callable[[], object]]) -> None:
    x = torch.randn(*size, requires_grad=True)
    made = layers(size.n, size.d)
    training = {name: steps(layer, x)[1] for name, layer in made.items()}
    flops = {name: 3 * size.batch * count_flops(layer, x[:1].detach()) for name, layer in made.items()}
    peak = {name: peak_bytes(step, "cpu") for name, step in training.items()}
    timed_so = dict(training)
    timed_so[TORCH] = as_peer(training[TORCH])
    timed_so[LITERAL] = default_of_torch(training[LITERAL])
    products = {setting: under(setting, product(SIDE)) for setting in PRECISIONS}
    samples = timed(timed_so | products, rounds)
    best = [2 * SIDE**3 / min(seconds) for seconds in zip(*(samples[setting] for setting in PRECISIONS), strict=True)]

    columns = ("ms", "× kv", "literal /", "torch /", "GFLOP/s", "of best")
    head(f"batch {size.batch}, n {size.n}, d {size.d}", *columns, "peak MiB", "× kv", "literal /", "torch /")
    for name, seconds in samples.items():
        if name in made:
            row(
                name,
                spread(seconds, unit=1e-3),
                *(times(seconds, samples["kv"]), times(samples[LITERAL], seconds), times(samples[TORCH], seconds)),
                *rates(flops[name], seconds, best),
                digits(peak[name] / 2**20),
                *map(digits, (peak[name] / peak["kv"], peak[LITERAL] / peak[name], peak[TORCH] / peak[name])),
            )


def rates(flops: int, seconds: Samples, best: Samples) -> tuple[str, str]:
    """Return the median GFLOP/s and their median share of the best."""
    per_second = [flops / each for each in seconds]
    shares = [rate / highest for rate, highest in zip(per_second, best, strict=True)]
    return digits(quartiles(per_second)[1] / 1e9), f"{quartiles(shares)[1]:.0%}"


def main(argv: Sequence[str] | None = None) -> None:
    flags = Flags(__doc__, repeats=15)
    flags.add_peers()
    asked = flags.switch(argv)
    for size in SIZES:
        compare(size, asked.repeats, PEERS[asked.peers])


if __name__ == "__main__":
    main()
