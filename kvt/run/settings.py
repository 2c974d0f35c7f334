"""The parser of a run's settings, with types from the signatures of the task, its data and the Trainer."""

import re
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import signature
from pkgutil import resolve_name
from typing import Any, Literal

import lightning as L
from jsonargparse import ActionConfigFile
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from kvt.run.sections import BUILT, GIVEN, GROUPS, KEPT, OTHERS, RUN_FLAGS, TRAINER_DEFAULTS, Sections, plain
from kvt.system.console import OneLineParser
from kvt.system.errors import UserError, argument_types, require_finite, require_positive, require_seed
from kvt.tasks import Task, TaskData

SECTIONS: dict[str, type[Any]] = dict(zip(BUILT, (Task, TaskData), strict=True))
"""A dict that maps each section in `BUILT` to the base class that its class must have."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive. The Trainer accepts other values."""
REFUSED: dict[type[L.Callback], tuple[str, str]] = {
    theirs.LearningRateFinder: (
        "the run would record another learning rate than it trains with",
        "pass --lr, or compare learning rates with kvt study",
    ),
    theirs.BatchSizeFinder: (
        "the run would record another batch size than it trains with",
        "pass --batch_size, or compare batch sizes with kvt study",
    ),
    theirs.GradientAccumulationScheduler: (
        "the learning-rate schedule would span another number of steps than the run has",
        "pass --accumulate_grad_batches",
    ),
    theirs.StochasticWeightAveraging: (
        "no checkpoint would hold the averaged weights, and no result would be measured with them",
        "choose EMAWeightAveraging",
    ),
    theirs.ModelPruning: (
        "it masks weights when their module is called, and models use some weights without that call",
        "prune the trained model, kvt.load(checkpoint)",
    ),
    theirs.SpikeDetection: (
        "it cannot read its own state, so that the run could not be resumed",
        "choose EarlyStopping with divergence_threshold",
    ),
    theirs.BaseFinetuning: (
        "a resumed run would not train the weights that it has unfrozen",
        "freeze weights with requires_grad_(False) in a task of your own",
    ),
}
"""A dict of Lightning callbacks that kvt rejects, because a run would differ from its record: (reason, remedy)."""
LOGGERS = ("tensorboard", "csv", "none")
"""The names that --logger accepts."""
LoggerSetting = Literal[LOGGERS] | list[Literal[LOGGERS]] | bool | Logger | list[Logger] | None  # type: ignore[valid-type]
LOGGER_HELP = """tensorboard, csv, none, or a list of these such as [tensorboard,csv], which write their files into the
run's folder; or a Lightning logger class such as WandbLogger, or a class of your own, with arguments such as
--logger.project kvt"""
OPTIMIZER_HELP = """import path of the optimiser's class, such as torch.optim.AdamW or a class of your own; default:
Adam. Its arguments are flags such as --optimizer.weight_decay 0.1. --lr sets the learning rate, and the task sets the
schedule"""
ACCUMULATE_HELP = """The gradient is the mean over batches. If batches differ in their number of predictions, as in
translation, this mean differs from the gradient of one large batch"""
COMPILE_HELP = """whether to compile the model with torch.compile: training starts about a minute later, and each step
launches fewer kernels; on a GPU it uses CUDA graphs. Not available for translation"""
THREADS_HELP = """number of CPU threads, at most the number of cores. Default: one for a model with less than a million
parameters, else torch's number. The number affects the last digits of results"""


class SettingsParser(OneLineParser, LightningArgumentParser):
    """A parser for settings of Trainer, model and data, with full names, --model.lr, and short names, --lr."""

    def add_settings(self, classes: Mapping[str, type[Any]]) -> None:
        """Add the settings of the run, of the Trainer and of the task's and data's classes, with short names."""
        self.add_argument("-c", "--config", action=ActionConfigFile, help=RUN_FLAGS["--config"])
        for section, cls in classes.items():
            skip = GIVEN & argument_types(cls).keys()
            self.add_class_arguments(cls, section, instantiate=False, skip=skip)
        skip = {"logger"}
        self.add_class_arguments(L.Trainer, "trainer", fail_untyped=False, instantiate=False, skip=skip)
        self.add_argument("--seed_everything", type=int, default=0, help="seed of the split and of all randomness")
        self.add_argument("--trainer.logger", type=LoggerSetting, default="tensorboard", help=LOGGER_HELP)
        self.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
        self.add_argument("--threads", type=int | None, default=None, help=THREADS_HELP)
        self.add_subclass_arguments(
            Optimizer, "optimizer", skip={"params", "lr"}, required=False, instantiate=False, help=OPTIMIZER_HELP
        )
        self.add_argument("--ckpt_path", type=str | None, default=None, help=RUN_FLAGS["--ckpt_path"])
        for flag in ("--resume", *(f"--{name}" for name in BUILT if name not in classes)):
            self.add_argument(flag, help=RUN_FLAGS[flag])
        accumulate = self._option_string_actions["--trainer.accumulate_grad_batches"]
        accumulate.help = f"{accumulate.help} {ACCUMULATE_HELP}"
        self.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})
        options = self._option_string_actions
        for action in self._actions:
            _, dot, name = action.dest.partition(".")
            bare = "--seed" if action.dest == "seed_everything" else f"--{name}"
            if ((dot and "." not in name) or bare == "--seed") and bare not in options:
                names = [bare, f"{bare}+"] if f"--{action.dest}+" in options else [bare]
                action.option_strings = [*names, *action.option_strings]
                options |= dict.fromkeys(names, action)
            elif action.dest in GROUPS:  # in jsonargparse, this flag names a file to read
                action.help, action.metavar = RUN_FLAGS.get(f"--{action.dest}", SUPPRESS), "CLASS"

    def parse_given(self, settings: list[str] | Mapping[str, Any]) -> Sections:
        """Return the given settings, words or sections, without defaults. Required settings may be missing."""
        return _short(self._parse_given(settings).as_dict())

    def parse_all(self, words: list[str], sections: Mapping[str, Any]) -> Sections:
        """Return all settings, with values from `words`, else from `sections`, else with default values."""
        return _short(self.parse_args(words, namespace=self._parse_given(sections)).as_dict())

    def _parse_given(self, settings: list[str] | Mapping[str, Any]) -> Any:
        required = [action for action in self._actions if action.required]
        parse: Any = self.parse_args if isinstance(settings, list) else self.parse_object
        settings = plain(settings)
        try:
            for action in required:
                action.required = False
            return parse(settings, defaults=False)
        finally:
            for action in required:
                action.required = True

    def by_section(self, settings: Mapping[str, Any]) -> Sections:
        """Return settings by section. `settings` has short names, such as lr; raise UserError for unknown names."""
        sections: Sections = {}
        options = [item for item in self._option_string_actions.items() if not item[0].endswith("+")]
        known = {option[2:]: one for option, one in options if "." in one.dest or one.dest in OTHERS}
        for name, value in settings.items():
            if (action := known.get(name)) is None:
                nearest = get_close_matches(name, sorted(name for name in known if "." not in name), n=3, cutoff=0)
                raise UserError(f"unknown setting {name!r}: the nearest are {', '.join(nearest)}")
            section, dot, setting = action.dest.partition(".")
            if dot:
                sections.setdefault(section, {})[setting] = value
            else:
                sections[section] = value
        return sections


def _short(parsed: Mapping[str, Any]) -> Sections:
    """Return sections as plain data. Arguments of the optimiser that equal their defaults are left out."""
    sections: Sections = plain(parsed)
    if sections.get("optimizer"):
        sections["optimizer"] = without_defaults(sections["optimizer"])
    return sections


def without_defaults(named: Any) -> Any:
    """Return a class, {"class_path": …, "init_args": …}, or a list of them, without arguments that equal defaults."""
    if isinstance(named, list):
        return [*map(without_defaults, named)]
    given = named.get("init_args", {}).items()
    makers = [vars(base).get("__init__") for base in reversed(resolve_name(named["class_path"]).__mro__)]
    defaults = {p.name: p.default for make in makers if make for p in signature(make).parameters.values()}
    usual = {name: plain(defaults[name]) for name, _ in given if name in defaults}
    return named | {"init_args": {name: value for name, value in given if value != usual.get(name)}}


def settings_parser(**classes: type[Any]) -> SettingsParser:
    """Return the parser of all settings of a run. `classes` has the classes of task and data, by section."""
    return _settings_parser(*classes.items())


@cache
def _settings_parser(*classes: tuple[str, type[Any]]) -> SettingsParser:
    parser = SettingsParser(exit_on_error=False, allow_abbrev=False)
    parser.add_settings(dict(classes))
    return parser


def trainer_objects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of objects for the Trainer settings that name a class, {"class_path": …, "init_args": …}.

    An object gets a copy of its arguments, and may change this copy.
    """
    named = plain({name: value for name, value in settings.items() if _names_class(value)})
    if not named:
        return {}
    parser = settings_parser()
    made = parser.instantiate_classes(parser.parse_object({"trainer": named}, defaults=False))
    return {name: made.trainer[name] for name in named}


def _names_class(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_names_class, value))
    return isinstance(value, Mapping) and "class_path" in value


def require_callbacks(callbacks: Iterable[L.Callback]) -> None:
    """Raise UserError if the class of a callback is in `REFUSED`, or has a base class in `REFUSED`."""
    for callback in callbacks:
        for cls, (reason, remedy) in REFUSED.items():
            if isinstance(callback, cls):
                name = type(callback).__name__
                named = name if type(callback) is cls else f"{name}, a {cls.__name__}"
                raise UserError(f"--callbacks {named}: {reason}: {remedy}")


def kept_settings(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer settings that checkpoints keep."""
    return {name: value for name, value in {**TRAINER_DEFAULTS, **trainer}.items() if name in KEPT}


def require_settings(sections: Mapping[str, Any]) -> None:
    """Raise UserError for values that parser and Trainer accept, but not a run.

    A run rejects numbers that are not finite or not positive, and strategies that kvt does not support.
    """
    require_seed(sections["seed_everything"])
    trainer = sections["trainer"]
    for section in (trainer, sections["model"], sections["data"]):
        require_finite(**{f"--{name}": value for name, value in section.items()})
    given = {f"--{name}": trainer.get(name) for name in POSITIVE} | {"--threads": sections["threads"]}
    require_positive(**{name: value for name, value in given.items() if isinstance(value, int | float)})
    if trainer.get("barebones"):
        remedy = "drop it, or pass --enable_checkpointing false --enable_progress_bar false --logger none"
        raise UserError(f"--barebones true: a run must log, and save its best weights: {remedy}")
    strategy = str(trainer.get("strategy"))
    if re.search("spawn|fork|notebook", strategy):
        raise UserError(f"--strategy {strategy}: spawn strategies are not supported: choose ddp")
    if re.search("ModelParallel|sharded|fsdp|deepspeed", strategy, re.IGNORECASE):
        raise UserError(f"--strategy {strategy}: each process must hold the whole model: choose ddp")
