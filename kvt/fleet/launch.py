"""`kvt fit --fleet N`: N runs with consecutive seeds, trained as one."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvt.fleet.member import FleetRun
from kvt.fleet.trainer import FleetTrainer
from kvt.system.errors import UserError
from kvt.training.flags import split_flags


def run_fleet(argv: Sequence[str], test: bool = False) -> None:
    """Train the N runs of a command line with --fleet N as one, with consecutive seeds, and print their results.

    With `test`, each run ends with a test of its best checkpoint.
    """
    flags, words = split_flags(argv)
    if not flags.fleet.isdecimal() or not int(flags.fleet):
        raise UserError(f"--fleet {flags.fleet}: how many runs? A number from 1")
    if words[:1] != ["fit"]:
        raise UserError(f"--fleet trains: it goes with fit, not with {' '.join(words[:1])}")
    if flags.ckpt_path is not None:
        raise UserError("--ckpt_path: each run of a fleet goes on alone, from its own last.ckpt: leave --fleet out")
    fleet = FleetTrainer([partial(_start, argv, test, number) for number in range(int(flags.fleet))])
    fleet.run()
    print(f"\n{summary(sorted(fleet.results, key=lambda rows: rows['seed']))}")


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each run, and the mean and standard deviation of those that have not diverged."""
    import pandas as pd  # imported here: it takes long

    frame = pd.DataFrame(results)
    metrics = [name for name in frame if "/" in name]
    kept = frame if "diverged" not in frame else frame[frame["diverged"].isna()]
    ends = [{"seed": name, **getattr(kept[metrics], name)()} for name in ("mean", "std")] if len(kept) > 1 else []
    columns = ["seed", *metrics, *(name for name in ("diverged", "run") if name in frame)]
    return str(pd.concat([frame, pd.DataFrame(ends)])[columns].to_string(index=False, na_rep="", float_format="%.4f"))


def _start(words: Sequence[str], test: bool, number: int, fleet: FleetTrainer) -> None:
    seed = [f"--seed={fleet.runs[0].config.seed_everything + number}"] if number else []
    FleetRun([*words, *seed], test=test, fleet=fleet)
