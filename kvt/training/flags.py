"""Flags: those that say which run a command is about, bare names for all settings, and checks of their values."""

import inspect
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import kvt.tasks
from kvt.system.console import OneLineErrors
from kvt.system.errors import UserError, require_finite, require_positive, require_seed
from kvt.system.hardware import require_memory

RUN_FLAGS = {
    "--config": "a task's YAML, such as cifar10 or a file of your own; given twice, the later one wins",
    "--ckpt_path": "a checkpoint to use, or to train on from",
    "--resume": "continue a run that was stopped, exactly: its folder",
    "--fleet": "how many runs to train as one, with seeds from --seed upwards",
    "--model": "a task class of your own, such as my_task.MyTask",
    "--data": "a data class of your own, such as my_task.MyData",
}
"""The flags that say which run a command is about."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Trainer settings that must be positive, which the Trainer does not check."""
BYTES_PER_PROCESS = 2**28
"""Memory that a process needs before it loads anything."""


class RunFlags(OneLineErrors, ArgumentParser):
    """Parses `RUN_FLAGS` and leaves the settings to `SettingsParser`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        for flag in RUN_FLAGS:
            if flag == "--config":
                self.add_argument(flag, "-c", action="append", default=[])
            else:
                self.add_argument(flag)
        self.add_argument("--print_config", action="store_true")


def split_flags(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split words into the values of `RUN_FLAGS` and the words that are settings.

    >>> flags, rest = split_flags(["--config", "cifar10", "--attn", "kv", "--fleet=2"])
    >>> flags.config, flags.fleet, rest
    (['cifar10'], '2', ['--attn', 'kv'])
    """
    return RunFlags().parse_known_args(words)


class SettingsParser(OneLineErrors, LightningArgumentParser):
    """Parses the settings of Trainer, model and data, each by its full and by its bare name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

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

    def known_flags(self) -> Iterable[str]:
        """Return the bare names of all settings, of other tasks too, for proposals in place of an unknown one."""
        classes = [cls for cls in vars(kvt.tasks).values() if isinstance(cls, type)]
        names = [name for cls in (L.Trainer, *classes) for name in inspect.signature(cls).parameters]
        own = [flag.removeprefix("--") for flag in self._option_string_actions if "." not in flag]
        return dict.fromkeys([*own, *names])


def require_settings(settings: Mapping[str, Any]) -> None:
    """Check what the types of settings leave open.

    Args:
        settings: by section: seed_everything, model, data and trainer.

    Raises:
        UserError: a number is not finite or too large; a Trainer setting makes no sense; the processes need more memory
            than there is.
    """
    require_seed(settings["seed_everything"])
    trainer = settings["trainer"]
    for section in (trainer, settings["model"], settings["data"]):
        for name, value in section.items():
            require_finite(**{f"--{name}": value})
    for name in POSITIVE:
        if isinstance(trainer[name], int | float):
            require_positive(**{f"--{name}": trainer[name]})
    part = trainer["overfit_batches"]
    if isinstance(part, float) and not 0 <= part <= 1:
        raise UserError(f"--overfit_batches {part}: expected a part of all batches, from 0.0 to 1.0, or their number")
    for name in ("max_time", "val_check_interval"):
        if isinstance(trainer[name], str | dict):
            _require_duration(f"--{name}", trainer[name])
    if str(trainer["devices"]).isdecimal():
        require_memory(int(trainer["devices"]) * BYTES_PER_PROCESS, f"--devices {trainer['devices']}")


def require_rendezvous(trainer: L.Trainer) -> None:
    """Raise UserError if processes on several machines cannot find each other; they would wait for half an hour."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"--num_nodes {trainer.num_nodes}: nothing says where the other machines are: start it by srun or torchrun "
            "or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each"
        )


def _require_duration(flag: str, given: str | dict[str, int]) -> None:
    try:
        Timer(given)
    except (MisconfigurationException, ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{flag} {given}: expected days, hours, minutes and seconds, such as 00:12:00:00") from error
