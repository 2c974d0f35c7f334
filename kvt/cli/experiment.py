"""The experiment scripts: a task chosen by name, trained, tested and recorded."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from kvt.cli.main import run_lightning
from kvt.system.console import OneLineErrors, run
from kvt.system.errors import unknown


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Run the experiment of a script under experiments/ with the flags of the command line.

    Args:
        script: its `__file__`.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs, the default first.
        option: the flag that chooses among them, if there are several.

    Raises:
        UserError: another choice; whatever `run_lightning` raises.
    """
    run(lambda: _experiment(script, description, choices, option))


def _experiment(script: str, description: str, choices: Sequence[str], option: str | None) -> None:
    parser = _Choice(add_help=False, allow_abbrev=False)
    parser.set_defaults(chosen=None)
    if option:
        parser.add_argument(f"--{option}", dest="chosen")
    for flag in ("--resume", "--ckpt_path"):
        parser.add_argument(flag)
    flags, words = parser.parse_known_args(sys.argv[1:])
    if flags.chosen is not None and flags.chosen not in choices:
        raise unknown(str(option), flags.chosen, choices)
    words += [f"--{name}={value}" for name in ("resume", "ckpt_path") if (value := getattr(flags, name)) is not None]
    if flags.resume is None and (flags.chosen or flags.ckpt_path is None):  # else the run or its checkpoint says
        words.insert(0, f"--config={flags.chosen or choices[0]}")
    chosen = f"--{option} chooses among {', '.join(choices)}. " if option else ""
    prog = f"python {Path(script).parent.name}/{Path(script).name}"
    run_lightning(["fit", *words], test=True, prog=prog, description=f"{description} {chosen}")


class _Choice(OneLineErrors, ArgumentParser):
    pass
