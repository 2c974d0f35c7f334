"""Runs the scripts in experiments/, which act as kvt run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvt.system.console import run


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Train and test as `kvt run` does, with the flags of the command line and the tasks of a script.

    Args:
        script: `__file__` of the script.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs. The first name is the default.
        option: name of the flag that selects one of `choices`.
    """
    chosen = f"--{option} chooses among {', '.join(choices)}. " if option else ""
    prog = f"python {Path(script).parent.name}/{Path(script).name}"

    def command() -> None:
        from kvt.cli.lightning_cli import run_words  # imports torch

        run_words(["run", *sys.argv[1:]], choices, option, prog=prog, description=f"{description} {chosen}")

    run(command)
