"""Lightning's commands: fit, validate, test and predict; and the experiment scripts, which fit and then test."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvt.system.console import ignore_broken_pipe, quick_imports, run


def run_lightning(argv: Sequence[str], test: bool = False, **options: Any) -> None:
    """Run `fit`, `validate`, `test` or `predict`.

    Args:
        argv: the command and its flags.
        test: whether `fit` ends with a test of the best checkpoint.
        options: what `--help` shows: prog, description; and of an experiment script, `choices` and `option`.
    """
    with quick_imports():
        from kvt.cli.lightning_cli import run_words
    with ignore_broken_pipe():
        run_words(argv, test, **options)


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Run the experiment of a script under experiments/ with the flags of the command line.

    Args:
        script: its `__file__`.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs, the default first.
        option: the flag that chooses among them, if there are several.
    """
    chosen = f"--{option} chooses among {', '.join(choices)}. " if option else ""
    prog = f"python {Path(script).parent.name}/{Path(script).name}"
    options = {"choices": choices, "option": option, "prog": prog, "description": f"{description} {chosen}"}
    run(lambda: run_lightning(["fit", *sys.argv[1:]], test=True, **options))
