"""The Lightning CLI: words and YAML files become a run's configuration, which is then trained, tested …"""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile

from kvt.system.console import OneLineParser, tell
from kvt.system.errors import UserError
from kvt.system.quoting import printable, shell_word
from kvt.training import results, run
from kvt.training.config import RunConfig, find_classes, read_files
from kvt.training.load_checkpoint import Checkpoint
from kvt.training.run_dir import last_checkpoint, run_folder
from kvt.training.settings import CKPT_PATH_HELP, SECTIONS, Sections, SettingsParser

RUN_FLAGS = {
    "--config": "a task's YAML, such as cifar10 or a file of your own; given twice, the later one wins",
    "--ckpt_path": CKPT_PATH_HELP,
    "--resume": "the folder of a stopped run to resume exactly",
    "--model": "a task class of your own, such as my_task.MyTask",
    "--data": "a data class of your own, such as my_task.MyData",
}
"""The flags that say which run a command is about, with their help."""


def run_words(
    argv: Sequence[str], test: bool = False, choices: Sequence[str] = (), option: str | None = None, **parser: str
) -> None:
    """Run `fit`, `validate`, `test` or `predict`; the arguments are those of `kvt.cli.experiment.run_lightning`."""
    command, flags, words = split_flags(argv, choices, option)
    cli = CLI(command, flags, words, parser)
    config, checkpoint = cli.run_config, cli.checkpoint
    if flags.print_config:
        tell(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    if cli.resumed and results.read_json(cli.resumed / "result.json") is not None:
        tell(f"{printable(os.path.relpath(cli.resumed))} already finished; see result.json")
        return
    built = run.build(config, cli.source)
    if command == "fit":
        result = run.fit(built, cli.resumed, resume=cli.resumed is not None, test=test)
        if result.metrics:
            folder = {"run": os.path.relpath(result.folder)} if result.folder else {}
            tell(f"\n{results.table(result.metrics | built.task.metric_notes | folder)}")
            if not test and "test" in built.data.splits and result.checkpoint:
                named = f"{shell_word(os.path.relpath(result.checkpoint))}{config.own_flags}"
                tell(f"not tested yet: kvt test --ckpt_path {named}")
        return
    if checkpoint is None:
        raise UserError(f"{command} needs --ckpt_path, a file under a run's checkpoints/")
    if path := {"validate": run.validate, "test": run.test, "predict": run.predict}[command](built, checkpoint):
        tell(f"{'predictions' if command == 'predict' else 'metrics'} in {printable(os.path.relpath(path))}")


def split_flags(
    argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None
) -> tuple[str, Namespace, list[str]]:
    """Split words into the command, the values of `RUN_FLAGS`, and the words that are settings.

    >>> command, flags, rest = split_flags(["fit", "--config", "cifar10", "--attn", "kv", "--ckpt_path=last.ckpt"])
    >>> command, flags.config, flags.ckpt_path, rest
    ('fit', ['cifar10'], 'last.ckpt', ['--attn', 'kv'])
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
        raise UserError(f"{words[0]}: expected a flag: did you mean --config {words[0]}?")
    flags, words = parser.parse_known_args(words)
    if flags.resume is not None:
        if given := [name for name, value in vars(flags).items() if value and name not in ("resume", "print_config")]:
            remedy = f"drop --{given[0]}"
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings and checkpoint: {remedy}")
    elif choices:
        chosen = getattr(flags, option) if option else None
        if chosen or flags.ckpt_path is None:  # else its checkpoint says
            flags.config.insert(0, chosen or choices[0])
    return command, flags, words


class CLI:
    """The Lightning CLI with this project's settings: its parser, for a run that words describe.

    Attributes:
        run_config: the configuration that the words ask for.
        checkpoint: the one that they name, if they do.
        source: the same, if it describes the run, in place of YAML files.
        resumed: the folder of the run to resume, if it is one.
    """

    def __init__(self, command: str, flags: Namespace, words: list[str], texts: Mapping[str, str]) -> None:
        named = {"model": flags.model, "data": flags.data}
        self.resumed = _run_to_resume(flags.resume, command) if flags.resume is not None else None
        configs = [str(self.resumed / "config.yaml")] if self.resumed else flags.config
        self.checkpoint = Checkpoint(flags.ckpt_path, named) if flags.ckpt_path is not None else None
        self.source = None if configs else self.checkpoint
        paths, self._sections = (None, {}) if self.source else read_files(configs, named)
        self._classes = self.source.classes if self.source else find_classes(paths or {})
        if not self._classes and not {"-h", "--help"} & {*words}:
            raise UserError("--config is missing: pass a task's YAML, such as --config cifar10")
        settings: dict[str, Any] = {"prog": f"kvt {command}", "usage": "%(prog)s [flags]", **texts}
        self.run_config = self._parse(SettingsParser(allow_abbrev=False, **settings), words, paths or {})

    def _parse(self, parser: SettingsParser, words: list[str], paths: Mapping[str, str]) -> RunConfig:
        """Parse the words; --help shows the values of YAML files as defaults.

        The parser imports and calls what values name, so it sees YAML files and the user's words only, and nothing that
        comes from a checkpoint.
        """
        self._add_flags(parser)
        if {"-h", "--help"} & {*words}:
            sections = {name: self._sections.get(name, {}) for name in (*SECTIONS, "trainer")}
            shown = {f"{name}.{key}": value for name, given in sections.items() for key, value in given.items()}
            shown = {name: value for name, value in shown.items() if not isinstance(value, dict)}
            parser.set_defaults({**shown, "optimizer": self._sections.get("optimizer")})
            parser.parse_args(words)
        if self.source:
            given = parser.parse_given(words)
            return RunConfig.of_checkpoint(self.source, given.get("model", {}).get("attn")).merged(given)
        if self.resumed:
            self._require_unchanged(given := parser.parse_given(words))
            return RunConfig.of(paths, parser.parse_all([], self._sections)).merged(given)
        config = RunConfig.of(paths, parser.parse_all(words, self._sections))
        if self.checkpoint:
            return replace(config, ckpt_path=str(self.checkpoint.path))
        if config.ckpt_path is not None:
            self.checkpoint = Checkpoint(config.ckpt_path)
        return config

    def _add_flags(self, parser: SettingsParser) -> None:
        """Add the settings, and the flags that are no setting, for their help."""
        parser.add_argument("-c", "--config", action=ActionConfigFile)
        parser.add_settings(self._classes)
        known = {action.dest: action for action in parser._actions}
        for flag, text in RUN_FLAGS.items():
            if (action := known.get(flag[2:])) is not None:
                action.help = text
            else:
                parser.add_argument(flag, help=text)

    def _require_unchanged(self, given: Sections) -> None:
        may_differ = {"enable_progress_bar", *self._classes["data"].path_settings}
        for section, values in given.items():
            for name in values if section in (*SECTIONS, "trainer") else [section]:
                if name not in may_differ:
                    raise UserError(
                        f"--resume {self.resumed}: a resumed run keeps its settings: drop --{name}, or start a new run "
                        f"from --ckpt_path {shell_word(last_checkpoint(self.resumed or Path()))}"
                    )


def _run_to_resume(named: str, command: str) -> Path:
    if command != "fit":
        raise UserError(f"--resume {named}: only fit resumes a run; {command} takes --ckpt_path")
    return run_folder(named, "--resume ").resolve()
