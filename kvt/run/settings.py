"""The settings of a run, typed by the signatures of its task, its data and the Trainer.

jsonargparse reads them; besides the command line, only this file knows it.
"""

import re
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import signature
from pkgutil import resolve_name
from typing import Any, Literal

import lightning as L
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from kvt.run.sections import BUILT, CKPT_PATH_HELP, GIVEN, KEPT, OTHERS, TEACHER, TRAINER_DEFAULTS, Sections, plain
from kvt.system.console import OneLineParser
from kvt.system.errors import UserError, argument_types, require_finite, require_positive, require_seed
from kvt.tasks import Task, TaskData

SECTIONS: dict[str, type[Any]] = dict(zip(BUILT, (Task, TaskData), strict=True))
"""What the class that each of `BUILT` names must be derived from."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive, which the Trainer does not check."""
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
"""Lightning's callbacks with which a run is not what its record says: the reason, and what to do instead."""
LOGGERS = ("tensorboard", "csv", "wandb", "trackio", "mlflow", "none")
"""The names that --logger takes."""
LoggerSetting = Literal[LOGGERS] | list[Literal[LOGGERS]] | bool | Logger | list[Logger] | None  # type: ignore[valid-type]
LOGGER_HELP = """tensorboard, csv, wandb, trackio, mlflow, none, or a list of them, such as [tensorboard,csv]; or a
class of Lightning's. The files of a run lie in its folder with each of them"""
OPTIMIZER_HELP = """the class in place of Adam, such as torch.optim.AdamW, with its arguments as
--optimizer.weight_decay 0.1; or one of your own. The rate is --lr, the schedule the task's"""
ACCUMULATE_HELP = """Each batch counts alike: where batches differ in their number of predictions, as those of
translation do in words, the gradient differs from that of all of them as one"""
COMPILE_HELP = """whether torch compiles the model first: a minute's wait, then fewer launches a step, on a GPU a few
(CUDA graphs); not for translation"""
THREADS_HELP = """threads of the processor, at most as many as it has cores; default: measured when training starts, one
unless more are clearly faster then. A resumed run keeps their number, which decides the last digits of its result"""
TEACHER_HELP = {
    "teacher": """a run of the same task and data to learn from, its folder or a checkpoint, with any attention:
KL(teacher ‖ model) of the logits, in nats, the mean over predictions, is added to the loss of training, not to that
of validation. To resume, it must still be there, or --resume RUN --teacher NEW names its new place""",
    "teacher_temperature": """T: the logits of teacher and model are divided by T, and their divergence is multiplied by
T² (Hinton et al. 2015)""",
    "teacher_weight": "weight of the divergence from the teacher in the loss of training",
}


class SettingsParser(OneLineParser, LightningArgumentParser):
    """Parses the settings of Trainer, model and data, each by its full and by its bare name."""

    def add_settings(self, classes: Mapping[str, type[Any]]) -> None:
        """Add the settings of task and data by section, of the Trainer and of the run, with their bare names."""
        for section, cls in classes.items():
            skip = GIVEN & argument_types(cls).keys()
            self.add_class_arguments(cls, section, instantiate=False, skip=skip)
        skip = {"logger"}
        self.add_class_arguments(L.Trainer, "trainer", fail_untyped=False, instantiate=False, skip=skip)
        self.add_argument("--seed_everything", type=int, default=0, help="of the split, and of all randomness")
        self.add_argument("--trainer.logger", type=LoggerSetting, default="tensorboard", help=LOGGER_HELP)
        self.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
        self.add_argument("--threads", type=int | None, default=None, help=THREADS_HELP)
        self.add_subclass_arguments(
            Optimizer, "optimizer", skip={"params", "lr"}, required=False, instantiate=False, help=OPTIMIZER_HELP
        )
        for name, usual in TEACHER.items():
            kind = str | None if usual is None else float
            self.add_argument(f"--{name}", type=kind, default=usual, help=TEACHER_HELP[name])
        self.add_argument("--ckpt_path", type=str | None, default=None, help=CKPT_PATH_HELP)
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
            elif action.dest in ("model", "data", "trainer"):  # jsonargparse would read a file for the section
                action.help, action.metavar = SUPPRESS, "CLASS"

    def parse_given(self, settings: list[str] | Mapping[str, Any]) -> Sections:
        """Parse words or sections, without defaults, and without what else is required."""
        return _short(self._parse_given(settings).as_dict())

    def parse_all(self, words: list[str], sections: Mapping[str, Any]) -> Sections:
        """Parse words that replace settings in sections; all others have their defaults."""
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
        """Return settings by bare name, such as lr, as sections; raise UserError if there is none of that name."""
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
    """Return sections as plain data, of an optimiser's arguments only those that differ from its defaults."""
    sections: Sections = plain(parsed)
    if asked := sections.get("optimizer"):
        defaults = signature(resolve_name(asked["class_path"])).parameters
        given = asked.get("init_args", {}).items()
        asked["init_args"] = {name: value for name, value in given if value != plain(defaults[name].default)}
    return sections


def settings_parser(**classes: type[Any]) -> SettingsParser:
    """Return the parser of all settings of a run whose task and data have these classes."""
    return _settings_parser(*classes.items())


@cache
def _settings_parser(*classes: tuple[str, type[Any]]) -> SettingsParser:
    parser = SettingsParser(exit_on_error=False)
    parser.add_settings(dict(classes))
    return parser


def trainer_objects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the Trainer's settings that name a class, {"class_path": …, "init_args": …}, as its objects.

    An object that changes its arguments changes copies.
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
    """Raise UserError for a callback of a class in `REFUSED`, or of one derived from it."""
    for callback in callbacks:
        for cls, (reason, remedy) in REFUSED.items():
            if isinstance(callback, cls):
                name = type(callback).__name__
                named = name if type(callback) is cls else f"{name}, a {cls.__name__}"
                raise UserError(f"--callbacks {named}: {reason}: {remedy}")


def kept_settings(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the Trainer's settings that checkpoints keep."""
    return {name: value for name, value in {**TRAINER_DEFAULTS, **trainer}.items() if name in KEPT}


def require_settings(sections: Mapping[str, Any]) -> None:
    """Raise UserError for numbers that their types and the Trainer let pass: not finite, not positive, too many."""
    require_seed(sections["seed_everything"])
    trainer = sections["trainer"]
    for section in (trainer, sections["model"], sections["data"]):
        require_finite(**{f"--{name}": value for name, value in section.items()})
    taught = {name: sections[name] for name, usual in TEACHER.items() if usual is not None}
    if sections["teacher"] is None and (idle := [name for name in taught if taught[name] != TEACHER[name]]):
        raise UserError(f"--{idle[0]} {taught[idle[0]]}: needs --teacher, the run to learn from")
    given = {f"--{name}": trainer.get(name) for name in POSITIVE} | {"--threads": sections["threads"]}
    given |= {f"--{name}": value for name, value in taught.items()}
    require_positive(**{name: value for name, value in given.items() if isinstance(value, int | float)})
    if trainer.get("barebones"):
        remedy = "drop it, or pass --enable_checkpointing false --enable_progress_bar false --logger none"
        raise UserError(f"--barebones true: a run logs, and saves its best weights: {remedy}")
    strategy = str(trainer.get("strategy"))
    if re.search("spawn|fork|notebook", strategy):
        raise UserError(f"--strategy {strategy}: spawn strategies are not supported: choose ddp")
    if re.search("ModelParallel|sharded|fsdp|deepspeed", strategy, re.IGNORECASE):
        raise UserError(f"--strategy {strategy}: each process must hold the whole model: choose ddp")
