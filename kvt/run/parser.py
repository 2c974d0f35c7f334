"""Parses the settings of a run, with their types from the signatures of the task, its data and the Trainer."""

import json
import re
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal, NoReturn

import lightning as L
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from kvt.run.sections import BUILT, OTHERS, Config
from kvt.system import (
    UserError,
    argument_defaults,
    argument_names,
    require_finite,
    require_positive,
    require_seed,
    with_nearest,
)
from kvt.tasks.datamodule import classes_of

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20}
"""The Trainer settings for which kvt has other defaults than Lightning."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive. The Trainer accepts other values."""
LOGGERS = ("tensorboard", "csv", "none")
"""The names that --logger accepts."""
LoggerSetting = Literal[LOGGERS] | list[Literal[LOGGERS]] | bool | Logger | list[Logger] | None  # type: ignore[valid-type]
HELP = {
    "config": "name of a task, such as cifar10, or path of a YAML file; a second file overrides the first",
    "model": "import path of your task class, such as my_task.MyTask",
    "data": "import path of your data class, such as my_task.MyData",
    "trainer": SUPPRESS,
    "trainer.logger": """tensorboard, csv, none, or a list of these such as [tensorboard,csv], which write their files
        into the run's folder; or a Lightning logger class such as WandbLogger, or a class of your own, with arguments
        such as --logger.project kvt""",
    "seed_everything": "seed of the split and of all randomness",
    "compile": """whether to compile the model with torch.compile: training starts about a minute later, and each step
        launches fewer kernels; on a GPU it uses CUDA graphs. Not available for translation""",
    "threads": """number of CPU threads, at most the number of cores. Default: one for a model with less than a million
        parameters, else torch's number. The number affects the last digits of results""",
    "optimizer": """import path of the optimiser's class, such as torch.optim.AdamW or a class of your own; default:
        Adam. Its arguments are flags such as --optimizer.weight_decay 0.1. --lr sets the learning rate, and the task
        sets the schedule""",
    "ckpt_path": "path to a checkpoint to measure, or to continue training from in a new run",
    "resume": "folder of a stopped run to resume; the result is the same as without the stop",
}
"""A dict that maps a flag without its dashes to the flag's help."""


class Parser(LightningArgumentParser):
    """A parser of the settings of a run, with full names, --model.lr, and short names, --lr. It raises UserError."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError. For an unknown flag, the message suggests the most similar flag."""
        raise UserError(with_nearest(" ".join(message.split()), self._option_string_actions)) from ex

    def add_settings(self, classes: Mapping[str, Any]) -> None:
        """Add the settings of the Trainer, of the task, of its data and of the optimiser, with short names."""
        self.add_argument("--seed_everything", type=int, default=0)
        for section, cls in classes.items():
            self.add_class_arguments(cls, section, fail_untyped=False, sub_configs=True)
        if classes:
            if "spec" in argument_names(classes["model"]):
                self.link_arguments("data.spec", "model.spec", apply_on="instantiate")
            if "seed" in argument_names(classes["data"]):
                self.link_arguments("seed_everything", "data.seed")
        self.add_class_arguments(L.Trainer, "trainer", fail_untyped=False, instantiate=False, skip={"logger"})
        self.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
        self.add_argument("--trainer.logger", type=LoggerSetting, default="tensorboard")
        self.add_argument("--compile", type=bool, default=False)
        self.add_argument("--threads", type=int | None, default=None)
        skip: Any = {"params", "lr"}
        how: Any = {"skip": skip, "required": False, "instantiate": False}
        self.add_subclass_arguments(Optimizer, "optimizer", **how)
        self.add_argument("--ckpt_path", type=str | None, default=None)
        options = self._option_string_actions
        for action in self._actions:
            group, dot, name = action.dest.partition(".")
            short = f"--{name}" if dot and "." not in name else "--seed" if group == "seed_everything" else None
            if action.dest in HELP:  # jsonargparse says that --model and --data name files to read
                action.help = HELP[action.dest]
            if short and short not in options:
                names = [short, f"{short}+"] if f"--{action.dest}+" in options else [short]
                action.option_strings = [*names, *action.option_strings]
                options |= dict.fromkeys(names, action)

    def content(self, parsed: Namespace) -> Config:
        """Return settings by section, as plain data, without default arguments of the optimiser and of callbacks."""
        content: Config = json.loads(json.dumps(parsed.as_dict(), default=_plain))
        for section, linked in (("", "config"), ("model", "spec"), ("data", "seed")):
            content.get(section, content).pop(linked, None)
        for group, name in [(content, "optimizer"), (content.get("trainer", {}), "callbacks")]:
            if group.get(name):
                group[name] = without_defaults(group[name])
        return content


@cache
def settings_parser(**classes: Any) -> Parser:
    """Return a parser of the settings of a run; a required setting may be missing.

    `classes` has the class of the task, "model", and of its data, "data". Without classes, the parser lacks the
    settings of task and data.
    """
    parser = Parser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_settings(classes)
    for action in parser._actions:
        action.required = False
    return parser


def parse(parser: Parser, config: Config, words: Sequence[str] = ()) -> tuple[Namespace, Config]:
    """Return parsed settings, and all settings in the form of config.yaml.

    Args:
        parser: the parser.
        config: a configuration in the form of config.yaml; settings that it lacks get their defaults.
        words: flags, which override the configuration.
    """
    given = config | {name: config[name]["init_args"] for name in BUILT}
    parsed = parser.parse_args(["--config", json.dumps(given), *words])
    content = {**{name: {} for name in BUILT}, **parser.content(parsed)}  # a class may have no arguments
    content |= {name: {"class_path": config[name]["class_path"], "init_args": content[name]} for name in BUILT}
    require_settings(content)
    return parsed, {name: content[name] for name in (*OTHERS[:-1], "trainer", *BUILT, "ckpt_path")}


def parse_config(config: Config, words: Sequence[str] = ()) -> Config:
    """Return a configuration with the defaults of all settings that it lacks, and values of their declared types."""
    return parse(settings_parser(**classes_of(config)), config, words)[1]


def parse_settings(classes: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Return settings by section, with values of their declared types. `settings` has the names of flags, such as lr.

    Raises UserError for an unknown name, and for a value of another type.
    """
    parser = settings_parser(**classes)
    known = {option[2:]: action.dest for option, action in parser._option_string_actions.items()}
    sections: Config = {}
    for name, value in json.loads(json.dumps(settings, default=_plain)).items():
        section, dot, setting = known.get(name, "").partition(".")
        if dot:
            sections.setdefault(section, {})[setting] = value
        elif section in OTHERS:
            sections[section] = value
        else:
            near = get_close_matches(name, [one for one in known if "." not in one], n=3, cutoff=0)
            raise UserError(f"unknown setting {name!r}: the nearest are {', '.join(near)}")
    parsed = parser.content(parser.parse_object({"seed_everything": 0, **sections}, defaults=False))
    for section in sections.keys() & {*BUILT}:  # the parser accepts None for every type
        for name, value in parsed[section].items():
            if value is None and default_settings(classes)[section].get(name) is not None:
                raise UserError(f"{name}=None: expected a value")
    return {name: parsed[name] for name in sections}


def default_settings(classes: Mapping[str, Any]) -> Config:
    """Return the defaults of all settings by section."""
    parser = settings_parser(**classes)
    return parser.content(parser.get_defaults())


def without_defaults(named: Any) -> Any:
    """Return a class, {"class_path": …, "init_args": …}, or a list of them, without arguments that equal defaults."""
    if isinstance(named, list):
        return [*map(without_defaults, named)]
    given, defaults = named.get("init_args", {}).items(), argument_defaults(resolve_name(named["class_path"]))
    usual = json.loads(json.dumps({name: defaults[name] for name, _ in given if name in defaults}, default=_plain))
    return named | {"init_args": {name: value for name, value in given if value != usual.get(name)}}


def _plain(value: Any) -> Any:
    """Return a NumPy number or array as a Python number or list, and any other object as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def require_settings(config: Mapping[str, Any]) -> None:
    """Raise UserError for values that parser and Trainer accept, but not a run.

    A run rejects numbers that are not finite or not positive, and strategies that kvt does not support.
    """
    require_seed(config["seed_everything"])
    trainer = config["trainer"]
    for section in (trainer, *(config[name]["init_args"] for name in BUILT)):
        require_finite(**{f"--{name}": value for name, value in section.items()})
    given = {f"--{name}": trainer.get(name) for name in POSITIVE} | {"--threads": config["threads"]}
    require_positive(**{name: value for name, value in given.items() if isinstance(value, int | float)})
    strategy = str(trainer.get("strategy"))
    if re.search("spawn|fork|notebook|ModelParallel|sharded|fsdp|deepspeed", strategy, re.IGNORECASE):
        raise UserError(f"--strategy {strategy}: each process must run the script and hold the whole model: choose ddp")
