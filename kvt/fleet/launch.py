"""`--fleet N`: N runs with seeds in a row, trained as one."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvt.fleet.member import FleetRun, FleetTrainer
from kvt.system.console import ignore_broken_pipe
from kvt.system.errors import UserError
from kvt.training.flags import take
from kvt.training.lightning_cli import CLI


def run_cli(argv: Sequence[str], test: bool = False) -> None:
    """A command of the Lightning CLI; with --fleet N it is `fit` N times at once, from the seed given upwards.

    Args:
        argv: the words after the program's name.
        test: whether `fit` ends with a test of its best checkpoint.

    Raises:
        UserError: N is no number above 0, or this command knows no fleets.
    """
    with ignore_broken_pipe():
        _run_cli(argv, test)


def _run_cli(argv: Sequence[str], test: bool) -> None:
    if not any(word.partition("=")[0] == "--fleet" for word in argv):
        CLI(argv, test)
        return
    size, words = take(argv, "fleet")
    if not (size or "").isdecimal() or not int(size or ""):
        raise UserError(f"--fleet {size}: how many runs? A number from 1")
    if words[:1] != ["fit"]:
        raise UserError(f"--fleet trains: it goes with fit, not with {' '.join(words[:1])}")
    if take(words, "ckpt_path")[0] is not None:
        raise UserError("--ckpt_path: each run of a fleet goes on alone, from its own last.ckpt: leave --fleet out")
    meeting = FleetTrainer([partial(_begin, words, test, number) for number in range(int(size or ""))])
    meeting.hold()
    print(f"\n{summary(sorted(meeting.results, key=lambda rows: rows['seed']))}")


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """A row a run, and the mean and the standard deviation of those that have not diverged."""
    import pandas as pd  # here: every command comes by this file, and pandas takes long to import

    frame = pd.DataFrame(results)
    metrics = [name for name in frame if "/" in name]
    kept = frame if "diverged" not in frame else frame[frame["diverged"].isna()]
    ends = [{"seed": name, **getattr(kept[metrics], name)()} for name in ("mean", "std")] if len(kept) > 1 else []
    columns = ["seed", *metrics, *(name for name in ("diverged", "run") if name in frame)]
    return str(pd.concat([frame, pd.DataFrame(ends)])[columns].to_string(index=False, na_rep="", float_format="%.4f"))


def _begin(words: Sequence[str], test: bool, number: int, meeting: FleetTrainer) -> None:
    seed = [f"--seed={meeting.begun[0].config['fit']['seed_everything'] + number}"] if number else []
    FleetRun([*words, *seed], test=test, meeting=meeting)
