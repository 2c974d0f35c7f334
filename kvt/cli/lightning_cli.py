"""Executes run, fit, validate, test and predict with a configuration that is read from flags and YAML files."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import yaml

from kvt.run import fit as run
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig, bare, read_configs
from kvt.run.folder import LAST, run_folder
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.parser import parse_config, settings_parser
from kvt.run.sections import BUILT, Config
from kvt.system import OneLineParser, UserError, printable, read_json, silence_libraries, table, tell
from kvt.system import run as execute

TRAINING = ("run", "fit")
"""The commands that train. `run` also tests, and accepts the name of the task without --config."""
RUN_FLAGS = ("config", "ckpt_path", "resume", "model", "data")
"""The flags that choose a task, a checkpoint or a run."""


def experiment(script: str, description: str, choices: Sequence[str], option: str | None = None) -> None:
    """Train and test as `kvt run` does, with the flags of the command line and the tasks of a script.

    Args:
        script: `__file__` of the script.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs. The first name is the default.
        option: name of the flag that selects one of `choices`.
    """
    chosen = f"--{option} chooses among {', '.join(choices)}. " if option else ""
    texts = {"prog": f"python {Path(script).parent.name}/{Path(script).name}", "description": f"{description} {chosen}"}
    execute(lambda: run_words(["run", *sys.argv[1:]], choices, option, **texts))


def run_words(argv: Sequence[str], choices: Sequence[str] = (), option: str | None = None, **texts: str) -> None:
    """Execute the command `run`, `fit`, `validate`, `test` or `predict`.

    Args:
        argv: the command and its flags.
        choices: names of configurations that a script in experiments/ accepts; the first is the default.
        option: name of the flag that selects one of `choices`.
        texts: `prog` and `description` for `--help`.
    """
    silence_libraries()  # importing Lightning has reset its log levels
    command, *words = argv
    flags, words = _run_flags(command, words, choices, option)
    texts = {"prog": f"kvt {command}", "usage": "%(prog)s [flags]", **texts}
    if not (flags.config or flags.ckpt_path or flags.model) and {"-h", "--help"} & {*words}:
        (general := settings_parser()).prog = texts["prog"]
        general.print_help()
        return
    named = {"attn": flags.attn, "model": flags.model, "data": flags.data}
    resumed = flags.resume
    checkpoint = Checkpoint(flags.ckpt_path, named) if flags.ckpt_path is not None else None
    source = None if flags.config else checkpoint
    config = source.config if source else read_configs(flags.config, named)
    if checkpoint:
        config["ckpt_path"] = str(checkpoint.path)
    if command not in TRAINING:  # only the command's own flags limit the data that it measures
        limits = "limit_|overfit_batches|fast_dev_run"
        config["trainer"] = {name: value for name, value in config["trainer"].items() if not re.match(limits, name)}
    if flags.print_config:
        tell(yaml.safe_dump(parse_config(config, words), sort_keys=False), end="")
        return
    if resumed and read_json(resumed / "result.json") is not None:
        tell(f"{printable(os.path.relpath(resumed))} already finished; see result.json")
        return
    cli = KvtCLI(config, words, source, **texts)
    if resumed:
        _require_unchanged(resumed, config, cli)
    if command in TRAINING:
        _train(cli, resumed, tests=command == "run")
    elif path := {"validate": run.validate, "test": run.test, "predict": run.predict}[command](cli):
        tell(f"{'predictions' if command == 'predict' else 'metrics'} in {printable(os.path.relpath(path))}")


def _train(cli: KvtCLI, resumed: Path | None, tests: bool) -> None:
    """Train, and print the result with the paper's number for the same settings."""
    result = run.fit(cli, resumed, resume=resumed is not None, test=tests)
    if not result.metrics:
        return
    folder = {"run": os.path.relpath(result.folder)} if result.folder else {}
    tell(f"\n{table(result.metrics | cli.model.metric_notes | folder)}")
    from kvt.reports.paper import paper_of  # slow to import

    for metric, text in paper_of(cli.run_config, cli.datamodule.task_name):
        if metric in result.metrics:
            tell(text)
    if not tests and "test" in cli.datamodule.splits and result.checkpoint:
        named = f"{quote(os.path.relpath(result.checkpoint))}{cli.run_config.own_flags}"
        tell(f"not tested yet: kvt test --ckpt_path {named}")


def _run_flags(
    command: str, words: list[str], choices: Sequence[str], option: str | None
) -> tuple[Namespace, list[str]]:
    """Return the values of `RUN_FLAGS`, with `resume` as a path, and the remaining words of the command line."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    for flag in RUN_FLAGS[1:]:
        parser.add_argument(f"--{flag}")
    parser.add_argument("--attn", "--model.attn")
    parser.add_argument("--print_config", action="store_true")
    if option:
        parser.add_argument(f"--{option}", choices=choices)
    if words and not words[0].startswith("-"):
        if command != "run" or choices:
            raise UserError(f"{words[0]}: expected a flag: did you mean --config {words[0]}?")
        words.insert(0, "--config")
    flags, others = parser.parse_known_args(words)
    if flags.attn is not None:
        others.append(f"--attn={flags.attn}")
    if flags.resume is not None:
        if given := [name for name in ("config", "ckpt_path", *BUILT) if getattr(flags, name)]:
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings: drop --{given[0]}")
        if command not in TRAINING:
            raise UserError(f"--resume {flags.resume}: only run and fit resume a run; {command} takes --ckpt_path")
        flags.resume = run_folder(flags.resume, "--resume ").resolve()
        if (last := (flags.resume / LAST)).is_file():
            _ = Checkpoint(last, flag="--resume").saved  # an older version may have made the run
        flags.config = [str(flags.resume / "config.yaml")]
    elif choices:
        chosen = getattr(flags, option) if option else None
        if chosen or flags.ckpt_path is None:  # otherwise the checkpoint names the task
            flags.config.insert(0, chosen or choices[0])
    return flags, others


def _require_unchanged(resumed: Path, config: Config, cli: KvtCLI) -> None:
    """Raise UserError if flags change a setting of a run to resume, except paths, output and processes."""
    old, new = (RunConfig(**parts).flat for parts in (config, cli.run_config.as_dict()))
    free = {f"data.{name}" for name in cli.datamodule.path_settings}
    if changed := [name for name in new if name not in free and old.get(name) != new[name]]:
        remedy = f"start a new run from --ckpt_path {quote(str(resumed / LAST))}"
        raise UserError(f"--resume {resumed}: a resumed run keeps its settings: drop --{bare(changed[0])}, or {remedy}")
