"""Executes run, fit, validate, test and predict with a configuration that is read from flags and YAML files."""

import os
import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvt.run import run
from kvt.run.config import RunConfig, read_files
from kvt.run.folder import last_checkpoint, run_folder
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.same import TO_RESUME
from kvt.run.sections import GROUPS, RUN_FLAGS, Sections
from kvt.run.settings import SettingsParser, settings_parser
from kvt.system.console import OneLineParser, table, tell
from kvt.system.errors import UserError
from kvt.system.files import read_json
from kvt.system.quoting import printable, shell_word

TRAINING = ("run", "fit")
"""The commands that train. `run` also tests, and accepts the name of the task without --config."""


def run_words(argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None, **parser: str) -> None:
    """Execute `run`, `fit`, `validate`, `test` or `predict`; `experiment.run_lightning` has the same arguments."""
    command, *_ = argv
    config, source, resumed, is_printed = read_words(argv, choices, option, **parser)
    if is_printed:
        tell(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    if resumed and read_json(resumed / "result.json") is not None:
        tell(f"{printable(os.path.relpath(resumed))} already finished; see result.json")
        return
    built = run.build(config, source)
    if command in TRAINING:
        tests = command == "run"
        result = run.fit(built, resumed, resume=resumed is not None, test=tests)
        if result.metrics:
            folder = {"run": os.path.relpath(result.folder)} if result.folder else {}
            tell(f"\n{table(result.metrics | built.task.metric_notes | folder)}")
            from kvt.reports.paper import paper_of  # slow to import

            for metric, text in paper_of(config, built.data.task_name):
                if metric in result.metrics:
                    tell(text)
            if not tests and "test" in built.data.splits and result.checkpoint:
                named = f"{shell_word(os.path.relpath(result.checkpoint))}{config.own_flags}"
                tell(f"not tested yet: kvt test --ckpt_path {named}")
        return
    if path := {"validate": run.validate, "test": run.test, "predict": run.predict}[command](built):
        tell(f"{'predictions' if command == 'predict' else 'metrics'} in {printable(os.path.relpath(path))}")


class Asked(NamedTuple):
    """A parsed command line.

    Attributes:
        config: the configuration.
        source: the checkpoint from which the configuration was read; None if it was read from YAML files.
        resumed: the folder of the run to resume; None for a new run.
        is_printed: whether to print the configuration and do nothing else.
    """

    config: RunConfig
    source: Checkpoint | None = None
    resumed: Path | None = None
    is_printed: bool = False


def read_words(argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None, **texts: str) -> Asked:
    """Parse a command line. With --help, print the help with these `texts`, and exit.

    `RUN_FLAGS` are read first. They choose the classes whose arguments are the other flags. The parser of the other
    flags imports every class that a value names. This parser therefore gets only values from YAML files and from the
    command line, and never values from a checkpoint.

    >>> read_words(["run", "reverse", "--attn", "qkv"]) == read_words(["run", "--config=reverse", "--model.attn=qkv"])
    True
    """
    command, *words = argv
    flags, words = _run_flags(command, words, choices, option)
    named = {"model": flags.model, "data": flags.data}
    resumed = None if flags.resume is None else _run_to_resume(flags.resume, command)
    files = [str(resumed / "config.yaml")] if resumed else flags.config
    checkpoint = None if flags.ckpt_path is None else Checkpoint(flags.ckpt_path, named)
    source = None if files else checkpoint
    paths, classes, sections = ({}, source.classes, {}) if source else read_files(files, named)
    if {"-h", "--help"} & {*words}:
        _print_help(classes, sections, {"prog": f"kvt {command}", **texts})
    parser = settings_parser(**classes)
    if source:
        given = parser.parse_given(words)
        config = RunConfig.of_checkpoint(source, given.get("model", {}).get("attn"))
        config = replace(config, trainer=_kept(command, config.trainer)).merged(given)
        return Asked(config, source, None, flags.print_config)
    if not classes:
        if command == "run":
            raise UserError("kvt run needs a task: pass its name, or your own YAML, such as kvt run cifar10")
        raise UserError("--config is missing: pass a task's YAML, such as --config cifar10")
    if resumed:
        _require_unchanged(resumed, parser.parse_given(words), classes["data"].path_settings)
    sections["trainer"] = _kept(command, sections.get("trainer", {}))
    config = RunConfig.of(paths, parser.parse_all(words, sections))
    config = replace(config, ckpt_path=str(checkpoint.path)) if checkpoint else config
    return Asked(config, None, resumed, flags.print_config)


def _kept(command: str, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's Trainer settings for a command. Only its own flags limit the data that a command measures."""
    limits = "limit_|overfit_batches|fast_dev_run"
    return {name: value for name, value in trainer.items() if command in TRAINING or not re.match(limits, name)}


def _run_flags(
    command: str, words: list[str], choices: Sequence[str], option: str | None
) -> tuple[Namespace, list[str]]:
    """Return the values of `RUN_FLAGS`, and the remaining words of the command line."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    for flag in [*RUN_FLAGS][1:]:
        parser.add_argument(flag)
    parser.add_argument("--print_config", action="store_true")
    if option:
        parser.add_argument(f"--{option}", choices=choices)
    if words and not words[0].startswith("-"):
        if command != "run" or choices:
            raise UserError(f"{words[0]}: expected a flag: did you mean --config {words[0]}?")
        words.insert(0, "--config")
    flags, others = parser.parse_known_args(words)
    if flags.resume is not None:
        if given := [name for name, value in vars(flags).items() if value and name not in ("resume", "print_config")]:
            remedy = f"drop --{given[0]}"
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings and checkpoint: {remedy}")
    elif choices:
        chosen = getattr(flags, option) if option else None
        if chosen or flags.ckpt_path is None:  # otherwise the checkpoint names the task
            flags.config.insert(0, chosen or choices[0])
    return flags, others


def _print_help(classes: Mapping[str, type[Any]], sections: Sections, texts: Mapping[str, str]) -> None:
    """Print the flags and exit. The values in YAML files are printed as defaults."""
    parser = SettingsParser(usage="%(prog)s [flags]", **texts)  # type: ignore[arg-type]
    parser.add_settings(classes)
    settings = {f"{name}.{key}": value for name in GROUPS for key, value in sections.get(name, {}).items()}
    plain = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    parser.set_defaults({**plain, "optimizer": sections.get("optimizer")})
    parser.parse_args(["--help"])


def _require_unchanged(resumed: Path, given: Sections, paths: Collection[str]) -> None:
    for section, values in given.items():
        for name in values if section in GROUPS else [section]:
            if name not in (*TO_RESUME, *paths):
                raise UserError(
                    f"--resume {resumed}: a resumed run keeps its settings: drop --{name}, or start a new run "
                    f"from --ckpt_path {shell_word(last_checkpoint(resumed))}"
                )


def _run_to_resume(named: str, command: str) -> Path:
    if command not in TRAINING:
        raise UserError(f"--resume {named}: only run and fit resume a run; {command} takes --ckpt_path")
    return run_folder(named, "--resume ").resolve()
