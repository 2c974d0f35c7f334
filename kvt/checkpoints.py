"""Checkpoints as a user hands them in: a file that may be missing, broken, another model's, or made to do harm."""

import json
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kvt.console import user_error
from kvt.data.tensors import load
from kvt.errors import UserError
from kvt.memory import WithoutMemory, require_memory
from kvt.tasks import Task, TaskData
from kvt.trust import believe, believe_trainer, is_ours, require_named, without_strange_folder

AnyTask = TypeVar("AnyTask", bound=Task)
Kind = TypeVar("Kind")
Named = Mapping[str, str | None]
"""The classes that the user names besides, by flag: "attn", "model", "data"."""

LONGEST = 2**31
"""Of all that is counted in a run: steps, epochs, batches."""
LIGHTNING = r"([2-9]|\d\d+)\.\d+(\.\d+)?(\.?(a|b|rc|dev|post)\d*)?"
"""Versions of it that write checkpoints as this one reads them."""


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a file: plain data and tensors, as they were written. No code in it is run.

    Raises:
        UserError: there is no such file, or it is no checkpoint of a Lightning module.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, no error where the name is too long
        raise UserError(f"--ckpt_path {path}: no such file; a run keeps its own under checkpoints/")
    require_memory(size := os.path.getsize(path), f"--ckpt_path {path}")
    try:
        checkpoint = _plain(load(Path(path)), iter(range(size)))
        _require_form(checkpoint)
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"--ckpt_path {path}: not a checkpoint of kvt, or a broken one") from error
    return checkpoint


def load_task(path: str | Path, kind: type[AnyTask], named: Named = {}) -> AnyTask:  # noqa: B006 (only read)
    """The trained task in a checkpoint, in eval mode.

    Its class, and that of its attention, are kvt's, or those that the user names too.

    Raises:
        UserError: there is none, or not of this kind.
    """
    checkpoint = read_checkpoint(path)
    found = find_class(path, checkpoint, "model", kind, named)
    require_consistent(path, checkpoint, found, named)
    attn = {"attn": checkpoint["hyper_parameters"].get("attn")}
    _require_same(path, attn, {"attn": named.get("attn") or attn["attn"]})
    task = _make(path, checkpoint, found)
    load_weights(path, checkpoint, task)
    return task.eval()


def load_weights(path: str | Path, checkpoint: Mapping[str, Any], task: Task) -> None:
    """Gives a task the weights in a checkpoint.

    Raises:
        UserError: they are not those of such a task.
    """
    _require_fitting(path, checkpoint, task)
    task.load_state_dict(checkpoint["state_dict"])


def load_data(path: str | Path, data_dir: str | None = None, named: Named = {}) -> TaskData:  # noqa: B006
    """The data that a checkpoint was trained on, ready to be served.

    Args:
        path: the checkpoint.
        data_dir: where data sets lie by now; default: where the run found them.
        named: the classes that the user names.

    Raises:
        UserError: the checkpoint does not say, or the data are not there, or not the same.
    """
    checkpoint = read_checkpoint(path)
    found = find_class(path, checkpoint, "data", TaskData, named)  # type: ignore[type-abstract]
    config = believe(path, checkpoint.get("config"), named)
    moved = {} if data_dir is None else {"data_dir": data_dir}
    settings = without_strange_folder(config["data"]["init_args"]) | moved
    with settings_of(path):
        try:
            data = found(**settings, seed=config["seed_everything"])
        except UserError:
            raise
        except Exception as error:  # settings of any type raise nearly anything
            raise UserError(f"does not fit the {found.__name__} of this version ({error!s:.200})") from error
        data.prepare_data()
        _require_same(path, checkpoint["datamodule_hyper_parameters"], data.hparams)
        _require_same(path, checkpoint["hyper_parameters"].get("spec", data.spec), data.spec)
        data.setup("validate")
    return data


def configuration(path: str | Path, named: Named, given: Collection[str], trains: bool) -> dict[str, Any]:
    """What --config is to be where a checkpoint is all that the user names: plain data.

    Args:
        path: the checkpoint.
        named: the classes that the user names.
        given: settings of the Trainer that the user gives.
        trains: whether training goes on from it; else the model is looked at.

    Raises:
        UserError: it holds no configuration, or one that contradicts it, or that only the user may give.
    """
    checkpoint = read_checkpoint(path)
    found = find_class(path, checkpoint, "model", Task, named)  # type: ignore[type-abstract]
    require_consistent(path, checkpoint, found, named)
    find_class(path, checkpoint, "data", TaskData, named)  # type: ignore[type-abstract]
    config = believe(path, checkpoint.get("config"), named)
    model, data = (config[name]["init_args"] for name in ("model", "data"))
    config["model"]["init_args"] = {key: checkpoint["hyper_parameters"].get(key, value) for key, value in model.items()}
    config["data"]["init_args"] = without_strange_folder(data)
    return config | {"trainer": believe_trainer(path, config["trainer"], given, trains)}


@contextmanager
def settings_of(path: str | Path) -> Iterator[None]:
    """A block that does what the settings in a checkpoint say: an error of theirs names the file."""
    try:
        yield
    except Exception as error:
        mistake = user_error(error)
        if mistake is None or str(path) in mistake:
            raise
        raise UserError(f"--ckpt_path {path}: {mistake}") from None


def find_class(
    path: str | Path,
    checkpoint: Mapping[str, Any],
    section: str,
    kind: type[Kind],
    named: Named = {},  # noqa: B006
) -> type[Kind]:
    """The class that a section of a checkpoint's configuration names.

    Args:
        path: of the checkpoint, for the error.
        checkpoint: what was read there.
        section: "model" or "data".
        kind: what it must be derived from.
        named: the classes that the user names.

    Raises:
        UserError: there is none, or not of this kind, or the user must name it too.
    """
    name = believe(path, checkpoint.get("config"), named)[section]["class_path"]
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(import_module(module_name), class_name, None)  # one import: no walk through what it imports
    except Exception as error:  # a user's code, a name of any form, raise nearly anything
        reason = f"of a {name:.100}, which cannot be imported: {error!s:.200}"
        raise UserError(f"--ckpt_path {path}: {reason}") from error
    trusted = name == named.get(section) or is_ours(getattr(found, "__module__", ""))
    if not (isinstance(found, type) and issubclass(found, kind) and trusted):
        raise UserError(f"--ckpt_path {path}: of a {name:.100}, where a {kind.__name__} is needed")
    return found


def require_consistent(path: str | Path, checkpoint: Mapping[str, Any], found: type[Task], named: Named) -> None:
    """Makes sure that the weights in a checkpoint are those of its own settings, before memory is taken for these.

    Raises:
        UserError: they are not, or the settings name an attention that the user must name too.
    """
    attn = checkpoint["hyper_parameters"].get("attn")
    require_named(path, "attn", attn, named)
    if is_ours(attn) and is_ours(found.__module__):  # others may look at numbers, which would not be there
        with WithoutMemory():
            task = _make(path, checkpoint, found)
        _require_fitting(path, checkpoint, task)


def require_same_model(path: str | Path, task: Task) -> dict[str, Any]:
    """The checkpoint, if it is of a model made with these very settings.

    Raises:
        UserError: a setting differs, or the weights have other names or shapes.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint["hyper_parameters"].keys() != task.hparams.keys():
        raise UserError(
            f"--ckpt_path {path}: of another task than {type(task).__name__}: give the run's own config.yaml"
        )
    _require_same(path, checkpoint["hyper_parameters"], task.hparams)
    _require_fitting(path, checkpoint, task)
    return checkpoint


def require_same_run(path: str | Path, task: Task, data: TaskData) -> dict[str, Any]:
    """The checkpoint, if training can go on from it exactly: same model, same data, and the optimiser's state.

    Raises:
        UserError: a setting differs, or the checkpoint holds weights only.
    """
    checkpoint = require_same_model(path, task)
    if "optimizer_states" not in checkpoint:
        raise UserError(f"--ckpt_path {path}: holds weights only, training cannot go on from it")
    _require_same(path, checkpoint["datamodule_hyper_parameters"], data.hparams)
    return checkpoint


def _make(path: str | Path, checkpoint: Mapping[str, Any], found: type[AnyTask]) -> AnyTask:
    try:
        return found(**checkpoint["hyper_parameters"])
    except Exception as error:  # settings of any type raise nearly anything
        reason = f"does not fit the {found.__name__} of this version ({error!s:.200})"
        raise UserError(f"--ckpt_path {path}: {reason}") from None


def _plain(value: Any, budget: Iterator[int]) -> Any:
    """A copy of plain data and tensors, which says no more things than the file has bytes: none over and over again."""
    if next(budget, None) is None:
        raise ValueError("it repeats itself")
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, part in dict.items(value):
            if not isinstance(key, str | int):
                raise TypeError("a key that is no name")
            copy[key] = _plain(part, budget)
        return copy
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(part, budget) for part in value)
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or vars(value) or not _is_dense(value):
            raise TypeError("a tensor without values, or more than a tensor")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"a {type(value)}")
    return value


def _is_dense(tensor: Tensor) -> bool:
    return not (tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _require_form(checkpoint: dict[str, Any]) -> None:
    """Makes sure of what every checkpoint of a task says, but for what only training goes on with."""
    sections = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters")
    checkpoint.setdefault(sections[2], {})
    counts = (checkpoint["epoch"], checkpoint["global_step"])
    json.dumps([checkpoint[name] for name in sections[1:]])  # settings: plain data
    if not (
        all(isinstance(checkpoint[name], Mapping) for name in sections)
        and all(isinstance(value, Tensor) for value in checkpoint["state_dict"].values())
        and all(isinstance(key, str) for key in chain.from_iterable(checkpoint[name] for name in sections))
        and all(isinstance(count, int) and 0 <= count < LONGEST for count in counts)
        and re.fullmatch(LIGHTNING, checkpoint["pytorch-lightning_version"])
    ):
        raise TypeError


def _require_fitting(path: str | Path, checkpoint: Mapping[str, Any], task: Task) -> None:
    def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
        return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in state.items()}

    if forms(checkpoint["state_dict"]) != forms(task.state_dict()):
        raise UserError(f"--ckpt_path {path}: its weights do not fit a {type(task).__name__} with these settings")


def _require_same(path: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            there, here = (_short(settings.get(name)) for settings in (theirs, ours))
            raise UserError(f"--ckpt_path {path}: made with {name}={there}, not {here}: give the run's own config.yaml")


def _short(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
