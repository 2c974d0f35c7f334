"""Bare flags: every setting of model, data and Trainer by its own name, found by looking at their signatures."""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kvt.system.console import OneLineErrors, nearest
from kvt.system.errors import UserError, require_finite, require_positive, require_seed
from kvt.system.memory import require_memory
from kvt.system.yaml_io import parse_yaml, read_yaml
from kvt.tasks import Task, TaskData
from kvt.training.load_checkpoint import Checkpoint

CONFIG = ("--config", "-c")
FIRST = (*CONFIG, "--model", "--data")
"""Flags that say which classes the others belong to: they are moved in front of them."""
WITHOUT_VALUE = ("--help", "--print_config")
PARSER_FLAGS = (
    *("ckpt_path", "config", "data", "fleet", "help", "model", "print_config", "resume", "trainer", "verbose"),
    "weights_only",
)
"""What the parser knows besides the settings."""
POSITIVE = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val")
"""Settings of the Trainer that it takes and fails of, where they are not."""
PROCESS = 2**28
"""Bytes that each process takes before it has done anything."""


class SettingErrors(OneLineErrors):
    """For a parser of settings."""

    def known_flags(self) -> Iterable[str]:
        """Every setting of every task, and what the parser knows besides."""
        return (*bare_flags(), *PARSER_FLAGS)


def bare_flags() -> dict[str, str]:
    """From bare name to full name: {"attn": "model.attn", "batch_size": "data.batch_size", …}."""
    flags = {name: f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters}
    for group, base in (("data", TaskData), ("model", Task)):
        for cls in _concrete(base):
            flags |= {name: f"{group}.{name}" for name in inspect.signature(cls).parameters}
    del flags["spec"]  # comes from the data
    return flags | {"seed": "seed_everything", "compile": "compile"}


def expand(argv: Sequence[str]) -> list[str]:
    """Writes bare flags in full, and puts first what chooses the classes.

    >>> expand(["fit", "--attn", "kv", "--config", "c.yaml", "--seed=1"])
    ['fit', '--config=c.yaml', '--model.attn=kv', '--seed_everything=1']

    Raises:
        UserError: a flag that nothing takes, with the nearest that something does; a flag without its value.
    """
    known = bare_flags()
    command: list[str] = []
    first: list[str] = []
    rest: list[str] = []
    for flag, value in _pairs(argv):
        name, dot, key = flag[2:].partition(".")
        word = flag if value is None else f"{flag}={value}"
        if not flag.startswith("-"):
            (rest if command else command).append(word)
        elif flag in FIRST:
            first.append(word)
        elif flag.startswith("--") and name in known:
            rest.append(f"--{known[name]}{dot}{key}={value}")
        elif flag.startswith("--") and "" in flag[2:].split("."):
            raise UserError(f"unknown flag {flag}: see --help")
        elif flag.startswith("--") and not dot and name not in (*PARSER_FLAGS, *known.values()):
            raise UserError(f"unknown flag {flag}: {nearest(name, (*known, *PARSER_FLAGS))}")
        else:
            rest.append(word)
    return command + first + rest


def take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of --name and the other words; of several values the last.

    >>> take(["--dataset", "mnist", "--lr", "1"], "dataset")
    ('mnist', ['--lr=1'])
    """
    taken, rest = None, []
    for flag, value in _pairs(argv):
        if flag == f"--{name}":
            taken = value
        else:
            rest.append(flag if value is None else f"{flag}={value}")
    return taken, rest


def take_checkpoint(argv: Sequence[str]) -> tuple[Checkpoint | None, list[str]]:
    """Splits a command line into the checkpoint that describes the run, None if a --config does, and the rest."""
    ckpt_path, rest = take(argv, "ckpt_path")
    if ckpt_path is None or any(word.partition("=")[0] in CONFIG for word in rest):
        return None, [*argv]
    named = named_classes(rest)
    for section in ("model", "data"):
        _, rest = take(rest, section)
    return Checkpoint(ckpt_path, named), [*rest, f"--ckpt_path={ckpt_path}"]


def given_settings(words: Sequence[str]) -> set[str]:
    """Full names of the settings among expanded words: {"model.attn", "trainer.max_epochs", "seed_everything"}."""
    names = (word.partition("=")[0].removeprefix("--").replace(".init_args.", ".") for word in words)
    return {".".join(name.split(".")[:2]).removesuffix("+") for name in names}


def named_classes(argv: Sequence[str]) -> dict[str, str | None]:
    """The classes that the user names: model, data, and the model's attention."""
    names = {name: take(argv, name)[0] for name in ("attn", "model", "data", "model.attn")}
    return names | {"attn": names["attn"] or names["model.attn"]}


def classes_of(config: str | Path) -> dict[str, str]:
    """The classes that a configuration file names, by flag: "model", "data" and the model's "attn".

    Raises:
        UserError: there is no such file, or it is no configuration.
    """
    content = _read_config(str(config))
    sections = {name: part for name in ("model", "data") if isinstance(part := content.get(name), dict)}
    named = {name: section.get("class_path") for name, section in sections.items()}
    settings = sections.get("model", {}).get("init_args")
    named["attn"] = settings.get("attn") if isinstance(settings, dict) else None
    return {name: value for name, value in named.items() if isinstance(value, str)}


def import_named(argv: Sequence[str]) -> None:
    """Imports the user's own classes that flags and configurations name, so that their settings have bare flags.

    What cannot be imported is for the parser to tell.

    Raises:
        UserError: a --config is no YAML of sections.
    """
    for flag, value in _pairs(argv):
        named: Iterable[str | None] = ()
        if flag in ("--model", "--data"):
            named = (value,)
        elif flag in CONFIG and value is not None:
            classes = classes_of(value)
            named = (classes.get("model"), classes.get("data"))
        for name in named:
            module = (name or "").rpartition(".")[0]
            if module and not module.startswith("kvt."):
                with suppress(Exception):
                    import_module(module)


def require_settings(settings: Mapping[str, Any]) -> None:
    """Makes sure of what the types of settings leave open.

    Args:
        settings: parsed, by section: seed_everything, model, data and trainer.

    Raises:
        UserError: a number that is none, or too great; a setting of the Trainer that makes no sense; more processes
            than there is memory for.
    """
    require_seed(settings["seed_everything"])
    trainer = settings["trainer"]
    for section in (trainer, *(settings[name].get("init_args", {}) for name in ("model", "data"))):
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
        require_memory(int(trainer["devices"]) * PROCESS, f"--devices {trainer['devices']}")


def require_rendezvous(trainer: L.Trainer) -> None:
    """Makes sure that processes on several machines can find each other, where they would wait for half an hour.

    Raises:
        UserError: nothing says where the first machine is.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"--num_nodes {trainer.num_nodes}: nothing says where the other machines are: start it by srun or torchrun "
            "or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each"
        )


def _read_config(path: str) -> dict[str, Any]:
    """The content of a --config: a YAML file, or a YAML text, which a study passes."""
    try:
        if "\n" in path and not os.path.isfile(path):
            content = parse_yaml(path, "--config")
        else:
            content = read_yaml(Path(path), f"--config {path}")
    except FileNotFoundError as error:
        raise UserError(f"--config {path}: no such file") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: must hold sections, such as model:, data: and trainer:")
    return content


def _require_duration(flag: str, given: str | dict[str, int]) -> None:
    try:
        Timer(given)
    except (MisconfigurationException, ArithmeticError, TypeError, ValueError) as error:
        raise UserError(f"{flag} {given}: expected days, hours, minutes and seconds, such as 00:12:00:00") from error


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags with their values, other words with None."""
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-h" or flag in WITHOUT_VALUE or flag.endswith(".help"):
            yield word, None
        elif equals:
            yield flag, value
        else:
            following = next(words, "--")
            if following.startswith("--"):
                raise UserError(f"{flag} needs a value")
            yield flag, following


def _concrete(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        if not inspect.isabstract(cls):
            yield cls
        yield from _concrete(cls)
