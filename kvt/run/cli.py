"""`KvtCLI`: a `LightningCLI` that starts from a configuration, with short flags (--lr for --model.lr)."""

import json
import re
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal

import lightning as L
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from kvt.run.load_checkpoint import Checkpoint
from kvt.run.sections import BUILT, GROUPS, ORDER, OTHERS, Config
from kvt.system import OneLineParser, UserError, arguments, require_positive
from kvt.tasks.datamodule import classes_of
from kvt.tune import tune

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20}
"""Defaults of Trainer settings that differ from Lightning's. `settings_parser` sets the default of `logger`."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive if they are numbers. The Trainer would also accept other numbers."""
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
"""Maps a flag without its dashes to the flag's help."""


class KvtCLI(LightningCLI):
    """Parses a configuration and flags of a command line, and makes the data (`datamodule`) and the task (`model`).

    Args:
        config: the configuration, in the form of config.yaml.
        words: flags, which override the configuration.
        checkpoint: the checkpoint from which `config` was read, or None.
        texts: prog, usage and description for --help.

    Attributes:
        content: the configuration with all settings, as in config.yaml.
        start: the checkpoint to measure or to start training from: `checkpoint`, else that at `ckpt_path`, else None.
    """

    def __init__(
        self, config: Config, words: Sequence[str] = (), checkpoint: Checkpoint | None = None, **texts: Any
    ) -> None:
        tune()
        self.given, self.checkpoint, self.texts, classes = config, checkpoint, texts, classes_of(config)
        how: Any = {"auto_configure_optimizers": False, "load_from_checkpoint_support": False, "run": False}
        super().__init__(classes["model"], classes["data"], save_config_callback=None, args=[*words], **how)

    def setup_parser(self, *_: Any) -> None:
        self.parser = settings_parser({"model": self.model_class, "data": self.datamodule_class}, **self.texts)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        if {"-h", "--help"} & {*args}:  # the help shows the values of the configuration as defaults
            groups = self.given | {name: self.given[name]["init_args"] for name in BUILT}
            values = [(f"{group}.{name}", value) for group in GROUPS for name, value in groups.get(group, {}).items()]
            parser.set_defaults({name: value for name, value in values if not isinstance(value, dict)})
        self.config, self.content = parse(parser, self.given, args)

    def instantiate_classes(self) -> None:
        """Make data and task. `make_trainer` makes the Trainer later, because its callbacks depend on the task."""
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule, self.model = self.config_init.data, self.config_init.model
        self.model.run_config = self.content
        path = self.content["ckpt_path"]
        self.start = self.checkpoint or (None if path is None else Checkpoint(path))


class Parser(OneLineParser, LightningArgumentParser):
    """A parser of the settings of a run."""


def settings_parser(classes: Mapping[str, Any], **texts: Any) -> Parser:
    """Return a parser of all settings of a run.

    Args:
        classes: {"model": the task's class, "data": the data's class}; if empty, the parser lacks their settings.
        texts: prog, usage and description for --help.
    """
    parser = Parser(exit_on_error=False, allow_abbrev=False, **texts)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_argument("--seed_everything", type=int, default=0)
    for section, cls in classes.items():
        parser.add_class_arguments(cls, section, fail_untyped=False, sub_configs=True)
    known = {action.dest for action in parser._actions}
    if "model.spec" in known:
        parser.link_arguments("data.spec", "model.spec", apply_on="instantiate")
    if "data.seed" in known:
        parser.link_arguments("seed_everything", "data.seed")
    parser.add_class_arguments(L.Trainer, "trainer", fail_untyped=False, instantiate=False, skip={"logger"})
    parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
    parser.add_argument("--trainer.logger", type=LoggerSetting, default="tensorboard")
    parser.add_argument("--compile", type=bool, default=False)
    parser.add_argument("--threads", type=int | None, default=None)
    how: Any = {"skip": {"params", "lr"}, "required": False, "instantiate": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", **how)
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    options = parser._option_string_actions
    for action in parser._actions:
        group, dot, name = action.dest.partition(".")
        short = f"--{name}" if dot and "." not in name else "--seed" if group == "seed_everything" else None
        if action.dest in HELP:  # jsonargparse's help says that --model and --data are files to read
            action.help = HELP[action.dest]
        if short and short not in options:
            names = [short, f"{short}+"] if f"--{action.dest}+" in options else [short]
            action.option_strings = [*names, *action.option_strings]
            options |= dict.fromkeys(names, action)
    return parser


def parse(parser: Parser, config: Config, words: Sequence[str] = ()) -> tuple[Namespace, Config]:
    """Return the parsed settings, and the same settings as plain data in the form of config.yaml.

    Raises UserError for unknown settings, values of a wrong type, and values that kvt does not accept.

    Args:
        parser: a parser from `settings_parser`.
        config: a configuration in the form of config.yaml; settings that it lacks get their defaults.
        words: flags, which override the configuration.
    """
    given = config | {name: config[name]["init_args"] for name in BUILT}
    parsed = parser.parse_args(["--config", json.dumps(given, default=_plain), *words])
    content = {**{name: {} for name in BUILT}, **by_section(parsed)}  # a class may have no arguments
    content |= {name: {"class_path": config[name]["class_path"], "init_args": content[name]} for name in BUILT}
    seed, trainer = content["seed_everything"], content["trainer"]
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: expected int from 0 to {2**32 - 1}")
    numbers = {f"--{name}": trainer[name] for name in POSITIVE} | {"--threads": content["threads"]}
    require_positive(**{name: value for name, value in numbers.items() if isinstance(value, int | float)})
    if re.search("spawn|fork|notebook|ModelParallel|sharded|fsdp|deepspeed", str(trainer["strategy"]), re.IGNORECASE):
        needs = "each process must run the script and hold the whole model"
        raise UserError(f"--strategy {trainer['strategy']}: {needs}: choose ddp")
    return parsed, {name: content[name] for name in ORDER}


def by_section(parsed: Namespace) -> Config:
    """Return settings by section as plain data.

    The result lacks model.spec, data.seed, and the default arguments of the optimiser and of callbacks.
    """
    content: Config = json.loads(json.dumps(parsed.as_dict(), default=_plain))
    for section, linked in (("", "config"), ("model", "spec"), ("data", "seed")):
        content.get(section, content).pop(linked, None)
    for group, name in [(content, "optimizer"), (content.get("trainer", {}), "callbacks")]:
        if group.get(name):
            group[name] = without_defaults(group[name])
    return content


@cache
def _known_parser(**classes: Any) -> Parser:
    parser = settings_parser(classes)
    for action in parser._actions:
        action.required = False
    return parser


def parse_config(config: Config, words: Sequence[str] = ()) -> Config:
    """Return `config`, overridden by the flags `words` and completed by defaults; raise UserError if `parse` does."""
    return parse(_known_parser(**classes_of(config)), config, words)[1]


def default_settings(classes: Mapping[str, Any]) -> Config:
    """Return the defaults of all settings of a run by section, for `classes` as in `settings_parser`."""
    return by_section(_known_parser(**classes).get_defaults())


def typed_settings(classes: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Convert settings to their declared types, and group them by section: {"lr": 0.1} → {"model": {"lr": 0.1}}.

    Raises UserError for an unknown name, and for a value of a wrong type.
    """
    parser = _known_parser(**classes)
    known = {option[2:]: action.dest for option, action in parser._option_string_actions.items()}
    sections: Config = {}
    for name, value in json.loads(json.dumps(settings, default=_plain)).items():
        section, dot, setting = known.get(name, "").partition(".")
        if not dot and section not in OTHERS:
            near = get_close_matches(name, [one for one in known if "." not in one], n=3, cutoff=0)
            raise UserError(f"unknown setting {name!r}: the nearest are {', '.join(near)}")
        group, key = (sections.setdefault(section, {}), setting) if dot else (sections, section)
        group[key] = value
    parsed = by_section(parser.parse_object({"seed_everything": 0, **sections}, defaults=False))
    return {name: parsed[name] for name in sections}


def without_defaults(named: Any) -> Any:
    """Return a class, {"class_path": …, "init_args": …}, or a list of classes, with only non-default arguments."""
    if isinstance(named, list):
        return [*map(without_defaults, named)]
    given, defaults = named.get("init_args", {}), arguments(resolve_name(named["class_path"]))
    usual = json.loads(json.dumps({name: defaults.get(name) for name in given}, default=_plain))
    return named | {"init_args": {name: value for name, value in given.items() if value != usual[name]}}


def _plain(value: Any) -> Any:
    """Return an object with `tolist`, such as a NumPy array, as a number or list, and any other object as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
