"""Throughput of fleets of several sizes, and of the same runs one at a time, on a small list task.

Each row makes runs of one size by the command line, from start to result.json, and extrapolates to an hour. On a GPU a
small model alone leaves the device mostly idle; on a CPU fleets gain little or nothing.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from kvt.fleet.member import FleetRun
from kvt.fleet.trainer import FleetTrainer
from kvt.system.console import run
from kvt.training.callbacks import without_plots
from kvt.training.lightning_cli import CLI

CONFIGS = Path(__file__).parent.parent / "experiments" / "configs"


def words(asked: argparse.Namespace, seed: int) -> list[str]:
    sizes = {name: getattr(asked, name) for name in ("accelerator", "attn", "dim", "depth", "length", "max_steps")}
    quiet = {"enable_progress_bar": "false", "devices": 1}
    given = [f"--{name}={value}" for name, value in {**sizes, **quiet, "seed": seed}.items()]
    return ["fit", f"--config={CONFIGS / 'sort.yaml'}", "--val_check_interval=0.25", *given]


def begin(argv: list[str], fleet: FleetTrainer) -> None:
    FleetRun(argv, test=True, fleet=fleet)


def seconds(asked: argparse.Namespace, fleet: int) -> tuple[float, float]:
    """Return the seconds of a fleet, in total and of training alone."""
    start = perf_counter()
    trainer = FleetTrainer([partial(begin, words(asked, seed)) for seed in range(fleet)])
    trainer.run()
    return perf_counter() - start, trainer.throughput.seconds


def seconds_alone(asked: argparse.Namespace) -> tuple[float, float]:
    """As `seconds`, of an ordinary run."""
    start = perf_counter()
    alone = Alone(words(asked, 0), test=True)
    return perf_counter() - start, alone.throughput.seconds


class Alone(CLI):
    """Without plots, as in a fleet."""

    def callbacks_of_fit(self, config: Any) -> list[Callback]:
        return without_plots(super().callbacks_of_fit(config))

    def show(self, rows: Any) -> None:
        """Print nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--accelerator", default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attn", default="kv")
    for name, default in {"dim": 32, "depth": 2, "length": 16, "max_steps": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(lambda: measure(asked))


def measure(asked: argparse.Namespace) -> None:
    seconds_alone(asked)  # imports, caches
    print("| runs at once | seconds | of training | ms a step | runs an hour | steps of a run a second, all runs |")
    print("|---|---|---|---|---|---|")
    for fleet in asked.fleets:
        whole, training = seconds_alone(asked) if fleet == 1 else seconds(asked, fleet)
        step = training / asked.max_steps
        print(
            f"| {fleet} | {whole:.1f} | {training:.1f} | {1000 * step:.1f} | {3600 * fleet / whole:.0f} "
            f"| {fleet / step:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
