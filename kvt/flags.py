"""Bare flags: every setting of model, data and Trainer by its own name, found by looking at their signatures."""

import inspect
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import lightning as L

from kvt.errors import UserError
from kvt.tasks import Task, TaskData

FIRST = ("--config", "-c", "--model", "--data")
"""Flags that say which classes the others belong to: they are moved in front of them."""
OTHER = ("ckpt_path", "config", "data", "help", "model", "print_config", "trainer", "verbose", "weights_only")


def bare_flags() -> dict[str, str]:
    """From bare name to full name: {"attn": "model.attn", "batch_size": "data.batch_size", …}."""
    flags = {name: f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters}
    for group, base in (("data", TaskData), ("model", Task)):
        for cls in _concrete(base):
            flags |= {name: f"{group}.{name}" for name in inspect.signature(cls).parameters}
    del flags["spec"]  # comes from the data
    return flags | {"seed": "seed_everything"}


def expand(argv: Sequence[str]) -> list[str]:
    """Writes bare flags in full, and puts first what chooses the classes.

    >>> expand(["fit", "--attn", "kv", "--config", "c.yaml", "--seed=1"])
    ['fit', '--config', 'c.yaml', '--model.attn', 'kv', '--seed_everything=1']

    Raises:
        UserError: a flag that nothing takes, with the nearest that something does.
    """
    known = bare_flags()
    first: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in FIRST:
            first += [word] if equals else [word, next(words, "")]
        elif flag.startswith("--") and (name := flag[2:].partition("."))[0] in known:
            rest.append(f"--{known[name[0]]}{name[1]}{name[2]}{equals}{value}")
        elif flag.startswith("--") and "." not in flag and flag[2:] not in (*OTHER, *known.values()):
            raise UserError(f"unknown flag {flag}: {_nearest(flag[2:])}")
        else:
            rest.append(word)
    subcommand, rest = ([rest[0]], rest[1:]) if rest and not rest[0].startswith("-") else ([], rest)
    return subcommand + first + rest


def take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of --name and the other words; of several values the last.

    >>> take(["--dataset", "mnist", "--lr", "1"], "dataset")
    ('mnist', ['--lr', '1'])
    """
    value, rest = None, []
    words = iter(argv)
    for word in words:
        flag, equals, given = word.partition("=")
        if flag != f"--{name}":
            rest.append(word)
            continue
        value = given if equals else next(words, None)
        if value is None:
            raise UserError(f"--{name} needs a value")
    return value, rest


def config_of_checkpoint(argv: Sequence[str]) -> list[str]:
    """Where --ckpt_path is given without --config: the config.yaml that the run saved beside its checkpoints."""
    ckpt_path, _ = take(argv, "ckpt_path")
    named = any(word.partition("=")[0] in ("--config", "-c") for word in argv)
    config = Path(ckpt_path or "").parent.parent / "config.yaml"
    return ["--config", str(config)] if ckpt_path and not named and config.is_file() else []


def readable(message: str) -> str:
    r"""A parser's paragraph in one line: which flag, what it was given, what it takes.

    >>> readable("Parser key \"trainer.max_epochs\":\n  Expected a <class 'int'>. Got value: x")
    '--trainer.max_epochs x: expected int'
    """
    if "arguments are required" in message:
        return "--config is missing: give a task's YAML, such as --config experiments/configs/cifar10.yaml"
    if unaccepted := re.search(r"Option '(.+?)' is not accepted", message):
        return f"unknown setting {unaccepted[1]!r}: {_nearest(unaccepted[1])}"
    key = re.match(r'Parser key "([\w.]+)":', message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value.*)?$", message, re.MULTILINE)
    if not (key and given and kinds):
        return message
    plain = [re.sub(r"<class '(?:.*\.)?(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind) for kind in kinds]
    wanted = [kind for kind in dict.fromkeys(plain) if kind != "NoneType"]
    return f"--{key[1]} {given[1]}: expected {' or '.join(wanted)}"


def _nearest(name: str) -> str:
    nearest = get_close_matches(name, [*bare_flags(), *OTHER], n=1)
    return f"did you mean --{nearest[0]}?" if nearest else "see --help"


def _concrete(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        if not inspect.isabstract(cls):
            yield cls
        yield from _concrete(cls)
