"""The command `kvt completion`, which prints a completion script for a shell."""

from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence

import shtab

from kvt.cli.study import TABLE1
from kvt.system.console import quick_imports, tell
from kvt.system.errors import unknown
from kvt.system.files import CONFIGS, GRIDS, yaml_names


def completion(shell: str = "bash") -> None:
    """Print a script that makes a shell complete commands, flags, and names of attentions, tasks and grids.

    For bash, save the script as ~/.local/share/bash-completion/completions/kvt. For zsh, save it as _kvt in a folder of
    $fpath. Save the script again after each update of kvt.

    Args:
        shell: bash, zsh, tcsh, fish or powershell.
    """
    if shell not in shtab.SUPPORTED_SHELLS:
        raise unknown("shell", shell, shtab.SUPPORTED_SHELLS)
    tell(shtab.complete(_all_words(), shell))


def _all_words() -> ArgumentParser:
    """Return an argparse parser of all commands. The commands that train or measure have the flags of all tasks."""
    with quick_imports():
        from kvt.attention.factory import ATTENTION
        from kvt.cli.main import COMMANDS, LIGHTNING, command_parser
        from kvt.run.config import RunConfig
        from kvt.run.sections import RUN_FLAGS
        from kvt.run.settings import settings_parser

    tasks, grids = yaml_names(CONFIGS), yaml_names(GRIDS)
    choices = {"attn": [*ATTENTION], "config": tasks, "grids": grids, "names": [*grids, TABLE1]}
    choices["shell"] = shtab.SUPPORTED_SHELLS
    run = ArgumentParser(add_help=False)
    for flag, about in RUN_FLAGS.items():
        run.add_argument(flag, help=about)
    settings = [action for name in tasks for action in settings_parser(**RunConfig.from_name(name).classes)._actions]

    kvt = ArgumentParser("kvt")
    groups = {"": kvt.add_subparsers()}  # maps the word before a command, such as "study" in "study run", to subparsers
    for name, about in LIGHTNING.items():
        parser = groups[""].add_parser(name, help=about)
        if name == "run":
            parser.add_argument("task", choices=tasks)
        _add(parser, [*run._actions, *settings], choices)
    for name, (_, about) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group in COMMANDS:  # "runs rm" is left out, because a shell offers folders after "kvt runs"
            continue
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help="trains and compares runs").add_subparsers()
        _add(groups[group].add_parser(last, help=about), command_parser(name)[1]._actions, choices)
    return kvt


def _add(parser: ArgumentParser, actions: Iterable[Action], choices: Mapping[str, Sequence[str]]) -> None:
    """Add flags to a parser.

    For the value of a flag, a shell offers the `choices` of the flag's name. Without such choices, it offers files.
    """
    for action in actions:
        flag, name = (action.option_strings or [action.dest])[0], action.dest.rpartition(".")[2]
        if flag in parser._option_string_actions or "." in flag:  # duplicates, and flags for the help of a class
            continue
        about = action.help and action.help.replace("%", "%%")  # only argparse expands % in help texts
        if action.nargs == 0:
            parser.add_argument(flag, action="store_true", help=about)
        else:
            added = parser.add_argument(flag, nargs=action.nargs, choices=choices.get(name), help=about)
            if not added.choices:
                added.complete = shtab.FILE  # type: ignore[attr-defined]
