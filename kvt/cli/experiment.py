"""Lightning's commands: fit, validate, test and predict; and the experiment scripts, which fit and then test."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvt.system.console import OneLineParser, ignore_broken_pipe, quick_imports, run


def run_lightning(argv: Sequence[str], test: bool = False, **parser: str) -> None:
    """Run `fit`, `validate`, `test` or `predict`.

    Args:
        argv: the command and its flags.
        test: whether `fit` ends with a test of the best checkpoint.
        parser: what `--help` shows: prog, description.
    """
    with quick_imports():
        from kvt.training.lightning_cli import CLI
    with ignore_broken_pipe():
        CLI(argv, test, **parser)


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Run the experiment of a script under experiments/ with the flags of the command line.

    Args:
        script: its `__file__`.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs, the default first.
        option: the flag that chooses among them, if there are several.
    """
    run(lambda: _experiment(script, description, choices, option))


def _experiment(script: str, description: str, choices: Sequence[str], option: str | None) -> None:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.set_defaults(chosen=None)
    if option:
        parser.add_argument(f"--{option}", dest="chosen", choices=choices)
    for flag in ("--resume", "--ckpt_path"):
        parser.add_argument(flag)
    flags, words = parser.parse_known_args(sys.argv[1:])
    words += [f"--{name}={value}" for name in ("resume", "ckpt_path") if (value := getattr(flags, name)) is not None]
    if flags.resume is None and (flags.chosen or flags.ckpt_path is None):  # else the run or its checkpoint says
        words.insert(0, f"--config={flags.chosen or choices[0]}")
    chosen = f"--{option} chooses among {', '.join(choices)}. " if option else ""
    prog = f"python {Path(script).parent.name}/{Path(script).name}"
    run_lightning(["fit", *words], test=True, prog=prog, description=f"{description} {chosen}")
