"""Flags that say which run a command is about, and where its settings come from: YAML files, a checkpoint, a run."""

import os
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from kvt.system.console import OneLineParser
from kvt.system.errors import UserError, argument_types, require_finite, require_positive, require_seed, unknown
from kvt.system.files import CONFIGS, find_yaml, parse_yaml, read_yaml, user_path
from kvt.tasks.base import find_class
from kvt.training.load_checkpoint import SECTIONS, Checkpoint
from kvt.training.run_dir import last_checkpoint

RUN_FLAGS = {
    "--config": "a task's YAML, such as cifar10 or a file of your own; given twice, the later one wins",
    "--ckpt_path": "a checkpoint to use, or to continue training from",
    "--resume": "the folder of a stopped run to resume exactly",
    "--model": "a task class of your own, such as my_task.MyTask",
    "--data": "a data class of your own, such as my_task.MyData",
}
"""The flags that say which run a command is about, with their help."""
SCALARS = ("seed_everything", "compile", "ckpt_path")
"""What a YAML may say besides its sections."""
FROM_ELSEWHERE = {"spec", "seed"}
"""Arguments of a task and its data that come from the data and from --seed."""

POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive, which the Trainer does not check."""


def split_flags(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split words into the values of `RUN_FLAGS` and the words that are settings.

    >>> flags, rest = split_flags(["--config", "cifar10", "--attn", "kv", "--resume=run"])
    >>> flags.config, flags.resume, rest
    (['cifar10'], 'run', ['--attn', 'kv'])
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    for flag in [*RUN_FLAGS][1:]:
        parser.add_argument(flag)
    parser.add_argument("--print_config", action="store_true")
    return parser.parse_known_args(words)


@dataclass(frozen=True)
class RunSource:
    """The classes and the settings of a run, before the settings on the command line.

    Attributes:
        classes: of the task and its data, by section: "model", "data".
        settings: from YAML files: {"model": {"lr": 0.001}, "trainer": {"max_epochs": 2}, "seed_everything": 1}.
        ckpt_path: the checkpoint to use, if there is one.
        checkpoint: the same, if it describes the run in place of YAML files.
        resumed: the folder of the run to resume, if it is one.
    """

    classes: Mapping[str, type[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ckpt_path: str | None = None
    checkpoint: Checkpoint | None = None
    resumed: Path | None = None


def find_source(flags: Namespace, command: str) -> RunSource | None:
    """Return where a command's settings come from, None if the flags do not say."""
    named = {"model": flags.model, "data": flags.data}
    if flags.resume is not None:
        return _resumed(flags, command)
    if flags.ckpt_path is not None and not flags.config:
        checkpoint = Checkpoint(flags.ckpt_path, named)
        return RunSource(checkpoint.classes, ckpt_path=flags.ckpt_path, checkpoint=checkpoint)
    return _from_files(flags.config, named, flags.ckpt_path)


def _resumed(flags: Namespace, command: str) -> RunSource | None:
    for name in ("config", "ckpt_path", "model", "data"):
        if getattr(flags, name):
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings and checkpoint: drop --{name}")
    if command != "fit":
        raise UserError(f"--resume {flags.resume}: only fit resumes a run; {command} takes --ckpt_path")
    run = user_path(flags.resume).resolve()
    if not (run / "config.yaml").is_file():
        raise UserError(f"--resume {flags.resume}: not a run folder, such as lightning_logs/reverse/kv/version_0")
    last = last_checkpoint(run)
    return _from_files([str(run / "config.yaml")], {}, str(last) if last.exists() else None, run)


def _from_files(
    configs: Sequence[str], named: Mapping[str, str | None], ckpt_path: str | None, resumed: Path | None = None
) -> RunSource | None:
    """Merge YAML files; a class on the command line replaces theirs, and takes those settings that it knows."""
    settings: dict[str, Any] = {}
    class_paths: dict[str, str] = {}
    for config in configs:
        for section, values in read_config(config).items():
            if section in SCALARS:
                settings[section] = values
                continue
            if section in SECTIONS:
                values = {"class_path": values} if isinstance(values, str) else values
                class_path, values = values.get("class_path"), values.get("init_args") or {}
                if not (isinstance(class_path, str | None) and isinstance(values, dict)):
                    raise UserError(f"--config {config:.200}: {section}: expected class_path and init_args")
                class_paths |= {section: class_path} if class_path else {}
            settings[section] = settings.get(section, {}) | values
    own = {section: class_path for section, class_path in named.items() if class_path is not None}
    class_paths |= own
    if class_paths.keys() != SECTIONS.keys():
        return None
    classes = {section: find_class(path, section, SECTIONS[section]) for section, path in class_paths.items()}
    for section, cls in classes.items():
        takes, given = argument_types(cls), settings.get(section, {})
        if section not in own and (strange := given.keys() - takes.keys()):
            raise unknown(f"{section} setting of --config {configs[-1]:.200}:", min(strange), sorted(takes))
        settings[section] = {name: given[name] for name in given if name in takes and name not in FROM_ELSEWHERE}
    in_files = settings.pop("ckpt_path", None)
    return RunSource(classes, settings, ckpt_path or in_files, resumed=resumed)


def read_config(config: str) -> dict[str, Any]:
    """Return the sections of a configuration: a YAML file, the name of a packaged one, or YAML text.

    Raises:
        UserError: there is no such file, or it has no such sections.
    """
    try:
        if "\n" in config and not os.path.isfile(config):
            content = parse_yaml(config, "--config")
        else:
            content = read_yaml(find_yaml(config, CONFIGS), f"--config {config}")
    except FileNotFoundError as error:
        raise UserError(f"--config {config}: no such file") from error
    mappings = isinstance(content, dict) and all(
        isinstance(part, dict) or (name in SECTIONS and isinstance(part, str))
        for name, part in content.items()
        if name not in SCALARS
    )
    if not mappings:
        raise UserError(f"--config {config:.200}: expected sections such as model:, data: and trainer:")
    if strange := [name for name in content if name not in (*SECTIONS, *SCALARS, "trainer")]:
        raise unknown(f"section of --config {config:.200}:", strange[0], [*SECTIONS, "trainer", *SCALARS])
    return content


class SettingsParser(OneLineParser, LightningArgumentParser):
    """Parses the settings of Trainer, model and data, each by its full and by its bare name."""

    def add_bare_names(self) -> None:
        """Let every setting be given by its own name: --attn for --model.attn, --seed for --seed_everything."""
        known = self._option_string_actions
        for action in self._actions:
            _, dot, name = action.dest.partition(".")
            bare = "--seed" if action.dest == "seed_everything" else f"--{name}"
            if ((dot and "." not in name) or bare == "--seed") and bare not in known:
                action.option_strings = [bare, *action.option_strings]
                known[bare] = action
            elif action.dest in ("model", "data", "trainer"):  # jsonargparse would read a file for the section
                action.help, action.metavar = RUN_FLAGS.get(f"--{action.dest}", SUPPRESS), "CLASS"

    def parse_given(self, settings: list[str] | dict[str, Any]) -> Any:
        """Parse words or a mapping without defaults, and without what else is required."""
        required = [action for action in self._actions if action.required]
        parse: Any = self.parse_args if isinstance(settings, list) else self.parse_object
        try:
            for action in required:
                action.required = False
            return parse(settings, defaults=False)
        finally:
            for action in required:
                action.required = True


def require_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for numbers that their types and the Trainer let pass: not finite, not positive, too many."""
    require_seed(settings["seed_everything"])
    trainer = settings["trainer"]
    for section in (trainer, settings.get("model", {}), settings.get("data", {})):
        require_finite(**{f"--{name}": value for name, value in section.items()})
    positive = {f"--{name}": trainer[name] for name in POSITIVE if isinstance(trainer[name], int | float)}
    require_positive(**positive)
    if re.search("spawn|fork|notebook", str(trainer["strategy"])):
        raise UserError(f"--strategy {trainer['strategy']}: spawn strategies are not supported: choose ddp")
