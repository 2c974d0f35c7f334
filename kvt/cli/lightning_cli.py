"""The commands run, fit, validate, test and predict: read flags and YAML files into a configuration, and execute it."""

import os
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from jsonargparse import ActionConfigFile

from kvt.cli.flags import RUN_FLAGS, split_flags
from kvt.run import run
from kvt.run.config import RunConfig, read_files
from kvt.run.folder import last_checkpoint, run_folder
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.same import TO_RESUME
from kvt.run.sections import GROUPS, Sections
from kvt.run.settings import SettingsParser
from kvt.system.console import table, tell
from kvt.system.errors import UserError
from kvt.system.files import read_json
from kvt.system.quoting import printable, shell_word

TRAINING = ("run", "fit")
"""The commands that train; `run` also tests, and takes the task's name without --config."""


def run_words(argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None, **parser: str) -> None:
    """Execute `run`, `fit`, `validate`, `test` or `predict`; the arguments are those of `experiment.run_lightning`."""
    command, flags, words = split_flags(argv, choices, option)
    config, source, resumed = read_words(command, flags, words, parser)
    if flags.print_config:
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
        source: the checkpoint that the configuration comes from; None if it comes from YAML files.
        resumed: the folder of the run to resume; None: the run is new.
    """

    config: RunConfig
    source: Checkpoint | None = None
    resumed: Path | None = None


def read_words(
    command: str, flags: Namespace, words: list[str], texts: Mapping[str, str] = MappingProxyType({})
) -> Asked:
    """Parse words that `split_flags` has split; with --help, print the help, with these `texts`, and exit.

    The parser imports classes that values name. So it gets only YAML files and the user's words, and never values from
    a checkpoint.
    """
    named = {"model": flags.model, "data": flags.data}
    resumed = None if flags.resume is None else _run_to_resume(flags.resume, command)
    files = [str(resumed / "config.yaml")] if resumed else flags.config
    checkpoint = None if flags.ckpt_path is None else Checkpoint(flags.ckpt_path, named)
    source = None if files else checkpoint
    paths, classes, sections = ({}, source.classes, {}) if source else read_files(files, named)
    if {"-h", "--help"} & {*words}:
        helper = _parser(classes, {"prog": f"kvt {command}", **texts})
        _show_values(helper, sections)
        helper.parse_args(words)
    parser = _same_parser(*classes.items())
    if source:
        given = parser.parse_given(words)
        config = RunConfig.of_checkpoint(source, given.get("model", {}).get("attn")).merged(given)
        return Asked(config, source)
    if not classes:
        if command == "run":
            raise UserError("kvt run needs a task: pass its name, or your own YAML, such as kvt run cifar10")
        raise UserError("--config is missing: pass a task's YAML, such as --config cifar10")
    if resumed:
        places = [*classes["data"].path_settings, *(["teacher"] if sections.get("teacher") else [])]
        _require_unchanged(resumed, parser.parse_given(words), places)
    config = RunConfig.of(paths, parser.parse_all(words, sections))
    return Asked(replace(config, ckpt_path=str(checkpoint.path)) if checkpoint else config, resumed=resumed)


def _parser(classes: Mapping[str, type[Any]], texts: Mapping[str, str]) -> SettingsParser:
    """Return a parser of settings whose --help includes `RUN_FLAGS`."""
    parser = SettingsParser(usage="%(prog)s [flags]", allow_abbrev=False, **texts)  # type: ignore[arg-type]
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_settings(classes)
    actions = {action.dest: action for action in parser._actions}
    for flag, text in RUN_FLAGS.items():
        if (action := actions.get(flag[2:])) is not None:
            action.help = text
        else:
            parser.add_argument(flag, help=text)
    return parser


@cache
def _same_parser(*classes: tuple[str, type[Any]]) -> SettingsParser:
    return _parser(dict(classes), {})


def _show_values(parser: SettingsParser, sections: Sections) -> None:
    """Make --help show values from YAML files as defaults."""
    settings = {f"{name}.{key}": value for name in GROUPS for key, value in sections.get(name, {}).items()}
    plain = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    parser.set_defaults({**plain, "optimizer": sections.get("optimizer")})


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
