"""Shared by the comparisons: flags, samples taken in turns, cells of a table."""

import argparse
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.util import find_spec
from typing import TypeVar

import torch

from kvt.bench.measure import Stopwatch, in_turns, quartiles
from kvt.system.hardware import environment, keep_memory, tune_products

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Samples = list[float]
"""Seconds of one call, one number per round."""


class Flags(argparse.ArgumentParser):
    """The flags of a comparison, some of which change settings of the process."""

    def __init__(self, description: str | None, repeats: int) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--repeats", type=int, default=repeats, help="rounds, each of which times everything once")
        self.add_argument(
            "--allocator",
            choices=("tuned", "default"),
            default="tuned",
            help="whether freed memory stays with the process or returns to the system",
        )
        self.add_argument(
            "--matmul",
            choices=("fast", "default"),
            default="fast",
            help="whether kvt's float32 products use the fastest library that is as accurate, as in training; the "
            "paper's formulas use torch's default",
        )

    def add_peers(self) -> None:
        """Add --peers, for a comparison with other libraries."""
        self.add_argument(
            "--peers",
            choices=("default", "best"),
            default="default",
            help="whether other libraries use torch's default, or the faster of it and the setting of --matmul",
        )

    def switch(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the flags, apply their settings, and print what the numbers are measured on."""
        asked = self.parse_args(argv)
        if asked.repeats < 1:
            self.error(f"--repeats={asked.repeats} must be positive")
        if asked.allocator == "tuned" and not keep_memory():
            self.error("--allocator tuned needs glibc: choose --allocator default")
        if asked.matmul == "fast":
            tune_products()
        found = environment()
        machine, version = found["machine"], found["packages"]["torch"]
        print(
            f"{machine['processor']}, threads: {machine['threads']}; torch {version}, float32 products: "
            f"{torch.get_float32_matmul_precision()}, allocator: {asked.allocator}; medians of {asked.repeats} rounds, "
            "in brackets the quartiles.",
            flush=True,
        )
        return asked

    def require(self, *modules: str) -> None:
        """End the script if a library to compare with is not installed."""
        if missing := [module for module in modules if find_spec(module) is None]:
            self.error(f"{', '.join(missing)} not found: pip install -e '.[bench]'")


def timed(calls: Mapping[Name, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[Name, Samples]:
    """Return the seconds of each call, each measured once per round."""
    watches = [Stopwatch(call, device) for call in calls.values()]
    return dict(zip(calls, in_turns([watch.sample for watch in watches], rounds), strict=True))


def default_of_torch(call: Callable[[], Result]) -> Callable[[], Result]:
    """Return the call under torch's default for float32 products."""
    return under("highest", call)


def at_its_best(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call under torch's default for float32 products or the process's setting, whichever is faster."""
    ways = [default_of_torch(call), call]
    samples = timed(dict(enumerate(ways)), rounds=1)
    return min(ways, key=lambda way: min(samples[ways.index(way)]))


PEERS: dict[str, Callable[[Callable[[], object]], Callable[[], object]]] = {
    "default": default_of_torch,
    "best": at_its_best,
}
"""How other libraries run, by --peers."""


def under(setting: str, call: Callable[[], Result]) -> Callable[[], Result]:
    """Return the call under a setting of `torch.set_float32_matmul_precision`, restored afterwards."""

    def run() -> Result:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def times(slow: Samples, fast: Samples) -> str:
    """Format the ratio of slow to fast, computed round by round.

    >>> times([6.0, 8.0, 9.0], [2.0, 2.0, 3.0])
    '3.00 (3.00–3.50)'
    """
    return spread([ours / theirs for ours, theirs in zip(slow, fast, strict=True)])


def spread(samples: Samples, unit: float = 1.0) -> str:
    """Format median and quartiles with three digits.

    >>> spread([0.012, 0.013, 0.02], unit=1e-3)
    '13.0 (12.5–16.5)'
    """
    first, median, third = (digits(sample / unit) for sample in quartiles(samples))
    return f"{median} ({first}–{third})"


def digits(number: float) -> str:
    """Format a measured number with three digits.

    >>> digits(0.123456), digits(1.23456), digits(12.3456), digits(12345.6)
    ('0.123', '1.23', '12.3', '12,346')
    """
    places = next((places for limit, places in ((1, 3), (10, 2), (100, 1)) if abs(number) < limit), 0)
    return f"{number:,.{places}f}"


def head(*columns: str) -> None:
    """Print the head of a table."""
    print()
    row(*columns)
    row(*(":--" if column == columns[0] else "--:" for column in columns))


def row(*cells: str) -> None:
    """Print one line of a table at once, to show progress."""
    print(f"| {' | '.join(cells)} |", flush=True)
