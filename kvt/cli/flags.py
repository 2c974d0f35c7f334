"""The flags of `run`, `fit`, `validate`, `test` and `predict` that select a run."""

from argparse import Namespace
from collections.abc import Sequence

from kvt.run.sections import CKPT_PATH_HELP
from kvt.system.console import OneLineParser
from kvt.system.errors import UserError

RUN_FLAGS = {
    "--config": "name of a task, such as cifar10, or path of a YAML file; a second file overrides the first",
    "--ckpt_path": CKPT_PATH_HELP,
    "--resume": "folder of a stopped run to resume, with the same result as without the stop",
    "--model": "import path of your task class, such as my_task.MyTask",
    "--data": "import path of your data class, such as my_task.MyData",
}
"""The flags that select a run, with their help."""


def split_flags(
    argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None
) -> tuple[str, Namespace, list[str]]:
    """Split words into the command, the values of `RUN_FLAGS`, and the words that are settings.

    >>> command, flags, rest = split_flags(["fit", "--config", "cifar10", "--attn", "kv", "--ckpt_path=last.ckpt"])
    >>> command, flags.config, flags.ckpt_path, rest
    ('fit', ['cifar10'], 'last.ckpt', ['--attn', 'kv'])
    >>> split_flags(["run", "cifar10", "--attn", "kv"])[1].config
    ['cifar10']
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    for flag in [*RUN_FLAGS][1:]:
        parser.add_argument(flag)
    parser.add_argument("--print_config", action="store_true")
    if option:
        parser.add_argument(f"--{option}", choices=choices)
    command, *words = argv
    if words and not words[0].startswith("-"):
        if command != "run" or choices:
            raise UserError(f"{words[0]}: expected a flag: did you mean --config {words[0]}?")
        words.insert(0, "--config")
    flags, words = parser.parse_known_args(words)
    if flags.resume is not None:
        if given := [name for name, value in vars(flags).items() if value and name not in ("resume", "print_config")]:
            remedy = f"drop --{given[0]}"
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings and checkpoint: {remedy}")
    elif choices:
        chosen = getattr(flags, option) if option else None
        if chosen or flags.ckpt_path is None:  # otherwise the checkpoint names the task
            flags.config.insert(0, chosen or choices[0])
    return command, flags, words
