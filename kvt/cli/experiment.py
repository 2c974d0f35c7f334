"""Runs the commands run, fit, validate, test and predict, and the scripts in experiments/, which act as kvt run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvt.system.console import quick_imports, run


def run_lightning(argv: Sequence[str], **options: Any) -> None:
    """Execute the command `run`, `fit`, `validate`, `test` or `predict`.

    Args:
        argv: the command and its flags.
        options: `prog` and `description` for `--help`. A script in experiments/ also passes `choices` and `option`.
    """
    with quick_imports():
        from kvt.cli.lightning_cli import run_words
    run_words(argv, **options)


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
    options = {"choices": choices, "option": option, "prog": prog, "description": f"{description} {chosen}"}
    run(lambda: run_lightning(["run", *sys.argv[1:]], **options))
