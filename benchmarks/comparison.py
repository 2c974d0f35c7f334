"""Functions that benchmarks share: flags, settings of float32 products, and formats of times."""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kvt.bench import Samples, machine, quartiles, spread, timed
from kvt.tune import tune

Result = TypeVar("Result")


def flags(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return an argument parser with the flag --repeats, and with the device "cpu" if no flag is added for it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(device="cpu")
    parser.add_argument("--repeats", type=int, default=repeats, help="number of rounds; each times everything once")
    return parser


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        choices=PEERS,
        default="default",
        help="float32 products of other libraries: torch's default, or the faster of torch's default and kvt's setting",
    )


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and return the flags, tune the process as in training, and print the machine and the number of rounds."""
    asked = parser.parse_args(argv)
    if asked.repeats < 1:
        parser.error(f"--repeats={asked.repeats} must be positive")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: choose --device cpu")
    tune()
    print(f"{machine(asked.device)}; medians of {asked.repeats} rounds, in brackets the quartiles.", flush=True)
    return asked


def under(setting: str, call: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that sets `torch.set_float32_matmul_precision`, calls `call`, and restores the old setting."""

    def run() -> Result:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def default_of_torch(call: Callable[[], Result]) -> Callable[[], Result]:
    """Return `call` with torch's default for float32 products."""
    return under("highest", call)


def at_its_best(call: Callable[[], object]) -> Callable[[], object]:
    """Return `call` with torch's default for float32 products, or `call` itself, whichever is faster in one round."""
    samples = timed({way: way for way in (default_of_torch(call), call)}, rounds=1)
    return min(samples, key=lambda way: samples[way])


PEERS: dict[str, Callable[[Callable[[], object]], Callable[[], object]]] = {
    "default": default_of_torch,
    "best": at_its_best,
}
"""For each value of --peers: a function that applies the setting to a function of another library."""


def ratios(slow: Samples, fast: Samples) -> list[float]:
    """Return slow / fast for each round."""
    return [numerator / denominator for numerator, denominator in zip(slow, fast, strict=True)]


def times(slow: Samples, fast: Samples) -> str:
    """Format median and quartiles of `ratios`: "3.00 (3.00–3.50)"."""
    return spread(quartiles(ratios(slow, fast)))


def milliseconds(samples: Samples) -> str:
    """Format median and quartiles in milliseconds: "13.0 (12.5–16.5)"."""
    return spread(1000 * seconds for seconds in quartiles(samples))
